"""Nodes of ours take the place of several of ggml's: in stock's memory, with the same routing, and fewer of them."""

from __future__ import annotations

import time
from ctypes import c_bool, c_float
from pathlib import Path

import llama_cpp
import pytest

from moeedge.llama import library
from moeedge.native import OffloadScope, Sensor
from moeedge.native.abi import KernelChoice
from moeedge.native.compute import kernels, set_kernel_choice
from tests.conftest import TinyFactory
from tests.native.conftest import printed
from tests.support.cases import K_DIMS, MOE_CASES
from tests.support.raw_ggml import F32, Graph, Queue, ggml
from tests.support.sensed import experts_used, sensed_context
from tests.support.stock import StockContext

# batches of several sizes in turns; prints what the sensor saw
SCRIPT = """
import logging
import sys
from pathlib import Path
import numpy as np
from moeedge.llama import library
from moeedge.native import OffloadScope
from tests.support.sensed import sensed_context

library.logger.addHandler(logging.StreamHandler())
library.logger.setLevel(logging.ERROR)
context, sensor = sensed_context(Path(sys.argv[1]), OffloadScope[sys.argv[2]], n_threads=2)
tokens = np.random.default_rng(5).integers(0, 256, 80).tolist()
with context:
    for n_tokens in (80, 1, 9, 1, 80, 24, 5):
        context.decode(tokens[:n_tokens])
        for frame in sensor.frames():
            print(frame.n_tokens, frame.ids.tolist())
"""


@pytest.mark.parametrize("scope", [OffloadScope.NONE.name, OffloadScope.ALL.name])
def test_no_batch_makes_ggml_reserve_memory_again(scope: str, tiny_moe: Path) -> None:
    """GGML_SCHED_DEBUG_REALLOC=2: ggml ends the process where a graph does not fit what was reserved at first."""
    found = printed("-c", SCRIPT, tiny_moe, scope, GGML_SCHED_DEBUG_REALLOC="2")
    assert bool(found) == (scope == OffloadScope.ALL.name)


def test_routing_does_not_depend_on_ggmls_fusion(tiny_moe: Path) -> None:
    fused, apart = (printed("-c", SCRIPT, tiny_moe, "ALL", GGML_CPU_DISABLE_FUSION=off) for off in ("0", "1"))
    assert fused == apart != ""


def _count_operations(context: StockContext, tokens: list[int]) -> int:
    """Operations of the CPU backend's thread 0, after each of which llama.cpp's callback is asked whether to stop."""
    n = 0

    @llama_cpp.ggml_abort_callback
    def ask(_: object) -> bool:
        nonlocal n
        n += 1
        return False

    llama_cpp.llama_set_abort_callback(context.context, ask, None)
    context.decode(tokens)
    return n


# up, gate and activation: 2 fewer; weights, sum and the addition of the input: as many as experts per token; the
# router's get_rows to div: 3; biases of up, gate and down: 3
@pytest.mark.parametrize(("case", "layers", "n_fewer"), [("Q4_K_M", K_DIMS["layers"], 5), ("gpt-oss-q8", 2, 5)])
@pytest.mark.parametrize("n_tokens", [1, 9])
def test_a_block_has_fewer_operations_than_ggmls(
    n_tokens: int, case: str, layers: int, n_fewer: int, tiny: TinyFactory
) -> None:
    """Qwen3's and gpt-oss's blocks: the tests of bits would pass, too, where nothing is fused."""
    if not kernels():
        pytest.skip("no kernels of ours on this CPU")
    arch, dimensions = MOE_CASES[case]
    path = tiny(arch, **(dimensions | {"layers": layers}))
    stock = StockContext(path, n_ubatch=64)
    ours, _ = sensed_context(path, OffloadScope.ALL, n_ubatch=64)
    set_kernel_choice(KernelChoice.ALL)
    try:
        with stock, ours:
            found = [_count_operations(context, list(range(n_tokens))) for context in (stock, ours)]
    finally:
        set_kernel_choice(KernelChoice.MEASURED)
    assert found[0] - found[1] >= layers * (n_fewer + experts_used(path))


@pytest.mark.flaky(reruns=2)
def test_values_that_many_paths_reach_are_recognised_as_fast_as_others() -> None:
    """The scheduler asks for each operation of a graph whether it belongs to experts: here 2^12 paths lead back."""
    library.start()
    queue, graph = Queue("MOEEDGE"), Graph()
    Sensor(1, 1, 1, 1).set_offload_scope(OffloadScope.MOE)
    scaled = squared = graph.tensor(F32, 8)
    for _ in range(20):
        scaled = graph.op("scale", scaled, c_float(1.0))
        squared = graph.op("mul", squared, squared)

    def ask_s(tensor: int) -> float:
        start_s = time.thread_time()
        for _ in range(500):
            assert not ggml("ggml_backend_dev_supports_op", queue.device, tensor, result=c_bool)
        return time.thread_time() - start_s

    try:
        assert min(ask_s(squared) for _ in range(5)) < 3 * min(ask_s(scaled) for _ in range(5))
    finally:
        graph.close()
        queue.close()
