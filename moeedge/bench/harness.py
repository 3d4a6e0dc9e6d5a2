"""The dataset part of a run: every prompt a conversation, every turn answered by all modes before the next turn.

The routing behind a benchmark: its prompts answered once more, unmeasured, while every token's experts are noted.

Not during the measurement: writing the rows takes time. Answers are greedy, so that the routing is that of the measured
ones; they end where the model ends them, --ignore-eos or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from moeedge.bench.arms import BenchArm
from moeedge.bench.config import REFERENCE, BenchMode, BenchPlan, rotated
from moeedge.bench.samples import Sample, counted, drain_transfers, from_stats
from moeedge.data import Prompt
from moeedge.engine.recording import Question, record_routing
from moeedge.engine.types import SamplingConfig
from moeedge.errors import InputError
from moeedge.llama.model import Model
from moeedge.trace.format import Trace

GREEDY = SamplingConfig(temperature=0.0, seed=0)
# long enough to take every path once (prefill, draft, verification, plain decoding), short enough not to wait for
_WARM_UP_TOKENS = 16


def warm_up(arms: Sequence[BenchArm], prompt: Prompt, cancel: Callable[[], bool]) -> None:
    """Runs every mode once, so that the first sample finds memory touched and threads started."""
    for arm in arms:
        tokens = _prompt_tokens(arm, [message.as_dict() for message in prompt.turns[0]])
        for _ in arm.session.generate(tokens, n_predict=_WARM_UP_TOKENS, sampling=GREEDY, cancel=cancel):
            pass
        drain_transfers(arm.session)


def run_conversation(
    arms: Sequence[BenchArm],
    prompt: Prompt,
    *,
    repetition: int,
    rotation: int,
    n_predict: int,
    ignore_eos: bool,
    warm: bool,
    cancel: Callable[[], bool],
) -> Iterator[Sample]:
    """The samples of one prompt, one per turn and mode; ends early when `cancel` says so.

    The modes take turns within a turn of the conversation, each on its own KV cache, which is empty at first and then
    holds what was said. All go on from the reference's answer: where a mode's own differs (which the output check
    reports), the next turn still asks all of them the same.
    """
    for arm in arms:
        arm.session.reset()
    by_label = {arm.mode.label: arm for arm in arms}
    order = rotated([arm.mode for arm in arms], rotation)
    reference = REFERENCE if REFERENCE in by_label else arms[0].mode.label
    messages: list[dict[str, str]] = []
    for turn, new_messages in enumerate(prompt.turns):
        messages += [message.as_dict() for message in new_messages]
        tokens = _prompt_tokens(arms[0], messages)
        answer: list[int] = []
        for place, mode in enumerate(order):
            session = by_label[mode.label].session
            before = session.placement_stats()
            cpu_before_s = time.process_time()
            generation = session.generate(
                tokens, n_predict=n_predict, sampling=GREEDY, cancel=cancel, ignore_eos=ignore_eos
            )
            next(generation, None)  # the first token ends the prefill
            prefilled = session.placement_stats()
            for _ in generation:
                pass
            cpu_s = time.process_time() - cpu_before_s
            drain_transfers(session)
            if cancel():  # the answer may be cut: no sample
                return
            if mode.label == reference:
                answer = generation.tokens
            yield from_stats(
                generation.stats,
                mode=mode.label,
                prompt=prompt.id,
                turn=turn,
                repetition=repetition,
                order=place,
                cpu_s=cpu_s,
                warm=warm,
                prefill_placement=counted(before, prefilled),
                placement=counted(prefilled, session.placement_stats()),
                stop_reason=generation.stop_reason,
                tokens=list(generation.tokens),
                prompt_ids=tokens,
            )
        messages.append({"role": "assistant", "content": answer_text(arms[0].session.model, answer)})


def answer_text(model: Model, tokens: Sequence[int]) -> str:
    """The text of an answer. One that is cut within a character ends before it.

    A replacement for the rest could take more tokens than were counted on.
    """
    return b"".join(model.piece(token) for token in tokens).decode("utf-8", "ignore")


def _prompt_tokens(arm: BenchArm, messages: list[dict[str, str]]) -> list[int]:
    model = arm.session.model
    return model.tokenize(model.render_chat(messages))


def recorded_mode(modes: Sequence[BenchMode]) -> BenchMode:
    """The mode whose routing is written: the first with our backend, one with drafts before others.

    Raises InputError where there is none.
    """
    ours = [mode for mode in modes if mode.engine == "moeedge"]
    if not ours:
        raise InputError("Stock modes record no routing.", "Name moeedge or moeedge-ar in --modes, or no --trace-out.")
    return next((mode for mode in ours if mode.drafts), ours[0])


def record_answers(arm: BenchArm, prompts: Sequence[Prompt], plan: BenchPlan) -> Trace:
    """The trace of all answers."""
    questions = [
        Question(prompt.id, tuple([message.as_dict() for message in turn] for turn in prompt.turns))
        for prompt in prompts
    ]
    name = plan.dataset.name if plan.dataset is not None else ""
    return record_routing(
        arm.session,
        questions,
        n_predict=plan.n_predict,
        sampling=GREEDY,
        source={"dataset": name, "prompts": len(questions), "mode": arm.mode.label},
        command="bench",
    ).trace
