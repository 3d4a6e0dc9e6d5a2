"""The value of -dev reaches llama.cpp's model parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.engine import library
from moeedge.engine.context import Context
from moeedge.engine.model import Model
from moeedge.engine.types import Phase


def test_auto_leaves_the_choice_to_llama_cpp() -> None:
    library.start()
    assert library.device_list("auto") is None


@pytest.mark.parametrize("name", ["none", "CPU"])
def test_no_gpu_is_an_empty_list(name: str, tiny_moe: Path) -> None:
    """An empty list keeps GPUs out of large batches too; without one the answer is the same."""
    library.start()
    chosen = library.device_list(name)
    assert chosen is not None
    assert list(chosen) == [None]
    logits = []
    for device in ("auto", name):
        with Model.load(tiny_moe, device=device) as model, Context(model, n_ctx=256, n_threads=1) as context:
            logits.append(context.decode([1, 2, 3], phase=Phase.PREFILL, logits="all").copy())
    assert np.array_equal(*logits)
