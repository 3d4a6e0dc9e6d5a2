"""References for answers, the scorers that compare them, and what an answer says: its number, letter, list or program.

docs/datasets.md describes the row format of references. ROUGE-L is Google's rouge-score, the reimplementation of
ROUGE-1.5.5 that papers on summaries cite.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, get_args

from moeedge.errors import DatasetError, InputError, SandboxError, require
from moeedge.scoring.sandbox import run_python

_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*\n(.*?)(?:^[ \t]*(?:```|~~~)[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*$\n?", re.MULTILINE)
_LAST_DEFINITION = re.compile(r"^(?:async )?def (\w+)", re.MULTILINE)
_CODE_STARTS = re.compile(r"^(?:def |class |import |from |@|async def )", re.MULTILINE)
# runs as a module of another name, so that code below `if __name__ == "__main__"` is not run
_AS_MODULE = 'import sys; __name__ = "answer"; sys.modules[__name__] = sys.modules["__main__"]; del sys\n'
_MAX_LINES = 400


def program_of(answer: str, tests: str, *, head: str = "") -> str:
    """Returns the program that passes if `answer` solves the task.

    head: the text that the answer continues: imports and helpers, the signature, a docstring. An answer that defines
    the function itself replaces the signature; one with only the body, indented or not, is placed below it.
    """
    definition = next(reversed([*_LAST_DEFINITION.finditer(head)]), None)  # of the function that `head` starts
    entry = definition[1] if definition else ""
    code = _code_of(answer, entry)
    if definition and _defines(code, entry):
        code = f"{head[: definition.start()]}\n{code}"
    elif head:
        code = _completed(head, code)
    futures = "".join(f"{line.strip()}\n" for line in _FUTURE.findall(code))
    return f"{futures}{_AS_MODULE}{_FUTURE.sub('', code)}\n\n{tests}\n"


def compiles(code: str) -> bool:
    """Whether `code` is a Python module; never raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def _defines(code: str, entry: str) -> bool:
    return re.search(rf"^(?:async )?def {entry}\b", code, re.MULTILINE) is not None


def _code_of(answer: str, entry: str) -> str:
    """Returns the fenced block that defines `entry`, else the last one; without fences the part that may be code."""
    blocks = [textwrap.dedent(block) for block in _FENCE.findall(answer)]
    if blocks:
        defining = [block for block in blocks if entry and _defines(block, entry)]
        return (defining or blocks)[-1]
    start = _CODE_STARTS.search(answer)
    if start is None or (entry and f"def {entry}" not in answer):
        return answer
    return _longest_code(answer[start.start() :])


def _completed(head: str, body: str) -> str:
    """Returns `head` with `body` below its signature, for any indentation; text after the body is dropped."""
    start = head if head.endswith("\n") else f"{head}\n"
    first_only = f"    {body.strip()}"  # an indented body whose first blanks were stripped
    shapes = (body.strip("\n"), first_only, textwrap.indent(body.strip("\n"), "    "))
    complete = [start + shape for shape in shapes if shape.startswith((" ", "\t"))]
    prefixes = (_longest_code(code, at_least=start.count("\n") + 1) for code in complete)
    return next(filter(compiles, chain(complete, prefixes)), start + body)


def _longest_code(text: str, at_least: int = 1) -> str:
    """Returns the longest prefix of lines that compiles, or `text` if none does."""
    lines = text.split("\n")[:_MAX_LINES]
    for n in range(len(lines), at_least - 1, -1):
        code = "\n".join(lines[:n])
        if compiles(code):
            return code
    return text


Scorer = Literal["contains", "contains-any", "exact", "starts", "number", "letter", "list", "code", "rouge-l"]
SCORERS: tuple[str, ...] = get_args(Scorer)
_HINT = "Correct this entry, or remove it from the file."
NOT_RUN = "a program, and programs are run with --run-code only"
LETTERS = "ABCDEFGHIJ"  # MMLU-Pro has up to ten options

# a minus sign belongs to a number unless it follows something to subtract from
_DIGITS = re.compile(
    r"(?:(?<![\w.,)\]])(?P<sign>[-\N{MINUS SIGN}]))?"
    r"(?:[$\N{EURO SIGN}\N{POUND SIGN}]\s?(?P<inner>-)?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?!\w))?|\.[0-9]+)"
)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")

_CHOSEN = re.compile(
    r"\b(?i:answer|choice|option)\b(?i:\s+(?:choice|option|letter))?"
    r"(?:[\s*_]*(?:(?i:\bis\b|\b(?:would|should|must)\s+be\b)\s*:?|[:=])\s*(?i:option|choice|letter)?|(?=[\s*_]*\())"
    r"[\s*_\"'`]*(?:\(([A-Ja-j])\)|([A-HJ](?![\w'])|I(?![\w']|\s+[a-z])))"
)
_ONLY_LETTER = re.compile(r"\W*([A-Ja-j])\W*")
_LETTER_FIRST = re.compile(r"\W*([A-J])\s*[).:]")
_IN_BRACKETS = re.compile(r"\(([A-J])\)")
# not a pronoun or an article: "I think", "A car"
_ALONE = re.compile(r"(?<![\w'])([A-J])(?![\w']|\s+[a-z])")
_ITEM_MARK = re.compile(r"^\s*(?:[-*\N{BULLET}]\s+|\(?[0-9]{1,3}[.)]\s+)")


