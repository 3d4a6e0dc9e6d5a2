"""Our attention gives the bits of ggml's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.native.abi import KernelChoice
from moeedge.native.compute import ATTENTION, attention_count, kernels, set_kernel_choice
from tests.support.expert_blocks import Engine
from tests.support.raw_ggml import F16, F32, Graph, ggml

_CHOICES = {"avx512vnni": KernelChoice.ALL, "avxvnni": KernelChoice.AVXVNNI, "avx2": KernelChoice.AVX2}


@dataclass(frozen=True)
class Shape:
    """Of an attention; n_window: keys that a token sees, n_passed: keys before the first token."""

    n_tokens: int
    n_kv: int
    n_heads: int = 4
    n_key_heads: int = 2
    n_key: int = 128
    n_value: int = 128
    n_window: int = 1 << 20
    n_passed: int = 0
    is_half: bool = True
    has_mask: bool = True
    has_sinks: bool = False
    softcap: float = 0.0
    max_bias: float = 0.0
    is_ours: bool = True
    is_permuted: bool = False  # keys of all heads side by side, as llama.cpp keeps them
    n_masks: int = 1  # heads take them in turns
    masked: float = 0.0  # of every seventh key that is seen


class Attention(Graph):
    """The graph of a FLASH_ATTN_EXT, with random values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kind = F16 if shape.is_half else F32
        q = self.tensor(F32, shape.n_key, shape.n_tokens, shape.n_heads)
        k, v = (self._keys(kind, width) for width in (shape.n_key, shape.n_value))
        mask = self.tensor(F16, shape.n_kv, shape.n_tokens, shape.n_masks) if shape.has_mask else None
        factors = (c_float(0.2), c_float(shape.max_bias), c_float(shape.softcap))
        out = self.expand(self.op("flash_attn_ext", q, k, v, mask, *factors))
        self._tensors = {"q": q, "k": k, "v": v, "mask": mask, "out": out}
        if shape.has_sinks:
            sinks = self._tensors["sinks"] = self.tensor(F32, shape.n_heads)
            ggml("ggml_flash_attn_ext_add_sinks", out, sinks, result=None)
        self.allocate()
        self._fill(np.random.default_rng(shape.n_tokens))

    def _keys(self, kind: int, width: int) -> int:
        shape = self.shape
        if not shape.is_permuted:
            return self.tensor(kind, width, shape.n_kv, shape.n_key_heads)
        return self.op("permute", self.tensor(kind, width, shape.n_key_heads, shape.n_kv), *map(c_int, (0, 2, 1, 3)))

    def _fill(self, rng: np.random.Generator) -> None:
        shape = self.shape
        for name in ("q", "k", "v"):
            found = self.values(name)
            found[:] = rng.standard_normal(found.shape) ** 3
        if shape.has_mask:
            keys, tokens = np.arange(shape.n_kv), np.arange(shape.n_tokens)[:, None] + shape.n_passed
            seen = (keys <= tokens) & (keys > tokens - shape.n_window)
            usual = np.where(keys % 7 == 0, shape.masked, 0)
            for i, mask in enumerate(self.values("mask")):
                mask[:] = np.where(seen & (keys % shape.n_masks <= i), usual, -np.inf)
        if shape.has_sinks:
            self.values("sinks").ravel()[:] = np.linspace(-3, 60, shape.n_heads)

    def values(self, name: str) -> NDArray[Any]:
        """A tensor's values, the last dimension first."""
        shape = self.shape
        sides = (shape.n_kv, shape.n_key_heads) if shape.is_permuted else (shape.n_key_heads, shape.n_kv)
        shapes = {
            "q": (shape.n_heads, shape.n_tokens, shape.n_key),
            "k": (*sides, shape.n_key),
            "v": (*sides, shape.n_value),
            "mask": (shape.n_masks, shape.n_tokens, shape.n_kv),
            "sinks": (1, 1, shape.n_heads),
            "out": (shape.n_tokens, shape.n_heads, shape.n_value),
        }
        is_half = name == "mask" or (name in ("k", "v") and shape.is_half)
        found = self.array(self._tensors[name], ctypes.c_uint16 if is_half else c_float, *shapes[name])
        return found.view(np.float16) if is_half else found

    def run(self, engine: Engine) -> NDArray[np.int32]:
        """Bits of the outputs, [n_tokens, n_heads, n_value]."""
        self.values("out")[:] = np.nan
        engine.compute(self.graph)
        return self.values("out").view(np.int32).copy()


