"""Drafts by a head that reads the target's hidden states: exact answers, and a KV cache that follows the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.engine.drafts import DraftRequest
from moeedge.engine.head_draft import StateLog
from moeedge.engine.loading import drafts_for_itself
from moeedge.engine.sampling import Sampler
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.llama.draft_heads import own_head
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.scheduler.governor import GAMMA_MAX
from tests.conftest import TinyFactory
from tests.engine.conftest import Check
from tests.support.hybrid import hybrid_config
from tests.support.interruption import interrupt_decode
from tests.support.sessions import GREEDY, answered, plain_config

PROMPT = np.random.default_rng(4).integers(0, 256, 24).tolist()
N_PREDICT = 60
DEEPSEEK: dict[str, Any] = {"sigmoid": True, "mtp": 1}
# name -> target, dimensions; the head's dimensions, None for a head in the target's file
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "mtp-glm4moe": ("glm4moe", {}, None),
    "mtp-deepseek2": ("deepseek2", DEEPSEEK, None),
    "mtp-qwen35moe": ("qwen35moe", {}, None),
    "mtp-cohere2moe": ("cohere2moe", {}, None),
    "mtp-hy_v3": ("hy_v3", {}, None),
    "chain-hy_v3": ("hy_v3", {"mtp": 2}, None),
    "chain-step35": ("step35", {}, None),
    "chain-mimo2": ("mimo2", {}, None),
    "mtp-mimo2": ("mimo2", {"mtp": 1}, None),
    "eagle-qwen3moe": ("qwen3moe", {}, {}),
    "eagle-gpt-oss": ("gpt-oss", {}, {}),
    "eagle-mixtral": ("llama", {}, {}),
    "dflash-qwen3moe": ("qwen3moe", {}, {"arch": "dflash", "draft_vocab": 304}),
    "dflash-shared": ("gpt-oss", {}, {"arch": "dflash", "target_layers": "1"}),  # the target's embeddings and output
    "dflash-dspark": ("qwen3moe", {}, {"arch": "dflash", "variant": "dspark"}),
    "dflash-sections": ("llama", {}, {"arch": "dflash", "variant": "sections", "draft_vocab": 304}),
    "eagle-narrow": ("qwen3moe", {}, {"embd": 32, "heads": 2, "heads_kv": 2, "draft_vocab": 100, "seed": 1}),
}
KINDS = ("chain-step35", "mtp-glm4moe", "mtp-qwen35moe", "eagle-qwen3moe", "dflash-qwen3moe")
Pair = tuple[Path, Any]
# whose memory can be shifted, and holds several texts
ATTENTION = ("chain-hy_v3", "mtp-glm4moe", "eagle-qwen3moe", "dflash-qwen3moe")


def files(tiny: TinyFactory, case: str) -> Pair:
    """The target's file, and the value of EngineConfig.draft."""
    arch, dimensions, head = CASES[case]
    return tiny(arch, **dimensions), "mtp" if head is None else tiny(**{"arch": "eagle3"} | head)


def options(pair: Pair, **changes: Any) -> EngineConfig:
    return plain_config(*pair, **{"gamma": 4} | changes)


def answer(session: Session, prompt: Sequence[int] = PROMPT, n_predict: int = N_PREDICT, **changes: Any) -> list[int]:
    return answered(session, prompt, n_predict, **changes).tokens


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=12), st.integers(2, 9))
def test_the_log_keeps_the_last_states(steps: list[tuple[int, int]], n_kept: int) -> None:
    """Against a dictionary: each decode begins somewhere before the end, or anew."""
    log, known, end, number = StateLog(n_kept, 3), dict[int, float](), 0, 0.0
    for back, n in steps:
        start = max(0, end - back)
        rows = np.arange(number + 1, number + n + 1, dtype=np.float32)
        known = {position: value for position, value in known.items() if position < start}
        known |= {start + i: float(value) for i, value in enumerate(rows)}
        number, end = number + n, start + n
        log.add(start, np.repeat(rows[:, None], 3, axis=1))
        assert log.end == end
        found = log.read(-1, end + 3)[:, 0]
        expected = [known.get(position, 0.0) for position in range(-1, end + 2)]
        n_last = min(n_kept, n)  # those of the last decode are there
        np.testing.assert_array_equal(found[end + 1 - n_last : end + 1], expected[end + 1 - n_last : end + 1])
        assert all(value in (0.0, wanted) for value, wanted in zip(found.tolist(), expected, strict=True))


