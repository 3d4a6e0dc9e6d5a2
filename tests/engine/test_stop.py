"""An answer can be stopped in the middle of a computation or a wait for the disk; the caches hold what is complete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError
from moeedge.experts import Residency
from moeedge.llama.model import Mode
from moeedge.llama.sequence import Cancelled
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.scheduler.config import PlacementConfig
from moeedge.ui.figures import answer_rows, turn_line
from tests.conftest import TinyFactory
from tests.support.ram_driver import ram_context
from tests.support.sessions import GREEDY, answered, plain_config
from tests.support.stock import StockContext

TOKENS = np.random.default_rng(5).integers(0, 256, 200).tolist()
PROMPT = np.random.default_rng(5).integers(0, 256, 900).tolist()
DISK_BYTES_PER_S = 5e6
N_UBATCH = 128
N_PREDICT = 12
# target and its dimensions, draft
SOURCES: dict[str, tuple[str, dict[str, int], str]] = {
    "model": ("qwen3moe", {}, "qwen3"),
    "head": ("glm4moe", {"mtp": 1}, "mtp"),
    "recurrent head": ("qwen35moe", {"mtp": 1}, "mtp"),
}


class Stop:
    """Asks to stop at the `n_max`th question; None: never."""

    def __init__(self, n_max: int | None = None) -> None:
        self.n_asked, self.n_max = 0, n_max

    def __call__(self) -> bool:
        self.n_asked += 1
        return self.n_max is not None and self.n_asked >= self.n_max


class StopAfter(Stop):
    """Asks to stop some time after it was made, and says how long the answer went on."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.at_s = time.monotonic() + seconds

    def __call__(self) -> bool:
        super().__call__()
        return time.monotonic() > self.at_s

    @property
    def late_s(self) -> float:
        return time.monotonic() - self.at_s


def config(path: Path, draft: Any = None, **changes: Any) -> EngineConfig:
    return plain_config(path, draft, **{"n_ctx": 1024, "n_ubatch": N_UBATCH} | changes)


def stock_answer(path: Path) -> list[int]:
    with StockContext(path, n_ctx=1024, n_batch=1024, n_ubatch=N_UBATCH) as stock:
        return stock.greedy(PROMPT, N_PREDICT)[0]


@pytest.mark.usefixtures("asks_always")
@pytest.mark.parametrize("mode", ["moeedge", "stock"])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "qwen35moe"])  # plain, sliding window, recurrent states
def test_the_next_answer_equals_stocks(tiny: TinyFactory, arch: str, mode: Mode) -> None:
    path = tiny(arch)
    with Session.open(config(path, mode=mode)) as session:
        never = Stop()
        session.target.sequences[0].prefill(PROMPT, logits="last", run=Run(cancelled=never))
        assert never.n_asked > 20 * -(-len(PROMPT) // N_UBATCH), "operations ask"
        n_before = 0
        for share in (0.06, 0.4, 0.7, 0.3):  # of what is left of the prompt: the first within its first batch
            if n_before == 0:
                session.reset()
            stop = Stop(max(2, int(share * never.n_asked * (1 - n_before / len(PROMPT)))))
            stopped = answered(session, PROMPT, N_PREDICT, run=Run(cancelled=stop))
            assert (stopped.tokens, stopped.stop_reason) == ([], "interrupted")
            n_kept = session.target.n_past
            assert session.target.sequences[0].tokens == PROMPT[:n_kept]
            assert n_kept % N_UBATCH == 0
            if session.model.can_roll_back:
                assert n_kept == stopped.stats.prefill_tokens + n_before >= n_before
                assert stopped.stats.cached_tokens == n_before
            n_before = n_kept
        assert n_before > 0 or not session.model.can_roll_back, "what is complete stays"
        answer = answered(session, PROMPT, N_PREDICT)
        assert answer.tokens == stock_answer(path)
        assert answer.stats.cached_tokens == n_before
        assert answer.stats.prefill_tokens == len(PROMPT) - n_before


@pytest.mark.usefixtures("asks_always")
@pytest.mark.parametrize("source", SOURCES)
def test_the_prompt_of_the_draft_can_be_stopped_as_well(tiny: TinyFactory, source: str) -> None:
    arch, dimensions, draft = SOURCES[source]
    path = tiny(arch, **dimensions)
    expected = stock_answer(path)
    with Session.open(config(path, draft if draft == "mtp" else tiny(draft))) as session:
        for n_asked in (2, 40):  # in the first batch of the draft, and later
            session.reset()
            stop = Stop()
            stopped = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, run=Run(cancelled=stop))
            first = next(iter(stopped)).tokens  # the target has read the prompt, the draft has not
            stop.n_max = stop.n_asked + n_asked
            assert [token for step in stopped for token in step.tokens] == []
            assert stopped.stop_reason == "interrupted" and stopped.tokens == first == expected[:1]
            answer = answered(session, PROMPT, N_PREDICT)
            assert answer.tokens == expected
            assert answer.stats.drafted > 0


