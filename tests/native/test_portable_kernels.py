"""The kernels in plain C++, which only processors without others use, next to ggml's plain code and ggml's results."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from ctypes import c_size_t, c_void_p

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.native.abi import KernelChoice
from moeedge.native.kernels import set_kernel_choice
from tests.support.expert_blocks import BlockShape, DenseMatmul, Engine, ExpertBlock, Experts, nmse

NMSE_MAX = 1e-6
TYPES = ("Q4_0", "Q4_K", "Q6_K", "Q8_0")


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    set_kernel_choice(KernelChoice.PORTABLE)
    yield
    set_kernel_choice(KernelChoice.MEASURED)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_blocks_are_near_ggmls(type_: str, n_threads: int) -> None:
    """Batches of one to many tokens; ggml rounds otherwise on a processor with vector instructions."""
    shape = BlockShape(type_, n_embd=512, n_ff=256, n_experts=12, n_used=4)
    rng = np.random.default_rng(n_threads)
    theirs, ours = Engine("CPU", n_threads), Engine("MOEEDGE", n_threads)
    with Experts(shape, repacked=False) as experts:
        for n_tokens in (1, 2, 5, 9, 16):
            block = ExpertBlock(experts, n_tokens)
            input_ = (rng.standard_normal((n_tokens, shape.n_embd)) ** 3).astype(np.float32)
            ids = np.stack([rng.permutation(shape.n_experts)[: shape.n_used] for _ in range(n_tokens)]).astype(np.int32)
            found = block.run(ours, input_, ids)
            assert nmse(found, block.run(theirs, input_, ids)) < NMSE_MAX
            set_kernel_choice(KernelChoice.MEASURED)  # the same input by other kernels: are ours used at all?
            differs = not np.array_equal(found, block.run(ours, input_, ids))
            set_kernel_choice(KernelChoice.PORTABLE)
            assert differs or type_ in ("Q4_0", "Q8_0"), f"{n_tokens} tokens"
            block.close()
    theirs.close()
    ours.close()


class PlainMatmul:
    """A dense matmul by ggml's plain code for one row and one column, which the library exports on every processor."""

    def __init__(self, matrix: Experts, input_: NDArray[np.float32]) -> None:
        type_, n_in = matrix.shape.type, matrix.shape.n_embd
        column_type = "q8_0" if type_ in ("Q4_0", "Q8_0") else "q8_K"
        library = ctypes.CDLL("libggml-cpu.so.0")  # loaded already
        self._dot = library[f"ggml_vec_dot_{type_.lower().replace('k', 'K')}_{column_type}_generic"]
        self._matrix, self._n_in = matrix, n_in
        self._columns = [ctypes.create_string_buffer(2 * n_in) for _ in input_]  # more than they take
        for column, values in zip(self._columns, input_, strict=True):
            library[f"quantize_row_{column_type}"](values.ctypes.data_as(c_void_p), column, ctypes.c_int64(n_in))

    def compute(self) -> NDArray[np.float32]:
        """Returns [columns, rows]."""
        n_rows, zero = self._matrix.shape.n_ff, c_size_t(0)
        row_bytes = self._matrix.shape.expert_bytes // 3 // n_rows
        out = np.empty((len(self._columns), n_rows), dtype=np.float32)
        for i, column in enumerate(self._columns):
            for row in range(n_rows):
                at = c_void_p(self._matrix.up_address + row * row_bytes)
                self._dot(self._n_in, c_void_p(out[i, row:].ctypes.data), zero, at, zero, column, zero, 1)
        return out


@pytest.mark.parametrize("type_", TYPES)
def test_rows_are_near_ggmls_plain_code(type_: str) -> None:
    shape = BlockShape(type_, n_embd=768, n_ff=512, n_experts=1, n_used=1)
    engine = Engine("MOEEDGE", 1)
    with Experts(shape, repacked=False, roles=("up",)) as matrix:
        matmul = DenseMatmul(matrix.tensors["up"], shape.n_embd, shape.n_ff, 3)
        engine.compute(matmul.graph)
        assert nmse(matmul.out, PlainMatmul(matrix, matmul.input).compute()) < 1e-12  # but for fused multiplications
    engine.close()


@pytest.mark.bench
@pytest.mark.parametrize("type_", TYPES)
def test_four_columns_are_faster_than_ggmls_plain_code(type_: str) -> None:
    """Long rows, so that calls from Python cost little; processor time of one thread."""
    shape = BlockShape(type_, n_embd=8192, n_ff=256, n_experts=1, n_used=1)
    engine = Engine("MOEEDGE", 1)
    with Experts(shape, repacked=False, roles=("up",)) as matrix:
        matmul = DenseMatmul(matrix.tensors["up"], shape.n_embd, shape.n_ff, 4)
        plain = PlainMatmul(matrix, matmul.input)
        theirs_s, ours_s = [], []
        for _ in range(7):
            start_s = time.thread_time()
            plain.compute()
            theirs_s.append(time.thread_time() - start_s)
            engine.compute(matmul.graph)
            ours_s.append(time.thread_time() - start_s - theirs_s[-1])
        ratio = min(theirs_s) / min(ours_s)
        print(f"{type_}: {ratio:.2f} times as fast")
        assert ratio > 1
    engine.close()
