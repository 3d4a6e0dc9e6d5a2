"""Hits and uploads have one name each on every screen and in every JSON output (docs/structure.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import moeedge
from moeedge.lab.cli.schema import schema_text

_ROOT = Path(moeedge.__file__).parent
# names of earlier releases
_OLD = re.compile(
    r"hit rate|hit_rate_unique|unique hit|pair hit\b|expert hit\b|RAM hits?\b|uploads/step|loads/step|evictions/step|"
    r"uploads_per_step|evictions_per_step"
)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The string constants of a module that are not docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_no_text_has_an_old_name() -> None:
    found = [
        f"{path.relative_to(_ROOT)}:{line}: {text}"
        for path in sorted(_ROOT.rglob("*.py"))
        for line, text in texts(path)
        if _OLD.search(text)
    ]
    assert not found


def test_old_names_are_found(tmp_path: Path) -> None:
    path = tmp_path / "view.py"
    path.write_text('"""The hit rate."""\nTITLES = ("hit rate", "pair hits", f"{1} uploads/step")\n')
    assert [text for _, text in texts(path) if _OLD.search(text)] == ["hit rate", " uploads/step"]


def test_schemas_have_the_names_of_the_glossary() -> None:
    page = (_ROOT.parent / "docs" / "structure.md").read_text(encoding="utf-8")
    glossary = page.split("## Glossary\n")[1]
    for name in ("hit_rate_pairs", "hit_rate_experts", "uploads_per_layer_step"):
        assert f"(`{name}`)" in glossary
        assert f'"{name}"' in schema_text("bench")
