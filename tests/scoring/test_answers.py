"""What answers say in the end: the number, the letter, the list; references as rows have them, and what answers get."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.errors import DatasetError
from moeedge.scoring.answers import (
    NOT_RUN,
    SCORERS,
    Reference,
    as_number,
    chosen_letter,
    last_number,
    listed_items,
    score_answer,
)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("She pays $1,234.50.", "1234.50"), ("-5", "-5"), ("It fell to \N{MINUS SIGN}5 degrees", "-5"), ("10-5", "5"),
        ("it is -$3.", "-3"), ("costs $-3", "-3"), ("50% of them", "50"), ("18.", "18"), ("**18**", "18"),
        ("3 + 4 = 7 eggs", "7"), (".5", "0.5"), ("1,2,3", "3"), ("12,345,678", "12345678"),
        ("2 of 1,0000", "0000"),  # no thousands
        ("so 4\n#### 18", "18"), ("#### $1,000 in 2 weeks", "1000"), ("#### 5\n#### 6", "6"), ("18.0", "18"),
        ("#### Step 3: 20 in all\n21", "21"),  # a heading is no mark
        (r"\boxed{12} since 2020", "12"), (r"\boxed{\$12}", "12"), (r"\boxed{12\text{ apples}} of 5", "12"),
        ("1.5e3", "1500"), ("2e-1", "0.2"), ("3 eggs", "3"), ("4ever", "4"),
        *((answer, None) for answer in ("", "none", "####", "eighteen", "- - -", ".")),
    ],
)  # fmt: skip
def test_numbers(answer: str, number: str | None) -> None:
    assert last_number(answer) == (None if number is None else Decimal(number))


def test_a_reference_has_one_number() -> None:
    assert as_number("1,080") == as_number("$1080") == 1080
    assert as_number("3 or 4") is as_number("many") is None


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The answer is (B).", "B"), ("(A) is wrong. The answer is (C). I checked (D).", "C"), ("Answer: **C**", "C"),
        ("First I thought the answer is (A). The answer is (B).", "B"), ("**Answer:** D", "D"), ("**Answer**: E", "E"),
        ("The answer is A because it is.", "A"), ("The correct answer is option H, as", "H"), ("My choice: J", "J"),
        ("the correct option is (c)", "C"), (r"The answer is $\boxed{G}$.", "G"), (r"\boxed{(G)}", "G"), ("b", "B"),
        ("I think so.\nD", "D"), ("(b)", "B"), ("F. Because of that, and A is wrong", "F"), ("**(E)** is it", "E"),
        ("It is not (A) but (B)", "B"), ("I would say C", "C"), ("So the answer is: I", "I"),
        ("Answer: I think C", "C"),
        *((answer, None) for answer in ("", "A car is a thing", "I think not", "none of them", "42", "(K)", "ABC")),
    ],
)  # fmt: skip
def test_letters(answer: str, letter: str | None) -> None:
    assert chosen_letter(answer) == letter


@pytest.mark.parametrize(
    ("answer", "items"),
    [
        ("apple, fig, pear", ["apple", "fig", "pear"]),
        ("Sorted: apple, fig, and pear.", ["apple", "fig", "pear"]),
        ("apple and pear", ["apple", "pear"]),
        ("1. apple\n2. pear", ["apple", "pear"]),
        ("Here they are:\n- apple\n- pear\n", ["apple", "pear"]),
        ("* 3\n* 10", ["3", "10"]),
        ("apple", ["apple"]),
        ("", []),
    ],
)
def test_lists(answer: str, items: list[str]) -> None:
    assert listed_items(answer) == items


_MARKS = ["####", "answer", "is", "(A)", "B", "\\boxed{", "}", "$", "-", ",", ".", "1", "23", "\n", " ", "*"]
_PIECES = st.lists(st.sampled_from(_MARKS) | st.text(max_size=3)).map("".join)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=2))
def test_any_number_round_trips(number: Decimal) -> None:
    assert last_number(f"It is {number:f}.") == last_number(f"It is {number:,f}.") == number
    assert last_number(f"3 and 4, so\n#### {number:,f}") == number


def _value(row: dict[str, Any], answer: str, *, run_code: bool = False) -> float | None:
    return score_answer(Reference.from_row(row, "here"), answer, run_code=run_code).value


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        ({"scorer": "contains", "expect": ["Oslo", "12"]}, "In  oslo,\nat 12.", "In Oslo at 112."),
        ({"scorer": "contains", "expect": "12"}, "12, and 3.12.", "12.5"),
        ({"scorer": "contains", "expect": "a b"}, "A\n B", "ab"),
        ({"scorer": "contains", "max_chars": 5}, " 12345 ", "123456"),
        ({"scorer": "contains", "expect": "x", "max_words": 2}, "x y", "x y z"),
        ({"scorer": "contains", "expect": "x", "ends_with": "Amen."}, "x. amen.", "Amen. x"),
        ({"scorer": "contains", "expect": "x", "not_contains": ["y", "z"]}, "x", "x Z"),
        ({"scorer": "contains-any", "expect": ["Oslo", "Bergen"]}, "To Bergen!", "To Paris"),
        ({"scorer": "exact", "expect": ["yes", "Oh  yes"]}, " OH YES\n", "Oh yes, no"),
        ({"scorer": "starts", "expect": "Yes"}, "yes, of course", "Oh yes"),
        ({"scorer": "number", "expect": ["18", 19]}, "It is 19.0 now", "18 or 20"),
        ({"scorer": "number", "expect": 1.5}, "$1.50", "15"),
        ({"scorer": "number", "expect": "1", "max_chars": 3}, "1", "so 1"),
        ({"scorer": "letter", "expect": "c"}, "The answer is (C).", "The answer is (A)."),
        ({"scorer": "list", "expect": ["apple", "fig"]}, "Apple, fig", "fig, apple"),
    ],
)
def test_right_and_wrong_answers(row: dict[str, Any], right: str, wrong: str) -> None:
    reference = Reference.from_row(row, "here")
    assert score_answer(reference, right) == score_answer(reference, right, run_code=True)
    assert (score_answer(reference, right).value, score_answer(reference, right).reason) == (1.0, "")
    failed = score_answer(reference, wrong)
    assert failed.value == 0.0
    assert failed.reason
    assert "\n" not in failed.reason
    assert score_answer(reference, "").value == (1.0 if row == {"scorer": "contains", "max_chars": 5} else 0.0)


_ADD = {"scorer": "code", "head": 'import math\n\ndef add(a, b):\n    """Adds."""\n', "tests": "assert add(1, 2) == 3"}


@pytest.mark.parametrize(
    "answer",
    [
        "    return a + b",
        "return a + b",
        "\n    return a + b\n",
        "total = a + b\n    return total",  # the blanks before the first line are often lost
        "def add(a, b):\n    return a + b",
        "```python\ndef add(a, b):\n    return a + b\n```",
        "```\n    return a + b\n```",
        "It is:\n\n```py\ndef add(x, y):\n    return x + y\n```\nUse it:\n```\nadd(1, 2)\n```",
        "  ```python\n  def add(a, b):\n      return a + b\n  ```",
        "```python\ndef add(a, b):\n    return a + b",  # cut before the fence
        "Sure!\n\ndef add(a, b):\n    return a + b\n\nThat adds them, doesn't it?",
        "    return a + b\n\nThat adds them.",
        "from __future__ import annotations\ndef add(a: Later, b) -> int:\n    return a + b",
        "def add(a, b):\n    return int(math.fsum([a, b]))",
        "def helper(a):\n    return a\n\ndef add(a, b):\n    return helper(a) + b",
        "def add(a, b):\n    return a + b\n\nif __name__ == '__main__':\n    print(add(int(input()), 2))",
    ],
)
def test_code_in_every_form(answer: str) -> None:
    score = score_answer(Reference.from_row(_ADD, "here"), answer, run_code=True)
    assert (score.value, score.reason) == (1.0, "")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "    pass",
        "I cannot.",
        "def add(a, b):\n    return a - b",
        "def sub(a, b):\n    return a + b",
        "import sys\nsys.exit(0)",
        "```\n```",
        "\0",
        "    return a +",
        "def add(a, b):\n    import os\n    os._exit(0)",
    ],
)
def test_wrong_code(answer: str) -> None:
    score = score_answer(Reference.from_row(_ADD, "here"), answer, run_code=True)
    assert score.value == 0.0
    assert score.reason


def test_code_runs_only_on_request() -> None:
    score = score_answer(Reference.from_row(_ADD, "here"), "def add(a, b):\n    return a + b")
    assert (score.value, score.reason) == (None, NOT_RUN)
    assert _value({"scorer": "code", "tests": "assert x == 1"}, "x = 1", run_code=True) == 1.0
    assert _value({**_ADD, "timeout_s": 1}, "while True: pass", run_code=True) == 0.0
    assert _value({**_ADD, "max_chars": 5}, "    return a + b", run_code=True) == 0.0


def test_rouge_l_is_graded() -> None:
    pytest.importorskip("rouge_score")
    row = {"scorer": "rouge-l", "expect": ["The cat sat on the mat.", "A dog barked."]}
    assert _value(row, "the cat sat on the mat") == 1.0
    assert _value(row, "dogs barked") == pytest.approx(2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3))  # stemmed
    assert _value(row, "nothing like it") == 0.0
    assert _value(row, "") == 0.0
    assert _value({**row, "max_words": 2}, "the cat sat on the mat") == 0.0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("42", 'a reference must be an object with a "scorer"'),
        ([], 'a reference must be an object with a "scorer"'),
        ({}, 'a reference needs a "scorer"'),
        ({"scorer": "bleu", "expect": "x"}, "the scorer must be one of contains"),
        ({"scorer": 1}, '"scorer" must be a string'),
        ({"scorer": "contains"}, 'the scorer "contains" needs "expect"'),
        ({"scorer": "exact", "max_chars": 3}, 'the scorer "exact" needs "expect"'),
        ({"scorer": "contains", "expect": [" "]}, "must not hold empty strings"),
        ({"scorer": "contains", "expect": [None]}, '"expect" must be a string or a list of strings'),
        ({"scorer": "contains", "expect": {"a": 1}}, '"expect" must be a string or a list of strings'),
        ({"scorer": "number", "expect": "many"}, '"expect" must hold numbers'),
        ({"scorer": "letter", "expect": "K"}, '"expect" must hold letters from A to J'),
        ({"scorer": "code", "expect": "x"}, 'the scorer "code" needs "tests"'),
        ({"scorer": "code", "tests": "pass", "timeout_s": 0}, "timeout_s must be from 0.1 to 3600"),
        ({"scorer": "code", "tests": "pass", "timeout_s": float("inf")}, "timeout_s must be from 0.1 to 3600"),
        ({"scorer": "exact", "expect": "x", "max_chars": 0}, "a limit must be at least 1"),
        ({"scorer": "exact", "expect": "x", "max_chars": "9"}, '"max_chars" must be a number'),
        ({"scorer": "exact", "expect": "x", "max_chars": True}, '"max_chars" must be a number'),
        ({"scorer": "exact", "expected": "x"}, "a reference has no field 'expected'"),
    ],
)
def test_a_malformed_reference_names_its_line(row: object, said: str) -> None:
    with pytest.raises(DatasetError) as caught:
        Reference.from_row(row, "own.jsonl, line 3")
    assert said in caught.value.message
    assert caught.value.message.startswith("own.jsonl, line 3: ")
    assert caught.value.exit_code == 2


def test_rows_round_trip() -> None:
    entire = Reference("code", ("x",), "pass", "def f():", 2.5, ("y",), ".", 80, 9)
    for reference in (entire, Reference("number", ("1",)), Reference("contains", max_words=3)):
        row = reference.to_row()
        assert Reference.from_row(json.loads(json.dumps(row)), "here") == reference
    assert Reference("number", ("1",)).to_row() == {"scorer": "number", "expect": ["1"]}


@given(
    st.sampled_from([name for name in SCORERS if name not in ("code", "rouge-l")]),
    st.lists(st.sampled_from(["1", "B", "yes", "a.b", "(", "é"]), min_size=1, max_size=3),
    _PIECES | st.text(),
)
def test_any_answer_gets_a_score(scorer: str, expect: list[str], answer: str) -> None:
    try:
        reference = Reference.from_row({"scorer": scorer, "expect": expect}, "here")
    except DatasetError:
        return
    assert score_answer(reference, answer).value in (0.0, 1.0)


_FIELDS = st.sampled_from(["scorer", "expect", "tests", "max_chars", "x"])


@given(st.dictionaries(_FIELDS, st.none() | st.text() | st.integers() | st.lists(st.text())))
def test_any_row_is_parsed_or_rejected(row: dict[str, Any]) -> None:
    try:
        Reference.from_row(row, "here")
    except DatasetError as error:
        assert error.message.startswith("here: ")
