"""The start of a session on screen: greeting, header line, details of /info."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from moeedge.engine.types import EngineInfo
from moeedge.hub.catalog import Starter, load_catalog
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.run import Decision, Level, Notification
from moeedge.ui.chat.greeting import details, print_greeting, print_header, print_warnings
from tests.ui.test_figures import INFO

WARNING = "Uploads of experts are slower than usual: the GPU's driver gives no pinned (page-locked) memory for them."
CACHED = replace(
    INFO,
    device="Vulkan0 (A Card)",
    place="on Vulkan0",
    policy="spac",
    cache_ratio=0.17,
    cache_slots=1044,
    pool_bytes=3 << 20,
    notes=[
        Notification("Experts are cached on Vulkan0: 1,044 of 6,144 (17.0%, 3 MiB); policy spac."),
        Notification(Decision("expert cache", "on", 1.4, "without", "measured in 0.5 s").sentence()),
        WARNING,
    ],
)


def printed(show: Any, info: EngineInfo, width: int = 120, **given: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show(console, info, **given)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def shown(info: EngineInfo, *, toy: bool = False, **given: Any) -> list[str]:
    return printed(print_greeting, info, toy=toy, **given)


def test_the_greeting_and_the_header() -> None:
    assert shown(CACHED, warnings=("-ngl has no effect.",)) == [
        "Model: t.gguf.",
        "Experts: 1,044 of 6,144 on Vulkan0 (3 MiB). Drafts: by d.gguf, up to 4 tokens.",
        "/exit or Ctrl-D leaves, /help lists the commands, /info shows more.",
        "-ngl has no effect.",
        WARNING,
    ]
    line = "t.gguf | experts 1,044 of 6,144 on Vulkan0 (3 MiB) | drafts by d.gguf, up to 4 tokens"
    lines = printed(print_header, CACHED, 80, toy=False, warnings=("-ngl has no effect.",))
    assert lines == [line, "-ngl has no effect.", WARNING]
    dense = replace(INFO, n_experts=0, draft="none", gamma=0)
    header = "t.gguf | drafts off, as there is no draft (-md FILE or -md ngram)"
    assert printed(print_header, dense, toy=False) == [header]
    assert "no experts" in shown(dense)[0] and shown(dense)[1].startswith("Drafts")


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (replace(CACHED, n_whole_layers=12, notes=[]), ["12 of 48 layers on the GPU, 1,044 of"]),
        (replace(CACHED, place="in RAM", notes=[]), ["in RAM (3 MiB)"]),
        (INFO, ["all 6,144 on the CPU", "d.gguf"]),
        (replace(INFO, n_whole_layers=48), ["all 6,144 on the GPU"]),
        (replace(INFO, draft="ngram", auto_gamma=True), ["from repeated text"]),
        (replace(INFO, draft="none", gamma=0), ["off", "no draft", "-md"]),
        (replace(INFO, gamma=0), ["off", "gamma"]),
    ],
)
def test_the_greeting_has_three_lines(info: EngineInfo, words: list[str]) -> None:
    for toy in (False, True):
        lines = shown(info, toy=toy)
        assert len(lines) == 3
        assert ("a toy" in lines[0]) == toy
        assert all(word in "\n".join(lines) for word in words)


def test_a_toy_names_the_first_real_model() -> None:
    starter = Starter("small", 784 << 20, "moeedge pull small && moeedge chat -m small")
    lines = shown(INFO, toy=True, starter=starter)
    assert "784 MiB" in lines[0] and lines[1] == f"  {starter.command}" and len(lines) == 4
    assert starter.command not in "\n".join(shown(INFO, starter=starter))
    named = load_catalog().starter()
    assert named is not None and max(map(len, shown(INFO, toy=True, starter=named))) <= 80


def test_a_gain_is_shown_where_it_was_measured() -> None:
    assert "1.40 times as fast" in "\n".join(shown(CACHED, cache_speed=1.4))
    assert "times" not in "\n".join(shown(INFO, cache_speed=1.4))  # nothing is cached


def test_quiet_keeps_warnings_and_what_is_lossy() -> None:
    notice = Notification("Experts are in RAM.", Level.NOTICE)
    info = replace(CACHED, expert_budget=ExpertBudget(budget=16), notes=[notice, WARNING])
    budget, *others = printed(print_warnings, info)
    assert "(lossy)" in budget and others == [notice, WARNING]
    assert printed(print_warnings, info, quiet=True) == [budget, WARNING]


def test_a_budget_is_in_greeting_header_and_details() -> None:
    info = replace(INFO, expert_budget=ExpertBudget(budget=16, coverage="truncation"))
    for gamma, state in ((4, "(lossy)"), (0, "(idle)")):
        own = replace(info, gamma=gamma)
        (line,) = [line for line in shown(own) if line.startswith("Budget 16")]
        assert state in line and state in printed(print_header, own, toy=False)[0]
    rows = {figure.label: figure.value for figure in details(info)}
    assert "truncation" in rows["budget"]
