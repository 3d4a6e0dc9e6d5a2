"""Our kernels for the experts' matmuls give the bits of ggml's, for every layout, batch and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from moeedge.native.abi import KernelChoice
from moeedge.native.compute import kernels, read_speed, set_kernel_choice
from tests.support.expert_blocks import BlockShape, DenseMatmul, Engine, ExpertBlock, Experts, spread_experts

LAYOUTS = [("Q4_0", True), ("Q4_0", False), ("Q4_K", True), ("Q4_K", False), ("Q6_K", False), ("Q8_0", False)]


INSTRUCTIONS = {"avx512vnni": KernelChoice.ALL, "avx2": KernelChoice.AVX2}  # and what chooses their kernels


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
    for kernel in kernels():
        assert kernel.is_equal, kernel
        assert kernel.single_speed > 0
        assert kernel.several_speed > 0
        assert kernel.many_speed > 0, "ggml's rounding from eight columns of an expert on"
        assert kernel.n_dense_max > 1, kernel


@pytest.mark.parametrize(("type_", "repacked"), LAYOUTS, ids=lambda value: str(value))
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_blocks_equal_ggmls(type_: str, repacked: bool, n_threads: int) -> None:
    """Batches of one to many tokens; every size leaves another rest of columns and pieces."""
    shape = BlockShape(type_, n_embd=512, n_ff=256, n_experts=12, n_used=4)
    rng = np.random.default_rng(n_threads)
    theirs, ours = Engine("CPU", n_threads), Engine("MOEEDGE", n_threads)
    with Experts(shape, repacked=repacked) as experts:
        for n_tokens in (1, 2, 3, 5, 9, 16, 24, 40, 150):
            block = ExpertBlock(experts, n_tokens)
            input_ = (rng.standard_normal((n_tokens, shape.n_embd)) ** 3).astype(np.float32)
            ids = np.stack([rng.permutation(shape.n_experts)[: shape.n_used] for _ in range(n_tokens)]).astype(np.int32)
            expected = block.run(theirs, input_, ids)
            found = block.run(ours, input_, ids)
            assert np.array_equal(found, expected), f"{n_tokens} tokens"
            block.close()
    theirs.close()
    ours.close()


@pytest.mark.parametrize(("type_", "repacked"), LAYOUTS, ids=lambda value: str(value))
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_dense_matrices_equal_ggmls(type_: str, repacked: bool, n_threads: int) -> None:
    """Batches of few tokens, which our kernels compute, and larger ones, which are left to ggml."""
    shape = BlockShape(type_, n_embd=768, n_ff=512, n_experts=1, n_used=1)
    theirs, ours = Engine("CPU", n_threads), Engine("MOEEDGE", n_threads)
    with Experts(shape, repacked=repacked, roles=("up",)) as matrix:
        for n_tokens in range(1, 20):
            matmul = DenseMatmul(matrix.tensors["up"], shape.n_embd, shape.n_ff, n_tokens)
            theirs.compute(matmul.graph)
            expected = matmul.out.copy()
            matmul.out[:] = np.nan
            ours.compute(matmul.graph)
            assert np.array_equal(matmul.out, expected), f"{n_tokens} tokens"
    theirs.close()
    ours.close()


def test_tokens_with_the_same_experts() -> None:
    """Each expert meets all tokens, one of which has an input of zeros."""
    shape = BlockShape("Q4_0", n_embd=256, n_ff=128, n_experts=8, n_used=8)
    rng = np.random.default_rng(0)
    theirs, ours = Engine("CPU", 2), Engine("MOEEDGE", 2)
    with Experts(shape, repacked=True) as experts:
        block = ExpertBlock(experts, 3)
        ids = spread_experts(rng.permutation(shape.n_experts), 3, shape.n_used)
        input_ = rng.standard_normal((3, shape.n_embd)).astype(np.float32)
        input_[1] = 0
        assert np.array_equal(block.run(ours, input_, ids), block.run(theirs, input_, ids))
        block.close()
    theirs.close()
    ours.close()


def test_memory_is_read() -> None:
    """Also by more threads than there are pieces."""
    assert read_speed(1 << 20, 1) > 1e8
    assert read_speed(1 << 16, 3, repetitions=2) > 1e6  # starting threads takes most of the time
    assert read_speed(0, 1) == 0.0
    data = np.zeros(1 << 16)
    assert read_speed(data.nbytes, 2, address=data.ctypes.data) > 1e8
