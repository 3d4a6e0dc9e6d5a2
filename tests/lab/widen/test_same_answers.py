"""A wide model computes what its source computes.

To the bit on the CPU where matrices are quantised, unless the head size changes: then attention sums its products in
another order. Such sums differ in a last bit, which rounding to 8 bits for the next matrix can make visible in logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.data.datasets import load_toy
from moeedge.lab.widen.layout import make_wide_plan
from moeedge.llama.model import Model
from tests.conftest import TinyFactory
from tests.support.stock import StockContext

MAX_TOKENS = 64
TOKENS = np.random.default_rng(1).integers(0, 250, 96).tolist()
WIDER = dict(embd=256, ff=128, heads=16, heads_kv=4, layers=54)
LARGER_HEADS = WIDER | {"head_dim": 128}


def widened(source: Path, folder: Path, asked: dict[str, int], type_: str | None = None) -> Path:
    path = folder / "wide.gguf"
    make_wide_plan(source, asked, type_=type_).write(path)
    return path


def logits(path: Path) -> np.ndarray:
    """Of the tokens in one batch, then of one alone."""
    with StockContext(path) as context:
        return np.concatenate([context.decode(TOKENS), context.decode(TOKENS[:1])])


@pytest.mark.parametrize(
    "asked",
    [
        dict(embd=256),
        dict(embd=192, ff=96),
        dict(heads=16, heads_kv=4),
        dict(heads=4, heads_kv=4, layers=5),
        dict(embd=512, ff=64, heads=12, heads_kv=4, layers=4),
    ],
    ids=["embd", "ff", "heads", "layers", "all"],
)
def test_logits_are_equal_bit_for_bit(asked: dict[str, int], tiny: TinyFactory, tmp_path: Path) -> None:
    narrow = tiny("qwen3moe", dense_type="Q8_0", head_dim=32)
    assert np.array_equal(logits(widened(narrow, tmp_path, asked)), logits(narrow))


def test_a_dense_model(tiny: TinyFactory, tmp_path: Path) -> None:
    asked = dict(embd=256, ff=512, heads=8, heads_kv=4, layers=6)
    assert np.array_equal(logits(widened(tiny("qwen3"), tmp_path, asked)), logits(tiny("qwen3")))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("embd", [64, 320])
def test_larger_heads_differ_by_rounding(embd: int, head_dim: int, tiny: TinyFactory, tmp_path: Path) -> None:
    """Of float32 matrices here; keys and values are 16 bits wide."""
    narrow = tiny("qwen3moe", expert_type="F32")
    asked = dict(embd=embd, head_dim=head_dim, heads=8, heads_kv=4)
    found, expected = logits(widened(narrow, tmp_path, asked)), logits(narrow)
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize(("type_", "error"), [("f16", 0.01), ("q8_0", 0.05), ("q4_k", 0.3)])
def test_other_types_differ_by_their_rounding(type_: str, error: float, tiny: TinyFactory, tmp_path: Path) -> None:
    narrow = tiny("qwen3", dense_type="F32")
    wide = widened(narrow, tmp_path, dict(embd=256, ff=256), type_)
    found, expected = logits(wide), logits(narrow)
    assert 0 < np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < error


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "least"), [(WIDER, 25), (LARGER_HEADS, 24)], ids=["wider", "larger-heads"])
def test_answers_of_the_target_are_the_same(
    asked: dict[str, int], least: int, bundled_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """In the types that the pair ships in. With larger heads a tie may fall the other way."""
    target, prompts = bundled_pair[0], load_toy().prompts[:25]
    wide = widened(target, tmp_path, asked)
    with Model.load(target, header_only=True) as model, StockContext(target) as narrow, StockContext(wide) as other:
        tokens = [model.chat_tokens(prompt.messages(0)) for prompt in prompts]
        same = [narrow.answer(prompt, MAX_TOKENS) == other.answer(prompt, MAX_TOKENS) for prompt in tokens]
    assert sum(same) >= least
