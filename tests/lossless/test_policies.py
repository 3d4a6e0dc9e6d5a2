"""Greedy answers equal stock's under every policy of the engine, with real transfers on the emulated device.

Those that need hidden states get them: tiny draft and tiny target have the same hidden size. The published systems'
rules of execution (loading on demand, waiting while drafting, transfers in batches) change no token either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.llama.context import Context
from moeedge.native import CaptureFlags
from moeedge.native.abi import Phase
from moeedge.policies.registry import POLICIES
from moeedge.scheduler.config import ExecutionConfig
from moeedge.scheduler.prediction import NextGatePredictor
from tests.lossless.conftest import PROMPT, Loaded, each_case
from tests.support.hybrid import MANY_EXPERTS, assert_answers, greedy_answer, hybrid_config

N_PREDICT = 24
CASES = ("qwen3moe", "deepseek3", "gpt-oss", "llama4")  # softmax, sigmoid and groups, biases, one expert per token
EXECUTIONS: dict[str, dict[str, Any]] = {
    "on demand": {"misses": "load", "drafting": "off"},
    "vanilla": {"misses": "load", "drafting": "vanilla", "batch": 1},
    "worker": {"misses": "load", "drafting": "worker", "batch": 1},
    "batched": {"misses": "load", "drafting": "worker", "batch": 64},
    "cutoff": {"misses": "load", "cutoff_layer": 1},
    "cpu": {"misses": "cpu", "drafting": "vanilla", "batch": 3},
}


def open_session(loaded: Loaded, policy: str, *, own_draft: bool = False, **execution: Any) -> Session:
    """own_draft: the target drafts for itself."""
    draft_path, draft = (loaded.path, loaded.model) if own_draft else (loaded.draft_path, loaded.draft)
    placement = {"policy": policy, "execution": ExecutionConfig(**execution)}
    config = hybrid_config(loaded.path, draft_path, 0.3, gamma=4, **placement)
    return Session.open(config, model=loaded.model, draft_model=draft)


@each_case(CASES, "policy", sorted(set(POLICIES) - {"none"}), quick=("spac", "sp-moe-prefetch"), in_turn=True)
def test_greedy_equals_stock(policy: str, loaded: Loaded) -> None:
    with open_session(loaded, policy) as session:
        assert_answers(session, loaded.stock, PROMPT, N_PREDICT, 2, what=policy)
        stats, placement = session.placement_stats(), session.placement
        assert stats is not None and placement is not None and not stats.lost
        assert stats.blocks_unknown == 0
        if policy != "spac-program":  # whose utilities rise at five of the batch's tokens, which has no more
            assert stats.uploads > 0 and stats.pairs_hit > 0
        share = placement.predicted_share
        needs_hidden_states = bool({"draft-inputs", "block-inputs"} & placement.driver.policy.required_inputs)
        assert (share is not None) == needs_hidden_states, session.info.notes
        if share is not None and policy != "sp-moe-prefetch":  # a random draft says nothing about a random target
            assert share > 1.5 * loaded.model.info.n_expert_used / MANY_EXPERTS, "no better than chance"


@each_case(CASES, "name", EXECUTIONS, quick=("batched",), in_turn=True)
def test_sp_moe_in_parts(name: str, loaded: Loaded) -> None:
    execution = ExecutionConfig(**EXECUTIONS[name])
    with open_session(loaded, "sp-moe-prefetch", **EXECUTIONS[name]) as session:
        assert_answers(session, loaded.stock, PROMPT, N_PREDICT, 2, what=name)
        stats, placement = session.placement_stats(), session.placement
        assert stats is not None and placement is not None
        if execution.misses == "load":
            assert placement.on_demand is not None and placement.on_demand.loaded > 0
            assert stats.evictions > 0, "there was no room for all"
            if placement.on_demand.uncached == 0:
                assert stats.pairs_hit == stats.pairs, "what is missing was loaded, so that the device computed all"
                if execution.drafting == "off":
                    assert stats.uploads == placement.on_demand.loaded, "nothing comes but on demand, and nothing twice"
        if placement.draft_prefetch is not None:
            assert (placement.draft_prefetch.stops > 0) == (execution.drafting == "vanilla")
        assert (placement.predicted_share is not None) == (execution.drafting != "off")


@pytest.mark.parametrize("drafting", ["worker", "vanilla"])
@each_case(CASES)
def test_a_target_predicts_itself(drafting: str, loaded: Loaded) -> None:
    """As its own draft it reads the same inputs: every expert is predicted, after dense layers, too."""
    with open_session(loaded, "sp-moe-prefetch", own_draft=True, drafting=drafting) as session:
        assert_answers(session, loaded.stock, PROMPT, N_PREDICT)
        placement = session.placement
        assert placement is not None and placement.predicted_share is not None
        # routers that choose among groups of experts are predicted without the groups
        assert placement.predicted_share > (0.7 if loaded.model.info.architecture == "deepseek2" else 0.99)


@each_case(CASES)
def test_hooks_are_off_in_stock_mode(loaded: Loaded) -> None:
    """Between stock and moeedge in one session: hooks are quiet in stock mode, and work again afterwards."""
    with open_session(loaded, "fate", misses="load") as session:
        assert session.placement is not None and session.placement.on_demand is not None
        within = session.placement.on_demand
        for mode in ("stock", "moeedge", "stock"):
            session.set_mode(mode)  # type: ignore[arg-type]
            before = within.loaded
            assert_answers(session, loaded.stock, PROMPT, N_PREDICT, what=mode)
            assert (within.loaded > before) == (mode == "moeedge")


@each_case(CASES)
def test_an_error_between_layers(loaded: Loaded) -> None:
    """An exception at a block ends the decode; the session works afterwards."""

    def interrupt(*_: object) -> None:
        raise ArithmeticError("between layers")

    with open_session(loaded, "fate") as session:
        assert session.placement is not None and session.placement.layer_hook is not None
        greedy_answer(session, PROMPT, 4)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ArithmeticError, match="between layers"):
            patch.setattr(NextGatePredictor, "predict", interrupt)
            greedy_answer(session, PROMPT, 4)
        assert_answers(session, loaded.stock, PROMPT, N_PREDICT, what="after an error")


@each_case(CASES)
def test_watching_changes_no_logit(loaded: Loaded) -> None:
    """Bit by bit, target and draft, kept and hooked."""
    for model in (loaded.model, loaded.draft):
        with Context(model, n_ctx=128, n_threads=1) as plain, Context(model, n_ctx=128, n_threads=1) as watched:
            capture = watched.capture_activations()
            assert capture is not None
            blocks: list[int] = []
            capture.enable(CaptureFlags.INPUTS | CaptureFlags.PROBS if model.info.n_experts else CaptureFlags.INPUTS)
            capture.set_hook(lambda block, seen=blocks: seen.append(block.layer))  # type: ignore[misc]
            for n, phase in ((20, Phase.PREFILL), (5, Phase.VERIFY), (1, Phase.DECODE)):
                expected = plain.decode(PROMPT[:n], phase=phase, logits="all").copy()
                assert np.array_equal(expected, watched.decode(PROMPT[:n], phase=phase, logits="all"))
            assert blocks == 2 * sorted(set(blocks)) and blocks