@dataclass(frozen=True)
class Score:
    """0 to 1, or None without a score; `reason` is one line, empty for a full score."""

    value: float | None
    reason: str = ""


@dataclass(frozen=True)
class Reference:
    """One turn's reference. The limits below apply to every scorer: an answer that exceeds one scores 0."""

    scorer: Scorer
    expect: tuple[str, ...] = ()
    tests: str = ""  # code: run after the answer; passes if it reaches its end
    head: str = ""  # code: the text that the answer continues
    timeout_s: float = 5.0  # code
    not_contains: tuple[str, ...] = ()
    ends_with: str = ""
    max_chars: int | None = None
    max_words: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a reference that no answer, or every answer, satisfies."""
        require(self.scorer in SCORERS, f'the scorer must be one of {", ".join(SCORERS)}, not "{self.scorer}"')
        limited = self.not_contains or self.ends_with or self.max_chars is not None or self.max_words is not None
        if self.scorer == "code":
            require(self.tests.strip(), 'the scorer "code" needs "tests"')
        else:
            is_enough = self.expect or (self.scorer == "contains" and limited)
            require(is_enough, f'the scorer "{self.scorer}" needs "expect"')
        is_filled = all(text.strip() for text in (*self.expect, *self.not_contains))
        require(is_filled, '"expect" and "not_contains" must not hold empty strings')
        if self.scorer == "number":
            are_numbers = all(as_number(text) is not None for text in self.expect)
            require(are_numbers, f'"expect" must hold numbers, not {self.expect}')
        if self.scorer == "letter":
            are_letters = all(text.upper() in set(LETTERS) for text in self.expect)
            require(are_letters, f'"expect" must hold letters from A to J, not {self.expect}')
        for limit in (self.max_chars, self.max_words):
            require(limit is None or limit >= 1, f"a limit must be at least 1, not {limit}")
        require(0.1 <= self.timeout_s <= 3600, f"timeout_s must be from 0.1 to 3600, not {self.timeout_s:g}")

    @classmethod
    def from_row(cls, row: object, where: str) -> Reference:
        """Builds the reference in a row's field. Raises DatasetError, which names `where`."""
        if not isinstance(row, Mapping):
            raise DatasetError(f'{where}: a reference must be an object with a "scorer".', _HINT)
        unknown = set(row) - {field.name for field in fields(cls)}
        if unknown:
            raise DatasetError(f"{where}: a reference has no field {', '.join(sorted(map(repr, unknown)))}.", _HINT)
        try:
            values: dict[str, Any] = {key: _checked(key, value) for key, value in row.items() if value is not None}
            return cls(**values)
        except TypeError:
            raise DatasetError(f'{where}: a reference needs a "scorer".', _HINT) from None
        except ValueError as error:
            raise DatasetError(f"{where}: {error}.", _HINT) from None

    def to_row(self) -> dict[str, Any]:
        """Returns the JSON form that `from_row` reads; fields with default values are left out."""
        plain = Reference.__dataclass_fields__
        row = {key: value for key, value in asdict(self).items() if key == "scorer" or value != plain[key].default}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in row.items()}


def score_answer(reference: Reference, answer: str, *, run_code: bool = False) -> Score:
    """Scores `answer` against `reference`; runs programs only with `run_code`.

    ROUGE-L is the F1 of the longest common subsequence of stemmed words, 0 to 1, with the best reference. Raises
    InputError if rouge-score is missing.
    """
    if beyond := _beyond_limits(reference, answer):
        return Score(0.0, beyond)
    if reference.scorer == "code":
        if not run_code:
            return Score(None, NOT_RUN)
        program = program_of(answer, reference.tests, head=reference.head)
        try:
            result = run_python(program, timeout_s=reference.timeout_s)
        except SandboxError as error:  # what is measured is not lost
            return Score(None, f"{error.message} {error.hint}".strip())
        return Score(float(result.passed), result.reason)
    if reference.scorer == "rouge-l":
        rouge = rouge_scorer()
        return Score(max(float(rouge.score(text, answer)["rougeL"].fmeasure) for text in reference.expect))
    reason = _mismatch(reference, answer)
    return Score(0.0 if reason else 1.0, reason)


def _mismatch(reference: Reference, answer: str) -> str:
    """Returns the reason for a wrong answer; empty for a right one."""
    expect, either = reference.expect, _quoted(reference.expect, " or ")
    match reference.scorer:
        case "contains":
            missing = [text for text in expect if not _occurs(text, answer)]
            return f"without {_quoted(missing)}" if missing else ""
        case "contains-any":
            return "" if any(_occurs(text, answer) for text in expect) else f"without {either}"
        case "exact":
            return "" if normal(answer) in map(normal, expect) else f"not {either}"
        case "starts":
            starts = normal(answer).startswith(tuple(map(normal, expect)))
            return "" if starts else f"does not start with {either}"
        case "number":
            number = last_number(answer)
            right = number is not None and number in map(as_number, expect)
            value = "no number" if number is None else f"{number:f}"[:40]
        case "letter":
            value = chosen_letter(answer) or "no letter"
            right = value in map(str.upper, expect)
        case _:
            items = listed_items(answer)
            right, value = [*map(normal, items)] == [*map(normal, expect)], _quoted(items[:20])
            expect = (_quoted(expect),)
    return "" if right else f"{value}, not {' or '.join(expect)}"


