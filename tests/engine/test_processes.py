"""Sessions and other processes: a forked child ends in time, and children of every kind open sessions of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TinyFactory
from tests.native.test_cache import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

# a program in a file, which spawned children import
PROGRAM = """\
import multiprocessing, os, signal, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.scheduler.config import PlacementConfig


def open_session():
    placement = PlacementConfig(cache_ratio=0.5, calibrate=False, policy=sys.argv[2])
    config = EngineConfig(
        model=Path(sys.argv[1]), draft="ngram", n_ctx=256, n_threads=1, device="emulated", placement=placement
    )
    return Session.open(config)


def answer(session):
    session.reset()
    generation = session.generate([1, 5, 6, 7], n_predict=8, sampling=SamplingConfig(temperature=0), ignore_eos=True)
    list(generation)
    return generation.tokens


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
    [
        ("lru", ["fork"]),
        pytest.param("spac", ["spawn", "forkserver"], marks=pytest.mark.slow),
    ],
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
