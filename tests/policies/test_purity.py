"""Policies, expert counts and the step driver are functions of arrays: they import few modules and read no file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moeedge

ALLOWED = {"__future__", "abc", "collections", "dataclasses", "enum", "itertools", "json", "math", "numpy"}
ALLOWED |= {"functools", "importlib", "pkgutil", "operator", "scipy", "typing"}
PURE = (
    "moeedge.policies",
    "moeedge.lab.policies",
    "moeedge.scheduler.driver",
    "moeedge.analysis.routing_curves",
    "moeedge.experts",
    "moeedge.records",
    "moeedge.speculation",
)
ROOT = Path(moeedge.__file__).parent
FILES = sorted(
    [
        *(ROOT / "policies").glob("**/*.py"),
        *(ROOT / "lab" / "policies").glob("*.py"),
        ROOT / "scheduler" / "driver.py",
        ROOT / "analysis" / "routing_curves.py",
        ROOT / "experts.py",
        ROOT / "speculation.py",
    ]
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_are_pure(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in ALLOWED or name.startswith((*PURE, "moeedge.errors")), f"{file} imports {name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "print", "input"), f"{file} calls {node.func.id}"
