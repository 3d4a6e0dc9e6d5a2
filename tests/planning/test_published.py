"""Plans of headers shaped as published models, against their published sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.engine.types import EngineConfig
from moeedge.llama.context import Context
from moeedge.planning.planner import Planner
from moeedge.scheduler.sizing import default_reserve
from tests.planning.test_planner import machine_with
from tests.support.machine import GIB, MIB
from tests.support.published import Mix, write_qwen3_30b_a3b

# Qwen/Qwen3-30B-A3B-GGUF, Qwen3-30B-A3B-Q4_K_M.gguf as huggingface.co lists it
Q4_K_M_FILE_BYTES = 18_556_685_824
# llama.cpp's log of that file: 17.28 GiB, 30.53 B weights, 4.86 bits each (ggml-org/llama.cpp issue 14235); with
# -ngl 30, 10750.86 MiB on the GPU and 6940.48 MiB in the file (issue 13729)
Q4_K_M_WEIGHTS_BYTES = (10750.86 + 6940.48) * MIB
# bartowski/Qwen_Qwen3-30B-A3B-GGUF, Q8_0: 32.48 GB
Q8_0_FILE_BYTES = 32.48e9
# CUDA buffers that llama.cpp logs at that vocabulary, width and n_ubatch 512 (SciSharp/LLamaSharp issue 1099: 300.75
# MiB on the GPU, 12.01 MiB in host memory at 4,096 tokens)
CUDA_COMPUTE_BYTES, HOST_COMPUTE_BYTES = 300.75 * MIB, 12.01 * MIB


def planner(path: Path, *, vram_gib: float, n_ctx: int = 0) -> Planner:
    return Planner(EngineConfig(model=path, n_ctx=n_ctx), machine_with(int(vram_gib * GIB)))


@pytest.fixture(scope="module")
def q4_k_m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_30b_a3b(tmp_path_factory.mktemp("published") / "qwen3-30b-a3b-q4_k_m.gguf")


@pytest.mark.parametrize(
    ("mix", "file_bytes"),
    [("Q4_K_M", Q4_K_M_FILE_BYTES), pytest.param("Q8_0", Q8_0_FILE_BYTES, marks=pytest.mark.slow)],
)
def test_sizes_of_the_files(tmp_path: Path, mix: Mix, file_bytes: float) -> None:
    path = write_qwen3_30b_a3b(tmp_path / "header.gguf", mix)
    with planner(path, vram_gib=0) as plan:
        facts = plan.facts
        assert facts.file_bytes == pytest.approx(file_bytes, rel=0.001)
        assert facts.dense_bytes + facts.experts_bytes == pytest.approx(file_bytes, rel=0.001)
        assert facts.n_weights == pytest.approx(30.53e9, rel=0.001)
        assert facts.missing_bytes > 0.99 * file_bytes


def test_weights_are_those_of_the_log(q4_k_m: Path) -> None:
    with planner(q4_k_m, vram_gib=0) as plan:
        assert plan.facts.bits_per_weight == pytest.approx(4.86, abs=0.005)
        found = plan.map(4096)
        weights = sum(line.n_bytes for line in found.places[-1].lines if line.what in ("experts", "dense weights"))
        assert weights == pytest.approx(Q4_K_M_WEIGHTS_BYTES, rel=1e-4)


def test_buffers_on_a_large_gpu_equal_cudas(q4_k_m: Path) -> None:
    with planner(q4_k_m, vram_gib=24) as plan:
        found = plan.map(4096)
        assert found.whole_on_gpu and found.verdict == "fits"
        gpu, ram = ({line.what: line.n_bytes for line in place.lines}["compute buffers"] for place in found.places)
        with Context(plan._target(all_on_gpu=True), n_ctx=4096, n_threads=1) as context:  # as llama.cpp's programs
            uses = context.memory_uses()
    assert sum(use.compute_bytes for use in uses if use.on_gpu) == CUDA_COMPUTE_BYTES
    assert sum(use.compute_bytes for use in uses if not use.on_gpu) == pytest.approx(HOST_COMPUTE_BYTES, rel=0.001)
    # a session reads the logits of fewer tokens than a graph has: their buffer is no longer the largest part
    logits_bytes = 4 * plan.facts.n_vocab
    assert EngineConfig(model=q4_k_m).n_outputs * logits_bytes < gpu < 0.3 * CUDA_COMPUTE_BYTES < 512 * logits_bytes
    assert ram == pytest.approx(HOST_COMPUTE_BYTES, rel=0.001)


def test_on_a_small_gpu_experts_get_the_remaining_memory(q4_k_m: Path) -> None:
    with planner(q4_k_m, vram_gib=8, n_ctx=8192) as plan:
        found = plan.default_map()
        gpu, ram = found.places
        lines = {line.what.split(":")[0]: line.n_bytes for line in gpu.lines}
        assert not found.whole_on_gpu and found.verdict == "fits"
        assert sum(lines.values()) <= 8 * GIB
        assert gpu.reserve_bytes == default_reserve(8 * GIB)  # as a session leaves free
        assert 0 <= gpu.left_bytes - gpu.reserve_bytes < plan.facts.expert_bytes + 1
        assert lines["dense weights"] == pytest.approx(plan.facts.dense_bytes - 166.92 * MIB, rel=0.001)  # embeddings
        assert found.cache_ratio == pytest.approx(lines["expert slots"] / plan.facts.experts_bytes, rel=1e-3)
        assert {line.what: line.n_bytes for line in ram.lines}["experts"] == plan.facts.experts_bytes
        # a longer context takes what it needs from the experts
        ratios = [plan.map(n).cache_ratio for n in (4096, 8192, 16384, 32768)]
        assert ratios == sorted(ratios, reverse=True) and ratios[0] - ratios[-1] > 0.1


def test_the_largest_context_fits_and_the_next_does_not(q4_k_m: Path) -> None:
    with planner(q4_k_m, vram_gib=5) as plan:
        largest = plan.largest_n_ctx(0.05)
        assert 0 < largest < plan.facts.n_ctx_train and largest % 256 == 0
        assert plan.map(largest).cache_ratio >= 0.05 > plan.map(largest + 256).cache_ratio
    with planner(q4_k_m, vram_gib=1) as plan:
        assert plan.largest_n_ctx() == 0
