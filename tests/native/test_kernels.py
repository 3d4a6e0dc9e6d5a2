"""Our kernels for the experts' matmuls give the bits of ggml's, for every layout, batch and number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_print_system_info
from numpy.typing import NDArray

from moeedge.native.abi import KernelChoice
from moeedge.native.compute import ATTENTION, kernels, multiply_speed, read_speed, set_kernel_choice
from tests.support.expert_blocks import BlockShape, DenseMatmul, Engine, ExpertBlock, Experts, spread_experts

REPACKED = ("Q4_0", "IQ4_NL", "MXFP4", "Q4_K")  # by ggml, on CPUs with AVX2
PLAIN = ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "BF16")
FLOATS = ("bf16", ATTENTION)
LAYOUTS = [*((type_, True) for type_ in REPACKED), *((type_, False) for type_ in PLAIN)]

Engines = Callable[[int], tuple[Engine, Engine]]
INSTRUCTIONS = {
    "avx512vnni": KernelChoice.ALL,
    "avxvnni": KernelChoice.AVXVNNI,
    "avx2": KernelChoice.AVX2,
}  # and what chooses their kernels


@pytest.fixture(autouse=True, params=INSTRUCTIONS)
def all_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those that were measured slower, too."""
    if request.param not in {kernel.instructions for kernel in kernels()}:
        pytest.skip(f"no kernels for {request.param} on this CPU")
    set_kernel_choice(INSTRUCTIONS[request.param])
    yield
    set_kernel_choice(KernelChoice.MEASURED)


def test_every_kernel_passes_its_check() -> None:
    """Each of them is used on this CPU; the figures are times over times."""
    found = kernels()
    newest = found[0].instructions  # ggml's bits may need these for a type that older ones compute, too
    for kernel in (kernel for kernel in found if kernel.instructions == newest and kernel.layout not in FLOATS):
        assert kernel.is_equal, kernel
        assert kernel.single_speed > 0
        assert kernel.several_speed > 0
        assert kernel.many_speed > 0, "ggml's rounding from eight columns of an expert on"
        has_dense = kernel.layout != "iq4_nl"  # which ggml rounds otherwise where its matrix is dense
        assert (kernel.n_dense_max > 1) == has_dense, kernel
        assert (kernel.dense_single_speed > 0) == has_dense, kernel
        assert (kernel.dense_speed > 0) == has_dense, kernel


@pytest.mark.parametrize("layout", FLOATS)
def test_sums_of_floats_have_the_order_of_ggmls_build(layout: str) -> None:
    """It was built for AVX2, AVX-512, or AVX-512 with products of BF16: ours for these have its bits."""
    info = llama_print_system_info().decode()
    if "AVX512 = 1" not in info:
        expected = "avx2"
    elif layout == ATTENTION:
        expected = "avx512vnni"
    else:
        expected = "avx512bf16" if "AVX512_BF16 = 1" in info else ""  # we have none for BF16 without its products
    found = [kernel for kernel in kernels() if kernel.layout == layout]
    if expected not in {kernel.instructions for kernel in found}:
        pytest.skip(f"no kernels of ours for a ggml with {info}")
    equal = [kernel for kernel in found if kernel.is_equal]
    names = {kernel.instructions for kernel in equal} - {"avxvnni"}  # which has AVX2's kernels
    if layout == ATTENTION:
        names -= {"avx512bf16"}  # of few tokens where ggml was built for AVX512-FP16, which comes with BF16
    assert names == {expected}
    assert any(kernel.several_speed > 0 for kernel in equal)
    assert any(kernel.many_speed > 0 for kernel in equal)


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Makes ggml's engine and ours, with that many threads."""
    with ExitStack() as stack:

        def make(n_threads: int) -> tuple[Engine, Engine]:
            made = Engine("CPU", n_threads), Engine("MOEEDGE", n_threads)
            for engine in made:
                stack.callback(engine.close)
            return made

        yield make


