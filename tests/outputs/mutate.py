"""Random single changes of product code, and whether the tests notice them.

    python -m tests.outputs.mutate [--seed N] [--count 100] [--resume FILE] [--again] [--slow] [--only PACKAGE]
        [--jobs 1|2]

A mutant is one change in one file of `moeedge/`: a file by its number of executable nodes, then any place in it. It is
tested in a copy of the tree with the test files that name the module, tests/outputs, and the tests of its room: first
those that fit into about a minute, and where it survives them the others of its room (--slow: its slow ones, too). A
test that fails must fail twice; a run that takes several times as long as without the mutant counts as caught. FILE
keeps the results: the same command goes on where it ended, `--again` repeats survivors.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUTPUTS = "tests/outputs/test_outputs.py"
BUDGET_S = 45.0  # of the test files next to OUTPUTS, without a mutant
LIMIT_S = 30.0  # of a mutant's tests, next to four times what they take without it
MEMORY_BYTES = 12 * 2**30  # of a process
_MOST_FAILING = 6  # tests of a file without a mutant; with more it says nothing
ROOMS = {  # of packages whose tests are not in the folder of the same name
    "moeedge": ["tests/cli", "tests/planning"],
    "moeedge/lab/experiments": ["tests/lab/cli", "tests/lab/bench", "tests/lab/sim"],
    "moeedge/lab/traces": ["tests/lab/trace", "tests/lab/cli"],
    "moeedge/lab/views": ["tests/lab/cli", "tests/lab/sim", "tests/ui"],
    "moeedge/policies/spac": ["tests/policies"],
    "moeedge/schemas": ["tests/lab/cli", "tests/analysis"],
    "moeedge/ui": ["tests/ui", "tests/cli", "tests/planning"],
    "moeedge/ui/chat": ["tests/ui", "tests/cli"],
}
OPTIONS_TEST = f"{OUTPUTS}::test_behaviour_is_that_of_the_record[options]"  # half of OUTPUTS' time
WITH_OPTIONS = re.compile(
    r"moeedge/((lab/)?cli/|\w+\.py|planning/|hub/|.*(config|types|spec|settings)\.py)"
)  # what it is for
COMPARISONS = {"<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"], "==": ["!="], "!=": ["=="]}
COMPARISONS |= {"is": ["is not"], "is not": ["is"], "in": ["not in"], "not in": ["in"]}
SWAPS = {"+": ["-"], "-": ["+"], "*": ["/"], "/": ["*"], "//": ["*"], "%": ["*"], "**": ["*"], "&": ["|"], "|": ["&"]}
_WORDS = re.compile(rb"is\s+not|not\s+in|\b(?:is|in|and|or)\b|[<>=!]=|<<|>>|//|\*\*|[-+*/%&|<>]")  # operators
_SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "bases")
# names whose values change speed, looks, texts or nothing; calls of that kind; calls with arguments in any order
_NEUTRAL = re.compile(
    r"strict|frozen|slots|eq|repr|copy|daemon|kw_only|help|epilog|stacklevel|flush|buffering|max_?size|__\w+__|fontsize|"
    r"frameon|alpha|linewidth|zorder|dpi|.*(timeout|poll|chunk|sleep|interval).*",
    re.IGNORECASE,
)
_SILENT = re.compile(r"(_?log(ger)?\..*|warnings\.warn|(typing\.)?cast|TypeVar|NewType|ParamSpec|.*sleep|\w*Error)$")
_SYMMETRIC = re.compile(r"(.*\.)?(max|min|isclose|maximum|minimum|add|multiply|gcd|lcm|logical_\w+|array_equal|union)$")
_TYPE = re.compile(r"(None|int|str|float|bool|bytes|list|dict|set|tuple|([\w.]+\.)?[A-Z]\w*[a-z]\w*)\b(?![.(])")


class Sites:
    """Where a file may change: `found` has per place its alternatives, (begin, end, text) in bytes.

    A text has as many line ends as what it replaces. `n_nodes` counts the executable statements and expressions.
    """

    def __init__(self, source: bytes) -> None:
        self._source, self.n_nodes = source, 0
        self.found: list[list[tuple[int, int, str]]] = []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._visit(ast.parse(source))

    def _visit(self, node: ast.AST) -> None:
        if not _is_inert(node):
            self.n_nodes += isinstance(node, (ast.stmt, ast.expr))
            self._mutate(node)
            for field, value in ast.iter_fields(node):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and field not in _SKIPPED_FIELDS:
                        self._visit(child)

    def _span(self, node: Any) -> tuple[int, int]:
        starts = self._starts
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        return self._source[slice(*self._span(node))].decode()

    def _replace(self, node: ast.AST, *texts: str) -> None:
        begin, end = self._span(node)
        ends = self._source.count(b"\n", begin, end)
        self.found.append([(begin, end, text + "\n" * (ends - text.count("\n"))) for text in texts])

    def _operators(self, nodes: list[ast.expr], table: dict[str, list[str]]) -> None:
        for left, right in pairwise(nodes):
            begin, end = self._span(left)[1], self._span(right)[0]
            match = _WORDS.search(self._source, begin, end)
            if match and b"#" not in self._source[begin:end]:
                texts = table.get(" ".join(match[0].decode().split()), [])
                self.found += [[(*match.span(), text) for text in texts]] if texts else []

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._replace(test, f"({self._text(test.operand)})")
        elif not isinstance(test, ast.Constant):
            self._replace(test, f"not ({self._text(test)})")

    def _mutate(self, node: ast.AST) -> None:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                self._negate(test)
            case ast.comprehension(ifs=tests):
                for test in tests:
                    self._negate(test)
            case ast.Compare():
                self._operators([node.left, *node.comparators], COMPARISONS)
            case ast.BoolOp():
                self._operators(node.values, {"and": ["or"], "or": ["and"]})
            case ast.BinOp() if not any(map(_is_no_number, (node.left, node.right))):
                self._operators([node.left, node.right], SWAPS)
            case ast.AugAssign():
                self._replace(node, "pass")
                if not _is_no_number(node.value):
                    self._operators([node.target, node.value], SWAPS)
            case (
                ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_])
                | ast.AnnAssign(target=ast.Attribute(), value=ast.expr())
                | ast.Expr(value=ast.Call())
            ):
                self._replace(node, "pass")
            case ast.Return(value=ast.expr() as value) if getattr(value, "value", True):
                self._replace(value, "None", "0")
            case ast.Call(args=arguments) if not _SYMMETRIC.match(ast.unparse(node.func)):
                for left, right in pairwise(arguments):
                    self._swap(left, right)
            case ast.arguments():
                for default in (*node.defaults, *node.kw_defaults):
                    if isinstance(default, ast.Constant) and isinstance(default.value, float):
                        self._replace(default, str(default.value + 1))
            case ast.Constant(value=bool(value)):
                self._replace(node, str(not value))
            case ast.Constant(value=int(value)):
                self._replace(node, str(value + 1), str(value - 1))
            case ast.Continue() | ast.Break():
                self._replace(node, "break" if isinstance(node, ast.Continue) else "continue")

    def _swap(self, left: ast.expr, right: ast.expr) -> None:
        (begin, left_end), (right_begin, end) = self._span(left), self._span(right)
        gap, texts = self._source[left_end:right_begin].decode(), (self._text(left), self._text(right))
        has_star = isinstance(left, ast.Starred) or isinstance(right, ast.Starred)
        are_messages = all(" " in str(getattr(side, "value", "")) for side in (left, right))
        # a gap with more than a comma: one is in parentheses
        if gap.strip() == "," and texts[0] != texts[1] and not (has_star or are_messages):
            self.found.append([(begin, end, texts[1] + gap + texts[0])])


def _is_inert(node: ast.AST) -> bool:
    """Whether nothing within changes: names, texts for readers, what only type checkers read."""
    match node:
        case ast.FunctionDef(name=name):
            return name in ("__repr__", "__str__") or "overload" in map(ast.unparse, node.decorator_list)
        case ast.ClassDef(bases=bases):
            return any(ast.unparse(base).split("[")[0] in ("Protocol", "TypedDict") for base in bases)
        case ast.If(test=test):
            return "TYPE_CHECKING" in ast.unparse(test) or "__name__" in ast.unparse(test)
        case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target):
            return bool(_NEUTRAL.fullmatch(ast.unparse(target)))
        case ast.keyword(arg=str(name)):
            return bool(_NEUTRAL.fullmatch(name))
        case ast.Call(func=function) | ast.Expr(value=ast.Call(func=function)):
            return bool(_SILENT.match(ast.unparse(function)))
        case ast.IfExp(test=test, body=ast.Constant(value=str()), orelse=ast.Constant(value=str())):
            return "== 1" in ast.unparse(test)  # singular and plural
        case ast.Subscript(value=ast.Name(id="Literal")):
            return True
        case _:
            return isinstance(node, (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert, ast.JoinedStr))


def _is_no_number(node: ast.expr) -> bool:
    """Whether an operand is a text, a list or a type, by its looks."""
    looks = isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)) or _TYPE.match(ast.unparse(node))
    return bool(looks) or isinstance(getattr(node, "value", None), (str, bytes))


@dataclass(frozen=True)
class Mutant:
    """A changed file: `before` and `after` are its lines from number `line` on, `source` the changed whole."""

    file: str
    line: int
    before: str
    after: str
    source: bytes


def mutants(root: Path, seed: int, count: int, only: str = "") -> list[Mutant]:
    """`count` different mutants of a tree, those of a smaller count first; only: a folder or file below `moeedge/`."""
    begin = "moeedge/" + only.removesuffix(".py").replace(".", "/").removeprefix("moeedge").strip("/")
    files = {str(path.relative_to(root)): path for path in sorted((root / "moeedge").rglob("*.py"))}
    sources = {
        name: path.read_bytes() for name, path in files.items() if name.startswith(begin) and "cmake" not in name
    }
    sites = {name: site for name, source in sources.items() if (site := Sites(source)).found}
    if sum(len(site.found) for site in sites.values()) < count:
        raise SystemExit(f"{begin} has fewer than {count} places to change")
    draw, made = random.Random(seed), dict[tuple[str, str], Mutant]()
    while len(made) < count:
        (name,) = draw.choices(list(sites), [site.n_nodes for site in sites.values()])
        start, end, text = draw.choice(draw.choice(sites[name].found))
        source = sources[name]
        new = source[:start] + text.encode() + source[end:]
        first, last = source.count(b"\n", 0, start), source.count(b"\n", 0, end) + 1
        with suppress(SyntaxError):
            compile(new, name, "exec")
            before, after = (b"".join(t.splitlines(True)[first:last]).decode().rstrip() for t in (source, new))
            made.setdefault((name, f"{start}:{end} {text}"), Mutant(name, first + 1, before, after, new))
    return list(made.values())


class Selection:
    """Which test files say something about a module, by their texts."""

    def __init__(self, root: Path) -> None:
        modules = {str(path.relative_to(root)) for path in (root / "moeedge").rglob("*.py")}
        self._modules: dict[str, set[str]] = {}  # of each test file, those that it names
        for path in sorted((root / "tests").rglob("test_*.py")):
            text = path.read_text(encoding="utf-8")
            names = set(re.findall(r"\bmoeedge(?:\.\w+)+", text))
            for package, words in re.findall(r"from (moeedge[\w.]*) import (\([^)]*\)|.*)", text):
                names |= {f"{package}.{word}" for word in re.findall(r"\w+", words)}
            paths = {name.replace(".", "/") for name in names}
            paths |= {path.rpartition("/")[0] for path in paths}  # of the module whose attribute it may be
            self._modules[str(path.relative_to(root))] = modules & {
                p + e for p in paths for e in (".py", "/__init__.py")
            }

    @staticmethod
    def room(file: str) -> list[str]:
        """The folders of a module's tests."""
        package = str(Path(file).parent)
        return ROOMS.get(package, [package.replace("moeedge", "tests", 1)])

    def of(self, file: str) -> tuple[list[str], list[str]]:
        """The test files that name a module, and the others of its room; the most specific ones first."""
        room = self.room(file)
        words = set(re.split(r"[_/]", file.removesuffix(".py")))

        def order(test: str) -> tuple[bool, int, int]:
            shared = words & set(re.split(r"[_/]", test.removesuffix(".py").removeprefix("tests/")))
            return not test.startswith(tuple(room)), -len(shared), len(self._modules[test])

        tests = sorted((test for test in self._modules if test != OUTPUTS), key=order)
        direct = [test for test in tests if file in self._modules[test]]
        return direct, [test for test in tests if str(Path(test).parent) in room and test not in direct]


