"""Prompt sets: conversations of one or more turns, and the files that they are read from.

JSON Lines (gzipped or not), a JSON array, CSV or Parquet to rows, and rows to prompts: one parse function per shape of
record, each with the column names of the published files. Errors name file and line.
"""

from __future__ import annotations

import csv
import io
import json
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from moeedge.errors import DatasetError
from moeedge.paths import unpacked
from moeedge.schemas import read_json
from moeedge.scoring.answers import LETTERS, Reference, as_number

Role = Literal["system", "user", "assistant"]
# environment: $MOEEDGE_DATA; package: the sample that comes with moeedge; several: sets from different places
Place = Literal["environment", "cache", "hub", "file", "package", "several"]


@dataclass(frozen=True)
class PromptMessage:
    role: Role
    content: str


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer turn by turn.

    `turns[i]` are the messages before the i-th answer: usually one, more with a system message or a fixed history.
    `references[i]` is the reference for that answer; empty if the data has none.
    """

    id: str
    category: str
    turns: tuple[tuple[PromptMessage, ...], ...]
    references: tuple[Reference | None, ...] = ()
    language: str = ""  # as the data names it; empty where it does not say
    dataset: str = ""  # name of the set; filled in where prompts of several sets are put together

    @property
    def description(self) -> dict[str, str]:
        """The prompt in a trace: id, and dataset, category and language where they are known."""
        names = ("id", "dataset", "category", "language")
        return {name: value for name in names if (value := getattr(self, name))}

    def messages(self, turn: int) -> list[dict[str, str]]:
        """Returns the messages before the answer to `turn` (from 0), as chat templates and the engine take them."""
        return [asdict(message) for message in self.turns[turn]]

    def reference(self, turn: int) -> Reference | None:
        """Returns the reference for the answer to `turn` (from 0), or None."""
        return self.references[turn] if turn < len(self.references) else None


@dataclass(frozen=True)
class Dataset:
    """Prompts in file order, with the facts that identify them."""

    name: str
    prompts: tuple[Prompt, ...]
    place: Place
    path: Path
    sha256: str  # of the file
    variant: str  # one line: whose file this is, and whether it is part of the set
    unscored: str = ""  # why answers without a reference have none
    answer_tokens: int = 512  # typical maximum of a complete answer

    def limited(self, limit: int | None) -> Dataset:
        """Returns `limit` prompts of each set, spread evenly over it (floor(i * n / limit)); all for None."""
        if limit is None or limit >= len(self.prompts):
            return self
        prompts: list[Prompt] = []
        for name in dict.fromkeys(prompt.dataset for prompt in self.prompts):
            own = [prompt for prompt in self.prompts if prompt.dataset == name]
            n = len(own)
            prompts += own if limit >= n else [own[i * n // limit] for i in range(limit)]
        return replace(self, prompts=tuple(prompts))


@dataclass(frozen=True)
class EvaluationText:
    """A fixed text for perplexity, and the facts that identify it."""

    name: str
    text: str
    sha256: str  # of the file


def join_datasets(sets: Sequence[Dataset]) -> Dataset:
    """Returns several sets as one: its categories are the sets, ids have their names in front; one set as it is."""
    if len(sets) == 1:
        return sets[0]
    pairs = [(each.name, prompt) for each in sets for prompt in each.prompts]
    places = {each.place for each in sets}
    return Dataset(
        name=",".join(each.name for each in sets),
        prompts=tuple(replace(p, id=f"{name}/{p.id}", category=name, dataset=name) for name, p in pairs),
        place=places.pop() if len(places) == 1 else "several",
        path=Path(",".join(each.path.name for each in sets)),
        sha256=",".join(each.sha256 for each in sets),
        variant="; ".join(each.variant for each in sets),
        unscored="; ".join(dict.fromkeys(each.unscored for each in sets if each.unscored)),
        answer_tokens=max(each.answer_tokens for each in sets),
    )


def user_turns(*texts: str) -> tuple[tuple[PromptMessage, ...], ...]:
    """Returns one turn with one user message per text."""
    return tuple((PromptMessage("user", text),) for text in texts)


PARQUET_HINT = 'Run: pip install "moeedge[score]"'
_HINT = "Correct this entry, or remove it from the file."
_FILE_HINT = "Check the path."
_ROLES = ("system", "user", "assistant")
_FIELD_CHARACTERS = 1 << 28  # of a field in a .csv

Turns = tuple[tuple[PromptMessage, ...], ...]


@dataclass(frozen=True)
class Row:
    """One record of a file; `where` names file and line in error messages."""

    fields: dict[str, Any]
    number: int  # line of a .jsonl, record of a .json, line of a .csv; from 1
    where: str

    def text(self, key: str) -> str:
        """Returns the non-empty string under `key`. Raises DatasetError otherwise."""
        value = self.fields.get(key)
        if not isinstance(value, str) or not value.strip():
            raise DatasetError(f'{self.where}: "{key}" must be a non-empty string.', _HINT)
        return value

    def strings(self, key: str) -> list[str]:
        """Returns the non-empty list of non-empty strings under `key`. Raises DatasetError otherwise."""
        value = self.fields.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v.strip() for v in value):
            raise DatasetError(f'{self.where}: "{key}" must be a non-empty list of non-empty strings.', _HINT)
        return value

    def optional_text(self, key: str) -> str:
        """Returns the string under `key`, or an empty one."""
        value = self.fields.get(key)
        return value if isinstance(value, str) else ""

    def optional_texts(self, *keys: str) -> tuple[str, ...]:
        """Returns the non-blank strings under the first of `keys` that has any (a string or a list); empty for none."""
        values = (value if isinstance(value, list) else [value] for value in map(self.fields.get, keys))
        texts = (tuple(text for text in each if isinstance(text, str) and text.strip()) for each in values)
        return next(filter(None, texts), ())

    def identity(self, *keys: str) -> str:
        """Returns the value of the first of `keys` that is present, else the row's number."""
        values = (*map(self.fields.get, keys), self.number)
        return next(str(value) for value in values if isinstance(value, (str, int)) and str(value))

    def category(self, default: str) -> str:
        return str(self.fields.get("category") or default)


