"""Times the parts of a speculative step: target and draft over batches of one or more texts, rejection sampling.

Batches are windows of real text, because which experts its tokens share decides how long they take. The windows of
several sequences are far apart, and therefore share fewer experts than neighbours of one text do. The KV cache holds as
many tokens of each sequence before a batch as before the steps of an answer. Before each timed pass run two of the same
shape: llama.cpp builds a graph for each new one, and the processor's caches have to fill, neither of which a decoder
pays for that goes on with the same shape.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import numpy as np

from moeedge.bench.experiment import GREEDY
from moeedge.bench.roofline import Weights, measure_read_speed
from moeedge.engine.sampling import Candidates, Sampler
from moeedge.engine.session import Session
from moeedge.errors import InputError
from moeedge.lab.analysis.step_fit import Machine, TimePoint
from moeedge.llama.context import Context
from moeedge.llama.sequence import BatchPart
from moeedge.native.abi import Phase
from moeedge.run import NO_PROGRESS, Progress, rotated, seconds_of

WARM_UPS = 2  # untimed passes of the same shape before each timed one; after a single one plain steps are still slower
_PREFILL_TOKENS = 256  # of the batch that says how many operations per second the kernels reach
_N_STEPS = 3  # plain steps, of which the fastest counts

Shape = tuple[int, int]  # of a batch: sequences, tokens of each
Measure = Callable[[Shape, int], tuple[float, float]]  # of a shape's pass in a repetition: seconds, distinct experts


def this_machine(session: Session, weights: Weights, text: Sequence[int]) -> Machine:
    """Operations per second by a long batch; bytes per second by reading memory, at least what a plain step needs.

    Next to a GPU the bytes per second are those of a plain step, which is a lower limit.
    """
    context = session.target
    tokens = text[: min(_PREFILL_TOKENS, len(text), context.n_ubatch, context.n_ctx - 2)]
    context.clear()
    context.decode(tokens, phase=Phase.PREFILL, logits="last")
    first = [BatchPart(context.sequences[0], text[:1], "all")]
    step_s = min(_decode_s(context, first, Phase.DECODE) for _ in range(_N_STEPS))
    context.clear()
    prefill_s = seconds_of(partial(context.decode, tokens, phase=Phase.PREFILL, logits="last"))
    flops = 2 * weights.products(len(tokens)) / prefill_s
    bytes_per_s = weights.bytes_of(1) / step_s
    if not session.model.uses_gpu:
        bytes_per_s = max(bytes_per_s, measure_read_speed(session.info.n_threads))
    context.clear()
    return Machine(bytes_per_s=bytes_per_s, flops=flops)


@dataclass(kw_only=True)
class StepTimer:
    """Times passes of a session's models over windows of `text`; its KV caches are the timer's while it works.

    The session must have as many sequences as the largest of `shapes` and `draft_sizes`. depth: tokens of each sequence
    before each window, which the KV cache holds. draft_sizes: sequences in a batch of the draft. progress: in
    passes.
    """

    session: Session
    text: Sequence[int]
    shapes: Sequence[Shape]
    depth: int
    repetitions: int
    draft_sizes: Sequence[int] = ()
    progress: Progress = NO_PROGRESS

    def __post_init__(self) -> None:
        if self.session.draft_context is None:
            self.draft_sizes = ()
        self._n_sequences = max([*(size for size, _ in self.shapes), *self.draft_sizes], default=1)
        self._most = max((each for _, each in self.shapes), default=1)
        n_ctx = self.session.target.n_ctx
        if min(len(self.text), n_ctx) < self.depth + self._most:
            raise InputError(
                f"A batch of {self._most} tokens after {self.depth} needs a longer text or context: the answers have "
                f"{len(self.text):,} tokens, and the context {n_ctx:,}.",
                "Use fewer --batch-tokens, a larger -c, or longer answers (-n).",
            )

    @property
    def n_passes(self) -> int:
        """Timed passes of `target` and `draft`."""
        return self.repetitions * (len(self.shapes) + len(self.draft_sizes))

    def target(self) -> list[TimePoint]:
        """T_T of all shapes, with the distinct experts that the batches used, per MoE layer."""
        context = self.session.target
        n_layers, sensor = max(1, len(context.model.host_expert_layers)), context.sensor

        def measure(shape: Shape, turn: int) -> tuple[float, float]:
            self._fill(context, shape[0], turn)
            self._warm_up(context, shape, turn, Phase.VERIFY)
            if sensor is not None:
                sensor.read_counts()
            seconds = _decode_s(context, self._parts(context, shape, turn), Phase.VERIFY)
            self.progress.add()
            return seconds, 0.0 if sensor is None else np.count_nonzero(sensor.read_counts()) / n_layers

        return self._times(self.shapes, measure, clears=context, n_used=context.model.info.n_expert_used)

    def draft(self) -> list[TimePoint]:
        """T_D(B): one pass of the draft model over a token of each sequence, and a choice for each."""
        context = self.session.draft_context
        if context is None:
            return []
        sampler = Sampler(GREEDY, context.model.info.n_vocab)

        def measure(shape: Shape, turn: int) -> tuple[float, float]:
            self._fill(context, shape[0], turn)
            self._warm_up(context, shape, turn, Phase.DRAFT)
            parts = self._parts(context, shape, turn)
            start_s = time.perf_counter()
            for logits in context.decode_parts(parts, phase=Phase.DRAFT):
                sampler.pick(sampler.candidates(logits[0], []))
            seconds = time.perf_counter() - start_s
            _take_back(parts)
            self.progress.add()
            return seconds, 0.0

        return self._times([(size, 1) for size in self.draft_sizes], measure, clears=context)

    def reject(self) -> list[TimePoint]:
        """T_rej(t): rejection sampling of t - 1 drafts, all of which are accepted, which takes longest."""
        context = self.session.target
        sampler = Sampler(GREEDY, context.model.info.n_vocab)
        context.clear()
        self._fill(context, 1, 0)
        before = self.text[: self.depth]
        (part,) = self._parts(context, (1, self._most), 0)
        (logits,) = (rows.copy() for rows in context.decode_parts([part], phase=Phase.VERIFY))
        best = [int(token) for token in logits.argmax(axis=1)]
        certain = [Candidates.certain(token) for token in best]

        def measure(shape: Shape, _turn: int) -> tuple[float, float]:
            n = shape[1]
            return seconds_of(partial(sampler.accept, logits[:n], best[: n - 1], certain[: n - 1], before)), 0.0

        points = self._times(self.shapes, measure)
        _take_back([part])
        return points

    def _times(
        self, shapes: Sequence[Shape], measure: Measure, *, clears: Context | None = None, n_used: int = 0
    ) -> list[TimePoint]:
        """The times of the shapes, in ascending order, each measured once in every repetition.

        The smallest batches come first, those of one size in rotated order. clears: emptied before each repetition.
        """
        measured: dict[Shape, list[tuple[float, float]]] = defaultdict(list)
        for turn in range(self.repetitions):
            if clears is not None:
                clears.clear()
            for size in sorted({size for size, _ in shapes}):
                for shape in rotated([shape for shape in shapes if shape[0] == size], turn):
                    measured[shape].append(measure(shape, turn))
        points = []
        for (size, each), passes in sorted(measured.items()):
            seconds, experts = zip(*passes, strict=True)
            counted = fmean(experts) or None  # where they were counted
            points.append(TimePoint(size * each, median(seconds), n_used, size, counted, seconds))
        return points

    def _place(self, index: int, turn: int) -> int:
        """Where the timed tokens of a sequence begin in the text; the sequences lie apart from each other."""
        room = len(self.text) - self.depth - self._most
        return self.depth + (index * self.repetitions + turn) * room // (self.repetitions * self._n_sequences)

    def _fill(self, context: Context, size: int, turn: int) -> None:
        """Lets the KV cache hold the `depth` tokens before each sequence's place."""
        parts = []
        for sequence in context.sequences[:size]:
            place = self._place(sequence.index, turn)
            if sequence.n_past < self.depth:  # at first, and where a sliding window has lost some
                begin = place - self.depth + sequence.n_past
                parts.append(BatchPart(sequence, self.text[begin:place], "none"))
        for group in context.fitting(parts) if parts else ():
            context.decode_parts(parts[group], phase=Phase.PREFILL)

    def _parts(self, context: Context, shape: Shape, turn: int, *, skip: int = 0) -> list[BatchPart]:
        """The batch of that shape; skip: tokens of the text after each place, which goes on at its begin."""
        size, each = shape
        parts = []
        for sequence in context.sequences[:size]:
            start = (self._place(sequence.index, turn) + skip) % (len(self.text) - each + 1)
            parts.append(BatchPart(sequence, self.text[start : start + each], "all"))
        return parts

    def _warm_up(self, context: Context, shape: Shape, turn: int, phase: Phase) -> None:
        """Computes the same shape with other tokens, untimed."""
        for n_back in range(WARM_UPS, 0, -1):
            _decode_s(context, self._parts(context, shape, turn, skip=n_back * shape[1]), phase)
        self._fill(context, shape[0], turn)


def _decode_s(context: Context, parts: Sequence[BatchPart], phase: Phase) -> float:
    """Seconds of one pass, of which the KV cache keeps nothing."""
    seconds = seconds_of(partial(context.decode_parts, parts, phase=phase))
    _take_back(parts)
    return seconds


def _take_back(parts: Sequence[BatchPart]) -> None:
    for part in parts:
        part.sequence.trim(part.sequence.n_past - len(part.tokens))