each_layout = pytest.mark.parametrize(("type_", "repacked"), LAYOUTS, ids=lambda value: str(value))
each_number_of_threads = pytest.mark.parametrize("n_threads", [1, 2, 3])


def assert_same_bits(found: NDArray[np.float32], expected: NDArray[np.float32], what: str) -> None:
    assert np.array_equal(found.view(np.int32), expected.view(np.int32)), what


def check_dense(
    engines: tuple[Engine, Engine], matrix: Experts, n_tokens: int, values: NDArray[np.float32] | None = None
) -> None:
    """values: [n_tokens, n_in], random unless given."""
    theirs, ours = engines
    matmul = DenseMatmul(matrix.tensors["up"], matrix.shape.n_embd, matrix.shape.n_ff, n_tokens)
    if values is not None:
        matmul.input[:] = values
    theirs.compute(matmul.graph)
    expected = matmul.out.copy()
    matmul.out[:] = np.nan
    ours.compute(matmul.graph)
    assert_same_bits(matmul.out, expected, f"{n_tokens} tokens")
    matmul.close()


def check_block(
    engines: tuple[Engine, Engine], experts: Experts, values: NDArray[np.float32], ids: NDArray[np.int32], **built: Any
) -> None:
    """values: [n_tokens, n_in]; ids [n_tokens, n_used]; built: how the block is."""
    block = ExpertBlock(experts, len(values), **built)
    expected = block.run(engines[0], values, ids).copy()
    assert_same_bits(block.run(engines[1], values, ids), expected, f"{len(values)} tokens, {built}")
    block.close()


@each_layout
@each_number_of_threads
def test_blocks_equal_ggmls(type_: str, repacked: bool, n_threads: int, engines: Engines) -> None:
    """Batches of one to many tokens: other rests of columns and pieces, with biases and without, summed or not."""
    shape = BlockShape(type_, n_embd=512, n_ff=256, n_experts=12, n_used=4)
    rng = np.random.default_rng(n_threads)
    pair = engines(n_threads)
    with Experts(shape, repacked=repacked) as experts:
        roles = ("up", "gate", "down")
        for n_tokens, summed, biases in (
            *((n_tokens, True, ()) for n_tokens in (1, 2, 3, 5, 9, 16, 24, 40, 150)),
            *((n_tokens, True, roles) for n_tokens in (1, 2, 9, 40)),
            *((9, True, roles[i : i + n]) for i in range(3) for n in (1, 2)),
            *((n_tokens, False, biases) for n_tokens in (1, 24) for biases in ((), roles)),
        ):
            values = (rng.standard_normal((n_tokens, shape.n_embd)) ** 3).astype(np.float32)
            ids = np.stack([rng.permutation(shape.n_experts)[: shape.n_used] for _ in range(n_tokens)]).astype(np.int32)
            check_block(pair, experts, values, ids, summed=summed, biases=biases)


@each_layout
@each_number_of_threads
def test_dense_matrices_equal_ggmls(type_: str, repacked: bool, n_threads: int, engines: Engines) -> None:
    """Batches of few tokens and of more, for which ggml rounds otherwise."""
    shape = BlockShape(type_, n_embd=768, n_ff=512, n_experts=1, n_used=1)
    pair = engines(n_threads)
    with Experts(shape, repacked=repacked, roles=("up",)) as matrix:
        for n_tokens in (*range(1, 20), 33, 67):
            check_dense(pair, matrix, n_tokens)


def hard_inputs(rng: np.random.Generator, n_tokens: int, n_in: int, *, is_finite: bool) -> NDArray[np.float32]:
    """Columns of zeros, of denormal, huge and equal numbers, and with one that is infinite or no number."""
    values = (rng.standard_normal((n_tokens, n_in)) ** 3).astype(np.float32)
    values[1], values[2], values[3] = 0, values[2] * 1e-42, values[3] * (1e3 if is_finite else 1e36)
    values[4], values[5, ::2], values[5, 1::2] = 1, 3, -3
    values[8, 300] = -0.0
    if not is_finite:
        values[6, 100], values[7, 200] = np.inf, np.nan
    return values


