"""Sessions and other processes: a forked child ends in time, and children of every kind open sessions of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TinyFactory

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

ROOT = Path(__file__).parents[2]

# a program in a file, which spawned children import
PROGRAM = """\
import multiprocessing, os, signal, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
from moeedge.engine.session import Session
from tests.support.hybrid import greedy_answer, hybrid_config


def open_session():
    return Session.open(hybrid_config(Path(sys.argv[1]), "ngram", 0.5, device="emulated", policy=sys.argv[2]))


def answer(session):
    return greedy_answer(session, [1, 5, 6, 7], 8)


def answer_alone(out):
    signal.alarm(40)
    with open_session() as session:
        out.put(answer(session))


def main():
    with open_session() as session:
        expected = answer(session)
        pid = os.fork()
        if pid == 0:
            signal.alarm(40)  # ends a child that waits
            sys.exit(0)  # closes the session on its way out
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"the forked child ended with {status}"
        for method in sys.argv[3:]:
            context = multiprocessing.get_context(method)
            out = context.SimpleQueue()
            child = context.Process(target=answer_alone, args=(out,))
            child.start()
            child.join()
            assert child.exitcode == 0, f"{method}: {child.exitcode}"
            assert out.get() == expected, method
        assert answer(session) == expected


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("policy", "methods"),
    [("lru", ["fork"]), pytest.param("spac", ["spawn", "forkserver"], marks=pytest.mark.slow)],
)
def test_children_end_and_answer(policy: str, methods: list[str], tiny: TinyFactory, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, str(program), str(tiny("qwen3moe")), policy, *methods],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
