"""The harness of every measurement: sessions side by side that answer the same prompts in turns, one sample an answer.

`moeedge bench`, `ablate` and `validate measured` run their prompts through BenchArm.answer, which is the only place
where answers are timed and samples are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from moeedge.bench.config import REFERENCE, BenchMode, mode_config
from moeedge.bench.samples import Counters, Sample, counted, disk_bytes_read, from_stats
from moeedge.data.prompts import Prompt
from moeedge.engine.loading import load_draft, load_target
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import ContextTooSmallError, EngineError, InputError
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.machine_load import LoadReading
from moeedge.llama.model import Model
from moeedge.notifications import Notify, ignore
from moeedge.scheduler.stats import StepRecord

GREEDY = SamplingConfig(temperature=0.0, seed=0)
# long enough to take every path once (prefill, draft, verification, plain decoding), and short
_WARM_UP_TOKENS = 16
# the shortest pause of a user between two turns, in which experts may still move
_PAUSE_S = 0.5

# llama.cpp pads contexts to multiples of this many tokens
_CONTEXT_STEP = 256
# tokens that a template puts around an answer; the exact number is not known before the answer is
_TOKENS_AROUND_ANSWER = 16

T = TypeVar("T")


def never() -> bool:
    """A `cancel` that lets everything run."""
    return False


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
        cancel: Callable[[], bool] = never,
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


def open_arms(
    base: EngineConfig,
    modes: Sequence[BenchMode],
    models: tuple[Model, Model | None],
    stack: ExitStack,
    *,
    notify: Notify = ignore,
) -> list[BenchArm]:
    """Opens a session per mode on the shared models; `stack` closes them. notify: as for Session.open."""
    target, draft = models
    return [open_arm(base, mode, stack, model=target, draft_model=draft, notify=notify) for mode in modes]


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


def warm_up(
    arms: Sequence[BenchArm],
    prompt: Prompt,
    *,
    n_predict: int = _WARM_UP_TOKENS,
    ignore_eos: bool = False,
    cancel: Callable[[], bool] = never,
) -> None:
    """Answers the first turn of `prompt` once in every arm: memory is touched, threads are started, caches filled."""
    for arm in arms:
        arm.session.reset()
        tokens = arm.prompt_tokens([message.as_dict() for message in prompt.turns[0]])
        arm.answer(tokens, n_predict=n_predict, ignore_eos=ignore_eos, cancel=cancel)


def run_conversations(
    arms: Sequence[BenchArm],
    prompts: Sequence[Prompt],
    *,
    repetitions: int,
    n_predict: int,
    ignore_eos: bool = False,
    warmed_up: bool = True,
    cancel: Callable[[], bool] = never,
    answers: dict[tuple[str, int], str] | None = None,
    skip: Collection[tuple[str, int]] = (),
) -> Iterator[Sample]:
    """Yields a sample per repetition, prompt, turn and arm; ends early when `cancel` returns True.

    The arms take turns within a turn of the conversation. Each has its own KV cache, which is empty at the first turn
    and then holds the conversation so far. All continue from the reference's answer: where an arm's own answer differs,
    which the output check reports, the next turn still asks all of them the same.
    answers: by prompt and turn, those to go on from instead; those that are missing are added. skip: prompts' ids and
    repetitions that were measured before.
    """
    answers = {} if answers is None else answers
    reference = next((arm for arm in arms if arm.mode.label == REFERENCE), arms[0])
    model = reference.session.model
    for repetition in range(repetitions):
        for index, prompt in enumerate(prompts):
            if (prompt.id, repetition) in skip:
                continue
            for arm in arms:
                arm.session.reset()
            order = rotated(arms, repetition + index)
            messages: list[dict[str, str]] = []
            for turn, new_messages in enumerate(prompt.turns):
                messages += [message.as_dict() for message in new_messages]
                prompt_ids = reference.prompt_tokens(messages)
                for place, arm in enumerate(order):
                    if cancel():
                        return
                    sample = arm.answer(
                        prompt_ids,
                        n_predict=n_predict,
                        ignore_eos=ignore_eos,
                        cancel=cancel,
                        prompt=prompt.id,
                        category=prompt.category,
                        turn=turn,
                        repetition=repetition,
                        order=place,
                        warm=warmed_up or repetition > 0,
                    )
                    if cancel():  # the answer may be cut short: no sample
                        return
                    yield sample
                    if arm is reference:
                        answers.setdefault((prompt.id, turn), answer_text(model, sample.tokens))
                messages.append({"role": "assistant", "content": answers[prompt.id, turn]})


def answer_text(model: Model, tokens: Sequence[int]) -> str:
    """Returns the text of an answer, without a character that the answer's end cut.

    A replacement character could take more tokens in the next turn's prompt than were planned for.
    """
    return b"".join(model.piece(token) for token in tokens).decode("utf-8", "ignore")


def needed_context(model: Model, prompt: Prompt, n_predict: int) -> int:
    """Returns the tokens that the conversation can grow to, with all answers at full length."""
    messages = []
    for index, turn in enumerate(prompt.turns):
        if index:
            messages.append({"role": "assistant", "content": "-"})
        messages += [message.as_dict() for message in turn]
    tokens = model.tokenize(model.render_chat(messages))
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
        raise ContextTooSmallError(
            f"No prompt fits: the shortest needs {min(needs):,} tokens with its answer, but the context has {limit:,}.",
            "Use a larger -c or a smaller -n.",
        )
    if base.n_ctx:
        return base, kept
    longest = max([n_synthetic, *(need for need in needs if need <= limit)])
    padded = -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP
    return replace(base, n_ctx=min(padded, max(limit, n_synthetic))), kept
