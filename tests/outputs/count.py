"""Sizes of code and documents by package: lines, modules, and tokens without docstrings and comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
LAB = ("moeedge/lab",)
NATIVE = ("*.cpp", "*.h", "*.cu", "CMakeLists.txt")
DATA = ("*.json", "*.toml")


def n_lines(path: Path) -> int:
    """Lines of a text file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def n_tokens(path: Path) -> int:
    """Tokens of a module but those of docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _NO_CODE and token.start not in docstrings for token in tokens) - 1  # the end's


def functions(path: Path) -> list[tuple[int, str]]:
    """Length in lines and name of every function."""
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}:{node.lineno} {node.name}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def room(path: Path) -> str:
    """The package of a module below moeedge/, "moeedge/lab/sim" for those of the lab."""
    parts = path.parts[:-1]
    return "/".join(parts[: 3 if parts[:2] == ("moeedge", "lab") else 2])


def found(root: Path, folder: str, patterns: tuple[str, ...]) -> list[Path]:
    """The files below a folder of the root, relative to it."""
    files = (path for pattern in patterns for path in (root / folder).rglob(pattern))
    return sorted(path.relative_to(root) for path in files if not {"__pycache__", ".venv"} & set(path.parts))


def main(root: Path) -> int:
    """Prints all counts; returns the exit code."""
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for path in found(root, "moeedge", ("*.py",)):
        half = "lab" if path.as_posix().startswith(LAB) else "product"
        for name in (room(path), half, "all of moeedge"):
            lines[name] += n_lines(root / path)
            tokens[name] += n_tokens(root / path)
            modules[name] += 1
    totals = ("product", "lab", "all of moeedge")
    for name in (*sorted(lines.keys() - set(totals)), *totals):
        print(f"{name:24} {modules[name]:4} modules {lines[name]:7,} lines {tokens[name]:8,} tokens")
    rooms = {
        "TOML and JSON of moeedge": found(root, "moeedge", DATA),
        "C++ of moeedge": found(root, "moeedge", NATIVE),
        "tests": found(root, "tests", ("*.py",)),
        "C++ of tests": found(root, "tests", NATIVE),
        "models": found(root, "models", ("*.py", *DATA)),
    }
    for name, paths in rooms.items():
        print(f"{name:24} {len(paths):4} files   {sum(n_lines(root / path) for path in paths):7,} lines")
    pages = [*found(root, "docs", ("*.md",)), *(path.relative_to(root) for path in sorted(root.glob("*.md")))]
    words = {path: len(re.findall(r"\S+", (root / path).read_text(encoding="utf-8"))) for path in pages}
    print(f"{'documents':24} {len(pages):4} files   {sum(words.values()):7,} words")
    print(
        "longest:", *(f"  {n:6,} {path}" for path, n in sorted(words.items(), key=lambda item: -item[1])[:8]), sep="\n"
    )
    lengths = sorted(
        (each for path in found(root, "moeedge", ("*.py",)) for each in functions(root / path)), reverse=True
    )
    print("longest functions:", *(f"  {n} {name}" for n, name in lengths[:8]), sep="\n")
    return 0