class Copy:
    """A copy of the tree in a folder of its own, with its own home and cache; one file at a time may be changed."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder, self.tree, self._n_changes = folder, folder / "tree", 0
        ignored = shutil.ignore_patterns(".git", "*venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(root, self.tree, ignore=ignored)
        (folder / "site").mkdir()
        # an editable installation would import the tree that it was made from
        hook = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        (folder / "site/sitecustomize.py").write_text(hook)
        code, found = self.run(["-c", "import moeedge; print(moeedge.__file__)"])
        if code or str(self.tree) not in found:
            raise SystemExit(f"the tests would not import the copy in {self.tree}: {found}")

    def run(self, arguments: list[str], limit_s: float = 60.0, mutant: Mutant | None = None) -> tuple[int | None, str]:
        """Exit code (None: over the limit) and output of Python in the tree; no process of the run is left.

        What a mutant caches ends with it; what others cache is there for all.
        """
        kept, cache = b"", self._folder / "cache"
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        shutil.rmtree(self._folder / "home", ignore_errors=True)
        (self._folder / "home/tmp").mkdir(parents=True)
        if mutant:
            path, self._n_changes = self.tree / mutant.file, self._n_changes + 1
            kept, times = path.read_bytes(), path.stat()
            path.write_bytes(mutant.source)
            os.utime(path, (0, self._n_changes))  # a time of its own, lest an older .pyc is taken for it
            if cache.exists():
                shutil.copytree(cache, self._folder / "home/cache")
            cache = self._folder / "home/cache"
        home = {"HOME": "", "XDG_CONFIG_HOME": "config", "TMPDIR": "tmp"}
        others = {name: value for name, value in os.environ.items() if name not in ("MOEEDGE_CACHE", "HF_HOME")}
        environment = others | {name: str(self._folder / "home" / part) for name, part in home.items()}
        environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": f"{self._folder / 'site'}:{self.tree}"}
        with (self._folder / "output").open("w+b") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.tree, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self.kill()
                process.wait()
                if mutant:
                    path.write_bytes(kept)
                    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def pytest(self, tests: list[str], limit_s: float, mutant: Mutant | None = None) -> tuple[int | None, str]:
        """`run` of tests until one fails."""
        return self.run(["-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests], limit_s, mutant)

    def kill(self) -> None:
        """Ends the run's processes, also those with sessions of their own: all that have its home."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"HOME={self._folder}/home\0".encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)


