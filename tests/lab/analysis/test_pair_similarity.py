"""Similarity of draft and target: against hidden states that a hook sees token by token, and routers read by gguf."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError
from moeedge.lab.experiments import sp_moe
from moeedge.lab.experiments.sp_moe import compare_pair
from moeedge.llama.context import Context
from moeedge.native import Block
from moeedge.native.abi import Phase
from moeedge.run import Run
from tests.support.progress import SeenProgress

TEXTS = [list(range(5, 45)), [7, 8, 9]]


def open_pair(target: Path, draft: Path | str | None) -> Session:
    return Session.open(EngineConfig(model=target, draft=draft, gamma=2, n_ctx=256, n_threads=1))  # type: ignore[arg-type]


def blocks_of(context: Context, phase: Phase) -> list[dict[int, Block]]:
    """For each token of TEXTS, decoded alone, the layers' blocks."""
    capture = context.capture_activations()
    assert capture is not None
    seen: list[dict[int, Block]] = []
    capture.set_hook(lambda block: seen[-1].__setitem__(block.layer, block))
    for text in TEXTS:
        context.clear()
        for token in text:
            seen.append({})
            context.decode([token], phase=phase, logits="all")
    capture.set_hook(None)
    return seen


def tensor(path: Path, name: str) -> np.ndarray:
    found = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
    return np.array(found.data, dtype=np.float64)


def test_figures_equal_single_tokens_through_the_routers(tiny_moe: Path, tiny_draft: Path) -> None:
    with open_pair(tiny_moe, tiny_draft) as session:
        result = compare_pair(session, TEXTS, Run())
        assert session.draft_context is not None
        own, drafted = blocks_of(session.target, Phase.DECODE), blocks_of(session.draft_context, Phase.DRAFT)
    assert result is not None
    assert (result.tokens, result.layers, result.draft) == (43, [0, 1, 2], tiny_draft.name)
    for layer in result.layers:
        draft_layer = [0, 1, 1][layer]  # of two, at the same relative depth
        router = tensor(tiny_moe, f"blk.{layer}.ffn_gate_inp.weight")
        ratio = tensor(tiny_moe, f"blk.{layer}.ffn_norm.weight") / tensor(
            tiny_draft, f"blk.{draft_layer}.ffn_norm.weight"
        )
        cosine, hits, entropies = [], [], []
        for target_blocks, draft_blocks in zip(own, drafted, strict=True):
            block = target_blocks[layer]
            assert block.inputs is not None and block.ids is not None
            a, b = block.inputs[0].astype(float), draft_blocks[draft_layer].inputs[0] * ratio  # type: ignore[index]
            cosine.append(a @ b / np.sqrt((a @ a) * (b @ b)))
            ranked = np.argsort(-(router @ b))[:4].tolist()
            used = set(block.ids[0].tolist())
            hits.append([sum(expert in used for expert in ranked[:n]) / n for n in range(1, 5)])
            entropies.append([entropy(router @ b), entropy(router @ a)])
        assert result.cosine[layer] == pytest.approx(np.mean(cosine), abs=2e-3)
        assert result.top_n[layer] == pytest.approx(np.mean(hits, axis=0), abs=0.02)  # near-ties of batches
        shown = [result.entropy_draft_bits[layer], result.entropy_target_bits[layer]]
        assert shown == pytest.approx(np.mean(entropies, axis=0), abs=5e-3)


def entropy(logits: np.ndarray) -> float:
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return float(-sum(x * np.log2(x) for x in p if x > 0))


def test_at_most_so_many_tokens_and_none_after_a_stop(
    tiny_moe: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sp_moe, "MAX_TOKENS", 20)
    with open_pair(tiny_moe, tiny_draft) as session:
        result = compare_pair(session, TEXTS, Run())
        assert result is not None and result.tokens == 20
        seen = SeenProgress()
        stopped = compare_pair(session, TEXTS, Run(cancelled=lambda: bool(seen.amounts), progress=seen))
        assert stopped is not None and stopped.tokens == 16 == sum(seen.amounts)
        assert compare_pair(session, TEXTS, Run(cancelled=lambda: True)) is None
        assert session.target.n_past == 0


def test_pairs_that_cannot_be_compared(tiny_moe: Path, bundled_pair: tuple[Path, Path]) -> None:
    with open_pair(tiny_moe, "ngram") as session, pytest.raises(EngineError, match="no draft model"):
        compare_pair(session, TEXTS, Run())
    with open_pair(*bundled_pair) as session, pytest.raises(EngineError, match="96 values and the target's 64"):
        compare_pair(session, TEXTS, Run())
