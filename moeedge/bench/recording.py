"""The routing behind a benchmark: its prompts answered once more, unmeasured, while every token's experts are noted.

Not during the measurement: writing the rows takes time. Answers are greedy, so that the routing is that of the measured
ones; they end where the model ends them, --ignore-eos or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeedge.bench.conversations import GREEDY
from moeedge.bench.lanes import Lane
from moeedge.bench.modes import BenchMode
from moeedge.bench.plan import BenchPlan
from moeedge.data import Prompt
from moeedge.errors import InputError
from moeedge.profiling.run import Question, record_routing
from moeedge.trace import Trace


def recorded_mode(modes: Sequence[BenchMode]) -> BenchMode:
    """The mode whose routing is written: the first with our backend, one with drafts before others.

    Raises InputError where there is none.
    """
    ours = [mode for mode in modes if mode.engine == "moeedge"]
    if not ours:
        raise InputError("Stock modes record no routing.", "Name moeedge or moeedge-ar in --modes, or no --trace-out.")
    return next((mode for mode in ours if mode.drafts), ours[0])


def record_answers(lane: Lane, prompts: Sequence[Prompt], plan: BenchPlan) -> Trace:
    """The trace of all answers."""
    questions = [
        Question(prompt.id, tuple([message.as_dict() for message in turn] for turn in prompt.turns))
        for prompt in prompts
    ]
    name = plan.dataset.name if plan.dataset is not None else ""
    return record_routing(
        lane.session,
        questions,
        n_predict=plan.n_predict,
        sampling=GREEDY,
        source={"dataset": name, "prompts": len(questions), "mode": lane.mode.label},
        command="bench",
    ).trace
