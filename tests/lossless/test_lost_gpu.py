"""A GPU fails in mid-answer, at llama.cpp's work or at the cache's: the answer goes on with the same tokens.

The counting device is the GPU. It reports an error once or for good, or throws an exception as Vulkan's backend does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.engine.session import Session
from moeedge.errors import DeviceFailedError
from moeedge.native.abi import DevicePath, Phase
from moeedge.run import is_warning
from moeedge.scheduler.stats import StepRecord
from tests.conftest import TinyFactory
from tests.support.counting import DEVICE, CountingDevice
from tests.support.hybrid import MANY_EXPERTS, assert_greedy, greedy_answer, hybrid_config
from tests.support.stock import StockContext

PROMPT = list(range(40, 60))
N_PREDICT = 24
ONCE, FOR_GOOD, THROWS = 0, 1, 3  # fail_mode


@pytest.fixture
def device(counting: CountingDevice) -> Iterator[CountingDevice]:
    yield counting
    counting.set("fail_graph", 0)
    counting.set("fail_mode", ONCE)


def check(path: Path, draft: Path, device: CountingDevice, *, ratio: float, mode: int, at_graph: int) -> None:
    """`at_graph` counts from the begin of the answer."""
    with StockContext(path) as stock:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        config = hybrid_config(path, draft, ratio, gamma=4, device=DEVICE, policy="lru")
        with Session.open(replace(config, n_gpu_layers=99, cpu_fallback=True)) as session:
            n_before = len(session.info.notes)
            device.set("fail_mode", mode)
            device.set("fail_graph", at_graph)
            for turn in range(2):
                tokens = greedy_answer(session, PROMPT, N_PREDICT)
                assert_greedy(stock, PROMPT, tokens, expected, f"turn {turn}")
            warnings = [note for note in session.info.notes[n_before:] if is_warning(note)]
            assert 1 <= len(warnings) <= 2  # of the cache's device, of llama.cpp's
            stats = session.placement_stats()
            assert stats is None or stats.lost


@pytest.mark.parametrize("mode", [ONCE, pytest.param(FOR_GOOD, marks=pytest.mark.slow), THROWS])
@pytest.mark.parametrize("at_graph", [1, 30])
def test_experts_in_a_cache(mode: int, at_graph: int, tiny: TinyFactory, device: CountingDevice) -> None:
    check(tiny("qwen3moe"), tiny("qwen3"), device, ratio=0.5, mode=mode, at_graph=at_graph)


def test_a_driver_that_throws_inside_our_backend_is_not_called_again(tiny: TinyFactory, device: CountingDevice) -> None:
    """Contexts are abandoned at whichever launch the driver throws: those of a block are queued by our backend."""
    config = replace(
        hybrid_config(tiny("qwen3moe", experts=MANY_EXPERTS), None, 0.5, device=DEVICE, device_path=DevicePath.AHEAD),
        n_gpu_layers=99,
    )
    for at_graph in range(1, 6):
        with Session.open(config) as session:
            greedy_answer(session, PROMPT, 2)
            assert session.placement is not None
            session.placement.wait()
            session.placement.cache.drain(10.0)  # experts in every layer: each launches a half of its block
            device.set("fail_mode", THROWS)
            device.set("fail_graph", at_graph)
            with pytest.raises(DeviceFailedError):
                session.target.decode([1], phase=Phase.DECODE)
            assert session.target.is_closed


def test_experts_per_step_count_all_layers_afterwards(tiny: TinyFactory, device: CountingDevice) -> None:
    """One of three layers is in host memory before, all of them after."""
    config = hybrid_config(tiny("qwen3moe"), None, 0.5, device=DEVICE, policy="lru")
    records: list[StepRecord] = []
    with Session.open(replace(config, n_gpu_layers=99, n_cpu_moe=1, cpu_fallback=True)) as session:
        assert session.info.n_whole_layers == 2
        session.observers.append(lambda record, _session: records.append(record))
        device.set("fail_mode", FOR_GOOD)
        device.set("fail_graph", 30)
        greedy_answer(session, PROMPT, N_PREDICT)
        assert (session.info.n_whole_layers, session.info.device) == (0, "none")
        used = [record.experts_unique for record in records if record.n_verified == 1]
        assert used and used == [session.info.n_expert_used] * len(used)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ONCE, FOR_GOOD, THROWS])
@pytest.mark.parametrize("at_graph", [2, 5, 9, 17, 33, 65])
@pytest.mark.parametrize("ratio", [0.0, 0.17, 1.0])
def test_everywhere(mode: int, at_graph: int, ratio: float, tiny: TinyFactory, device: CountingDevice) -> None:
    check(tiny("qwen3moe"), tiny("qwen3"), device, ratio=ratio, mode=mode, at_graph=at_graph)
