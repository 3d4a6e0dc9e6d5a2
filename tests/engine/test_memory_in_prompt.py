"""Experts in RAM while another program takes the memory, in the middle of a prompt or between answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.hardware.devices import ResolvedDevice, VramReading
from moeedge.run import Level, Notification, Run
from moeedge.scheduler import slot_memory
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.slot_memory import MemoryWatch
from tests.conftest import TinyFactory

GREEDY = SamplingConfig(temperature=0)
TOKENS = np.random.default_rng(5).integers(0, 256, 200).tolist()


@dataclass
class Machine:
    """Free memory and a clock that goes on with each look at it."""

    free_bytes: int
    time_s: float = 0.0

    def clock(self) -> float:
        self.time_s += 0.3
        return self.time_s

    def read(self, _device: ResolvedDevice) -> VramReading:
        return VramReading(0, self.free_bytes, self.free_bytes, "test")


def test_slots_go_within_a_prompt_and_come_back(
    tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tiny("qwen3moe", layers=4, embd=256, experts=64, expert_ff=256)
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path))
    monkeypatch.setattr(slot_memory, "_INTERVAL_S", 0.005)
    placement = PlacementConfig(disk_bytes_per_s=60e6)
    config = EngineConfig(model=path, n_ctx=512, n_threads=1, gamma=0, device="none", ram=64 << 20, placement=placement)
    said: list[Notification] = []
    with Session.open(config) as session:
        manager = session.placement
        assert manager is not None and manager.memory is not None
        manager.run.show = lambda text: said.append(text) if isinstance(text, Notification) else None
        cache = manager.cache
        answer = session.generate(TOKENS, n_predict=6, sampling=GREEDY)
        list(answer)
        expected = list(answer.tokens)
        n_opened = cache.info.n_slots
        slot_bytes = int(cache.groups()[2].max())
        cache.clear()
        session.target.clear()

        machine = Machine(free_bytes=40 * slot_bytes)

        def read(device: ResolvedDevice) -> VramReading:
            if in_prompt:
                machine.free_bytes = (5 if cache.stats().slots_used > 100 else 30) * slot_bytes
            return machine.read(device)

        in_prompt: list[int] = []
        manager.memory.watch = MemoryWatch(manager._device, 40 * slot_bytes, read=read, clock=machine.clock)

        def look() -> bool:
            if session.target.n_past == 0:
                in_prompt.append(cache.info.n_slots)
            return False

        answer = session.generate(TOKENS, n_predict=6, sampling=GREEDY, run=Run(cancelled=look))
        list(answer)
        assert list(answer.tokens) == expected
        assert in_prompt[0] == n_opened > in_prompt[-1], "in the middle of its only batch"
        assert cache.info.n_slots <= 100
        assert cache.stats().slots_used > 4, "it was not opened again"
        assert {note.level for note in said} == {Level.WARNING}

        said.clear()
        in_prompt.clear()
        machine.free_bytes = 1000 * slot_bytes
        session.target.clear()
        end_s = time.monotonic() + 20
        while Level.NOTICE not in {note.level for note in said} and time.monotonic() < end_s:
            session.target.clear()
            list(session.generate(TOKENS[:20], n_predict=10, sampling=GREEDY, ignore_eos=True))
        assert cache.info.n_slots == n_opened
        assert [note.level for note in said] == [Level.NOTICE]


def test_slots_go_between_answers(tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A chat waits for a message: a thread gives memory back, and the next answer says so."""
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path))
    monkeypatch.setattr(slot_memory, "_INTERVAL_S", 0.02)
    config = EngineConfig(
        model=tiny("qwen3moe", experts=64), n_ctx=512, n_threads=1, gamma=0, device="none", ram=64 << 20
    )
    said: list[Notification] = []
    with Session.open(config, run=Run(said.append)) as session:
        manager = session.placement
        assert manager is not None and manager.memory is not None
        answer = session.generate(TOKENS, n_predict=6, sampling=GREEDY)
        list(answer)
        expected = list(answer.tokens)
        n_used = manager.cache.stats().slots_used
        slot_bytes = int(manager.cache.groups()[2].max())
        machine = Machine(free_bytes=5 * slot_bytes)
        said.clear()
        manager.memory.watch = MemoryWatch(manager._device, 40 * slot_bytes, read=machine.read, clock=machine.clock)
        end_s = time.monotonic() + 20
        while manager.cache.stats().slots_used >= n_used and time.monotonic() < end_s:
            time.sleep(0.01)
        machine.free_bytes = 50 * slot_bytes
        assert manager.cache.stats().slots_used <= n_used - 30
        assert said == [], "not into a line that is being typed"
        session.watch_memory()
        assert {note.level for note in said} == {Level.WARNING}
        session.target.clear()
        answer = session.generate(TOKENS, n_predict=6, sampling=GREEDY)
        list(answer)
        assert list(answer.tokens) == expected
        machine.free_bytes = 0