Parser = Callable[[Row], Prompt]


def read_rows(path: Path) -> list[Row]:
    """Returns all rows of `path`, by its suffix: .jsonl, .json, .csv, each also with .gz, or .parquet.

    Raises DatasetError for a file that is absent, unreadable, malformed (with the line) or empty.
    """
    kind = path.name.removesuffix(".gz").rpartition(".")[2].lower()
    unit, read = _READERS.get(kind, _READERS["jsonl"])
    rows = []
    for number, fields in read(path):
        where = f"{path.name}, {unit} {number}"
        if not isinstance(fields, dict):
            raise DatasetError(f"{where}: expected a JSON object, not {type(fields).__name__}.", _HINT)
        rows.append(Row(fields, number, where))
    if not rows:
        raise DatasetError(f"{path.name} has no prompts.", "Give a file with one JSON object per line.")
    return rows


def read_text(path: Path) -> str:
    """Returns the UTF-8 text of a file, which may be compressed (.gz). Raises DatasetError."""
    try:
        raw = unpacked(path.read_bytes())
    except FileNotFoundError:
        raise DatasetError(f"There is no file {path}.", _FILE_HINT) from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"Cannot read {path} ({error}).", "Check the file.") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DatasetError(f"{path.name}, line {line}: not UTF-8 text.", "Save the file as UTF-8.") from None


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    # split at newlines only: str.splitlines also splits at U+2028, which JSON strings may contain
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, _value(line, path.name, number)


def _json_array(path: Path) -> Iterator[tuple[int, Any]]:
    records = _value(read_text(path), path.name, 1)
    if not isinstance(records, list):
        raise DatasetError(f"{path.name}: the file must be an array of objects.", _HINT)
    return enumerate(records, start=1)


