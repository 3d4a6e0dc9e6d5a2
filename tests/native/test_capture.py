"""Captured activations: the model's routers, applied to them, give the experts that the model selected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.errors import BackendError
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.routers import Routers, read_norms
from moeedge.native import CAPTURED_TOKENS, Block, CaptureFlags
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES

TOKENS = np.random.default_rng(5).integers(0, 256, 9).tolist()
GROUPED = {"deepseek3"}  # routes to groups of experts, which Routers does not model


@pytest.fixture(scope="module", params=MOE_CASES)
def model(request: pytest.FixtureRequest, tiny: TinyFactory) -> Model:
    library.start()
    arch, dimensions = MOE_CASES[request.param]
    loaded = Model.load(tiny(arch, **dimensions))
    request.addfinalizer(loaded.close)
    loaded.case = request.param  # type: ignore[attr-defined]
    return loaded


def test_routers_on_captured_inputs_select_the_models_experts(model: Model) -> None:
    info = model.info
    routers = Routers.read(model)
    with Context(model, n_ctx=64, n_threads=1) as context:
        capture = context.capture_activations()
        assert capture is not None and context.sensor is not None
        capture.enable(CaptureFlags.INPUTS | CaptureFlags.PROBS)
        assert capture.read(CaptureFlags.INPUTS).serial == 0
        context.decode(TOKENS, phase=Phase.VERIFY, logits="all")
        inputs, probs = capture.read(CaptureFlags.INPUTS), capture.read(CaptureFlags.PROBS)
        frame = context.sensor.frames()[-1]
        assert inputs.serial == probs.serial == 1
        assert inputs.rows.shape[1] == probs.rows.shape[1] == CAPTURED_TOKENS
        # dense layers, too; nemotron's layers have experts, attention or a state, and no second part
        computed = list(info.expert_layers) if model.case.startswith("nemotron") else slice(None)  # type: ignore[attr-defined]
        assert (inputs.layer_tokens[computed] == len(TOKENS)).all()
        assert (probs.layer_tokens[list(info.expert_layers)] == len(TOKENS)).all()
        for layer in info.expert_layers:
            here = slice(layer, layer + 1)
            scores = routers.scores(here, inputs.rows[here, : len(TOKENS)])
            if probs.layer_tokens[layer]:
                kept = probs.rows[here, : len(TOKENS)]
                kept = routers.probabilities(kept) if kept.min() < 0 else kept
                np.testing.assert_allclose(scores, kept, atol=2e-5)
            if model.case in GROUPED:  # type: ignore[attr-defined]
                continue
            n_used = info.used_per_layer[layer]
            chosen = np.sort(routers.best(here, scores, n_used)[0], axis=-1)
            assert np.array_equal(chosen, np.sort(frame.ids[layer, :, :n_used], axis=-1))


def test_the_hook_is_called_before_each_block(model: Model) -> None:
    """Its ids are the frame's, its inputs the captured ones; it is not called for prompts and large batches."""
    seen: list[Block] = []
    with Context(model, n_ctx=128, n_threads=1) as context:
        capture = context.capture_activations()
        assert capture is not None and context.sensor is not None
        capture.enable(CaptureFlags.INPUTS)
        capture.set_hook(seen.append)
        context.decode(TOKENS, phase=Phase.PREFILL)
        context.decode(TOKENS * 4, phase=Phase.VERIFY)
        assert not seen
        context.decode(TOKENS, phase=Phase.VERIFY, logits="all")
        frame, inputs = context.sensor.frames()[-1], capture.read(CaptureFlags.INPUTS)
        assert [block.layer for block in seen] == list(model.info.expert_layers)
        for block in seen:
            assert block.phase == Phase.VERIFY and block.ids is not None and block.inputs is not None
            assert np.array_equal(block.ids, frame.ids[block.layer, :, : model.info.used_per_layer[block.layer]])
            assert np.array_equal(block.inputs, inputs.rows[block.layer, : len(TOKENS)])
        capture.set_hook(None)
        context.decode(TOKENS[:1], phase=Phase.DECODE)
        assert len(seen) == len(model.info.expert_layers)


def test_a_dense_model(tiny_draft: Path, tiny: TinyFactory) -> None:
    """A draft: our backend computes it only while it is captured; the inputs contain the norm's scale."""
    library.start()
    seen: list[Block] = []
    with Model.load(tiny_draft) as model, Context(model, n_ctx=64, n_threads=1) as context:
        assert context.mode == "stock"
        capture = context.capture_activations()
        assert capture is not None and context.capture_activations() is capture and context.mode == "moeedge"
        capture.enable(CaptureFlags.INPUTS)
        capture.set_hook(seen.append)
        context.decode(TOKENS[:1], phase=Phase.DRAFT)
        inputs = capture.read(CaptureFlags.INPUTS)
        assert inputs.layer_tokens.tolist() == [1] * model.info.n_layers
        assert [block.layer for block in seen] == list(range(model.info.n_layers))
        assert all(block.ids is None for block in seen)
        norms = read_norms(model)
        assert norms is not None
        # after an RMS norm without weights a vector has length sqrt(n_embd)
        lengths = np.linalg.norm(inputs.rows[:, 0] / norms, axis=-1)
        np.testing.assert_allclose(lengths, np.sqrt(model.info.n_embd), rtol=1e-3)


def test_norms_are_converted_to_one_scale(tiny: TinyFactory) -> None:
    """One hidden state after two norms: scaled by the ratio of their weights, the router selects the same experts."""
    library.start()
    with Model.load(tiny("qwen3moe")) as model:
        routers = Routers.read(model)
        rng = np.random.default_rng(1)
        hidden = rng.standard_normal((1, 5, model.info.n_embd)).astype(np.float32)
        assert routers.norm is not None
        other = rng.uniform(0.2, 3.0, routers.norm[:1].shape).astype(np.float32)
        ratio = routers.ratio(np.array([1]), other)
        assert ratio is not None
        here = slice(1, 2)
        expected = routers.scores(here, hidden * routers.norm[here])
        np.testing.assert_allclose(routers.scores(here, hidden * other * ratio), expected, atol=1e-5)
        assert routers.ratio(np.array([1]), None) is None


def test_after_closing_nothing_is_captured(tiny_moe: Path) -> None:
    seen: list[Block] = []
    with Model.load(tiny_moe) as model, Context(model, n_ctx=64, n_threads=1) as context:
        capture = context.capture_activations()
        assert capture is not None
        capture.enable(CaptureFlags.INPUTS)
        capture.set_hook(seen.append)
        context.decode(TOKENS[:1], phase=Phase.DECODE)
        n_blocks = len(seen)
        assert n_blocks and capture.read(CaptureFlags.INPUTS).serial == 1
        capture.close()
        context.decode(TOKENS[:1], phase=Phase.DECODE)
        assert len(seen) == n_blocks
        with pytest.raises(BackendError):  # no memory is kept for it
            capture.read(CaptureFlags.INPUTS)
