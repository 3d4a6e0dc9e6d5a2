"""llama-bench's tests: prefill of N random tokens (ppN), and decoding of N random tokens one by one (tgN).

They time the target alone, as llama-bench does: no sampling, and no drafts, because random tokens cannot be guessed.
The difference to stock is the cost of our backend. With an expert cache, the policy observes and experts move as in an
answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moeedge.bench.config import BenchMode
from moeedge.bench.harness import BenchArm, rotated
from moeedge.bench.samples import Sample, bytes_between, counted, disk_bytes_read
from moeedge.engine.session import Session
from moeedge.native.abi import Phase
from moeedge.scheduler.stats import StepRecord

_SEED = 1
_SLICE_TOKENS = 16


def synthetic_modes(modes: Sequence[BenchMode]) -> tuple[list[BenchMode], list[str]]:
    """Returns one mode per engine and expert cache, and one sentence for each mode that would repeat another one."""
    kept: dict[tuple[object, ...], BenchMode] = {}
    notes = []
    for mode in modes:
        first = kept.setdefault((mode.engine, mode.method, mode.policy, mode.cache_ratio), mode)
        if first is not mode:
            notes.append(f"{mode.label} is left out of pp and tg: without drafts it is the same as {first.label}.")
    return list(kept.values()), notes


def n_slices(n_tokens: int) -> int:
    """Returns the samples per mode and repetition of tgN."""
    return -(-n_tokens // _SLICE_TOKENS)


class SyntheticRun:
    """The two tests on some arms; each yields its samples and ends early when `cancel` returns True."""

    def __init__(
        self, arms: Sequence[BenchArm], repetitions: int, *, warm_up: bool, cancel: Callable[[], bool]
    ) -> None:
        self._arms = arms
        self._repetitions = range(-1 if warm_up else 0, repetitions)  # -1 warms up and gives no samples
        self._warm_up = warm_up
        self._cancel = cancel

    def prefill(self, n_tokens: int) -> Iterator[Sample]:
        """ppN: one sample per arm and repetition."""
        tokens = self._tokens(n_tokens)
        for repetition in self._repetitions:
            for place, arm in enumerate(rotated(self._arms, repetition + 1)):
                if self._cancel():
                    return
                session = arm.session
                session.reset()
                before, read_before = session.placement_stats(), disk_bytes_read()
                cpu_before_s, start_s = time.process_time(), time.perf_counter()
                session.target.decode(tokens, phase=Phase.PREFILL, logits="last")
                _observe(session, tokens, n_verified=0)
                elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_before_s
                n_read = bytes_between(read_before, disk_bytes_read())
                drain_s = arm.drain_transfers()
                if repetition >= 0:
                    yield Sample(
                        arm.mode.label, "", 0, repetition, place,
                        prompt_tokens=n_tokens, prefill_tokens=n_tokens, prefill_s=elapsed_s, cpu_s=cpu_s,
                        drain_s=drain_s, warm=self._is_warm(repetition), prefill_read_bytes=n_read,
                        prefill_placement=counted(before, session.placement_stats()),
                    )  # fmt: skip

    def decode(self, n_tokens: int) -> Iterator[Sample]:
        """tgN: N tokens per arm and repetition, from an empty KV cache; one slice before them warms up.

        The arms take turns every _SLICE_TOKENS tokens, each continuing in its own KV cache, and each slice is a sample:
        pairs of neighbours stay close in time however large N is.
        """
        tokens = self._tokens(n_tokens)
        turn = 0
        for repetition in self._repetitions:
            for arm in self._arms:
                arm.session.reset()
            n_measured = n_tokens if repetition >= 0 else min(n_tokens, _SLICE_TOKENS)
            for index, first in enumerate(range(0, n_measured, _SLICE_TOKENS)):
                for place, arm in enumerate(rotated(self._arms, turn)):
                    sample = self._decode_slice(arm, tokens[first : first + _SLICE_TOKENS], index, repetition, place)
                    if sample is None:
                        return
                    if repetition >= 0:
                        yield sample
                turn += 1

    def _decode_slice(
        self, arm: BenchArm, tokens: Sequence[int], index: int, repetition: int, place: int
    ) -> Sample | None:
        """Decodes `tokens` one by one; returns None for a cancelled run."""
        session = arm.session
        before, read_before = session.placement_stats(), disk_bytes_read()
        cpu_before_s, start_s = time.process_time(), time.perf_counter()
        for token in tokens:
            if self._cancel():
                return None
            token_s = time.perf_counter()
            session.target.decode([token], phase=Phase.DECODE, logits="last")
            _observe(session, [token], n_verified=1, verify_s=time.perf_counter() - token_s)
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_before_s
        n_read = bytes_between(read_before, disk_bytes_read())
        drain_s = arm.drain_transfers()
        n = len(tokens)
        return Sample(
            arm.mode.label, "", index, repetition, place,
            generated_tokens=n, decode_tokens=n, decode_s=elapsed_s, steps=n, cpu_s=cpu_s, drain_s=drain_s,
            warm=self._is_warm(repetition), decode_read_bytes=n_read,
            placement=counted(before, session.placement_stats()),
        )  # fmt: skip

    def _tokens(self, n: int) -> list[int]:
        """Returns `n` random token ids, the same on every run and in every mode."""
        n_vocab = self._arms[0].session.model.info.n_vocab
        return [int(token) for token in np.random.default_rng(_SEED).integers(0, n_vocab, n)]

    def _is_warm(self, repetition: int) -> bool:
        return self._warm_up or repetition > 0


def _observe(session: Session, batch: Sequence[int], *, n_verified: int, verify_s: float = 0.0) -> None:
    """Lets the policy observe the decoded `batch`, and starts the transfers of its plan, as the engine's loop does.

    How many experts arrive before the next plan replaces the queue depends on the speed of the decodes and of the link.
    """
    if session.placement is None or session.target.sensor is None:
        return
    counts = session.target.sensor.read_counts()
    record = StepRecord(tokens=list(batch[-1:]), n_verified=n_verified, verify_s=verify_s)
    session.placement.after_verification(counts, batch, record)