def _value(text: str, name: str, line: int) -> Any:
    """Reads JSON that begins in `line` of a file."""
    try:
        return read_json(text)
    except ValueError as error:
        reason = str(error)
        if isinstance(cause := error.__context__, json.JSONDecodeError):
            line, reason = line + cause.lineno - 1, f"{cause.msg}, column {cause.colno}"
        raise DatasetError(f"{name}, line {line}: not valid JSON ({reason}).", _HINT) from None


def _csv_lines(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(_FIELD_CHARACTERS)
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        for fields in reader:
            yield reader.line_num, fields
    except csv.Error as error:
        raise DatasetError(f"{path.name}, line {reader.line_num}: not valid CSV ({error}).", _HINT) from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        raise DatasetError(f"There is no file {path}.", _FILE_HINT)
    if not reads_parquet():
        raise DatasetError(f"{path.name} is Parquet, which needs the package pyarrow.", PARQUET_HINT)
    from pyarrow.parquet import read_table  # imported here: it takes a third of a second

    try:
        return enumerate(read_table(path).to_pylist(), start=1)
    except (OSError, ValueError) as error:  # bases of pyarrow's errors
        raise DatasetError(f"Cannot read {path} ({' '.join(str(error).split())[:200]}).", "Check the file.") from None


# by the end of a file's name: what a number counts, and what reads the file
_READERS: dict[str, tuple[str, Callable[[Path], Iterator[tuple[int, Any]]]]] = {
    "jsonl": ("line", _json_lines),
    "json": ("record", _json_array),
    "csv": ("line", _csv_lines),
    "parquet": ("row", _parquet_rows),
}


def reads_parquet() -> bool:
    return find_spec("pyarrow") is not None


def parse_custom(row: Row) -> Prompt:
    """Parses a user's own record: "messages" (answered once), "turns" (answered one after another) or "prompt".

    "reference" belongs to the only turn; "references" has one item per turn, null for none. "category" and "language"
    are kept as they are.
    """
    if "messages" in row.fields:
        turns: Turns = (_messages(row),)
    elif "turns" in row.fields:
        turns = user_turns(*row.strings("turns"))
    elif "prompt" in row.fields:
        turns = user_turns(row.text("prompt"))
    else:
        raise DatasetError(f'{row.where}: none of "prompt", "turns", "messages" is present.', "Add one of them.")
    identity, language = row.identity("id", "question_id", "task_id"), str(row.fields.get("language") or "")
    return Prompt(identity, row.category("custom"), turns, _own_references(row, len(turns)), language=language)


def parse_turns(row: Row) -> Prompt:
    """Parses MT-bench and files in its form: "question_id", "category", "turns"."""
    identity = row.identity("question_id", "prompt_id", "id")
    return Prompt(identity, row.category("other"), user_turns(*row.strings("turns")))


def parse_humaneval(row: Row) -> Prompt:
    """Parses HumanEval: the head of a Python function in "prompt", and `check(candidate)` in "test"."""
    head, tests, entry = row.text("prompt"), row.optional_text("test"), row.optional_text("entry_point")
    reference = Reference("code", tests=f"{tests}\n\ncheck({entry})\n", head=head) if tests and entry else None
    turns = user_turns(f"Complete this Python function.\n\n{head}")
    return Prompt(row.identity("task_id"), "code", turns, (reference,))


def parse_gsm8k(row: Row) -> Prompt:
    """Parses GSM8K: "question", and "answer" with the number after "####"; or a benchmark collection's record."""
    numbers = [text.rpartition("####")[2].strip() for text in row.optional_texts("answer", "reference")[:1]]
    references = tuple(Reference("number", (number,)) for number in numbers if as_number(number) is not None)
    return _question(row, "math", "question", references)


def parse_mmlu_pro(row: Row) -> Prompt:
    """Parses MMLU-Pro: "question" and up to ten "options", shown as a lettered list; the letter in "answer"."""
    options = row.strings("options")
    if len(options) > len(string.ascii_uppercase):
        raise DatasetError(f"{row.where}: {len(options)} options are too many.", _HINT)
    lines = [f"({letter}) {option}" for letter, option in zip(string.ascii_uppercase, options, strict=False)]
    task = 'Think step by step, then finish with "The answer is (X)", where X is the letter of the right answer.'
    text = "\n".join([row.text("question"), *lines, task])
    answer = row.optional_text("answer").strip().upper()
    is_letter = len(answer) == 1 and answer in LETTERS[: len(options)]
    references = (Reference("letter", (answer,)),) if is_letter else ()
    return Prompt(row.identity("question_id"), row.category("other"), user_turns(text), references)


def parse_instructions(row: Row) -> Prompt:
    """Parses Alpaca and self-instruct: "instruction", its input in "input" or in the first of "instances"."""
    text, material, instances = row.text("instruction"), row.fields.get("input"), row.fields.get("instances")
    if material is None and isinstance(instances, list) and instances and isinstance(instances[0], dict):
        material = instances[0].get("input")
    if isinstance(material, str) and material.strip():
        text = f"{text}\n\n{material}"
    return Prompt(row.identity("id"), "instructions", user_turns(text))


def parse_articles(row: Row) -> Prompt:
    """Parses CNN/DailyMail: the full request or the bare "article"; a summary in "reference" or "highlights"."""
    summaries = row.optional_texts("reference", "highlights")
    references = (Reference("rouge-l", summaries),) if summaries else ()
    return _question(row, "summarization", "article", references, before="Summarize: ")


def parse_questions(row: Row) -> Prompt:
    """Parses open questions: the full request or "question"; accepted answers in "answer", "answers" or "reference"."""
    answers = row.optional_texts("answer", "answers", "reference")
    references = (Reference("contains-any", answers),) if answers else ()
    return _question(row, "qa", "question", references)


def _question(row: Row, category: str, key: str, references: tuple[Reference, ...], *, before: str = "") -> Prompt:
    """Parses the text under `key`, or a benchmark collection's "turns" or "prompt", a string or a list of turns."""
    if "turns" in row.fields:
        return replace(parse_turns(row), references=references)
    if "prompt" not in row.fields:
        return Prompt(row.identity("id"), category, user_turns(before + row.text(key)), references)
    texts = row.strings("prompt") if isinstance(row.fields["prompt"], list) else [row.text("prompt")]
    return Prompt(row.identity("question_id", "id"), row.category(category), user_turns(*texts), references)


def _own_references(row: Row, n_turns: int) -> tuple[Reference | None, ...]:
    """Returns the references of a user's own record; a "reference" of another format (no object) is ignored."""
    listed = row.fields.get("references")
    if listed is None:
        single = row.fields.get("reference")
        listed = [single] if isinstance(single, dict) else []
    if not isinstance(listed, list) or len(listed) not in (0, n_turns):
        raise DatasetError(f"{row.where}: expected one reference for each of the {n_turns} turns.", _HINT)
    return tuple(None if each is None else Reference.from_row(each, row.where) for each in listed)


def _messages(row: Row) -> tuple[PromptMessage, ...]:
    listed = row.fields["messages"]
    if not isinstance(listed, list) or not listed:
        raise DatasetError(f'{row.where}: "messages" must be a non-empty list of objects.', _HINT)
    messages = []
    for entry in listed:
        role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            needed = f'every message needs a "role" ({", ".join(_ROLES)}) and a "content" string'
            raise DatasetError(f"{row.where}: {needed}.", _HINT)
        messages.append(PromptMessage(cast(Role, role), content))
    if messages[-1].role != "user" or not messages[-1].content.strip():
        raise DatasetError(f"{row.where}: the last message must be the user's and not empty.", _HINT)
    return tuple(messages)
