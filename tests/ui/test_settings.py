"""/set: names, values, limits."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from moeedge.engine.types import SamplingConfig
from moeedge.errors import InputError
from moeedge.ui.chat.settings import Settings, change, listing, names, restored, seed_or_random
from moeedge.ui.console import show_figures


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("temp", "0.5", "temp = 0.5"),
        ("temperature", "0", "temp = 0"),
        ("--top-k", "5", "top_k = 5"),
        ("top_p", "1", "top_p = 1"),
        ("min-p", "0.1", "min_p = 0.1"),
        ("repeat_penalty", "1.1", "repeat_penalty = 1.1"),
        ("repeat_last_n", "32", "repeat_last_n = 32"),
        ("samplers", "top_k; temperature", "samplers = top_k, temperature"),
        ("typical", "0.7", "typical_p = 0.7"),
        ("grammar", "off", "grammar = off"),
        ("think", "off", "think = off"),
        ("seed", "7", "seed = 7"),
        ("seed", "-1", "seed = random"),
        ("n", "100", "n_predict = 100"),
        ("draft-max", "8", "gamma = 8"),
        ("budget", "16", "budget = 16"),
        ("expert-budget", "off", "budget = off"),
    ],
)
def test_a_value_is_set_and_reported(name: str, text: str, line: str) -> None:
    changed, reported = change(Settings(gamma=4), name, text)
    assert reported == line
    shown = {item.label: item.value.split("  ")[0].strip() for item in listing(changed)}
    assert shown[line.split(" = ")[0]] == line.split(" = ")[1]
    assert list(shown) == names()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("heat", "1", 'setting "heat"'),
        ("temp", "hot", "temp must be a number"),
        ("temp", "nan", "temp must be a number"),
        ("temp", "-1", "temperature (--temp) must be 0 or more"),
        ("top_k", "1.5", "top_k must be a whole number"),
        ("top_p", "2", "top_p must be above 0 and at most 1"),
        ("seed", "-2", "seed must be -1"),
        ("samplers", "top_k;foo", "'foo'"),
        ("grammar", "/no/such/file", "/no/such/file"),
        ("think", "maybe", "maybe is not one of"),
        ("gamma", "65", "gamma (--draft-max) must be auto or from 0 to 64"),
        ("n", "-2", "n_predict (-n) must be -1 or more"),
        ("budget", "0", "budget (--expert-budget) must be at least 1 or off"),
        ("budget", "some", "budget must be a whole number or off"),
    ],
)
def test_a_bad_value_is_one_sentence(name: str, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        change(Settings(), name, text)
    assert message in caught.value.message


def test_other_settings_stay() -> None:
    before = Settings(sampling=SamplingConfig(seed=3, top_k=9), n_predict=5, gamma=2)
    after, _ = change(before, "temp", "0.1")
    assert (after.sampling.seed, after.sampling.top_k, after.n_predict, after.gamma) == (3, 9, 5, 2)
    assert before.sampling.temperature == SamplingConfig().temperature


def test_seed_convention() -> None:
    assert seed_or_random(-1) is None
    assert seed_or_random(0) == 0


def test_every_setting_says_what_it_does() -> None:
    console = Console(file=io.StringIO(), width=80)
    rows = listing(Settings())
    show_figures(console, [row for row in rows if row.label != "samplers"])  # whose value is long
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == len(rows) - 1 == len(names()) - 1
    assert all(len(row.value.split("  ")[-1].split()) >= 3 for row in rows)


@pytest.mark.parametrize("n_predict", [float("inf"), float("nan"), "many", None, -7])
def test_unreadable_settings_of_a_saved_chat_change_nothing(n_predict: object) -> None:
    current = Settings(n_predict=5)
    assert restored({"sampling": {}, "n_predict": n_predict}, current) == current


@pytest.mark.parametrize(
    "saved",
    [
        {"sampling": [1]},
        {"sampling": {"seed": "x"}},
        {"sampling": {"top_k": 1.5}},
        {"sampling": {"stop": [1]}},
        {"sampling": {"grammar": 3}},
        {"sampling": {"logit_bias": [["a", "b"]]}},
        {"sampling": {"unknown": 1}},
        {"sampling": {}, "template": {"arguments": []}},
    ],
)
def test_settings_of_wrong_types_are_left(saved: dict[str, Any]) -> None:
    current = Settings(n_predict=7)
    assert restored({"n_predict": 1, **saved}, current) == current


def test_names_stand_above_values_where_a_terminal_is_too_narrow_for_both() -> None:
    out = io.StringIO()
    show_figures(Console(file=out, width=20), listing(Settings()))
    lines = out.getvalue().splitlines()
    assert "frequency_penalty" in [line.strip() for line in lines]
    assert max(map(len, lines)) <= 20
    assert sum(len(line.strip()) > 8 for line in lines) > len(lines) / 2  # words, not columns of letters
