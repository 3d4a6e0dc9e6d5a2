"""A wide model computes what its source computes.

To the bit on the CPU where matrices are quantised, unless the head size changes: then attention sums its products in
another order. Such sums differ in a last bit, which rounding to 8 bits for the next matrix can make visible in logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from models.generator import Chat, held_back, render_prompt, score
from models.llama_runner import Runner
from moeedge.data.datasets import load_toy
from moeedge.lab.widen.layout import RequestedSizes, WeightType, make_wide_plan
from moeedge.lab.widen.writer import write
from moeedge.llama import library
from tests.conftest import TinyFactory

MAX_TOKENS = 64
WIDER = RequestedSizes(embd=256, ff=128, heads=16, heads_kv=4, layers=54)
LARGER_HEADS = RequestedSizes(embd=256, ff=128, heads=16, heads_kv=4, head_dim=128, layers=54)


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """The runner of models/ silences llama.cpp; later tests read its log as the program does."""
    yield
    library.lib.llama_log_set(library._log_callback, None)


def widened(source: Path, folder: Path, asked: RequestedSizes, type_: WeightType | None = None) -> Path:
    path = folder / "wide.gguf"
    write(make_wide_plan(source, asked, type_=type_), path)
    return path


def prompt_of(chat: Chat) -> str:
    """The first question."""
    return render_prompt(chat.messages(1))


def toy_prompts() -> list[str]:
    return [
        render_prompt([(message.role, message.content) for message in prompt.turns[0]]) for prompt in load_toy().prompts
    ]


def greedy(model: Runner, prompt: str) -> list[int]:
    model.cut(0)
    token = int(model.eval(model.encode(prompt))[-1].argmax())
    answer: list[int] = []
    while not model.is_end(token) and len(answer) < MAX_TOKENS:
        answer.append(token)
        token = int(model.eval([token])[-1].argmax())
    return answer


@pytest.mark.parametrize(
    "asked",
    [
        RequestedSizes(embd=256),
        RequestedSizes(embd=192, ff=96),
        RequestedSizes(heads=16, heads_kv=4),
        RequestedSizes(heads=4, heads_kv=4, layers=5),
        RequestedSizes(embd=512, ff=64, heads=12, heads_kv=4, layers=4),
    ],
    ids=["embd", "ff", "heads", "layers", "all"],
)
def test_logits_are_equal_bit_for_bit(asked: RequestedSizes, tiny: TinyFactory, tmp_path: Path) -> None:
    narrow = tiny("qwen3moe", dense_type="Q8_0", head_dim=32)
    wide = widened(narrow, tmp_path, asked)
    tokens = np.random.default_rng(1).integers(0, 250, 48).tolist()
    with Runner(narrow, 128, 1) as first, Runner(wide, 128, 1) as second:
        assert np.array_equal(first.eval(tokens), second.eval(tokens))
        assert np.array_equal(first.eval(tokens[:1]), second.eval(tokens[:1]))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("embd", [None, 320])
def test_larger_heads_differ_by_rounding(embd: int | None, head_dim: int, tiny: TinyFactory, tmp_path: Path) -> None:
    """Of float32 matrices here; keys and values are 16 bits wide."""
    narrow = tiny("qwen3moe", expert_type="F32")
    wide = widened(narrow, tmp_path, RequestedSizes(embd=embd, head_dim=head_dim, heads=8, heads_kv=4))
    tokens = np.random.default_rng(2).integers(0, 250, 96).tolist()
    with Runner(narrow, 128, 1) as first, Runner(wide, 128, 1) as second:
        expected, found = first.eval(tokens), second.eval(tokens)
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def test_a_dense_model(tiny: TinyFactory, tmp_path: Path) -> None:
    narrow = tiny("qwen3")
    wide = widened(narrow, tmp_path, RequestedSizes(embd=256, ff=512, heads=8, heads_kv=4, layers=6))
    tokens = np.random.default_rng(3).integers(0, 250, 48).tolist()
    with Runner(narrow, 128, 1) as first, Runner(wide, 128, 1) as second:
        assert np.array_equal(first.eval(tokens), second.eval(tokens))


@pytest.mark.slow
def test_the_bundled_draft_gives_equal_answers(bundled_pair: tuple[Path, Path], tmp_path: Path) -> None:
    wide = widened(bundled_pair[1], tmp_path, RequestedSizes(embd=384, ff=512, heads=8, heads_kv=4, layers=6))
    with Runner(bundled_pair[1], n_threads=1) as narrow, Runner(wide, n_threads=1) as model:
        for prompt in toy_prompts()[::9]:
            assert greedy(model, prompt) == greedy(narrow, prompt)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "least"), [(WIDER, 50), (LARGER_HEADS, 48)], ids=["wider", "larger-heads"])
def test_fifty_answers_of_the_target_are_the_same(
    asked: RequestedSizes, least: int, bundled_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """In the types that the pair ships in. With larger heads a tie may fall the other way."""
    wide = widened(bundled_pair[0], tmp_path, asked)
    prompts = toy_prompts()[::2] + [prompt_of(chat) for chat in held_back(50)]
    prompts = prompts[:50]
    with Runner(bundled_pair[0], n_threads=1) as narrow, Runner(wide, n_threads=1) as model:
        same = [greedy(model, prompt) == greedy(narrow, prompt) for prompt in prompts]
    print(f"{sum(same)} of {len(same)} answers are the same")
    assert len(same) == 50 and sum(same) >= least


@pytest.mark.slow
@pytest.mark.parametrize("type_", [t for t in WeightType if t != WeightType.Q4_0])  # Q4_0 are the source's own bytes
def test_the_score_in_other_types(type_: WeightType, bundled_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Within two points of the source's on held-back prompts."""
    wide = widened(bundled_pair[0], tmp_path, RequestedSizes(embd=256, ff=256), type_)
    chats = held_back(100)
    with Runner(bundled_pair[0], n_threads=1) as narrow, Runner(wide, n_threads=1) as model:
        right = np.array(
            [
                [score(chat, 0, one.decode_text(greedy(one, prompt_of(chat)))) for one in (narrow, model)]
                for chat in chats
            ]
        )
    before, after = right.mean(axis=0)
    print(f"{type_.value}: {before:.3f} -> {after:.3f}, {(right[:, 0] != right[:, 1]).sum()} answers changed sides")
    assert after >= before - 0.02
