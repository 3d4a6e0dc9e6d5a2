"""What users of llama.cpp and ollama type acts, or gets a sentence that names what to write."""

from __future__ import annotations

import re

import pytest

from moeedge.cli.app import environment_kept, load_command
from moeedge.cli.habits import Habit, habits
from tests.support.commands import refused

HABITS = habits()


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: f"{habit.source}: {habit.typed}")
def test_it_acts_or_is_refused_with_a_sentence(habit: Habit) -> None:
    """What acts is read by the command's own parser as well: values have the right form."""
    if habit.acts:
        name, *arguments = habit.arguments
        command = load_command(name)
        with environment_kept():  # as the program does
            context = command.make_context(name, list(arguments), resilient_parsing=False)
        assert context.args == []
        return
    assert not re.search(r"has no (option|command)", habit.result), "nothing is known about it"
    assert re.search(r"[.] [A-Z/-].*[.]$", habit.result), "a sentence, and what to do"
    program = {"llama.cpp": ["chat"], "llama-bench": ["bench"], "ollama": []}[habit.source]
    message = refused(*program, *habit.typed.replace('"', "").split())
    assert habit.result.split(". ")[-1] in message


def test_most_of_it_acts() -> None:
    acting = [habit for habit in HABITS if habit.acts]
    assert len(HABITS) >= 77
    assert len(acting) >= 60
    assert len({(habit.source, habit.typed) for habit in HABITS}) == len(HABITS)
