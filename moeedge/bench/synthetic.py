"""llama-bench's tests: prefill of N random tokens (ppN), decoding of N random tokens one by one (tgN), and both.

Before each of them a KV cache may be filled with D tokens, which are not timed (@ dD).

They time the target alone, as llama-bench does: no sampling, and no drafts, because random tokens cannot be guessed.
The difference to stock is the cost of our backend. With an expert cache, the policy observes and experts move as in an
answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from moeedge.bench.config import BenchMode, SyntheticTest
from moeedge.bench.harness import BenchArm, Meter, rotated
from moeedge.bench.samples import Sample
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


def n_samples(test: SyntheticTest) -> int:
    """Returns the samples per mode and repetition of a test: slices where tokens are decoded alone."""
    return 1 if test.n_prompt else -(-test.n_gen // _SLICE_TOKENS)


class SyntheticRun:
    """The tests on some arms.

    delay_s: a pause before each repetition of an arm.
    """

    def __init__(
        self,
        arms: Sequence[BenchArm],
        repetitions: int,
        *,
        warm_up: bool,
        cancel: Callable[[], bool],
        delay_s: float = 0.0,
    ) -> None:
        self._arms = arms
        self._n_repetitions = repetitions
        self._warm_up = warm_up
        self._cancel = cancel
        self._delay_s = delay_s

    def samples(self, test: SyntheticTest, skip: Collection[int] = ()) -> Iterator[Sample]:
        """Yields the samples of a test without the repetitions in `skip`; ends early when `cancel` returns True."""
        left = [repetition for repetition in range(self._n_repetitions) if repetition not in skip]
        if not left:
            return
        repetitions = [-1, *left] if self._warm_up else left  # -1 warms up and gives no samples
        yield from (self._prompts(test, repetitions) if test.n_prompt else self._decoding(test, repetitions))

    def _fill(self, arm: BenchArm, test: SyntheticTest) -> bool:
        """Empties the KV cache and fills it to the test's depth; returns whether to go on."""
        arm.session.reset()
        if self._delay_s and not self._cancel():
            time.sleep(self._delay_s)
        if test.depth and not self._cancel():
            tokens = self._tokens(test.depth)
            arm.session.target.decode(tokens, phase=Phase.PREFILL, logits="last")
            _observe(arm.session, tokens, n_verified=0)
            arm.drain_transfers()
        return not self._cancel()

    def _prompts(self, test: SyntheticTest, repetitions: Sequence[int]) -> Iterator[Sample]:
        """ppN, ppN+tgM: one sample per arm and repetition."""
        tokens = self._tokens(test.n_prompt)
        following = self._tokens(test.n_gen)
        for repetition in repetitions:
            for place, arm in enumerate(rotated(self._arms, repetition + 1)):
                if not self._fill(arm, test):
                    return
                with Meter(arm.session) as meter:
                    arm.session.target.decode(tokens, phase=Phase.PREFILL, logits="last")
                    _observe(arm.session, tokens, n_verified=0)
                counters = meter.counters()
                decoded = self._decode_slice(arm, following, 0, repetition, place) if following else None
                if following and decoded is None:
                    return
                drain_s = arm.drain_transfers()
                if repetition >= 0:
                    sample = Sample(
                        arm.mode.label, "", 0, repetition, place,
                        prompt_tokens=test.n_prompt, prefill_tokens=test.n_prompt, prefill_s=meter.seconds,
                        cpu_s=meter.cpu_s, others_s=meter.others_s, drain_s=drain_s, warm=self._is_warm(repetition),
                        prefill_read_bytes=meter.read_bytes, prefill_placement=counters,
                    )  # fmt: skip
                    yield sample if decoded is None else _together(sample, decoded)

    def _decoding(self, test: SyntheticTest, repetitions: Sequence[int]) -> Iterator[Sample]:
        """tgN: N tokens per arm and repetition; one slice before them warms up.

        The arms take turns every _SLICE_TOKENS tokens, each continuing in its own KV cache, and each slice is a sample:
        pairs of neighbours stay close in time however large N is.
        """
        tokens = self._tokens(test.n_gen)
        turn = 0
        for repetition in repetitions:
            for arm in self._arms:
                if not self._fill(arm, test):
                    return
            n_measured = test.n_gen if repetition >= 0 else min(test.n_gen, _SLICE_TOKENS)
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
        with Meter(session) as meter:
            for token in tokens:
                if self._cancel():
                    return None
                token_s = time.perf_counter()
                session.target.decode([token], phase=Phase.DECODE, logits="last")
                _observe(session, [token], n_verified=1, verify_s=time.perf_counter() - token_s)
        drain_s = arm.drain_transfers()
        n = len(tokens)
        return Sample(
            arm.mode.label, "", index, repetition, place,
            generated_tokens=n, decode_tokens=n, decode_s=meter.seconds, steps=n, cpu_s=meter.cpu_s,
            others_s=meter.others_s, drain_s=drain_s, warm=self._is_warm(repetition),
            decode_read_bytes=meter.read_bytes, placement=meter.counters(),
        )  # fmt: skip

    def _tokens(self, n: int) -> list[int]:
        """Returns `n` random token ids, the same on every run and in every mode."""
        n_vocab = self._arms[0].session.model.info.n_vocab
        return [int(token) for token in np.random.default_rng(_SEED).integers(0, n_vocab, n)]

    def _is_warm(self, repetition: int) -> bool:
        return self._warm_up or repetition > 0


def _together(prompt: Sample, decoded: Sample) -> Sample:
    """Returns one sample of a prompt and the tokens decoded after it."""
    names = ("generated_tokens", "decode_tokens", "decode_s", "steps", "decode_read_bytes", "placement")
    return replace(
        prompt,
        **{name: getattr(decoded, name) for name in names},
        cpu_s=prompt.cpu_s + decoded.cpu_s,
        others_s=prompt.others_s + decoded.others_s,
        drain_s=prompt.drain_s + decoded.drain_s,
    )


def _observe(session: Session, batch: Sequence[int], *, n_verified: int, verify_s: float = 0.0) -> None:
    """Lets the policy observe the decoded `batch`, and starts the transfers of its plan, as the engine's loop does.

    How many experts arrive before the next plan replaces the queue depends on the speed of the decodes and of the link.
    """
    if session.placement is None or session.target.sensor is None:
        return
    counts = session.target.sensor.read_counts()
    record = StepRecord(tokens=list(batch[-1:]), n_verified=n_verified, verify_s=verify_s)
    session.placement.after_verification(counts, batch, record)