def test_a_short_computation_asks_nothing(tiny: TinyFactory) -> None:
    """The answer may take milliseconds, while the other threads of the computation wait."""
    with Session.open(config(tiny("qwen3moe"))) as session:
        asked = []
        for _ in range(5):  # a busy machine may take 50 ms for one
            session.reset()
            stop = Stop()
            session.target.sequences[0].decode(PROMPT[:N_UBATCH], phase=Phase.PREFILL, run=Run(cancelled=stop))
            asked.append(stop.n_asked)
    assert min(asked) == 0


@pytest.mark.flaky(reruns=2)
def test_it_stops_within_300_ms(tiny: TinyFactory) -> None:
    """A batch of 512 takes seconds here; Ctrl-C waits for one operation."""
    path = tiny("qwen3moe", layers=4, embd=512, experts=32, expert_ff=1024)
    late_s = []
    with Session.open(config(path, n_ctx=2048, n_ubatch=512)) as session:
        for wait_s in (0.05, 0.13, 0.2, 0.31):
            session.reset()
            stop = StopAfter(wait_s)
            if answered(session, [*PROMPT, *PROMPT], 4, run=Run(cancelled=stop)).stop_reason == "interrupted":
                late_s.append(stop.late_s)
    assert len(late_s) >= 3, "the machine is too fast for this prompt"
    print(f"stopped after {sorted(late_s)[len(late_s) // 2]:.3f} s (median), {max(late_s):.3f} s (most)")
    assert max(late_s) < 0.3


def test_the_figures_of_a_stopped_prompt(tiny: TinyFactory) -> None:
    with Session.open(config(tiny("qwen3moe"))) as session:
        n_before = 0
        for n_max in (4, 2):
            stopped = answered(session, PROMPT, 4, run=Run(cancelled=Stop(n_max)))
            stats, shown = stopped.stats, (session.info, stopped.stats, stopped.stop_reason)
            assert 0 < stats.prefill_tokens < len(PROMPT) == stats.prompt_tokens
            assert stats.prefill_tokens == session.target.n_past - n_before
            assert stats.cached_tokens == n_before
            assert stats.prefill_s > 0 and stats.pp_ts > 0
            computed = f"{stats.prefill_tokens} of {len(PROMPT) - n_before} tokens"
            assert computed in turn_line(*shown)
            [prompt] = [row for row in answer_rows(*shown) if row.label == "prompt"]
            assert computed in prompt.value
            assert (f"{n_before} kept" in prompt.value) == ("kept" in prompt.value) == (n_before > 0)
            n_before = session.target.n_past


# experts from a slow disk


@pytest.fixture(scope="module")
def path(tiny: TinyFactory) -> Path:
    """Reading all of its experts takes seconds."""
    return tiny("qwen3moe", layers=4, embd=256, experts=64, expert_ff=256)


@pytest.fixture(params=["none", "emulated:threads=1"])
def waiting(request: pytest.FixtureRequest, path: Path, cache_folder: Path) -> Iterator[Session]:
    """With all experts in RAM or in the file, or some of them on a device."""
    ratio = None if request.param == "none" else 0.1
    placement = PlacementConfig(disk_bytes_per_s=DISK_BYTES_PER_S, cache_ratio=ratio, calibrate=False)
    how = {"n_ctx": 512, "n_ubatch": 512, "device": request.param, "ram": 4 << 20, "placement": placement}
    with Session.open(config(path, **how)) as opened:
        yield opened


@pytest.mark.flaky(reruns=2)
def test_a_prompt_stops_within_its_batch(waiting: Session) -> None:
    stop = StopAfter(0.4)
    answer = waiting.generate(TOKENS, n_predict=4, sampling=GREEDY, run=Run(cancelled=stop))
    assert list(answer) == []
    assert stop.late_s < 0.3
    assert stop.n_asked > 3
    assert answer.stop_reason == "interrupted"
    assert waiting.placement_stats().pinned == 0
    assert waiting.target.n_past == 0


@pytest.mark.usefixtures("asks_always")
def test_without_a_disk_to_wait_for_it_stops_as_well(path: Path) -> None:
    """All experts are resident: the graph's own operations ask."""
    with ram_context(path, 1.0) as (context, cache):
        everything = np.argwhere(np.ones((4, 64))).astype(np.int32)
        cache.plan(everything, np.zeros(len(everything), np.uint8), everything[:0], np.zeros(0, np.float32))
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
        counts = context.sensor.read_counts().sum(axis=1)
        assert (counts[:-1] == n_tokens * context.model.info.n_expert_used).all(), "of this decode alone"


def test_what_a_stopped_block_wanted_is_forgotten(path: Path) -> None:
    """Otherwise it waits for room at the head of the queue, before all that is read ahead."""
    with ram_context(path, 8 / 256, disk_bytes_per_s=DISK_BYTES_PER_S) as (context, cache):
        with pytest.raises(Cancelled):
            context.decode(TOKENS[:6], phase=Phase.VERIFY, run=Run(cancelled=StopAfter(0.4)))
        assert cache.drain(10.0)
        stats = cache.stats()
        assert (stats.queued, stats.slots_used) == (0, cache.info.n_slots)
