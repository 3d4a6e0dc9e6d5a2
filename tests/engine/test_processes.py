"""Sessions and other processes: a forked child ends in time, and children of every kind open sessions of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TinyFactory
from tests.native.test_fork import PARENT

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

# in a file, which spawned children import
PROGRAM = f"""{PARENT}
import multiprocessing
from moeedge.engine.session import Session
from tests.support.hybrid import greedy_answer, hybrid_config

def open_session():
    return Session.open(hybrid_config(Path(sys.argv[1]), "ngram", 0.5, device="emulated", policy=sys.argv[2]))

def answer_alone(out):
    with open_session() as session:
        out.put(greedy_answer(session, [1, 5, 6, 7], 8))

if __name__ == "__main__":
    with open_session() as session:
        expected = greedy_answer(session, [1, 5, 6, 7], 8)
        in_child(lambda: None)  # which closes the session on its way out
        for method in sys.argv[3:]:
            context = multiprocessing.get_context(method)
            out = context.SimpleQueue()
            child = context.Process(target=answer_alone, args=(out,))
            child.start()
            child.join()
            assert (child.exitcode, out.get()) == (0, expected), method
        assert greedy_answer(session, [1, 5, 6, 7], 8) == expected
"""


@pytest.mark.parametrize(
    ("policy", "methods"),
    [("lru", ["fork"]), pytest.param("spac", ["spawn", "forkserver"], marks=pytest.mark.slow)],
)
def test_children_end_and_answer(policy: str, methods: list[str], tiny: TinyFactory, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tiny("qwen3moe")), policy, *methods]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
