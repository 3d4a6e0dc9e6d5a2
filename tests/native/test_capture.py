"""Captured activations: routers select the model's experts from them, and outputs of all experts of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.errors import BackendError
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.routers import Routers, read_norms
from moeedge.native import CAPTURED_TOKENS, ActivationCapture, Block, CaptureFlags, Sensor
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES, case_model
from tests.support.stock import GgmlTensor, StockContext, read_tensor

TOKENS = np.random.default_rng(5).integers(0, 256, 9).tolist()
QUICK = {"qwen3moe", "mixtral", "deepseek3", "gpt-oss"}
OUTPUT_CASES = [
    pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in MOE_CASES if case != "llama4"
]
OUTPUT_TOKENS = np.random.default_rng(11).integers(0, 256, 7).tolist()


@pytest.fixture(scope="module", params=MOE_CASES)
def model(request: pytest.FixtureRequest, tiny: TinyFactory) -> Iterator[tuple[str, Model]]:
    library.start()
    with Model.load(case_model(tiny, request.param)) as loaded:
        yield request.param, loaded


@contextmanager
def captured(model: Model, n_ctx: int = 64) -> Iterator[tuple[Context, ActivationCapture, Sensor]]:
    """A context whose activations may be captured."""
    with Context(model, n_ctx=n_ctx, n_threads=1) as context:
        capture = context.capture_activations()
        assert capture is not None and context.sensor is not None
        yield context, capture, context.sensor


def test_routers_on_captured_inputs_select_the_models_experts(model: tuple[str, Model]) -> None:
    case, loaded = model
    info = loaded.info
    routers = Routers.read(loaded)
    with captured(loaded) as (context, capture, sensor):
        capture.enable(CaptureFlags.INPUTS | CaptureFlags.PROBS)
        assert capture.read(CaptureFlags.INPUTS).serial == 0
        context.decode(TOKENS, phase=Phase.VERIFY, logits="all")
        inputs, probs = capture.read(CaptureFlags.INPUTS), capture.read(CaptureFlags.PROBS)
        frame = sensor.frames()[-1]
        assert inputs.serial == probs.serial == 1
        assert inputs.rows.shape[1] == probs.rows.shape[1] == CAPTURED_TOKENS
        # dense layers, too; nemotron's layers have experts, attention or a state, and no second part
        computed = list(info.expert_layers) if case.startswith("nemotron") else slice(None)
        assert (inputs.layer_tokens[computed] == len(TOKENS)).all()
        assert (probs.layer_tokens[list(info.expert_layers)] == len(TOKENS)).all()
        for layer in info.expert_layers:
            here = slice(layer, layer + 1)
            scores = routers.scores(here, inputs.rows[here, : len(TOKENS)])
            if probs.layer_tokens[layer]:
                kept = probs.rows[here, : len(TOKENS)]
                kept = routers.probabilities(kept) if kept.min() < 0 else kept
                np.testing.assert_allclose(scores, kept, atol=2e-5)
            if case == "deepseek3":  # routes to groups of experts, which Routers does not model
                continue
            n_used = info.used_per_layer[layer]
            chosen = np.sort(routers.best(here, scores, n_used)[0], axis=-1)
            assert np.array_equal(chosen, np.sort(frame.ids[layer, :, :n_used], axis=-1))


def test_the_hook_is_called_before_each_block(model: tuple[str, Model]) -> None:
    """Its ids are the frame's, its inputs the captured ones; it is not called for prompts and large batches."""
    info = model[1].info
    seen: list[Block] = []
    with captured(model[1], n_ctx=128) as (context, capture, sensor):
        capture.enable(CaptureFlags.INPUTS)
        capture.set_hook(seen.append)
        context.decode(TOKENS, phase=Phase.PREFILL)
        context.decode(TOKENS * 4, phase=Phase.VERIFY)
        assert not seen
        context.decode(TOKENS, phase=Phase.VERIFY, logits="all")
        frame, inputs = sensor.frames()[-1], capture.read(CaptureFlags.INPUTS)
        assert [block.layer for block in seen] == list(info.expert_layers)
        for block in seen:
            assert block.phase == Phase.VERIFY and block.ids is not None and block.inputs is not None
            assert np.array_equal(block.ids, frame.ids[block.layer, :, : info.used_per_layer[block.layer]])
            assert np.array_equal(block.inputs, inputs.rows[block.layer, : len(TOKENS)])
        capture.set_hook(None)
        context.decode(TOKENS[:1], phase=Phase.DECODE)
        assert len(seen) == len(info.expert_layers)


def test_a_dense_model(tiny_draft: Path) -> None:
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


def test_norms_are_converted_to_one_scale(tiny_moe: Path) -> None:
    """One hidden state after two norms: scaled by the ratio of their weights, the router selects the same experts."""
    library.start()
    with Model.load(tiny_moe) as model:
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
    library.start()
    seen: list[Block] = []
    with Model.load(tiny_moe) as model, captured(model) as (context, capture, _):
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


# outputs of all experts


@pytest.mark.parametrize("case", OUTPUT_CASES)
def test_outputs_of_the_selected_experts_add_up_to_llama_cpps(case: str, tiny: TinyFactory) -> None:
    path = case_model(tiny, case)
    expected = stock_outputs(path)
    outputs: dict[int, NDArray[np.float32]] = {}
    with Model.load(path) as model, captured(model) as (context, capture, sensor):
        capture.set_hook(lambda block: outputs.update({block.layer: capture.expert_outputs(block)}))
        context.decode(OUTPUT_TOKENS, phase=Phase.VERIFY, logits="all")
        frame = sensor.frames()[-1]
        assert list(outputs) == list(model.info.expert_layers) == list(expected)
        for layer, each in outputs.items():
            assert each.shape == (len(OUTPUT_TOKENS), model.info.n_experts, model.info.n_embd)
            picked = np.take_along_axis(each, frame.ids[layer][..., None], axis=1)
            total = (picked * frame.weights[layer][..., None]).sum(axis=1)
            np.testing.assert_allclose(total, expected[layer], rtol=1e-4, atol=1e-6 * np.abs(expected[layer]).max())
        capture.close()


def test_outputs_are_refused_where_they_cannot_be_computed(tiny: TinyFactory) -> None:
    """Outside of a call of the hook; where the weights are applied before the experts; and the decode goes on."""
    seen: list[Block] = []
    library.start()
    with Model.load(tiny("llama4")) as model, captured(model) as (context, capture, _):

        def hook(block: Block) -> None:
            with pytest.raises(BackendError):
                capture.expert_outputs(block)
            seen.append(block)

        capture.set_hook(hook)
        context.decode(OUTPUT_TOKENS, phase=Phase.VERIFY, logits="all")
        assert len(seen) == len(model.info.expert_layers)
        with pytest.raises(BackendError):
            capture.expert_outputs(seen[-1])
        capture.close()


def stock_outputs(path: Path) -> dict[int, NDArray[np.float32]]:
    """Each layer's sum over the experts, float32 [n_tokens, n_embd], read by llama.cpp's eval callback."""
    found: dict[int, NDArray[np.float32]] = {}
    library.start()

    def callback(tensor: int, ask: bool, _user: object) -> bool:
        view = GgmlTensor.from_address(tensor)
        name, _, layer = view.name.decode().rpartition("-")
        if name != "ffn_moe_out" or not layer.isdecimal():  # views have more after the number
            return not ask
        if not ask:
            found[int(layer)] = read_tensor(view, np.float32)
        return True

    with StockContext(path, callback=callback) as stock:
        stock.decode(OUTPUT_TOKENS)
    return found