def _beyond_limits(reference: Reference, answer: str) -> str:
    text = answer.strip()
    if reference.max_chars is not None and len(text) > reference.max_chars:
        return f"{len(text)} characters, more than {reference.max_chars}"
    if reference.max_words is not None and len(text.split()) > reference.max_words:
        return f"{len(text.split())} words, more than {reference.max_words}"
    if not normal(text).endswith(normal(reference.ends_with)):
        return f'does not end with "{reference.ends_with}"'
    unwanted = [part for part in reference.not_contains if _occurs(part, text)]
    return f"with {_quoted(unwanted)}" if unwanted else ""


def _occurs(part: str, text: str) -> bool:
    """Whether `part` occurs in `text`, ignoring case and spacing; a number must not be part of a longer one."""
    part = normal(part)
    before = r"(?<![0-9])(?<![0-9][.,])" if part[:1].isdigit() else ""
    after = r"(?![0-9]|[.,][0-9])" if part[-1:].isdigit() else ""
    return re.search(f"{before}{re.escape(part)}{after}", normal(text)) is not None


def _checked(key: str, value: object) -> object:
    """Returns `value` in the field's type. Raises ValueError."""
    if key in ("expect", "not_contains"):
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(text, (str, int, float)) and not isinstance(text, bool) for text in listed):
            raise ValueError(f'"{key}" must be a string or a list of strings')
        return tuple(map(str, listed))
    numeric = {"max_chars": int, "max_words": int, "timeout_s": (int, float)}
    if isinstance(value, bool) or not isinstance(value, numeric.get(key, str)):  # type: ignore[arg-type]
        raise ValueError(f'"{key}" must be a {"number" if key in numeric else "string"}')
    return value


def _quoted(texts: list[str] | tuple[str, ...], separator: str = ", ") -> str:
    return separator.join(f'"{text}"' for text in texts) or "nothing"


def as_number(text: str) -> Decimal | None:
    """Returns the only number in `text`, possibly with a currency sign, thousands commas and a unit; else None."""
    numbers = list(_DIGITS.finditer(text))
    return _value(numbers[0]) if len(numbers) == 1 else None


def last_number(text: str) -> Decimal | None:
    """Returns an answer's final number: after "####", else in the last LaTeX box, else the last one of all."""
    marked = _DIGITS.match(text.rpartition("####")[2].lstrip(" \t*")) if "####" in text else None
    if marked is not None:
        return _value(marked)
    in_box = _DIGITS.finditer("".join(_BOXED.findall(text)[-1:]))
    numbers = [*in_box] or [*_DIGITS.finditer(text)]
    return _value(numbers[-1]) if numbers else None


def chosen_letter(text: str) -> str | None:
    """Returns the option (A to J) that an answer chooses: the most explicit statement, and the last of equal ones."""
    stated = [in_brackets or bare for in_brackets, bare in _CHOSEN.findall(text)]
    boxed = [match[1] for content in _BOXED.findall(text) if (match := _ONLY_LETTER.fullmatch(content))]
    lines = [line for line in text.splitlines() if line.strip()]
    alone = [match[1] for line in lines[:1] + lines[-1:] if (match := _ONLY_LETTER.fullmatch(line))]
    leading = [match[1] for line in lines[:1] if (match := _LETTER_FIRST.match(line))]
    letters = stated or boxed or alone or leading or _IN_BRACKETS.findall(text) or _ALONE.findall(text)
    return str(letters[-1]).upper() if letters else None


def listed_items(text: str) -> list[str]:
    """Returns the items of a list: one per line, bulleted or numbered; or those of a single line, separated by commas.

    Text before a colon on that line, a final full stop, and "and" before the last item are dropped.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = lines[1:]
    if len(lines) == 1:
        line = lines[0].rpartition(": ")[2] if ": " in lines[0] else lines[0]
        lines = re.split(r"\s*[,;]\s*(?:and\s+)?|\s+and\s+", line)
    return [item for line in lines if (item := _ITEM_MARK.sub("", line).strip().rstrip(".,;").strip())]


def normal(text: str) -> str:
    """Returns `text` in lower case with single spaces."""
    return " ".join(text.casefold().split())


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] or match["inner"] else value


@lru_cache
def rouge_scorer() -> Any:
    """Returns rouge-score's scorer. Raises InputError if it is not installed."""
    try:
        # imported here: nltk, for its stemmer, takes a second
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        hint = 'Run: pip install "moeedge[score]"'
        raise InputError("ROUGE-L needs the package rouge-score, which is not installed.", hint) from None
    return RougeScorer(["rougeL"], use_stemmer=True)
