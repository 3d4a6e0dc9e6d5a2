"""The arms of every measurement: sessions side by side. BenchArm.answer is the only place where answers are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from moeedge.bench.config import BenchMode, mode_config
from moeedge.bench.samples import Counters, Sample, counted, disk_bytes_read, from_stats
from moeedge.data.prompts import Prompt
from moeedge.engine.loading import load_draft, load_target
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import ContextTooSmallError, EngineError, InputError
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.machine_load import LoadReading
from moeedge.llama.model import Model
from moeedge.run import Cancel
from moeedge.scheduler.stats import StepRecord

GREEDY = SamplingConfig(temperature=0.0, seed=0)
_PAUSE_S = 0.5  # the shortest of a user between two turns, in which experts may still move
_CONTEXT_STEP = 256  # llama.cpp pads contexts to multiples of this many tokens
_TOKENS_AROUND_ANSWER = 16  # that a template puts there; the exact number is not known before the answer is

T = TypeVar("T")


class Meter:
    """What a session and its machine do in a `with` block: seconds, and processor time of us and of other programs."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.seconds = self.cpu_s = self.others_s = 0.0
        self.read_bytes: int | None = None  # by this process from disks

    def __enter__(self) -> Meter:
        self._placement, self._read = self._session.placement_stats(), disk_bytes_read()
        self._load, self._cpu_s, self._start_s = LoadReading.now(), time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds, self.cpu_s = time.perf_counter() - self._start_s, time.process_time() - self._cpu_s
        self.others_s = LoadReading.now().others_s_since(self._load)
        read = disk_bytes_read()
        self.read_bytes = None if read is None or self._read is None else read - self._read

    def counters(self) -> Counters | None:
        """The expert cache's counters from the beginning of the block to now."""
        return counted(self._placement, self._session.placement_stats())


@dataclass(frozen=True, eq=False)
class BenchArm:
    """A mode and its session. Several arms share the models; each has contexts and an expert cache of its own."""

    mode: BenchMode
    session: Session
    own_target: bool = False  # its target has other layers on a GPU than that of the other modes

    def prompt_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """Returns the token ids of a conversation that asks for the next answer."""
        model = self.session.model
        return model.tokenize(model.render_chat(messages))

    def answer(
        self,
        prompt_ids: Sequence[int],
        *,
        n_predict: int,
        ignore_eos: bool = False,
        cancel: Cancel = lambda: False,
        drain: bool = True,
        on_step: Callable[[StepRecord], None] | None = None,
        **about: Any,
    ) -> Sample:
        """Answers greedily and returns the timed sample; the KV caches keep what they hold of the prompt.

        drain: end the transfers of this answer before returning, timed apart from it. on_step: called with each step
        after the prompt, scheduling included in its observe_s. about: fields of the sample that name its work.
        Raises KeyboardInterrupt where Ctrl-C ended the answer; without that the measurement would go on.
        """
        session = self.session
        with Meter(session) as prefill:
            generation = session.generate(
                prompt_ids, n_predict=n_predict, sampling=GREEDY, cancel=cancel, ignore_eos=ignore_eos
            )
            next(iter(generation), None)  # the first token ends it
        prefill_placement = prefill.counters()
        with Meter(session) as decoding:
            for record in generation:
                if on_step is not None:
                    on_step(record)
        if generation.stop_reason == "interrupted" and not cancel():
            raise KeyboardInterrupt
        drain_s = self.drain_transfers() if drain else 0.0
        return from_stats(
            generation.stats,
            mode=self.mode.label,
            **{"prompt": "", "turn": 0, "repetition": 0, "order": 0} | about,
            cpu_s=prefill.cpu_s + decoding.cpu_s,
            others_s=prefill.others_s + decoding.others_s,
            prefill_read_bytes=prefill.read_bytes,
            decode_read_bytes=decoding.read_bytes,
            drain_s=drain_s,
            prefill_placement=prefill_placement,
            placement=decoding.counters(),
            stop_reason=generation.stop_reason,
            tokens=list(generation.tokens),
            prompt_ids=list(prompt_ids),
        )

    def drain_transfers(self) -> float:
        """Ends the transfers of a sample, so that they do not slow down the arm that is measured next.

        Returns the seconds that this took: no sample's decoding has them.
        """
        start_s = time.perf_counter()
        if self.session.placement is not None:
            self.session.placement.drain_transfers(_PAUSE_S)
        return time.perf_counter() - start_s


