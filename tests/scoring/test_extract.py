"""What answers say in the end: the number, the letter, the list."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.scoring.answers import LETTERS, as_number, chosen_letter, last_number, listed_items


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("She pays $1,234.50.", "1234.50"),
        ("-5", "-5"),
        ("It fell to \N{MINUS SIGN}5 degrees", "-5"),
        ("10-5", "5"),
        ("it is -$3.", "-3"),
        ("costs $-3", "-3"),
        ("50% of them", "50"),
        ("18.", "18"),
        ("**18**", "18"),
        ("3 + 4 = 7 eggs", "7"),
        (".5", "0.5"),
        ("1,2,3", "3"),
        ("12,345,678", "12345678"),
        ("2 of 1,0000", "0000"),  # no thousands
        ("so 4\n#### 18", "18"),
        ("#### $1,000 in 2 weeks", "1000"),
        ("#### Step 3: 20 in all\n21", "21"),  # a heading is no mark
        ("#### 5\n#### 6", "6"),
        (r"\boxed{12} since 2020", "12"),
        (r"\boxed{\$12}", "12"),
        ("18.0", "18"),
    ],
)
def test_numbers(answer: str, number: str) -> None:
    assert last_number(answer) == Decimal(number)


@pytest.mark.parametrize("answer", ["", "none", "####", "eighteen", "- - -", "."])
def test_no_number(answer: str) -> None:
    assert last_number(answer) is None


def test_a_reference_has_one_number() -> None:
    assert as_number("1,080") == as_number("$1080") == 1080
    assert as_number("3 or 4") is as_number("many") is None


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The answer is (B).", "B"),
        ("(A) is wrong. The answer is (C). I checked (D).", "C"),
        ("First I thought the answer is (A). The answer is (B).", "B"),
        ("Answer: **C**", "C"),
        ("**Answer:** D", "D"),
        ("**Answer**: E", "E"),
        ("The answer is A because it is.", "A"),
        ("The correct answer is option H, as", "H"),
        ("the correct option is (c)", "C"),
        ("My choice: J", "J"),
        (r"The answer is $\boxed{G}$.", "G"),
        (r"\boxed{(G)}", "G"),
        ("I think so.\nD", "D"),
        ("b", "B"),
        ("(b)", "B"),
        ("F. Because of that, and A is wrong", "F"),
        ("**(E)** is it", "E"),
        ("It is not (A) but (B)", "B"),
        ("I would say C", "C"),
        ("So the answer is: I", "I"),
        ("Answer: I think C", "C"),
    ],
)
def test_letters(answer: str, letter: str) -> None:
    assert chosen_letter(answer) == letter


@pytest.mark.parametrize("answer", ["", "A car is a thing", "I think not", "none of them", "42", "(K)", "ABC"])
def test_no_letter(answer: str) -> None:
    assert chosen_letter(answer) is None


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


_PIECES = st.lists(
    st.sampled_from(
        ["####", "answer", "is", "(A)", "B", "\\boxed{", "}", "$", "-", ",", ".", "1", "23", "\n", " ", "*"]
    )
    | st.text(max_size=3)
).map("".join)


@given(_PIECES | st.text())
def test_any_text_can_be_parsed(answer: str) -> None:
    number, letter = last_number(answer), chosen_letter(answer)
    assert number is None or isinstance(number, Decimal)
    assert letter is None or (len(letter) == 1 and letter in LETTERS)
    assert all(item.strip() for item in listed_items(answer))


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=2))
def test_any_number_round_trips(number: Decimal) -> None:
    assert last_number(f"It is {number:f}.") == last_number(f"It is {number:,f}.") == number
    assert last_number(f"3 and 4, so\n#### {number:,f}") == number