@each_layout
def test_numbers_that_are_hard_to_round(type_: str, repacked: bool, engines: Engines) -> None:
    rng = np.random.default_rng(1)
    pair = engines(1)
    shape = BlockShape(type_, n_embd=512, n_ff=512, n_experts=2, n_used=1)
    # ggml quantizes what is not finite to -128, which its kernels of repacked blocks of 32 multiply as -128 or as 128
    # and so do kernels for AVX-512 and AVX-VNNI
    is_finite = (repacked and type_ != "Q4_K") or any(kernel.instructions != "avx2" for kernel in kernels())
    with Experts(replace(shape, n_experts=1), repacked=repacked, roles=("up",)) as matrix:
        for n_tokens in (9, 12, 23):  # the last columns are a rest of four, or none
            check_dense(pair, matrix, n_tokens, hard_inputs(rng, n_tokens, shape.n_embd, is_finite=is_finite))
    with Experts(shape, repacked=repacked) as experts:
        values = hard_inputs(rng, 23, shape.n_embd, is_finite=is_finite)
        check_block(pair, experts, values, rng.integers(0, 2, (23, 1)).astype(np.int32))


@each_layout
@pytest.mark.parametrize(
    ("n_in", "n_out", "numbers"),
    [
        pytest.param(2304, 136, (5, 6, 9, 17), id="parts"),
        pytest.param(256, 256, (*range(1, 129), *range(129, 601, 13)), marks=pytest.mark.slow, id="small"),
        pytest.param(2304, 264, range(1, 601, 29), marks=pytest.mark.slow, id="wide"),
        pytest.param(5120, 312, range(1, 601, 29), marks=pytest.mark.slow, id="wider"),
        pytest.param(256, 256, range(1, 601), marks=pytest.mark.bench, id="all"),  # six minutes
    ],
)
def test_every_number_of_columns(
    type_: str, repacked: bool, n_in: int, n_out: int, numbers: Sequence[int], engines: Engines
) -> None:
    """Columns of a dense matrix, and of an expert."""
    rng = np.random.default_rng(2)
    pair = engines(1)
    with Experts(BlockShape(type_, n_in, n_out, 1, 1), repacked=repacked, roles=("up",)) as matrix:
        for n_tokens in numbers:
            check_dense(pair, matrix, n_tokens)
    with Experts(BlockShape(type_, n_in, 256, 2, 1), repacked=repacked) as experts:
        for n_tokens in numbers:
            values = (rng.standard_normal((n_tokens, n_in)) ** 3).astype(np.float32)
            check_block(pair, experts, values, np.zeros((n_tokens, 1), np.int32))


def test_tokens_with_the_same_experts(engines: Engines) -> None:
    """Each expert meets all tokens, one of which has an input of zeros."""
    shape = BlockShape("Q4_0", n_embd=256, n_ff=128, n_experts=8, n_used=8)
    rng = np.random.default_rng(0)
    with Experts(shape, repacked=True) as experts:
        values = rng.standard_normal((3, shape.n_embd)).astype(np.float32)
        values[1] = 0
        check_block(engines(2), experts, values, spread_experts(rng.permutation(shape.n_experts), 3, shape.n_used))


def test_memory_is_read() -> None:
    """Also by more threads than there are pieces."""
    assert read_speed(1 << 20, 1) > 1e8
    assert read_speed(1 << 16, 3, repetitions=2) > 1e6  # starting threads takes most of the time
    assert read_speed(0, 1) == 0.0
    data = np.zeros(1 << 16)
    assert read_speed(data.nbytes, 2, address=data.ctypes.data) > 1e8


def test_products_are_counted() -> None:
    """Kernels of ours run here, so there is an instruction."""
    assert multiply_speed(1) > 1e9
    assert multiply_speed(2) > 1e9
    assert multiply_speed(0) == 0.0
