"""What an answer says in the end: its last number, the letter that it chooses, the items that it lists."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

LETTERS = "ABCDEFGHIJ"  # MMLU-Pro has up to ten options

# a sign belongs to a number unless something stands before it that it could be subtracted from
_DIGITS = re.compile(
    r"(?:(?<![\w.,)\]])(?P<sign>[-\N{MINUS SIGN}]))?"
    r"(?:[$\N{EURO SIGN}\N{POUND SIGN}]\s?(?P<inner>-)?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")

_CHOSEN = re.compile(
    r"\b(?i:answer|choice|option)\b(?i:\s+(?:choice|option|letter))?"
    r"(?:[\s*_]*(?:(?i:\bis\b|\b(?:would|should|must)\s+be\b)\s*:?|[:=])\s*(?i:option|choice|letter)?|(?=[\s*_]*\())"
    r"[\s*_\"'`]*(?:\(([A-Ja-j])\)|([A-HJ](?![\w'])|I(?![\w']|\s+[a-z])))"
)
_WHOLLY = re.compile(r"\W*([A-Ja-j])\W*")
_BEGINNING = re.compile(r"\W*([A-J])\s*[).:]")
_IN_BRACKETS = re.compile(r"\(([A-J])\)")
# a pronoun or an article is no choice: "I think", "A car"
_ALONE = re.compile(r"(?<![\w'])([A-J])(?![\w']|\s+[a-z])")
_ITEM_MARK = re.compile(r"^\s*(?:[-*\N{BULLET}]\s+|\(?[0-9]{1,3}[.)]\s+)")


def as_number(text: str) -> Decimal | None:
    """The only number in `text`, which may have a currency sign, commas for thousands and a unit; None otherwise."""
    found = list(_DIGITS.finditer(text))
    return _value(found[0]) if len(found) == 1 else None


def last_number(text: str) -> Decimal | None:
    """The number that an answer ends on: behind "####", else in the last box of LaTeX, else the last one of all."""
    marked = _DIGITS.match(text.rpartition("####")[2].lstrip(" \t*")) if "####" in text else None
    if marked is not None:
        return _value(marked)
    boxed = _BOXED.findall(text)
    for part in (boxed[-1] if boxed else "", text):
        found = list(_DIGITS.finditer(part))
        if found:
            return _value(found[-1])
    return None


def chosen_letter(text: str) -> str | None:
    """The option (A to J) that an answer settles on; the plainest statement counts, and of equal ones the last."""
    stated = [in_brackets or bare for in_brackets, bare in _CHOSEN.findall(text)]
    boxed = [match[1] for content in _BOXED.findall(text) if (match := _WHOLLY.fullmatch(content))]
    lines = [line for line in text.splitlines() if line.strip()]
    whole = [match[1] for line in lines[:1] + lines[-1:] if (match := _WHOLLY.fullmatch(line))]
    beginning = [match[1] for line in lines[:1] if (match := _BEGINNING.match(line))]
    for letters in (stated, boxed, whole, beginning, _IN_BRACKETS.findall(text), _ALONE.findall(text)):
        if letters:
            return str(letters[-1]).upper()
    return None


def listed_items(text: str) -> list[str]:
    """The items of a list: one per line, bulleted or numbered; or those of the one line, separated by commas.

    What comes before a colon on that line is no item, nor is a final full stop; "and" before the last one is dropped.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = lines[1:]
    if len(lines) == 1:
        line = lines[0].rpartition(": ")[2] if ": " in lines[0] else lines[0]
        lines = re.split(r"\s*[,;]\s*(?:and\s+)?|\s+and\s+", line)
    return [item for line in lines if (item := _ITEM_MARK.sub("", line).strip().rstrip(".,;").strip())]


def normal(text: str) -> str:
    """`text` in lower case with single spaces."""
    return " ".join(text.casefold().split())


def _value(match: re.Match[str]) -> Decimal | None:
    try:
        value = Decimal(match["digits"].replace(",", ""))
    except InvalidOperation:
        return None
    return -value if match["sign"] or match["inner"] else value
