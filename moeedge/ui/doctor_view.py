"""The findings of `moeedge doctor`: a line each, what to do about it; or one JSON object."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from moeedge.ui.console import visible
from moeedge.ui.tables import json_text

if TYPE_CHECKING:
    from moeedge.health.doctor import Finding, Report

_MARKS = {"ok": ("ok", "green"), "info": ("-", "dim"), "warning": ("!", "yellow"), "broken": ("x", "bold red")}
_TOPIC_WIDTH = 10
_ELLIPSIS = "..."
_COMMAND = "pip install"  # in a hint that is to be copied


def print_report(report: Report, console: Console) -> None:
    """One line per finding, cut to the terminal's width; below them what to fix, unbroken where it is a command."""
    for finding in report.findings:
        _print_line(finding, console)
    with_hint = [finding for finding in report.findings if finding.hint]
    if with_hint:
        console.print()
    for finding in with_hint:
        mark, style = _MARKS[finding.status]
        cut = f" {visible(finding.text)}" if finding.status == "broken" and _is_cut(finding, console) else ""
        text = f"{mark} {finding.topic}:{cut} {visible(finding.hint)}"
        console.print(Text(text, style=style), soft_wrap=_COMMAND in text or not console.is_terminal)
    console.print()
    console.print(_verdict(report), style="bold")


def _print_line(finding: Finding, console: Console) -> None:
    mark, style = _MARKS[finding.status]
    text = visible(finding.text)
    if _is_cut(finding, console):
        text = set_cell_size(text, _room(console) - len(_ELLIPSIS)) + _ELLIPSIS
    line = Text(f"{mark:<3}", style=style)
    line.append(f"{finding.topic:<{_TOPIC_WIDTH}} ", style="bold")
    line.append(text, style="" if finding.status == "ok" else style)
    console.print(line, soft_wrap=True)


def _room(console: Console) -> int:
    return max(20, console.width - _TOPIC_WIDTH - 4)


def _is_cut(finding: Finding, console: Console) -> bool:
    """Files get every line entire."""
    return console.is_terminal and cell_len(visible(finding.text)) > _room(console)


def _verdict(report: Report) -> str:
    broken = sum(finding.status == "broken" for finding in report.findings)
    warnings = sum(finding.status == "warning" for finding in report.findings)
    if broken:
        return "1 thing is broken." if broken == 1 else f"{broken} things are broken."
    return f"Everything works; {_count(warnings, 'thing')} to look at." if warnings else "Everything works."


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def report_json(report: Report) -> str:
    """One JSON object: whether something is broken, and the findings."""
    return json_text(
        {"is_broken": report.is_broken, "findings": [dataclasses.asdict(each) for each in report.findings]}
    )
