"""Which changes are made to code, which tests are chosen for them, and that results are found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.outputs import mutate
from tests.outputs.mutate import ROOT, Copy, Mutant, Selection, Sites, Trials, mutants, report

CHANGES = {
    "x = a < b": {"x = a <= b", "x = a >= b"},
    "x = a is not None": {"x = a is None"},
    "x = a not in b": {"x = a in b"},
    "x = (a) - (b)": {"x = (a) + (b)"},
    "x = a and b or c": {"x = a or b or c", "x = a and b and c"},
    "x = 7": {"x = 8", "x = 6"},
    "x = f(y, on=True)": {"x = f(y, on=False)"},
    "if a: f()": {"if not (a): f()", "if a: pass"},
    "if not a: f()": {"if (a): f()", "if not a: pass"},
    "x.y = z": {"pass"},
    "x += a": {"x -= a", "pass"},
    "x: int = f(a, b)": {"x: int = f(b, a)"},
    "def f(x=0.5): return x": {"def f(x=1.5): return x", "def f(x=0.5): return None", "def f(x=0.5): return 0"},
    "for x in y: continue": {"for x in y: break"},
    "x = [a for a in b if a]": {"x = [a for a in b if not (a)]"},
    "x = 'é' if a else b": {"x = 'é' if not (a) else b"},
}
NO_CHANGES = [
    '"""Text, 1 < 2."""', "from a import b", "raise E(1, 2)", "assert a < 1", "x = f'{1 + 1}'", "__slots__ = (1,)",
    "if TYPE_CHECKING: x = 1", "def f(x: tuple[1]) -> Literal[2]: return None", "X = int | None", "x = 'a' + b",
    "log.info(1, a)", "x = zip(a, strict=True)", "@dataclass(frozen=True)\nclass A: pass", "x = max(a, b)",
    "x = '' if n == 1 else 's'",
    "x = f('Two words', 'Three more words')", "x = ValueError(1, 2)", "def __repr__(self): return 1",
]  # fmt: skip


def changed(source: str) -> set[str]:
    code = source.encode()
    found = [change for alternatives in Sites(code).found for change in alternatives]
    return {(code[:begin] + text.encode() + code[end:]).decode() for begin, end, text in found}


@pytest.mark.parametrize("source", CHANGES)
def test_all_changes_of_a_statement(source: str) -> None:
    assert changed(source) == CHANGES[source]


@pytest.mark.parametrize("source", NO_CHANGES)
def test_what_says_nothing_stays(source: str) -> None:
    assert changed(source) == set()


def test_lines_keep_their_numbers() -> None:
    assert changed("f(\n    a,\n)  # why\ng = h") == {"pass\n\n  # why\ng = h"}


def test_a_seed_has_its_mutants() -> None:
    few, more = mutants(ROOT, 3, 10, "policies"), mutants(ROOT, 3, 20, "moeedge/policies")
    assert more[:10] == few and mutants(ROOT, 4, 10, "policies") != few
    assert len({(mutant.file, mutant.source) for mutant in more}) == 20
    for mutant in more:
        old = (ROOT / mutant.file).read_text()
        assert mutant.file.startswith("moeedge/policies/") and mutant.before != mutant.after
        assert mutant.source.decode() == old.replace(old, mutant.source.decode())
        assert mutant.before in old and mutant.source.count(b"\n") == old.count("\n")


def test_the_tests_that_name_a_module_come_first() -> None:
    selection = Selection(ROOT)
    direct, room = selection.of("moeedge/scheduler/governor.py")
    assert direct[0].startswith("tests/scheduler/test_governor") and "tests/scheduler/test_disk.py" in room
    assert not set(direct) & set(room)
    for mutant in mutants(ROOT, 5, 200):
        assert any(selection.of(mutant.file)), mutant.file


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a module, a good test of it, one that always fails, and one that would never end with a mutant."""
    files = {
        "moeedge/__init__.py": "", "moeedge/a/__init__.py": "",
        "moeedge/a/b.py": "def f(x):\n    return x + 1, x - 1, x < 1\n",
        "tests/a/test_b.py": "from moeedge.a.b import f\n\n\ndef test_f():\n    assert f(1)[0] == 2\n",
        "tests/outputs/test_outputs.py": "def test_bad():\n    assert not 'bad'\n",
        "tests/a/test_end.py": "from moeedge.a.b import f\n\n\ndef test_end():\n    while not f(0)[2]:\n        pass\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    return tmp_path / "root"


def test_mutants_are_caught_survive_and_are_found_again(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate, "LIMIT_S", 1.0)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    source = (tree / "moeedge/a/b.py").read_text()
    changes = [("x + 1", "x - 1"), ("x - 1", "x + 1"), ("x < 1", "x > 1")]
    cases = [Mutant("moeedge/a/b.py", 2, old, new, source.replace(old, new).encode()) for old, new in changes]
    copy, trials = Copy(tree, tmp_path / "copy"), Trials(tree, tmp_path / "journal")
    for index, mutant in enumerate(cases):
        trials.run(copy, mutant, index=index)
    assert (copy.tree / "moeedge/a/b.py").read_text() == source

    again = Trials(tree, tmp_path / "journal")
    rows: list[dict[str, Any]] = [row for mutant in cases if (row := again.result(mutant))]
    assert [row["caught"] for row in rows] == ["tests/a/test_b.py::test_f", None, "time limit"]
    text = report(rows)
    assert "moeedge/a                      2 of   3 caught" in text and "- x - 1\n+ x + 1" in text
