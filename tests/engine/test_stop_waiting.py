"""An answer whose experts come from a slow disk can be stopped while it waits for them; nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EngineError
from moeedge.experts import Residency
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.sequence import Cancelled
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.scheduler.config import PlacementConfig
from tests.conftest import TinyFactory
from tests.support.ram_driver import ram_context

GREEDY = SamplingConfig(temperature=0)
DISK_BYTES_PER_S = 5e6
TOKENS = np.random.default_rng(5).integers(0, 256, 200).tolist()


@pytest.fixture(scope="module")
def path(tiny: TinyFactory) -> Path:
    """Reading all of its experts takes seconds."""
    return tiny("qwen3moe", layers=4, embd=256, experts=64, expert_ff=256)


class StopAfter:
    """Asks to stop some time after it was made, and says how long the answer went on."""

    def __init__(self, seconds: float) -> None:
        self.at_s = time.monotonic() + seconds
        self.n_asked = 0

    def __call__(self) -> bool:
        self.n_asked += 1
        return time.monotonic() > self.at_s

    @property
    def late_s(self) -> float:
        return time.monotonic() - self.at_s


@pytest.fixture(params=["none", "emulated:threads=1"])
def session(
    request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Session]:
    """With all experts in RAM or in the file, or some of them on a device."""
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path))
    ratio = None if request.param == "none" else 0.1
    placement = PlacementConfig(disk_bytes_per_s=DISK_BYTES_PER_S, cache_ratio=ratio, calibrate=False)
    config = EngineConfig(
        model=path, n_ctx=512, n_threads=1, gamma=0, device=request.param, ram=4 << 20, placement=placement
    )
    with Session.open(config) as opened:
        yield opened


def test_a_prompt_stops_within_its_batch(session: Session, path: Path) -> None:
    stop = StopAfter(0.4)
    answer = session.generate(TOKENS, n_predict=4, sampling=GREEDY, run=Run(cancelled=stop))
    assert list(answer) == []
    assert stop.late_s < 0.3
    assert stop.n_asked > 3
    assert answer.stop_reason == "interrupted"
    stats = session.placement_stats()
    assert stats is not None and stats.pinned == 0
    assert session.target.n_past == 0


@pytest.mark.slow
def test_an_answer_goes_on_where_it_was_stopped(session: Session, path: Path) -> None:
    prompt = TOKENS[:3]
    with Model.load(path, storage="mapped") as model, Context(model, n_ctx=512, n_threads=1, mode="stock") as context:
        row = context.decode(prompt, phase=Phase.PREFILL)[-1]
        expected = []
        for _ in range(8):
            expected.append(int(row.argmax()))
            row = context.decode(expected[-1:], phase=Phase.DECODE)[-1]
    found: list[int] = []
    late_s = []
    for _ in range(40):
        stop = StopAfter(0.6)
        answer = session.generate(prompt + found, n_predict=8 - len(found), sampling=GREEDY, run=Run(cancelled=stop))
        for record in answer:
            found += record.tokens
        if answer.stop_reason == "interrupted":
            late_s.append(stop.late_s)
        if len(found) == 8:
            break
    assert found == expected
    assert len(late_s) > 2, "the disk was too fast for this test"
    assert max(late_s) < 0.3


@pytest.mark.usefixtures("asks_always")
def test_without_a_disk_to_wait_for_it_stops_as_well(path: Path) -> None:
    """All experts are resident: the graph's own operations ask."""
    with ram_context(path, 1.0) as (context, cache):
        everything = np.argwhere(np.ones((4, 64))).astype(np.int32)
        nothing = everything[:0]
        cache.plan(everything, np.zeros(len(everything), np.uint8), nothing, np.zeros(0, np.float32))
        assert cache.drain(30.0)
        assert (cache.copy_residency() == Residency.RESIDENT).all()
        expected = context.decode(TOKENS, phase=Phase.PREFILL).copy()
        context.clear()
        with pytest.raises(Cancelled):
            context.decode(TOKENS, phase=Phase.PREFILL, run=Run(cancelled=lambda: True))
        assert context.n_past == 0
        assert np.array_equal(context.decode(TOKENS, phase=Phase.PREFILL, run=Run(cancelled=lambda: False)), expected)


@pytest.mark.usefixtures("asks_always")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, EngineError])
def test_an_exception_in_the_question_ends_the_decode(path: Path, kind: type[BaseException]) -> None:
    def fail() -> bool:
        raise kind("while experts are awaited")

    with ram_context(path, 0.3) as (context, _cache):
        with pytest.raises(kind, match="awaited"):
            context.decode(TOKENS, phase=Phase.PREFILL, run=Run(cancelled=fail))
        assert context.n_past == 0
        n_tokens = 4
        assert context.decode(TOKENS[:n_tokens], phase=Phase.PREFILL, run=Run(cancelled=lambda: False)).shape[0] == 1
        assert context.sensor is not None
        n_used = context.model.info.n_expert_used
        counts = context.sensor.read_counts().sum(axis=1)
        assert (counts[:-1] == n_tokens * n_used).all(), "of this decode alone"


def test_what_a_stopped_block_wanted_is_forgotten(path: Path) -> None:
    """Otherwise it waits for room at the head of the queue, before all that is read ahead."""
    with ram_context(path, 8 / 256, disk_bytes_per_s=DISK_BYTES_PER_S) as (context, cache):
        with pytest.raises(Cancelled):
            context.decode(TOKENS[:6], phase=Phase.VERIFY, run=Run(cancelled=StopAfter(0.4)))
        assert cache.drain(10.0)
        stats = cache.stats()
        assert (stats.queued, stats.slots_used) == (0, cache.info.n_slots)
