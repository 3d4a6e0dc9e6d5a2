"""Rows to prompts: one function per shape of record, each accepting the published files' own column names."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any, cast

from moeedge.data.prompts import Message, Prompt, Role, user_turns
from moeedge.data.rows import Row
from moeedge.errors import DatasetError

Parser = Callable[[Row], Prompt]

_ROLES = ("system", "user", "assistant")


def parse_custom(row: Row) -> Prompt:
    """A user's own record: "messages" (answered once), "turns" (answered one after the other) or "prompt"."""
    identity = row.identity("id", "question_id", "task_id")
    category = str(row.fields.get("category") or "custom")
    if "messages" in row.fields:
        return Prompt(identity, category, (_messages(row),))
    if "turns" in row.fields:
        return Prompt(identity, category, user_turns(*row.strings("turns")))
    if "prompt" in row.fields:
        return Prompt(identity, category, user_turns(row.text("prompt")))
    raise DatasetError(f'{row.where}: none of "prompt", "turns", "messages" is there.', "Add one of them.")


def parse_turns(row: Row) -> Prompt:
    """MT-bench and the files in its form: "question_id", "category", "turns"."""
    return Prompt(
        row.identity("question_id", "prompt_id", "id"),
        str(row.fields.get("category") or "other"),
        user_turns(*row.strings("turns")),
    )


def parse_humaneval(row: Row) -> Prompt:
    """HumanEval: the head of a Python function in "prompt"."""
    text = f"Complete this Python function.\n\n{row.text('prompt')}"
    return Prompt(row.identity("task_id"), "code", user_turns(text))


def parse_gsm8k(row: Row) -> Prompt:
    """GSM8K: "question"; or written out as collections of benchmarks have it."""
    if _is_written_out(row):
        return _written_out(row, "math")
    return Prompt(row.identity("id"), "math", user_turns(row.text("question")))


def parse_mmlu_pro(row: Row) -> Prompt:
    """MMLU-Pro: "question" and up to ten "options", shown as a lettered list."""
    options = row.strings("options")
    if len(options) > len(string.ascii_uppercase):
        raise DatasetError(f"{row.where}: {len(options)} options are too many.", "Mend or remove it.")
    lines = [f"({letter}) {option}" for letter, option in zip(string.ascii_uppercase, options, strict=False)]
    text = "\n".join([row.text("question"), *lines, "Think step by step, then give the letter of the right answer."])
    return Prompt(row.identity("question_id"), str(row.fields.get("category") or "other"), user_turns(text))


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
    """CNN/DailyMail: written out with the request, or the bare "article"."""
    if _is_written_out(row):
        return _written_out(row, "summarization")
    return Prompt(row.identity("id"), "summarization", user_turns(f"Summarize: {row.text('article')}"))


def parse_questions(row: Row) -> Prompt:
    """Open questions: written out, or "question"."""
    if _is_written_out(row):
        return _written_out(row, "qa")
    return Prompt(row.identity("id"), "qa", user_turns(row.text("question")))


def _is_written_out(row: Row) -> bool:
    return "turns" in row.fields or "prompt" in row.fields


def _written_out(row: Row, category: str) -> Prompt:
    """A record of a collection of benchmarks: "turns", or "prompt" as a string or a list of turns."""
    if "turns" in row.fields:
        return parse_turns(row)
    texts = row.strings("prompt") if isinstance(row.fields["prompt"], list) else [row.text("prompt")]
    return Prompt(row.identity("question_id", "id"), str(row.fields.get("category") or category), user_turns(*texts))


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