def test_the_log_follows_a_shift() -> None:
    log = StateLog(8, 1)
    log.add(0, np.arange(12, dtype=np.float32)[:, None])  # keeps 4..11
    log.shift(2, 4)
    assert log.read(0, 8)[:, 0].tolist() == [0, 0, 6, 7, 8, 9, 10, 11]
    log.add(8, np.array([[20.0]], dtype=np.float32))
    assert log.read(1, 8)[:, 0].tolist() == [0, 6, 7, 8, 9, 10, 11, 20]
    log.shift(0, 20)
    assert not log.read(0, 9).any()


@pytest.mark.parametrize("case", ["chain-hy_v3", "chain-step35"])
def test_lengths_by_measured_cost_are_those_that_heads_draft(tiny: TinyFactory, case: str) -> None:
    with Session.open(options(files(tiny, case), auto_gamma=True)) as session:
        most = session.draft.context.kind.n_heads
        generation = session.generate(PROMPT, n_predict=30, sampling=GREEDY, ignore_eos=True)
        choices = [record.choice for record in generation if record.choice is not None]
    assert max(choice.best for choice in choices) <= most < 4
    assert choices[0].gamma_max == GAMMA_MAX


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_stock(case: str, gamma: int, tiny: TinyFactory, check: Check) -> None:
    pair = files(tiny, case)
    with Session.open(options(pair, gamma=gamma)) as session:
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True)
        records = []
        for record in generation:  # after each step the head has entries of the accepted text, and lacks few
            records.append(record)
            context = session.draft.context
            held, history = context.sequences[0].tokens, generation.state.history[context.kind.n_skipped :]
            assert held == history[: len(held)] and (not held or len(held) >= len(history) - gamma - 2)
        check(session, PROMPT, generation.tokens)
        stats, info = generation.stats, session.model.info
        assert stats.drafted > 0
        if case not in ("eagle-narrow", "dflash-shared"):  # of another vocabulary; whose masks are a token's embedding
            assert 0 < stats.accepted < stats.drafted
        assert session.info.draft == ("mtp" if pair[1] == "mtp" else pair[1].name)
        # activations of the verification alone: the head's own experts are not counted
        assert session.counts is not None and session.counts.shape == (info.n_layers, info.n_experts)
        n_verified = records[-1].n_verified
        assert set(session.counts[list(info.expert_layers)].sum(axis=1)) == {n_verified * info.n_expert_used}


@pytest.mark.parametrize("case", KINDS)
def test_drafts_are_those_of_a_fresh_head(case: str, tiny: TinyFactory) -> None:
    """After rejections and plain steps the head proposes as one that reads the entire text at once."""
    pair = files(tiny, case)
    with Session.open(options(pair)) as session, Session.open(options(pair)) as fresh:
        sampler = Sampler(GREEDY, session.model.info.n_vocab)
        generation = session.generate(PROMPT, n_predict=40, sampling=GREEDY, ignore_eos=True)
        lengths = iter([4, 4, 0, 0, 1, 4, 0, 0, 0, 0, 0, 0, 8] * 20)
        n_equal = n_compared = 0
        for record in generation:
            history = list(generation.state.history)
            if record.drafts and generation.stop_reason is None:
                before = history[: len(history) - len(record.tokens)]
                fresh.reset()
                fresh.target.decode(before[:-1], phase=Phase.PREFILL, logits="none")
                fresh.draft.begin(before)
                n_compared += 1
                proposal = fresh.draft.propose(DraftRequest(before, len(record.drafts), sampler))
                n_equal += proposal.tokens == record.drafts
            generation.gamma = next(lengths)
        assert n_compared > 5
        assert n_equal >= n_compared - 1  # rounding: the entries come in other batches


