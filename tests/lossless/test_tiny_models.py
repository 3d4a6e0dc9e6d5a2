"""The tiny models are worth testing on: routing and logits vary, every expert type reaches the kernels meant for it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from moeedge.lab.widen.vocabulary import ENDOFTEXT, IM_END, IM_START, N_VOCAB
from moeedge.llama import library
from tests.conftest import TinyFactory
from tests.support.cases import K_QUANTS, MOE_CASES
from tests.support.stock import StockContext, tap_context

TOKENS = np.random.default_rng(8).integers(0, 256, 128).tolist()


@pytest.mark.parametrize("case", MOE_CASES)
def test_routing_and_logits_vary(case: str, tiny: TinyFactory) -> None:
    arch, dimensions = MOE_CASES[case]
    library.start()
    context, tap = tap_context(tiny(arch, **dimensions))
    with context:
        logits = context.decode(TOKENS)
    for layer, ids in tap.ids.items():
        n_used = ids.shape[1]
        choices = {tuple(sorted(row)) for row in ids.tolist()}
        assert len(choices) > (32 if n_used > 2 else 8), f"layer {layer} routes alike"
        assert len(np.unique(ids)) >= 8, f"layer {layer} leaves most experts unused"
    assert 3 < logits.std() < 5
    assert len(set(logits.argmax(axis=1).tolist())) > 40
    best = np.sort(logits, axis=1)[:, -2:]
    assert np.median(best[:, 1] - best[:, 0]) > 0.3, "near-ties must be rare"


@pytest.mark.parametrize("case", MOE_CASES)
def test_files_are_as_named(case: str, tiny: TinyFactory) -> None:
    arch, dimensions = MOE_CASES[case]
    reader = gguf.GGUFReader(tiny(arch, **dimensions))
    assert reader.get_field("general.architecture").contents() == arch
    names = {tensor.name for tensor in reader.tensors}
    assert any("ffn_gate_up_exps" in name for name in names) == bool(dimensions.get("merged"))
    types = {tensor.tensor_type.name for tensor in reader.tensors if "_exps" in tensor.name}
    if case in K_QUANTS:
        assert types == K_EXPERT_TYPES.get(case, {case})


# what llama.cpp's quantizer mixes
K_EXPERT_TYPES = {"Q3_K_M": {"Q3_K", "Q4_K"}, "Q4_K_M": {"Q4_K", "Q6_K"}, "Q5_K_M": {"Q5_K", "Q6_K"}}


def test_vocabulary(tiny_moe: Path) -> None:
    library.start()
    with StockContext(tiny_moe) as context:
        assert context.n_vocab == N_VOCAB == 304
        assert context.tokenize("<|im_start|>") == [IM_START]
        assert context.tokenize("<|im_end|><|endoftext|>") == [IM_END, ENDOFTEXT]
        text = "the ärea is 日本 \U0001f600\n"
        assert 0 < len(context.tokenize(text)) < len(text.encode()), "some letters merge"
