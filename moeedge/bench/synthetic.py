"""llama-bench's tests: prefill of N random tokens (ppN) and decoding of N random tokens one by one (tgN).

They time the target alone, as llama-bench does: no sampling, no drafts (nothing can guess random tokens). What is left
is the cost of our backend beside stock's path. With an expert cache, the policy observes and experts move as in an
answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moeedge.bench.arms import BenchArm
from moeedge.bench.config import BenchMode, rotated
from moeedge.bench.samples import Sample, counted, drain_transfers
from moeedge.engine.session import Session
from moeedge.native.abi import Phase
from moeedge.scheduler.stats import StepRecord

_SEED = 1
_SLICE_TOKENS = 16


def random_tokens(n: int, n_vocab: int) -> list[int]:
    """The same `n` token ids on every run and in every mode."""
    return [int(token) for token in np.random.default_rng(_SEED).integers(0, n_vocab, n)]


def synthetic_modes(modes: Sequence[BenchMode]) -> tuple[list[BenchMode], list[str]]:
    """One mode per engine and expert cache, and one sentence for each that would only repeat another one's work."""
    kept: dict[tuple[object, ...], BenchMode] = {}
    notes = []
    for mode in modes:
        first = kept.setdefault((mode.engine, mode.policy, mode.cache_ratio), mode)
        if first is not mode:
            notes.append(f"pp and tg tests use no drafts; {mode.label} would be {first.label} again and is left out.")
    return list(kept.values()), notes


class SyntheticRun:
    """The tests on some lanes; each yields its samples and ends early when `cancel` says so."""

    def __init__(self, arms: Sequence[BenchArm], repetitions: int, warm_up: bool, cancel: Callable[[], bool]) -> None:
        self._arms = {arm.mode.label: arm for arm in arms}
        self._modes = [arm.mode for arm in arms]
        self._repetitions = range(-1 if warm_up else 0, repetitions)  # -1 warms up and gives no samples
        self._warm_up = warm_up
        self._cancel = cancel

    def prefill(self, n_tokens: int) -> Iterator[Sample]:
        """ppN: one sample per mode and repetition."""
        tokens = self._tokens(n_tokens)
        for repetition in self._repetitions:
            for place, mode in enumerate(rotated(self._modes, repetition + 1)):
                if self._cancel():
                    return
                session = self._arms[mode.label].session
                session.reset()
                before = session.placement_stats()
                cpu_before_s, start_s = time.process_time(), time.perf_counter()
                session.target.decode(tokens, phase=Phase.PREFILL, logits="last")
                _place(session, tokens, n_verified=0)
                elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_before_s
                drain_transfers(session)
                if repetition >= 0:
                    yield Sample(
                        mode.label, "", 0, repetition, place,
                        prompt_tokens=n_tokens, prefill_tokens=n_tokens, prefill_s=elapsed_s, cpu_s=cpu_s,
                        warm=self._is_warm(repetition),
                        prefill_placement=counted(before, session.placement_stats()),
                    )  # fmt: skip

    def decode(self, n_tokens: int) -> Iterator[Sample]:
        """tgN: N tokens per mode and repetition, from an empty KV cache; some tokens before them warm up.

        The modes take turns every _SLICE_TOKENS tokens, each going on in its own KV cache, and each slice is a sample:
        pairs of neighbours stay close in time however large N is.
        """
        tokens = self._tokens(n_tokens)
        rotation = 0
        for repetition in self._repetitions:
            for arm in self._arms.values():
                arm.session.reset()
            for index, first in enumerate(range(0, n_tokens, _SLICE_TOKENS)):
                part = tokens[first : first + _SLICE_TOKENS]
                for place, mode in enumerate(rotated(self._modes, rotation)):
                    sample = self._decode_slice(mode, part, index, repetition, place)
                    if sample is None:
                        return
                    if repetition >= 0:
                        yield sample
                rotation += 1
                if repetition < 0:
                    break  # one slice is enough to warm up

    def _decode_slice(
        self, mode: BenchMode, tokens: Sequence[int], index: int, repetition: int, place: int
    ) -> Sample | None:
        """Decodes `tokens` one by one; None when the run was cancelled."""
        session = self._arms[mode.label].session
        before = session.placement_stats()
        cpu_before_s, start_s = time.process_time(), time.perf_counter()
        for token in tokens:
            if self._cancel():
                return None
            token_s = time.perf_counter()
            if session.placement is not None:
                session.placement.anticipate([token])
            session.target.decode([token], phase=Phase.DECODE, logits="last")
            _place(session, [token], n_verified=1, verify_s=time.perf_counter() - token_s)
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_before_s
        drain_transfers(session)
        n = len(tokens)
        return Sample(
            mode.label, "", index, repetition, place,
            generated_tokens=n, decode_tokens=n, decode_s=elapsed_s, steps=n, cpu_s=cpu_s,
            warm=self._is_warm(repetition), placement=counted(before, session.placement_stats()),
        )  # fmt: skip

    def _tokens(self, n: int) -> list[int]:
        session = next(iter(self._arms.values())).session
        return random_tokens(n, session.model.info.n_vocab)

    def _is_warm(self, repetition: int) -> bool:
        return self._warm_up or repetition > 0


def _place(session: Session, batch: Sequence[int], *, n_verified: int, verify_s: float = 0.0) -> None:
    """What the engine's loop does after it has decoded `batch`: the policy observes, and experts move."""
    if session.placement is None or session.target.sensor is None:
        return
    counts = session.target.sensor.read_counts()
    record = StepRecord(list(batch[-1:]), 0, 0, n_verified, 0.0, draft_s=0.0, verify_s=verify_s, observe_s=0.0)
    session.placement.schedule(counts, batch, record)
    session.placement.prefetch()


def n_slices(n_tokens: int) -> int:
    """Samples per mode and repetition of tgN."""
    return -(-n_tokens // _SLICE_TOKENS)
