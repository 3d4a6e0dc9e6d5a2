"""The value of -dev reaches llama.cpp's model parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.model_memory import ModelMemory
from moeedge.native.abi import Phase


@pytest.mark.parametrize("name", ["auto", "emulated:link=25GB/s", "rpc://127.0.0.1:50052"])
def test_llama_cpp_gets_the_gpus_of_this_machine(name: str) -> None:
    """Whatever holds the experts; a remote worker is not among them."""
    library.start()
    assert len(library.device_list(name)) == len(library.local_gpus()) + 1


@pytest.mark.parametrize("name", ["none", "CPU"])
def test_no_gpu_is_an_empty_list(name: str, tiny_moe: Path) -> None:
    """An empty list keeps GPUs out of large batches too; without one the answer is the same."""
    library.start()
    assert list(library.device_list(name)) == [None]
    logits = []
    for device in ("auto", name):
        with Model.load(tiny_moe, device=device) as model, Context(model, n_ctx=256, n_threads=1) as context:
            logits.append(context.decode([1, 2, 3], phase=Phase.PREFILL, logits="all").copy())
    assert np.array_equal(*logits)


def test_experts_on_the_cpu_change_nothing_without_a_gpu(tiny_moe: Path) -> None:
    """The override is taken by llama.cpp, and the experts land where they would have been anyway."""
    logits = []
    for experts_on_cpu in (False, True):
        with (
            Model.load(tiny_moe, n_gpu_layers=-1, experts_on_cpu=experts_on_cpu) as model,
            Context(model, n_ctx=256, n_threads=1) as context,
        ):
            logits.append(context.decode([1, 2, 3], phase=Phase.PREFILL, logits="all").copy())
    assert np.allclose(*logits, rtol=0, atol=1e-3)


def test_header_only_has_the_shape(tiny_moe: Path) -> None:
    with Model.load(tiny_moe, header_only=True) as header, Model.load(tiny_moe) as model:
        assert header.info == model.info
        assert ModelMemory.of(header) == ModelMemory.of(model)
