"""moeedge.hardware stands on the native library and the errors alone: engine, commands and screens stand on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moeedge

FOLDER = Path(moeedge.__file__).parent / "hardware"
ALLOWED = ("moeedge.hardware", "moeedge.native", "moeedge.errors")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_imports(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            assert not name.startswith("moeedge") or name.startswith(ALLOWED), name
