"""Counts of the code: python tests/outputs/count_code.py [ROOT]

Lines and modules per package, the modules that a command imports, the longest functions, and the words that
docs/glossary.md replaces.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, deque
from pathlib import Path

OLD_WORDS = re.compile(
    r"\b(foret(?:ell\w*|old)|foresight|foresee\w*|mends?|mended|wish\w*|settl(?:e|es|ed|ing)|courtes\w+|imagined|nobody|"
    r"nowhere|beside|behind|stand[-_ ]ins?|let_rest|calm_idle\w*|warm_up\.py|comes? ahead|came ahead|refused draft\w*|"
    r"Hints|StandIn|WithinStep|Watcher|give_note|LateNotes)\b"
)
FLAT_INDEX = re.compile(r"\bcells?\b")  # elsewhere a table has cells
ARRAYS = (
    "moeedge/policies",
    "moeedge/sim",
    "moeedge/scheduler",
    "moeedge/native",
    "moeedge/analysis",
    "tests/policies",
)
ROOMS = ("*.py", "*.cpp", "*.h", "*.md")


def functions(path: Path) -> list[tuple[int, str]]:
    """Length in lines and name of every function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}:{node.lineno} {node.name}"))
    return found


def closure(root: Path, start: str) -> int:
    """Modules of moeedge that a module imports, directly or not, imports within functions included."""
    names = {}
    for path in (root / "moeedge").rglob("*.py"):
        names[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    seen, queue = {start}, deque([start])
    while queue:
        for node in ast.walk(ast.parse(names[queue.popleft()].read_text(encoding="utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            for target in targets:
                if target in names and target not in seen:
                    seen.add(target)
                    queue.append(target)
    return len(seen)


def main() -> None:
    """Prints all counts."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    total = modules = 0
    for folder in sorted({path.parent for path in (root / "moeedge").rglob("*.py")}):
        if "cmake" in folder.parts:
            continue
        files = sorted(folder.glob("*.py"))
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        total, modules = total + lines, modules + len(files)
        print(f"{folder.relative_to(root)!s:28} {len(files):4} modules {lines:7,} lines")
    print(f"{'all of moeedge':28} {modules:4} modules {total:7,} lines")
    native = [*(root / "moeedge/native").rglob("*.cpp"), *(root / "moeedge/native").rglob("*.h")]
    print(f"{'native C++':28} {len(native):4} files   {sum(len(f.read_text().splitlines()) for f in native):7,} lines")
    tests = list((root / "tests").rglob("*.py"))
    print(f"{'tests':28} {len(tests):4} files   {sum(len(f.read_text().splitlines()) for f in tests):7,} lines")
    for command in ("chat", "bench"):
        print(f"modules that moeedge {command} imports: {closure(root, f'moeedge.cli.{command}')}")
    lengths = sorted((item for path in (root / "moeedge").rglob("*.py") for item in functions(path)), reverse=True)
    print("longest functions:", *(f"  {n} {name}" for n, name in lengths[:8]), sep="\n")
    words: Counter[str] = Counter()
    for pattern in ROOMS:
        for part in ("moeedge", "tests", "models", "docs", "."):
            paths = (root / part).rglob(pattern) if part != "." else root.glob(pattern)
            for path in paths:
                if path.name not in ("glossary.md", "count_code.py") and ".venv" not in path.parts:
                    text = path.read_text(encoding="utf-8")
                    words.update(word.lower() for word in OLD_WORDS.findall(text))
                    if str(path.relative_to(root)).startswith(ARRAYS):
                        words.update(FLAT_INDEX.findall(text))
    print(f"words of the old dialect: {sum(words.values())}:", dict(words.most_common(30)))


if __name__ == "__main__":
    main()
