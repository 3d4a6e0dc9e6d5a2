"""A long prompt can be stopped in the middle of a computation; the caches hold what is complete, and figures say so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama.model import Mode
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.ui.figures import answer_rows, turn_line
from tests.benchmarks.stop_prompt import measure
from tests.conftest import TinyFactory
from tests.support.stock import StockContext

GREEDY = SamplingConfig(temperature=0)
PROMPT = np.random.default_rng(5).integers(0, 256, 900).tolist()
N_UBATCH = 128
N_PREDICT = 12
HEADS = {"model": {}, "head": {"mtp": 1}, "recurrent head": {"mtp": 1}}


class Stop:
    """Asks to stop at the `n_max`th question; None: never."""

    def __init__(self, n_max: int | None = None) -> None:
        self.n_asked, self._n_max = 0, n_max

    def stop_after(self, n_more: int) -> None:
        """Asks to stop at the `n_more`th question from now on."""
        self._n_max = self.n_asked + n_more

    def __call__(self) -> bool:
        self.n_asked += 1
        return self._n_max is not None and self.n_asked >= self._n_max


def config(
    path: Path, draft: Path | Literal["mtp"] | None = None, *, mode: Mode = "moeedge", device: str = "none"
) -> EngineConfig:
    return EngineConfig(
        model=path,
        draft=draft,
        gamma=4 if draft else 0,
        n_ctx=1024,
        n_threads=1,
        n_ubatch=N_UBATCH,
        device=device,
        mode=mode,
    )


@pytest.mark.usefixtures("asks_always")
@pytest.mark.parametrize("mode", ["moeedge", "stock"])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "qwen35moe"])  # plain, sliding window, recurrent states
def test_the_next_answer_equals_stocks(tiny: TinyFactory, arch: str, mode: Mode) -> None:
    path = tiny(arch)
    with StockContext(path, n_ctx=1024, n_batch=1024, n_ubatch=N_UBATCH) as stock:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
    with Session.open(config(path, mode=mode)) as session:
        never = Stop()
        session.target.sequences[0].prefill(PROMPT, logits="last", run=Run(cancelled=never))
        n_batches = -(-len(PROMPT) // N_UBATCH)
        assert never.n_asked > 20 * n_batches, "operations ask"
        n_before = 0
        for share in (0.06, 0.4, 0.7, 0.3):  # of what is left of the prompt: the first within its first batch
            session.reset() if n_before == 0 else None
            stop = Stop(max(2, int(share * never.n_asked * (1 - n_before / len(PROMPT)))))
            stopped = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, run=Run(cancelled=stop))
            assert list(stopped) == []
            assert stopped.stop_reason == "interrupted"
            n_kept = session.target.n_past
            assert session.target.sequences[0].tokens == PROMPT[:n_kept]
            assert n_kept % N_UBATCH == 0
            if session.model.can_roll_back:
                assert n_kept == stopped.stats.prefill_tokens + n_before >= n_before
                assert stopped.stats.cached_tokens == n_before
            n_before = n_kept
        assert n_before > 0 or not session.model.can_roll_back, "what is complete stays"
        answer = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
        for _ in answer:
            pass
        assert answer.tokens == expected
        assert answer.stats.cached_tokens == n_before
        assert answer.stats.prefill_tokens == len(PROMPT) - n_before


@pytest.mark.usefixtures("asks_always")
@pytest.mark.parametrize("source", ["model", "head", "recurrent head"])
def test_the_prompt_of_the_draft_can_be_stopped_as_well(tiny: TinyFactory, source: str) -> None:
    path = tiny({"model": "qwen3moe", "head": "glm4moe", "recurrent head": "qwen35moe"}[source], **HEADS[source])
    draft: Path | Literal["mtp"] = tiny("qwen3") if source == "model" else "mtp"
    with StockContext(path, n_ctx=1024, n_batch=1024, n_ubatch=N_UBATCH) as stock:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
    with Session.open(config(path, draft)) as session:
        for n_asked in (2, 40):  # in the first batch of the draft, and later
            session.reset()
            stop = Stop()
            stopped = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, run=Run(cancelled=stop))
            first = next(iter(stopped)).tokens  # the target has read the prompt, the draft has not
            stop.stop_after(n_asked)
            assert [token for step in stopped for token in step.tokens] == []
            assert stopped.stop_reason == "interrupted" and stopped.tokens == first == expected[:1]
            answer = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
            for _ in answer:
                pass
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


def test_it_stops_within_300_ms(tiny: TinyFactory) -> None:
    """A batch of 512 takes seconds here; Ctrl-C waits for one operation."""
    path = tiny("qwen3moe", layers=4, embd=512, experts=32, expert_ff=1024)
    late_s = []
    tokens = [*PROMPT, *PROMPT]
    with Session.open(EngineConfig(model=path, n_ctx=2048, n_threads=1, gamma=0, device="none")) as session:
        for wait_s in (0.05, 0.13, 0.2, 0.31):
            session.reset()
            at_s = time.monotonic() + wait_s
            answer = session.generate(
                tokens, n_predict=4, sampling=GREEDY, run=Run(cancelled=lambda at_s=at_s: time.monotonic() > at_s)
            )
            list(answer)
            if answer.stop_reason == "interrupted":
                late_s.append(time.monotonic() - at_s)
    assert len(late_s) >= 3, "the machine is too fast for this prompt"
    print(f"stopped after {sorted(late_s)[len(late_s) // 2]:.3f} s (median), {max(late_s):.3f} s (most)")
    assert max(late_s) < 0.3


def test_the_figures_of_a_stopped_prompt(tiny: TinyFactory) -> None:
    with Session.open(config(tiny("qwen3moe"))) as session:
        stopped = session.generate(PROMPT, n_predict=4, sampling=GREEDY, run=Run(cancelled=Stop(4)))
        list(stopped)
        stats = stopped.stats
        assert 0 < stats.prefill_tokens < len(PROMPT) == stats.prompt_tokens
        assert stats.prefill_tokens == session.target.n_past
        assert stats.cached_tokens == 0
        assert stats.prefill_s > 0 and stats.pp_ts > 0
        computed = f"{stats.prefill_tokens} of {len(PROMPT)} tokens"
        assert computed in turn_line(session.info, stats, stopped.stop_reason)
        [prompt] = [row for row in answer_rows(session.info, stats, stopped.stop_reason) if row.label == "prompt"]
        assert computed in prompt.value and "kept" not in prompt.value
        again = session.generate(PROMPT, n_predict=4, sampling=GREEDY, run=Run(cancelled=Stop(2)))
        list(again)
        assert again.stats.cached_tokens == stats.prefill_tokens
        assert f"of {len(PROMPT) - stats.prefill_tokens} tokens" in turn_line(
            session.info, again.stats, again.stop_reason
        )
        [prompt] = [row for row in answer_rows(session.info, again.stats, again.stop_reason) if row.label == "prompt"]
        assert f"{stats.prefill_tokens} kept" in prompt.value


def test_the_benchmark_of_ctrl_c(tiny: TinyFactory) -> None:
    path = tiny("qwen3moe", layers=4, embd=256, experts=16, expert_ff=256)
    asked = EngineConfig(model=path, n_ctx=4096, n_threads=1, gamma=0, device="none")
    found = measure(asked, n_stops=1, n_pairs=1)
    assert len(found["speed_ratios"]) == 1  # type: ignore[arg-type]
    assert found["late_s_max"] is None or found["late_s_max"] < 1.0  # type: ignore[operator]