@pytest.mark.parametrize("case", KINDS)
def test_a_long_prompt_is_read_on_the_way(case: str, tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where states are overwritten before the first draft, the head has read them: its drafts are the same."""
    pair, prompt = files(tiny, case), np.random.default_rng(7).integers(0, 256, 400).tolist()
    drafts = []
    for kept in ((64, 1024), (64, 64), (512, 512)):
        monkeypatch.setattr("moeedge.engine.head_draft._KEPT_TOKENS", kept)
        with Session.open(options(pair, n_ubatch=96)) as session:
            generation = session.generate(prompt, n_predict=12, sampling=GREEDY, ignore_eos=True)
            drafts.append([record.drafts for record in generation])
    assert drafts[0] == drafts[1] == drafts[2]


@pytest.mark.parametrize("case", KINDS)
def test_turns_reuse_both_kv_caches_and_those_of_answers_that_were_cut_off(
    case: str, tiny: TinyFactory, check: Check
) -> None:
    with Session.open(options(files(tiny, case))) as session:
        said = answer(session, n_predict=20)
        second = [*PROMPT, *said, *PROMPT[:5]]
        generation = answered(session, second, 20)
        assert generation.stats.prefill_tokens in (5, 6)
        check(session, second, generation.tokens)
        undone = [*PROMPT[:9], *PROMPT[3:12]]  # as /undo leaves
        check(session, undone, answer(session, undone, 20))
        session.reset()
        assert session.draft.context.n_past == 0
        with closing(session.generate(PROMPT, n_predict=30, sampling=GREEDY, ignore_eos=True)) as generation:
            for _ in zip(range(4), generation, strict=False):
                pass
        asked: Iterator[bool] = iter([False] * 6 + [True] * 100)
        answer(session, n_predict=30, run=Run(cancelled=lambda: next(asked)))
        for n_predict in (N_PREDICT, 20):
            check(session, PROMPT, answer(session, n_predict=n_predict))
            session.reset()


@pytest.mark.parametrize("at_call", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("case", KINDS)
def test_ctrl_c_at_any_decode(
    case: str, at_call: int, tiny: TinyFactory, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session.open(options(files(tiny, case))) as session:
        with monkeypatch.context() as patch:
            interrupt_decode(patch, at_call)
            cut = answered(session, PROMPT, 30)
        assert cut.stop_reason == "interrupted"
        text = [*PROMPT, *cut.tokens]
        check(session, text, answer(session, text, 20))


@pytest.mark.parametrize("case", ATTENTION)
def test_context_shift(case: str, tiny: TinyFactory, check: Check) -> None:
    pair = files(tiny, case)
    small = {"n_ctx": 64, "context_shift": True}
    with Session.open(options((pair[0], None), **small)) as plain:
        expected = answer(plain, n_predict=150)
    with Session.open(options(pair, **small)) as session:
        generation = answered(session, PROMPT, 150)
        assert len(generation.tokens) == 150 and generation.stats.accepted > 0
        assert generation.stats.context_shifts >= 2
        n_same = next((i for i, (a, b) in enumerate(zip(generation.tokens, expected, strict=True)) if a != b), 150)
        assert n_same >= 64 - len(PROMPT)  # then near-ties may go either way: the moved keys are rounded
        context, history = session.draft.context, generation.state.history
        assert context.sequences[0].tokens == history[context.kind.n_skipped :][: context.n_past]
        session.reset()
        check(session, PROMPT, answer(session, n_predict=20))


@pytest.mark.parametrize("case", ATTENTION)
def test_texts_decoded_together(case: str, tiny: TinyFactory, check: Check) -> None:
    prompts = [np.random.default_rng(i).integers(0, 256, 10 + 7 * i).tolist() for i in range(4)]
    with Session.open(options(files(tiny, case), n_parallel=2, n_ctx=256)) as session:
        generation = session.generate_parallel(prompts, n_predict=30, sampling=GREEDY, ignore_eos=True)
        list(generation)
        for prompt, found in zip(prompts, generation.answers, strict=True):
            check(session, prompt, found.tokens)
            assert found.stats.drafted > 0


@pytest.mark.parametrize(("variant", "n_most"), [("", 3), ("dspark", 4)])
def test_a_block_has_at_most_the_drafts_that_it_was_trained_on(variant: str, n_most: int, tiny: TinyFactory) -> None:
    draft = tiny("dflash", variant=variant, block=4, draft_vocab=304)
    with Session.open(options((tiny("qwen3moe"), draft), gamma=8)) as session:
        generation = session.generate(PROMPT, n_predict=20, sampling=GREEDY, ignore_eos=True)
        lengths = {len(record.drafts) for record in generation if record.n_verified}
        assert max(lengths) == n_most
        assert any("Drafts are limited to" in note for note in session.info.notes)


def test_a_block_ends_where_its_tokens_are_not_sure(tiny: TinyFactory, check: Check) -> None:
    pair = tiny("qwen3moe"), tiny("dflash", draft_vocab=304)
    with Session.open(options(pair, auto_gamma=True)) as session:
        check(session, PROMPT, answer(session))


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("sizes", [(1, 512), (64, 2), (64, 3)], ids=str)
def test_batches_smaller_than_a_draft(case: str, sizes: tuple[int, int], tiny: TinyFactory, check: Check) -> None:
    with Session.open(options(files(tiny, case), n_batch=sizes[0], n_ubatch=sizes[1])) as session:
        check(session, PROMPT, answer(session, n_predict=20))


def test_experts_from_the_file(tiny: TinyFactory, check: Check) -> None:
    """Where experts are loaded on demand, those of the head are in memory with the dense weights."""
    with Session.open(options(files(tiny, "mtp-glm4moe"), ram=2**20)) as session:
        assert session.model.dense is not None and session.model.has_head
        check(session, PROMPT, answer(session))
    with Session.open(options((tiny("glm4moe"), "ngram"))) as session:
        assert not session.model.has_head and session.model.info.n_head_layers == 1


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (("qwen3moe", {}), "mtp"),  # no head in the file
        (("glm4moe", {"mtp": 2}), "mtp"),  # more than one
        (("qwen3moe", {}), {"target_embd": 96}),  # of another target: width
        (("qwen3moe", {}), {"target_layers": "0,1,7"}),  # layers
        (("deepseek2", {}), {}),  # an architecture whose layers' inputs llama.cpp does not hand out
        (("deepseek2", {}), {"arch": "dflash"}),
        (("qwen3moe", {}), {"arch": "dflash", "embd": 96, "heads": 6, "heads_kv": 6}),
        (("qwen3moe", {}), {"arch": "dflash", "target_layers": "1,3"}),
        (("qwen3moe", {"vocab": 320}), {"arch": "dflash"}),
        (("qwen3moe", {}), {"arch": "dflash", "mask": -1}),
        (("qwen3moe", {}), {"arch": "dflash", "block": 1}),
        (("qwen3moe", {}), {"arch": "dflash", "variant": "selector"}),
    ],
)
def test_a_head_that_does_not_suit_the_target(target: Any, draft: Any, tiny: TinyFactory) -> None:
    source = draft if isinstance(draft, str) else tiny(**{"arch": "eagle3"} | draft)
    with pytest.raises(InputError) as caught:
        Session.open(options((tiny(target[0], **target[1]), source)))
    assert caught.value.hint


def test_which_models_draft_for_themselves(tiny: TinyFactory) -> None:
    assert drafts_for_itself(tiny("glm4moe"))
    assert drafts_for_itself(tiny("deepseek2", **DEEPSEEK))
    assert not drafts_for_itself(tiny("qwen3moe"))
    assert not drafts_for_itself(tiny("glm4moe", mtp=2))
    # a head needs its weights: llama.cpp would end the process
    with Model.load(tiny("glm4moe")) as model, pytest.raises(ValueError, match="without its head"):
        own_head(model)


@pytest.mark.parametrize("case", ["mtp-glm4moe", "chain-hy_v3", "eagle-qwen3moe"])
def test_experts_on_a_device_are_predicted_from_the_heads_states(case: str, tiny: TinyFactory, check: Check) -> None:
    with Session.open(hybrid_config(*files(tiny, case), 0.5, gamma=4)) as session:
        assert session.placement is not None and session.placement.wants_hidden_states
        generation = session.generate(PROMPT, n_predict=40, sampling=GREEDY, ignore_eos=True)
        states = [(record.hidden_states, record.drafts) for record in generation if record.drafts]
        assert any(found is not None for found, _ in states)
        assert all(found is None or len(found) == len(drafts) for found, drafts in states)
        check(session, PROMPT, generation.tokens)
