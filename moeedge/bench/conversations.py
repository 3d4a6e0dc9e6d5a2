"""The dataset part of a run: every prompt a conversation, every turn answered by all modes before the next turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from moeedge.bench.lanes import Lane
from moeedge.bench.modes import REFERENCE, rotated
from moeedge.bench.placement import counted, let_rest
from moeedge.bench.samples import Sample, from_stats
from moeedge.data import Prompt
from moeedge.engine.model import Model
from moeedge.engine.types import SamplingConfig

GREEDY = SamplingConfig(temperature=0.0, seed=0)
# long enough to take every path once (prefill, draft, verification, plain decoding), short enough not to wait for
_WARM_UP_TOKENS = 16


def warm_up(lanes: Sequence[Lane], prompt: Prompt, cancel: Callable[[], bool]) -> None:
    """Runs every mode once, so that the first sample finds memory touched and threads started."""
    for lane in lanes:
        tokens = _prompt_tokens(lane, [message.as_dict() for message in prompt.turns[0]])
        for _ in lane.session.generate(tokens, n_predict=_WARM_UP_TOKENS, sampling=GREEDY, cancel=cancel):
            pass
        let_rest(lane.session)


def run_conversation(
    lanes: Sequence[Lane],
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
    for lane in lanes:
        lane.session.reset()
    by_label = {lane.mode.label: lane for lane in lanes}
    order = rotated([lane.mode for lane in lanes], rotation)
    reference = REFERENCE if REFERENCE in by_label else lanes[0].mode.label
    messages: list[dict[str, str]] = []
    for turn, new_messages in enumerate(prompt.turns):
        messages += [message.as_dict() for message in new_messages]
        tokens = _prompt_tokens(lanes[0], messages)
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
            let_rest(session)
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
        messages.append({"role": "assistant", "content": answer_text(lanes[0].session.model, answer)})


def answer_text(model: Model, tokens: Sequence[int]) -> str:
    """The text of an answer. One that is cut within a character ends before it.

    A replacement for the rest could take more tokens than were counted on.
    """
    return b"".join(model.piece(token) for token in tokens).decode("utf-8", "ignore")


def _prompt_tokens(lane: Lane, messages: list[dict[str, str]]) -> list[int]:
    model = lane.session.model
    return model.tokenize(model.render_chat(messages))