class Trials:
    """Runs mutants against the tests chosen for them, and keeps results and times in a file, lines of JSON."""

    def __init__(self, root: Path, journal: Path | None, *, slow: bool = False) -> None:
        self.slow = slow
        self._selection, self._journal, self._lock = Selection(root), journal, threading.RLock()
        shared = [path for part in ("moeedge", "tests/support") for path in sorted((root / part).rglob("*.py"))]
        self._digest = zlib.crc32(b"".join(path.read_bytes() for path in shared))
        self._results: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._times: dict[tuple[str, int], dict[str, Any]] = {}
        self.stopped = False
        for line in journal.read_text().splitlines() if journal and journal.exists() else ():
            self._keep(json.loads(line))

    def _keep(self, row: dict[str, Any]) -> None:
        if "after" in row:
            self._results[row["file"], row["before"], row["after"]] = row
        else:
            self._times[row["test"], row["digest"]] = row

    def _add(self, **row: Any) -> None:
        with self._lock:
            self._keep(row)
            if self._journal:
                with self._journal.open("a") as file:
                    file.write(json.dumps(row) + "\n")

    def result(self, mutant: Mutant) -> dict[str, Any] | None:
        """What is known of a mutant, also of one with another index or line."""
        return self._results.get((mutant.file, mutant.before, mutant.after))

    def _time(self, copy: Copy, test: str, marks: str = "") -> tuple[float, list[str]] | None:
        """Seconds of a test file without a mutant and what deselects its failing tests; None where it is of no use.

        test: may be a folder. marks: of the tests that run; by default those of the default run.
        """
        path = copy.tree / test
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        digest = zlib.crc32(b"".join(file.read_bytes() for file in files), self._digest)  # what the time depends on
        name, chosen = f"{test} {marks}".strip(), ["-m", marks] if marks else []
        if (name, digest) not in self._times and not self.stopped:
            code, output = copy.pytest([f"--maxfail={_MOST_FAILING}", test, *chosen], 20 * BUDGET_S)
            seconds, failing = re.search(r"in ([\d.]+)s", output), _failing(output)
            if self.stopped:
                return None
            is_useful = seconds and code in (0, 1) and len(failing) < _MOST_FAILING
            self._add(test=name, digest=digest, seconds=float(seconds[1]) if is_useful else None, failing=failing)
            if failing or code is None:
                print("without a mutant:", f"{name} takes too long" if code is None else failing, flush=True)
        row = self._times.get((name, digest))
        if row is None or row["seconds"] is None:
            return None
        return row["seconds"], [f"--deselect={each}" for each in row["failing"]]

    def _tests(self, copy: Copy, file: str) -> tuple[list[str], float]:
        """The test files for a module that fit into about a minute, in order, and their seconds without a mutant."""
        direct, room = self._selection.of(file)
        taken, total_s, rest_s = list[str](), 0.0, BUDGET_S
        with self._lock:
            for test in (*direct, OUTPUTS, *room):
                if (test == OUTPUTS or rest_s > 0.2 * BUDGET_S) and (found := self._time(copy, test)):
                    seconds, deselected = found
                    if test == OUTPUTS or seconds <= rest_s:
                        taken += [test, *deselected]
                        if test == OUTPUTS and not WITH_OPTIONS.match(file):
                            taken.append(f"--deselect={OPTIONS_TEST}")
                        total_s += seconds
                        rest_s -= seconds if test != OUTPUTS else 0.0
        return taken, total_s

    def _others(self, copy: Copy, file: str, taken: list[str]) -> tuple[list[str], float]:
        """The test files of a module's room that are not in `taken`, as `_tests`."""
        folders, (direct, room) = self._selection.room(file), self._selection.of(file)
        others = [test for test in (*direct, *room) if str(Path(test).parent) in folders and test not in taken]
        return self._timed(copy, others)

    def _timed(self, copy: Copy, tests: list[str], marks: str = "") -> tuple[list[str], float]:
        with self._lock:
            found = {test: each for test in tests if (each := self._time(copy, test, marks))}
        words = [word for test, (_, deselected) in found.items() for word in (test, *deselected)]
        return words + (["-m", marks] if words and marks else []), sum(seconds for seconds, _ in found.values())

    def run(self, copy: Copy, mutant: Mutant, **row: Any) -> None:
        """Tests a mutant and keeps the result."""
        begin = time.perf_counter()
        tests, normal_s = self._tests(copy, mutant.file)
        caught = self._caught(copy, mutant, tests, normal_s)
        folders = [folder for folder in self._selection.room(mutant.file) if (copy.tree / folder).is_dir()]
        stages = [lambda: self._others(copy, mutant.file, tests), lambda: self._timed(copy, folders, "slow")]
        for stage in stages if self.slow else stages[:1]:
            if caught is None and not self.stopped:
                others, normal_s = stage()
                tests = [*tests, *others]
                caught = self._caught(copy, mutant, others, normal_s) if others else None
        if not self.stopped:
            seconds = round(time.perf_counter() - begin, 1)
            where = {"file": mutant.file, "line": mutant.line, "before": mutant.before, "after": mutant.after}
            self._add(**row, **where, caught=caught, seconds=seconds, tests=len(tests))
            print(f"{row['index']:3} {seconds:5.1f} s  {mutant.file}:{mutant.line}  {caught or 'SURVIVED'}", flush=True)

    def _caught(self, copy: Copy, mutant: Mutant, tests: list[str], normal_s: float) -> str | None:
        """The test that fails with a mutant, or what else ended them; None: it survives."""
        caught, limit_s = None, 4 * normal_s + LIMIT_S
        while caught is None and not self.stopped:
            code, output = copy.pytest(tests, limit_s, mutant)
            if code in (0, 5):
                break
            caught = (
                "time limit" if code is None else f"signal {-code}" if code < 0 else [*_failing(output), "pytest"][0]
            )
            if (
                "::" in caught and copy.pytest(["-m", "not bench", caught], limit_s, mutant)[0] == 0
            ):  # it failed by chance
                tests, caught = [*tests, f"--deselect={caught}"], None
        return caught


