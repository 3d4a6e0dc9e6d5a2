"""Times the parts of a speculative step: the target over 1 to 64 tokens of one text, rejection sampling.

Batches are windows of real text, because which experts its tokens share decides how long they take. Every repetition
takes another place of the text, and runs through the numbers of tokens in another order. Before each timed pass runs
one of as many tokens from elsewhere: llama.cpp builds a graph for each new number of tokens, which a decoder that goes
on with the same number does not pay for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from moeedge.analysis.step_fit import TimePoint
from moeedge.analysis.step_model import Machine
from moeedge.bench.harness import GREEDY, never, rotated
from moeedge.bench.roofline import measure_read_speed
from moeedge.engine.sampling import Candidates, Sampler
from moeedge.engine.session import Session
from moeedge.errors import InputError
from moeedge.llama import gguf_file
from moeedge.llama.context import Context
from moeedge.native.abi import Phase

_PREFILL_TOKENS = 256  # of the batch that says how many operations per second the kernels reach
_N_STEPS = 3  # plain steps, of which the fastest counts


@dataclass(frozen=True)
class ModelWeights:
    """What a step of a model reads and computes."""

    dense_bytes: float  # every step
    dense_weights: float
    expert_bytes: float  # of one expert in every MoE layer, together
    expert_weights: float

    @property
    def bytes_per_weight(self) -> float:
        """Of experts, or of all weights of a dense model."""
        if self.expert_weights:
            return self.expert_bytes / self.expert_weights
        return self.dense_bytes / max(self.dense_weights, 1.0)

    def step_bytes(self, n_used: int) -> float:
        """That one token reads."""
        return self.dense_bytes + n_used * self.expert_bytes

    def step_flops(self, n_used: int) -> float:
        """Operations of one token: two per weight."""
        return 2 * (self.dense_weights + n_used * self.expert_weights)


def read_weights(path: Path) -> ModelWeights:
    """The sizes in the header of a model. The input embedding counts only if it is the output matrix, too."""
    tensors = [tensor for file in gguf_file.parts(path) for tensor in gguf_file.read_tensors(file)]
    names = {tensor.name for tensor in tensors}
    dense_bytes = dense_weights = expert_bytes = expert_weights = 0.0
    for tensor in tensors:
        if "_exps." in tensor.name:
            n_experts = max(tensor.shape[2], 1)
            expert_bytes += tensor.size_bytes / n_experts
            expert_weights += tensor.shape[0] * tensor.shape[1]
        elif tensor.name != "token_embd.weight" or "output.weight" not in names:
            dense_bytes += tensor.size_bytes
            dense_weights += tensor.shape[0] * tensor.shape[1] if tensor.shape[1] > 1 else 0
    return ModelWeights(dense_bytes, dense_weights, expert_bytes, expert_weights)


def this_machine(session: Session, weights: ModelWeights, text: Sequence[int]) -> Machine:
    """Operations per second by a long batch; bytes per second by reading memory, at least what a plain step needs.

    Next to a GPU the bytes per second are those of a plain step, which is a lower limit.
    """
    context = session.target
    info = session.info
    tokens = text[: min(_PREFILL_TOKENS, len(text), context.n_ubatch, context.n_ctx - 2)]
    context.clear()
    context.decode(tokens, phase=Phase.PREFILL, logits="last")
    step_s = min(_decode_s(context, [text[0]], Phase.DECODE) for _ in range(_N_STEPS))
    context.clear()
    start_s = time.perf_counter()
    context.decode(tokens, phase=Phase.PREFILL, logits="last")
    flops = len(tokens) * weights.step_flops(info.n_expert_used) / (time.perf_counter() - start_s)
    bytes_per_s = weights.step_bytes(info.n_expert_used) / step_s
    if not session.model.uses_gpu:
        bytes_per_s = max(bytes_per_s, measure_read_speed(info.n_threads))
    context.clear()
    return Machine(name="this", bytes_per_s=bytes_per_s, flops=flops)


class StepTimer:
    """Times passes of a session's target over windows of `text`; its KV cache is the timer's while it works.

    cancel: True ends the measurement; the medians are of what was measured until then. on_pass: called after each.
    """

    def __init__(
        self,
        session: Session,
        text: Sequence[int],
        *,
        tokens: Sequence[int],
        repetitions: int,
        cancel: Callable[[], bool] = never,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._text = list(text)
        self._tokens = sorted(set(tokens))
        self._repetitions = repetitions
        self._cancel = cancel
        self._on_pass = on_pass
        room = min(len(self._text), session.target.n_ctx) - self._tokens[-1]
        if room < 1:
            raise InputError(
                f"A batch of {self._tokens[-1]} tokens needs a longer text or context: the answers have "
                f"{len(self._text):,} tokens, and the context {session.target.n_ctx:,}.",
                "Use fewer --batch-tokens, a larger -c, or longer answers (-n).",
            )
        self._room = room
        # ascending places, so that the KV cache only grows; the first holds some context already
        self._places = np.linspace(min(room, 16), room, repetitions).astype(int).tolist()

    def target(self) -> list[TimePoint]:
        """T_T(t) for all numbers of tokens, with the experts that the batches used, per MoE layer."""
        context = self._session.target
        n_layers = max(1, len(context.model.host_expert_layers))
        seconds: dict[int, list[float]] = defaultdict(list)
        unique: dict[int, list[float]] = defaultdict(list)
        context.clear()
        for turn, place in enumerate(self._places):
            for n_tokens in rotated(self._tokens, turn):
                if self._cancel():
                    break
                self._warm_up(context, place, n_tokens, Phase.VERIFY)
                if context.sensor is not None:
                    context.sensor.read_counts()
                seconds[n_tokens].append(_decode_s(context, self._text[place : place + n_tokens]))
                if context.sensor is not None:
                    unique[n_tokens].append(np.count_nonzero(context.sensor.read_counts()) / n_layers)
                self._on_pass()
        n_used = context.model.info.n_expert_used
        return [
            TimePoint(
                n_tokens,
                median(samples),
                n_used,
                unique_experts=fmean(unique[n_tokens]) if unique[n_tokens] else None,
                samples_s=tuple(samples),
            )
            for n_tokens, samples in sorted(seconds.items())
        ]

    def reject(self) -> list[TimePoint]:
        """T_rej(t): rejection sampling of t - 1 drafts, all of which are accepted, which takes longest."""
        context = self._session.target
        sampler = Sampler(GREEDY, context.model.info.n_vocab)
        place = self._places[-1]
        self._fill(context, place)
        most = self._tokens[-1]
        logits = context.decode(self._text[place : place + most], phase=Phase.VERIFY, logits="all").copy()
        best = [int(token) for token in logits.argmax(axis=1)]
        certain = [Candidates.certain(token) for token in best]
        seconds: dict[int, list[float]] = defaultdict(list)
        for turn in range(self._repetitions):
            for n_tokens in rotated(self._tokens, turn):
                drafts = best[: n_tokens - 1]
                start_s = time.perf_counter()
                sampler.accept(logits[:n_tokens], drafts, certain[: n_tokens - 1], self._text[:place])
                seconds[n_tokens].append(time.perf_counter() - start_s)
        context.trim(place)
        return _points(seconds)

    def _warm_up(self, context: Context, place: int, n_tokens: int, phase: Phase) -> None:
        """Lets the KV cache hold the text before `place`, and computes as many tokens from elsewhere, untimed."""
        self._fill(context, place)
        other = (place + self._room // 2) % self._room
        _decode_s(context, self._text[other : other + n_tokens], phase)
        self._fill(context, place)  # a sliding window may have lost it

    def _fill(self, context: Context, place: int) -> None:
        """Lets the KV cache hold the text before `place`."""
        context.keep_prefix(self._text[:place])
        if context.n_past < place:
            context.prefill(self._text[context.n_past : place], logits="none")


def _decode_s(context: Context, tokens: Sequence[int], phase: Phase = Phase.VERIFY) -> float:
    """Seconds of one pass, of which the KV cache keeps nothing."""
    before = context.n_past
    start_s = time.perf_counter()
    context.decode(tokens, phase=phase, logits="all")
    seconds = time.perf_counter() - start_s
    context.trim(before)
    return seconds


def _points(seconds: dict[int, list[float]]) -> list[TimePoint]:
    return [TimePoint(n, median(samples), samples_s=tuple(samples)) for n, samples in sorted(seconds.items())]