def check(attention: Attention, n_threads: int) -> None:
    """Computes it with ggml's engine and with ours, and frees it."""
    engines = [Engine(name, n_threads) for name in ("CPU", "MOEEDGE")]
    n_before = attention_count()
    found = [attention.run(engine) for engine in engines]
    n_ours = attention_count() - n_before
    for engine in engines:
        engine.close()
    attention.close()
    assert np.array_equal(*found)
    assert n_ours == attention.shape.is_ours


@pytest.fixture(params=_CHOICES)
def _choice(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param not in {
        kernel.instructions for kernel in kernels() if kernel.layout == ATTENTION and kernel.is_equal
    }:
        pytest.skip(f"none for {request.param} with ggml's bits on this CPU")
    set_kernel_choice(_CHOICES[request.param])
    yield
    set_kernel_choice(KernelChoice.MEASURED)


SHAPES = [
    # prompts
    *(Shape(n, 256) for n in (64, 65, 127, 200)),
    *(Shape(130, 512, n_passed=382, n_window=n, has_sinks=True) for n in (32, 100, 1 << 20)),
    Shape(512, 1024, n_passed=512),
    Shape(96, 256, has_mask=False, has_sinks=True),
    Shape(96, 320, n_key=192, n_value=128, is_half=False),
    Shape(96, 256, n_key=256, n_value=256, n_heads=3, n_key_heads=1),
    Shape(96, 256, n_key=64, n_value=64, n_heads=8, n_key_heads=8, has_sinks=True),
    # less; one token from 512 keys on: split between the threads
    *(Shape(n, 300, n_passed=237) for n in (2, 9, 17, 63)),
    *(
        Shape(1, n, n_passed=n - 20, n_heads=16, has_sinks=has_sinks)
        for n in (256, 530, 1024)
        for has_sinks in (False, True)
    ),
    *(Shape(n, 768, n_passed=700, n_window=n_window, has_sinks=True) for n in (1, 9) for n_window in (5, 90)),
    *(
        Shape(n, 600, has_mask=False, n_key_heads=4, n_key=192, n_value=n_value)
        for n in (1, 5)
        for n_value in (128, 192)
    ),
    *(Shape(n, 600, n_passed=590, n_heads=71, n_key_heads=1, n_key=64, n_value=64) for n in (1, 3)),
    Shape(4, 256, n_key=256, n_value=256, n_passed=252),
    # views, masks of heads and others than 0
    *(Shape(n, 512, n_passed=400, is_permuted=True, n_masks=2, masked=-1.5, has_sinks=True) for n in (1, 9, 100)),
    # ggml's own: keys that are no multiple of a tile, wide keys, other widths and types, a cap, ALiBi
    Shape(96, 250, is_ours=False),
    Shape(96, 256, n_key=320, n_value=320, is_ours=False),
    Shape(9, 256, n_key=80, n_value=80, is_ours=False),
    *(Shape(n, 600, is_half=False, is_ours=False) for n in (1, 9)),
    *(Shape(n, 256, softcap=30.0, is_ours=False) for n in (9, 96)),
    *(Shape(n, 256, max_bias=8.0, is_ours=False) for n in (9, 96)),
]


@pytest.mark.usefixtures("_choice")
@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_ggmls(shape: Shape, n_threads: int) -> None:
    check(Attention(shape), n_threads)


@pytest.mark.usefixtures("_choice")
@pytest.mark.parametrize("n_tokens", [1, 9, 128])
def test_scores_that_are_hard_to_round(n_tokens: int) -> None:
    """Denormal and huge values, equal scores, exponentials that underflow."""
    shape = Shape(n_tokens, 640, n_passed=640 - n_tokens, has_sinks=True)
    attention = Attention(shape)
    q, k, v = (attention.values(name) for name in "qkv")
    q[0] *= 30
    q[1, : n_tokens // 3] = 0
    q[1, n_tokens // 3 : n_tokens // 2] *= 1e-42
    q[2, ::2] = 3
    k[0, 100:140] = 0
    v[0, :64] *= 1e-4
    check(attention, 2)
