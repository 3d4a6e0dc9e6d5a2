"""Nodes of ours take the place of several of ggml's: in stock's memory, with the same routing, and fewer of them."""

from __future__ import annotations

import time
from ctypes import c_bool, c_float, c_int32, c_int64, c_size_t
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from moeedge.llama import library
from moeedge.native import OffloadScope, Sensor
from moeedge.native.abi import KernelChoice, Phase
from moeedge.native.cache import CacheConfig, ExpertCache, ExpertTensor
from moeedge.native.compute import kernels, set_kernel_choice
from tests.conftest import TinyFactory
from tests.native.conftest import printed
from tests.support.cases import K_DIMS, MOE_CASES
from tests.support.raw_ggml import F32, I32, Graph, Queue, ggml
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


@pytest.mark.parametrize("is_nested", [False, True])
def test_views_in_a_block_on_the_device(is_nested: bool, tmp_path: Path) -> None:
    """The offset of a view of a view is from the root's beginning, as ggml counts it."""
    n_ff, n_experts, n_used, n_tokens = 32, 4, 2, 2
    rng, path = np.random.default_rng(1), tmp_path / "experts.bin"
    shapes = {"up": (n_experts, 4 * n_ff, n_ff), "down": (n_experts, n_ff, n_ff)}
    values = {role: rng.standard_normal(shape).astype(np.float32) for role, shape in shapes.items()}
    path.write_bytes(b"".join(array.tobytes() for array in values.values()))
    graph, experts, tables, at = Graph(), [], {}, 0
    for role, (n, rows, width) in shapes.items():
        name, stride = f"blk.0.ffn_{role}_exps.weight", 4 * rows * width
        experts.append(ExpertTensor(0, F32, width, rows, n, 0, at, stride, name))
        tables[role], at = graph.tensor(F32, width, rows, n), at + n * stride
        ggml("ggml_set_name", tables[role], name.encode())
    x, ids = graph.tensor(F32, n_ff, 1, n_tokens), graph.tensor(I32, n_used, n_tokens)

    def view(of: int, n_values: int, first: int) -> int:
        sizes = (c_int64(n_values), c_int64(n_used), c_int64(n_tokens))
        strides = (c_size_t(16 * n_ff), c_size_t(16 * n_ff * n_used))
        return graph.op("view_3d", of, *sizes, *strides, c_size_t(4 * first))

    up = graph.op("mul_mat_id", tables["up"], x, ids)
    half, first = (view(up, 2 * n_ff, 2 * n_ff), 0) if is_nested else (up, 2 * n_ff)
    gated = graph.op("swiglu_split", view(half, n_ff, first), view(half, n_ff, first + n_ff))
    out = graph.expand(graph.op("mul_mat_id", tables["down"], gated, ids))
    graph.allocate()
    for role, shape in shapes.items():
        graph.array(tables[role], c_float, *shape)[:] = values[role]
    graph.array(x, c_float, n_tokens, 1, n_ff)[:] = rng.standard_normal((n_tokens, 1, n_ff))
    graph.array(ids, c_int32, n_tokens, n_used)[:] = [[0, 1], [2, 3]]
    result = graph.array(out, c_float, n_tokens, n_used, n_ff)
    Queue("CPU").compute(graph.graph)
    expected = result.copy()
    result[:] = 0
    queue, sensor = Queue("MOEEDGE"), Sensor(1, n_experts, n_used, 8)
    sensor.set_offload_scope(OffloadScope.ALL)
    config = CacheConfig(device="emulated", files=[path], tensors=experts, n_layers=1, n_experts=n_experts, ratio=1.0)
    with ExpertCache(config) as cache:
        all_experts = np.array([[0, expert] for expert in range(n_experts)], np.int32)
        cache.plan(all_experts, np.ones(n_experts, np.uint8), np.zeros((0, 2), np.int32), np.zeros(0, np.float32))
        assert cache.drain(5)
        cache.attach(sensor)
        sensor.set_phase(Phase.DECODE)
        queue.compute(graph.graph)
        assert cache.stats().pairs_hit == n_used * n_tokens
        cache.detach()
    assert np.array_equal(result, expected)