def load_models(
    base: EngineConfig, modes: Sequence[BenchMode], stack: ExitStack, device: ResolvedDevice | None = None
) -> tuple[Model, Model | None]:
    """Loads the target, and the draft model if there is one and a mode uses it; `stack` closes them.

    device: of `resolve_device`, if it is known.
    """
    has_size = any(mode.cache_ratio is not None for mode in modes)
    # a model that fits a GPU is not left there entirely where modes ask for a cache
    target = stack.enter_context(load_target(base, device, whole_fits=False if has_size else None))
    if not isinstance(base.draft, Path) or base.gamma == 0 or not any(mode.drafts for mode in modes):
        return target, None
    return target, stack.enter_context(load_draft(base, device))


def open_arm(
    base: EngineConfig,
    mode: BenchMode,
    stack: ExitStack,
    *,
    opened: Callable[..., Session] = Session.open,
    own_target: bool = False,
    **options: Any,
) -> BenchArm:
    """Opens the session of a mode; `stack` closes it. opened: makes it; options: of that function.

    An error of the engine, such as too little memory for the mode's context, names the mode.
    """
    try:
        session = stack.enter_context(opened(mode_config(base, mode), **options))
    except (InputError, EngineError) as error:
        raise type(error)(f"{mode.label} cannot run: {error.message}", error.hint) from error
    return BenchArm(mode, session, own_target)


def rotated(items: Sequence[T], turn: int) -> tuple[T, ...]:
    """Returns the order in which the items run for the `turn`-th time.

    A cycle of rotations puts every item in every place; every second cycle is reversed, so that every item also comes
    after each other one. Slow drift of the machine (clock, heat, other programs) then affects all items alike.
    """
    cycle, shift = divmod(turn, len(items))
    order = (*items[shift:], *items[:shift])
    return order[::-1] if cycle % 2 else order


def answer_text(model: Model, tokens: Sequence[int]) -> str:
    """Returns the text of an answer, without a character that the answer's end cut.

    A replacement character could take more tokens in the next turn's prompt than were planned for.
    """
    return b"".join(model.piece(token) for token in tokens).decode("utf-8", "ignore")


def needed_context(model: Model, prompt: Prompt, n_predict: int) -> int:
    """Returns the tokens that the conversation can grow to, with all answers at full length."""
    messages = []
    for index in range(len(prompt.turns)):
        messages += [*prompt.messages(index), {"role": "assistant", "content": "-"}]
    tokens = model.tokenize(model.render_chat(messages[:-1]))
    return len(tokens) + len(prompt.turns) * (n_predict + _TOKENS_AROUND_ANSWER)


def fit_context(
    base: EngineConfig, model: Model, prompts: Sequence[Prompt], n_predict: int, n_synthetic: int
) -> tuple[EngineConfig, tuple[Prompt, ...]]:
    """Returns `base` with the context that the run needs, and the prompts that fit it.

    Without -c the context is that of the longest conversation, limited to the model's training context, or of the
    largest synthetic test (n_synthetic tokens), which is not limited: its tokens have no meaning to lose.
    Raises ContextTooSmallError if no prompt fits.
    """
    needs = [needed_context(model, prompt, n_predict) for prompt in prompts]
    limit = base.n_ctx or model.info.n_ctx_train
    kept = tuple(prompt for prompt, need in zip(prompts, needs, strict=True) if need <= limit)
    if prompts and not kept:
        needed = f"the shortest needs {min(needs):,} tokens with its answer, but the context has {limit:,}"
        raise ContextTooSmallError(f"No prompt fits: {needed}.", "Use a larger -c or a smaller -n.")
    if base.n_ctx:
        return base, kept
    longest = max([n_synthetic, *(need for need in needs if need <= limit)])
    padded = -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP
    return replace(base, n_ctx=min(padded, max(limit, n_synthetic))), kept
