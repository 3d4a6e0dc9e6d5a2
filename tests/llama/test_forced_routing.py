"""Forced routing: both engines use the given experts, and the hook alone changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.errors import BackendError
from moeedge.llama.context import Context
from moeedge.llama.model import Mode, Model
from moeedge.native.abi import Phase, RoutingMode
from moeedge.trace.steps import RecordedRouting
from tests.conftest import TinyFactory
from tests.support.cases import case_model

CASES = ("qwen3moe", "gpt-oss", "deepseek3", "granitemoe", "llama4", "olmoe", "gemma4", "granitehybrid")
TOKENS = np.random.default_rng(1).integers(0, 256, 40).tolist()


@contextmanager
def forced(path: Path, mode: Mode, **further: Any) -> Iterator[Context]:
    with Model.load(path) as model:
        info, rng = model.info, np.random.default_rng(2)
        k = max(info.used_per_layer)
        ids = rng.random((64, info.n_layers, info.n_experts)).argsort(axis=2)[:, :, :k].astype(np.int32)
        routing = RecordedRouting(ids, np.array([0]))
        how = {"n_ctx": 256, "n_threads": 1, "n_batch": 32, "n_ubatch": 16, "routing": routing} | further
        with Context(model, mode=mode, **how) as context:
            context.set_mode(mode)
            yield context


def used_experts(context: Context, layer: int) -> np.ndarray:
    """The experts [T, k] that llama.cpp's graph used in the newest batch."""
    k = context.model.info.used_per_layer[layer]
    out = np.empty(len(TOKENS) * k, dtype=np.int32)
    return out[: context.routing.call("captured", layer, out.ctypes.data, out.size)].reshape(-1, k)


@pytest.mark.parametrize("mode", ["stock", "moeedge"])
@pytest.mark.parametrize("case", CASES)
def test_both_engines_use_the_given_experts(case: str, mode: Mode, tiny: TinyFactory) -> None:
    with forced(case_model(tiny, case), mode) as context:
        routing, info = context.routing, context.model.info
        routing.call("set_capture", 1)
        routing.offset = 50  # beyond the end it begins anew
        for n_done, tokens in ((0, TOKENS[:20]), (20, TOKENS[20:21]), (21, TOKENS[21:30])):
            rows = (50 + n_done + np.arange(len(tokens))) % 64
            if context.sensor is not None:
                context.sensor.read_counts()
            logits = context.decode(tokens, phase=Phase.VERIFY, logits="last" if n_done == 0 else "all")
            assert np.isfinite(logits).all()
            counts = context.sensor.read_counts() if context.sensor is not None and mode == "moeedge" else None
            for layer in info.expert_layers:
                k = info.used_per_layer[layer]
                used, expected = used_experts(context, layer), routing.recorded.ids[rows, layer, :k]
                assert len(used) in (len(tokens), logits.shape[0])  # the last layer may leave out tokens without logits
                assert np.array_equal(used, expected[-len(used) :])
                if counts is not None and len(used) == len(tokens):
                    assert np.array_equal(counts[layer], np.bincount(expected.ravel(), minlength=info.n_experts))


def test_micro_batches_of_models_that_keep_snapshots(tiny: TinyFactory) -> None:
    """llama.cpp splits their batches so that the last tokens are together."""
    with forced(tiny("qwen35moe"), "stock", n_snapshots=4) as context:
        context.routing.call("set_capture", 1)
        for tokens in (TOKENS[:30], TOKENS[30:35], TOKENS[35:36]):
            first = context.n_past
            context.decode(tokens, phase=Phase.VERIFY, logits="all")
            for layer in context.model.info.expert_layers:
                expected = context.routing.recorded.ids[first : first + len(tokens), layer]
                used = used_experts(context, layer)
                assert np.array_equal(used, expected[:, : used.shape[1]])


@pytest.mark.parametrize("mode", ["stock", "moeedge"])
@pytest.mark.parametrize("case", CASES)
def test_the_hook_alone_changes_no_bit(case: str, mode: Mode, tiny: TinyFactory) -> None:
    with forced(case_model(tiny, case), mode) as context:
        results = []
        for routing_mode in (RoutingMode.OFF, RoutingMode.IDENTITY, RoutingMode.FORCED):
            context.routing.mode = routing_mode
            context.clear()
            results.append(context.decode(TOKENS, phase=Phase.VERIFY, logits="all").copy())
        assert np.array_equal(results[0], results[1])
        assert not np.array_equal(results[0], results[2])


def test_both_engines_agree_under_forced_routing(tiny_moe: Path) -> None:
    logits = []
    for mode in ("stock", "moeedge"):
        with forced(tiny_moe, mode) as context:
            logits.append(context.decode(TOKENS, phase=Phase.VERIFY, logits="all").copy())
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-3)


def test_tokens_that_are_not_the_text_are_routed_elsewhere(tiny_moe: Path) -> None:
    with forced(tiny_moe, "stock") as context:
        routing = context.routing
        routing.call("set_capture", 1)
        routing.text = np.array(TOKENS, dtype=np.int32)
        context.decode([*TOKENS[:3], TOKENS[3] + 1, TOKENS[4]], phase=Phase.VERIFY, logits="all")
        # what follows a rejected draft is rejected, too
        assert np.array_equal(used_experts(context, 1), routing.recorded.ids[[0, 1, 2, 3 + 32, 4 + 32], 1])


def test_ids_out_of_range_are_refused(tiny_moe: Path) -> None:
    with forced(tiny_moe, "stock") as context:
        context.routing.recorded.ids[:] = context.model.info.n_experts
        with pytest.raises(BackendError):
            context.decode(TOKENS[:2], phase=Phase.DECODE)
