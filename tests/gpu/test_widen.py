"""Widening changes the shape and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.engine import library
from moeedge.engine.expert_tensors import expert_tensors
from tests.conftest import TinyFactory
from tests.support.stock import StockContext, transcript
from tests.support.widen import main, widen


@pytest.mark.parametrize(("dimensions", "tolerance"), [({"expert_type": "F32"}, 1e-4), ({"dense_type": "Q8_0"}, 2e-2)])
def test_same_logits(dimensions: dict[str, str], tolerance: float, tiny: TinyFactory, tmp_path: Path) -> None:
    """To the rounding of plain kernels; quantised ones round activations, which a last bit may turn over."""
    source = tiny("qwen3moe", **dimensions)
    wide = tmp_path / "wide.gguf"
    widen(source, wide, wide_embd=256, wide_expert_ff=96)
    library.start()
    with StockContext(source) as narrow, StockContext(wide) as context:
        expected, rows = transcript(narrow), transcript(context)
    assert np.abs(rows - expected).max() < tolerance * np.abs(expected).max()
    tensors, _ = expert_tensors(wide)
    assert {(tensor.ne0, tensor.ne1) for tensor in tensors} == {(256, 96), (96, 256)}


def test_the_bundled_target_says_the_same(bundled_pair: tuple[Path, Path], tmp_path: Path) -> None:
    wide = tmp_path / "wide.gguf"
    main(["--out", str(wide), "--embd", "256", "--expert-ff", "64"])
    library.start()
    with StockContext(bundled_pair[0]) as narrow, StockContext(wide) as context:
        prompt = narrow.tokenize("<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n")
        assert context.greedy(prompt, 32)[0] == narrow.greedy(prompt, 32)[0]


def test_widths_that_cannot_be(tiny: TinyFactory, tmp_path: Path) -> None:
    for embd, expert_ff in ((100, 64), (32, 64), (128, 16)):
        with pytest.raises(ValueError, match="multiples of 32"):
            widen(tiny("qwen3moe"), tmp_path / "wide.gguf", wide_embd=embd, wide_expert_ff=expert_ff)
    with pytest.raises(ValueError, match="no qwen3moe"):
        widen(tiny("llama"), tmp_path / "wide.gguf", wide_embd=128, wide_expert_ff=64)
