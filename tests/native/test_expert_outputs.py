"""Outputs of all experts of a block: those of the selected ones add up to what stock llama.cpp computes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.errors import BackendError
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native import Block
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES
from tests.support.stock import StockContext

TOKENS = np.random.default_rng(11).integers(0, 256, 7).tolist()
QUICK = {"qwen3moe", "mixtral", "deepseek3", "gpt-oss"}
CASES = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in MOE_CASES if case != "llama4"]
OUTPUT = b"ffn_moe_out-"  # llama.cpp's name of the sum over a token's experts


@pytest.mark.parametrize("case", CASES)
def test_selected_outputs_add_up_to_llama_cpps(case: str, tiny: TinyFactory) -> None:
    arch, dimensions = MOE_CASES[case]
    path = tiny(arch, **dimensions)
    expected = stock_outputs(path)
    outputs: dict[int, NDArray[np.float32]] = {}
    library.start()
    with Model.load(path) as model, Context(model, n_ctx=64, n_threads=1) as context:
        capture = context.capture_activations()
        assert capture is not None and context.sensor is not None
        capture.set_hook(lambda block: outputs.update({block.layer: capture.expert_outputs(block)}))
        context.decode(TOKENS, phase=Phase.VERIFY, logits="all")
        frame = context.sensor.frames()[-1]
        assert list(outputs) == list(model.info.expert_layers) == list(expected)
        for layer, each in outputs.items():
            assert each.shape == (len(TOKENS), model.info.n_experts, model.info.n_embd)
            picked = np.take_along_axis(each, frame.ids[layer][..., None], axis=1)
            total = (picked * frame.weights[layer][..., None]).sum(axis=1)
            np.testing.assert_allclose(total, expected[layer], rtol=1e-4, atol=1e-6 * np.abs(expected[layer]).max())
        capture.close()


def test_it_is_refused_where_it_cannot_be_computed(tiny: TinyFactory) -> None:
    """Outside of a call of the hook; where the weights are applied before the experts; and the decode goes on."""
    seen: list[Block] = []
    library.start()
    with Model.load(tiny("llama4")) as model, Context(model, n_ctx=64, n_threads=1) as context:
        capture = context.capture_activations()
        assert capture is not None

        def hook(block: Block) -> None:
            with pytest.raises(BackendError):
                capture.expert_outputs(block)
            seen.append(block)

        capture.set_hook(hook)
        context.decode(TOKENS, phase=Phase.VERIFY, logits="all")
        assert len(seen) == len(model.info.expert_layers)
        with pytest.raises(BackendError):
            capture.expert_outputs(seen[-1])
        capture.close()


def stock_outputs(path: Path) -> dict[int, NDArray[np.float32]]:
    """Each layer's sum over the experts, float32 [n_tokens, n_embd], read by llama.cpp's eval callback."""
    found: dict[int, NDArray[np.float32]] = {}
    library.start()
    name_of = library.ggml_function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
    n_bytes = library.ggml_function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
    copy = library.ggml_function(
        "ggml_backend_tensor_get", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
    )

    def callback(tensor: int, ask: bool, _user: object) -> bool:
        name = name_of(tensor)
        if not name.startswith(OUTPUT) or not name[len(OUTPUT) :].isdigit():  # views have more after the number
            return not ask
        if not ask:
            rows = np.empty(n_bytes(tensor) // 4, dtype=np.float32)
            copy(tensor, rows.ctypes.data, 0, rows.nbytes)
            found[int(name[len(OUTPUT) :])] = rows.reshape(len(TOKENS), -1)
        return True

    stock = StockContext(path, callback=callback)
    stock.decode(TOKENS)
    stock.close()
    return found
