"""Rows to prompts: one function per shape of record, each accepting the published files' own column names."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from moeedge.data.prompts import Message, Prompt, Role, user_turns
from moeedge.data.rows import Row
from moeedge.errors import DatasetError
from moeedge.scoring.extract import LETTERS, as_number
from moeedge.scoring.references import Reference

Parser = Callable[[Row], Prompt]

Turns = tuple[tuple[Message, ...], ...]

_ROLES = ("system", "user", "assistant")


def parse_custom(row: Row) -> Prompt:
    """A user's own record: "messages" (answered once), "turns" (answered one after the other) or "prompt".

    A "reference" belongs to the only turn, "references" are one for each turn, null for none.
    """
    if "messages" in row.fields:
        turns: Turns = (_messages(row),)
    elif "turns" in row.fields:
        turns = user_turns(*row.strings("turns"))
    elif "prompt" in row.fields:
        turns = user_turns(row.text("prompt"))
    else:
        raise DatasetError(f'{row.where}: none of "prompt", "turns", "messages" is there.', "Add one of them.")
    identity = row.identity("id", "question_id", "task_id")
    return Prompt(identity, str(row.fields.get("category") or "custom"), turns, _own_references(row, len(turns)))


def parse_turns(row: Row) -> Prompt:
    """MT-bench and the files in its form: "question_id", "category", "turns"."""
    return Prompt(
        row.identity("question_id", "prompt_id", "id"),
        str(row.fields.get("category") or "other"),
        user_turns(*row.strings("turns")),
    )


def parse_humaneval(row: Row) -> Prompt:
    """HumanEval: the head of a Python function in "prompt", and `check(candidate)` in "test"."""
    head = row.text("prompt")
    tests, entry = row.optional_text("test"), row.optional_text("entry_point")
    text = f"Complete this Python function.\n\n{head}"
    reference = Reference("code", tests=f"{tests}\n\ncheck({entry})\n", head=head) if tests and entry else None
    return Prompt(row.identity("task_id"), "code", user_turns(text), (reference,))


def parse_gsm8k(row: Row) -> Prompt:
    """GSM8K: "question", and "answer" with the number behind "####"; or as collections of benchmarks have it."""
    numbers = [given.rpartition("####")[2].strip() for given in row.optional_texts("answer", "reference")[:1]]
    references = tuple(Reference("number", (number,)) for number in numbers if as_number(number) is not None)
    if _is_written_out(row):
        return _written_out(row, "math", references)
    return Prompt(row.identity("id"), "math", user_turns(row.text("question")), references)


def parse_mmlu_pro(row: Row) -> Prompt:
    """MMLU-Pro: "question" and up to ten "options", shown as a lettered list; the letter in "answer"."""
    options = row.strings("options")
    if len(options) > len(string.ascii_uppercase):
        raise DatasetError(f"{row.where}: {len(options)} options are too many.", "Mend or remove it.")
    lines = [f"({letter}) {option}" for letter, option in zip(string.ascii_uppercase, options, strict=False)]
    task = 'Think step by step, then finish with "The answer is (X)", where X is the letter of the right answer.'
    text = "\n".join([row.text("question"), *lines, task])
    answer = row.optional_text("answer").strip().upper()
    known = len(answer) == 1 and answer in LETTERS[: len(options)]
    category = str(row.fields.get("category") or "other")
    references = (Reference("letter", (answer,)),) if known else ()
    return Prompt(row.identity("question_id"), category, user_turns(text), references)


def parse_instructions(row: Row) -> Prompt:
    """Alpaca and self-instruct: "instruction" with its input in "input" or in the first of "instances"."""
    text = row.text("instruction")
    given: Any = row.fields.get("input")
    instances = row.fields.get("instances")
    if given is None and isinstance(instances, list) and instances and isinstance(instances[0], dict):
        given = instances[0].get("input")
    if isinstance(given, str) and given.strip():
        text = f"{text}\n\n{given}"
    return Prompt(row.identity("id"), "instructions", user_turns(text))


def parse_articles(row: Row) -> Prompt:
    """CNN/DailyMail: written out with the request, or the bare "article"; a summary in "reference" or "highlights"."""
    given = row.optional_texts("reference", "highlights")
    references = (Reference("rouge-l", given),) if given else ()
    if _is_written_out(row):
        return _written_out(row, "summarization", references)
    return Prompt(row.identity("id"), "summarization", user_turns(f"Summarize: {row.text('article')}"), references)


def parse_questions(row: Row) -> Prompt:
    """Open questions: written out, or "question"; right answers, of which one will do, in "answer" or "reference"."""
    given = row.optional_texts("answer", "answers", "reference")
    references = (Reference("contains-any", given),) if given else ()
    if _is_written_out(row):
        return _written_out(row, "qa", references)
    return Prompt(row.identity("id"), "qa", user_turns(row.text("question")), references)


def _is_written_out(row: Row) -> bool:
    return "turns" in row.fields or "prompt" in row.fields


def _written_out(row: Row, category: str, references: tuple[Reference, ...]) -> Prompt:
    """A record of a collection of benchmarks: "turns", or "prompt" as a string or a list of turns."""
    if "turns" in row.fields:
        return replace(parse_turns(row), references=references)
    texts = row.strings("prompt") if isinstance(row.fields["prompt"], list) else [row.text("prompt")]
    identity = row.identity("question_id", "id")
    return Prompt(identity, str(row.fields.get("category") or category), user_turns(*texts), references)


def _own_references(row: Row, n_turns: int) -> tuple[Reference | None, ...]:
    """Of a user's own record. A "reference" that is no object is of another format, and left alone."""
    listed = row.fields.get("references")
    if listed is None:
        single = row.fields.get("reference")
        listed = [single] if isinstance(single, dict) else []
    if not isinstance(listed, list) or len(listed) not in (0, n_turns):
        raise DatasetError(f"{row.where}: there must be one reference for each of the {n_turns} turns.", "Mend them.")
    return tuple(None if given is None else Reference.from_row(given, row.where) for given in listed)


def _messages(row: Row) -> tuple[Message, ...]:
    listed = row.fields["messages"]
    if not isinstance(listed, list) or not listed:
        raise DatasetError(f'{row.where}: "messages" must be a non-empty list of objects.', "Mend or remove it.")
    messages = []
    for entry in listed:
        role = entry.get("role") if isinstance(entry, dict) else None
        content = entry.get("content") if isinstance(entry, dict) else None
        if role not in _ROLES or not isinstance(content, str):
            raise DatasetError(
                f'{row.where}: every message needs a "role" ({", ".join(_ROLES)}) and a "content" string.',
                "Mend or remove it.",
            )
        messages.append(Message(cast(Role, role), content))
    if messages[-1].role != "user" or not messages[-1].content.strip():
        raise DatasetError(f"{row.where}: the last message must be the user's and not empty.", "Mend or remove it.")
    return tuple(messages)
