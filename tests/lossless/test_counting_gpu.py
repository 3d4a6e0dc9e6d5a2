"""Attention on a GPU and experts cached on it, where the counting device is the GPU: the tokens are stock's.

Stock has the same split: the same layers on the device, all experts on the CPU. With `late` the device executes nothing
before something waits for it, and reports operations that nothing orders. tests/native/counting_device has the details.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, nullcontext
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.native.abi import DevicePath
from moeedge.scheduler.cache_governor import CacheGovernor
from tests.conftest import TinyFactory
from tests.support.cases import ATTENTION_CASES
from tests.support.counting import DEVICE, CountingDevice, count
from tests.support.hybrid import MANY_EXPERTS, AlternatingCache, assert_greedy, greedy_answer, hybrid_config
from tests.support.stock import StockContext, transcript

ALL = 99
PROMPT = np.random.default_rng(4).integers(0, 256, 40).tolist()  # long enough for llama.cpp's op offload
N_PREDICT = 24
PATHS = pytest.mark.parametrize("path", list(DevicePath))
LATE = pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])


@LATE
def test_stock_on_the_device_is_stock_on_the_cpu(late: bool, tiny_moe: Path, counting: CountingDevice) -> None:
    """Bit for bit: the device computes with the CPU's kernels, none of them for repacked weights."""
    with StockContext(tiny_moe, repack=False) as cpu:
        expected = transcript(cpu)
    with (
        counting.late() if late else nullcontext(),
        StockContext(tiny_moe, repack=False, gpu=DEVICE, n_gpu_layers=ALL) as gpu,
    ):
        assert np.array_equal(transcript(gpu), expected)


@pytest.mark.slow
@LATE
def test_the_bundled_target_on_the_device(
    late: bool, bundled_pair: tuple[Path, Path], counting: CountingDevice
) -> None:
    with StockContext(bundled_pair[0], repack=False) as cpu:
        expected, _ = cpu.greedy(PROMPT, 8)
    with (
        counting.late() if late else nullcontext(),
        StockContext(bundled_pair[0], repack=False, gpu=DEVICE, n_gpu_layers=ALL) as gpu,
    ):
        assert gpu.greedy(PROMPT, 8)[0] == expected


def check_session(
    path: Path,
    draft: Path,
    device: CountingDevice,
    *,
    n_gpu_layers: int,
    ratio: float,
    gamma: int,
    late: bool,
    n_predict: int = N_PREDICT,
    governor: CacheGovernor | None = None,
    **placement: object,
) -> None:
    """Two answers of a session: greedy decoding's, computed in part by the device, without hazards."""
    with ExitStack() as stack:
        options = {"gpu": DEVICE, "n_gpu_layers": n_gpu_layers, "experts_on_cpu": True}
        stock = stack.enter_context(StockContext(path, n_ctx=512, **options))
        expected, _ = stock.greedy(PROMPT, n_predict)
        stack.enter_context(device.late() if late else nullcontext())
        config = hybrid_config(path, draft, ratio, gamma=gamma, device=DEVICE, **placement)
        config = dataclasses.replace(config, n_gpu_layers=n_gpu_layers)
        session = stack.enter_context(Session.open(config))
        assert session.placement is not None
        session.placement.governor = governor
        device.reset()
        for turn in range(2):
            tokens = greedy_answer(session, PROMPT, n_predict)
            assert_greedy(stock, PROMPT, tokens, expected, f"turn {turn}")
        stats = session.placement_stats()
        assert stats is not None and stats.pairs_hit > 0 and stats.blocks_unknown == 0
        assert count(device.timeline()).launches > 0
        device.check()


@LATE
@PATHS
def test_cached_experts_next_to_attention(
    path: DevicePath, late: bool, tiny: TinyFactory, tiny_draft: Path, counting: CountingDevice
) -> None:
    model = tiny("qwen3moe", experts=MANY_EXPERTS)
    check_session(model, tiny_draft, counting, n_gpu_layers=ALL, ratio=0.5, gamma=4, late=late, device_path=path)


@LATE
@pytest.mark.parametrize("path", [DevicePath.PAIRS, DevicePath.AHEAD])
def test_a_cache_that_goes_off_and_on(
    path: DevicePath, late: bool, tiny: TinyFactory, tiny_draft: Path, counting: CountingDevice
) -> None:
    model, governor = tiny("qwen3moe", experts=MANY_EXPERTS), AlternatingCache()
    check_session(
        model,
        tiny_draft,
        counting,
        n_gpu_layers=ALL,
        ratio=0.5,
        gamma=4,
        late=late,
        governor=governor,
        device_path=path,
    )


@pytest.mark.slow
@LATE
@pytest.mark.parametrize("gamma", [0, 8])
@pytest.mark.parametrize("ratio", [0.17, 1.0])
@pytest.mark.parametrize("n_gpu_layers", [0, 1, 2, ALL])
@pytest.mark.parametrize("path", [DevicePath.PAIRS, DevicePath.AHEAD])
def test_every_split(
    path: DevicePath,
    n_gpu_layers: int,
    ratio: float,
    gamma: int,
    late: bool,
    tiny: TinyFactory,
    tiny_draft: Path,
    counting: CountingDevice,
) -> None:
    model = tiny("qwen3moe", experts=MANY_EXPERTS)
    check_session(
        model, tiny_draft, counting, n_gpu_layers=n_gpu_layers, ratio=ratio, gamma=gamma, late=late, device_path=path
    )


@pytest.mark.slow
@LATE
@PATHS
@pytest.mark.parametrize("case", [name for name in ATTENTION_CASES if name != "qwen3moe"])
def test_every_architecture(
    case: str, path: DevicePath, late: bool, tiny: TinyFactory, tiny_draft: Path, counting: CountingDevice
) -> None:
    arch, dimensions = ATTENTION_CASES[case]
    model = tiny(arch, **(dimensions | {"experts": MANY_EXPERTS}))
    check_session(model, tiny_draft, counting, n_gpu_layers=ALL, ratio=0.5, gamma=4, late=late, device_path=path)


@pytest.mark.slow
@LATE
@pytest.mark.parametrize("prefill", ["resident", "stream"])
def test_prefill_paths(prefill: str, late: bool, tiny: TinyFactory, tiny_draft: Path, counting: CountingDevice) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    check_session(path, tiny_draft, counting, n_gpu_layers=ALL, ratio=0.5, gamma=4, late=late, prefill=prefill)


@pytest.mark.slow
@LATE
@pytest.mark.parametrize("n_gpu_layers", [1, 24, ALL])
def test_the_bundled_pair(
    n_gpu_layers: int, late: bool, bundled_pair: tuple[Path, Path], counting: CountingDevice
) -> None:
    check_session(*bundled_pair, counting, n_gpu_layers=n_gpu_layers, ratio=0.17, gamma=4, late=late, n_predict=8)