def _failing(output: str) -> list[str]:
    """The tests that failed."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def report(rows: list[dict[str, Any]]) -> str:
    """Caught of all per package, and the survivors' lines."""
    survivors = [row for row in rows if row["caught"] is None]
    total, survived = (Counter(str(Path(row["file"]).parent) for row in part) for part in (rows, survivors))
    lines = [f"{name:28} {n - survived[name]:3} of {n:3} caught" for name, n in sorted(total.items())]
    lines.append(f"{'all':28} {len(rows) - len(survivors):3} of {len(rows):3} caught")
    for row in survivors:
        lines.append(f"\n{row['index']}  {row['file']}:{row['line']}")
        lines += [f"{sign} {line}" for sign, key in (("-", "before"), ("+", "after")) for line in row[key].splitlines()]
    return "\n".join(lines)


def main() -> int:
    """Runs the mutants of a seed; exit code 130 after Ctrl-C, with the results until then."""
    parser = argparse.ArgumentParser(prog="python -m tests.outputs.mutate", usage=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--only", default="", metavar="PACKAGE")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2))
    given = parser.parse_args()
    chosen, trials = mutants(ROOT, given.seed, given.count, given.only), Trials(ROOT, given.resume, slow=given.slow)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as scratch:
        copies = [Copy(ROOT, Path(scratch) / str(number)) for number in range(given.jobs)]
        free = list(copies)

        def one(index: int, mutant: Mutant) -> None:
            row = trials.result(mutant)
            if not trials.stopped and (row is None or (given.again and row["caught"] is None)):
                copy = free.pop()
                trials.run(copy, mutant, seed=given.seed, index=index)
                free.append(copy)

        with ThreadPoolExecutor(given.jobs) as pool:
            try:
                list(pool.map(one, range(given.count), chosen))
            except KeyboardInterrupt:
                trials.stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in copies:
                    copy.kill()
    print(report([row for mutant in chosen if (row := trials.result(mutant))]))
    return 130 if trials.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
