"""A worker on loopback as the device of the experts, also when it dies in mid-answer.

Needs a llama-cpp-python built with CMAKE_ARGS=-DGGML_RPC=on; skips visibly without.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeedge.engine.session import Session
from moeedge.llama import library
from moeedge.llama.model import Model
from tests.conftest import TinyFactory
from tests.lossless.conftest import PROMPT
from tests.support.cases import MOE_CASES, case_model
from tests.support.commands import refused
from tests.support.hybrid import GAMMAS, MANY_EXPERTS, assert_answers, hit_stats, hybrid_config
from tests.support.stock import StockContext
from tests.support.worker import WorkerProcess, start_worker

ROOT = Path(__file__).parents[2]
N_PREDICT = 24

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_rpc")]


@pytest.fixture(scope="module")
def worker(needs_rpc: None) -> Iterator[WorkerProcess]:
    """One for the tests that only compute: llama.cpp never forgets a worker, and asking a dead one ends the process."""
    library.start()
    with start_worker() as process:
        yield process


@pytest.mark.parametrize("case", MOE_CASES)
def test_greedy_equals_stock(case: str, tiny: TinyFactory, tiny_draft: Path, worker: WorkerProcess) -> None:
    path = case_model(tiny, case, experts=MANY_EXPERTS)
    with StockContext(path) as stock, Model.load(path, device="none") as model:
        for ratio in (0.17, 1.0):
            with Session.open(hybrid_config(path, tiny_draft, ratio, device=worker.device), model=model) as session:
                for gamma in (*GAMMAS, 0):
                    session.gamma = gamma
                    assert_answers(session, stock, PROMPT, N_PREDICT, what=f"ratio {ratio}, gamma {gamma}")
                hit_stats(session)


def chat(target: Path, draft: Path, device: list[str], cache: Path) -> subprocess.Popen[bytes]:
    """One greedy answer by the real command; standard output unbuffered as it comes."""
    options = ["-m", target, "-md", draft, "--draft-max", "4", "-t", "1", "-c", "4096", "-n", "1500"]
    return subprocess.Popen(
        [sys.executable, "-m", "moeedge", "chat", *map(str, options), "--temp", "0", "-p", "Hello there", *device],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        bufsize=0,  # communicate() knows nothing of what a buffer holds
        cwd=ROOT,
        env=os.environ | {"MOEEDGE_CACHE": str(cache), "PYTHONUNBUFFERED": "1"},
    )


def test_the_answer_survives_the_death_of_the_worker(tiny: TinyFactory, tiny_draft: Path, tmp_path: Path) -> None:
    """kill -9 after the first words: exit code 0, one line about it, the text is that of stock all the same."""
    # F32 experts: no repacked kernels on either side, so that the text can be compared byte by byte
    target = case_model(tiny, "qwen3moe-f32", experts=MANY_EXPERTS)
    stock_out, _ = chat(target, tiny_draft, ["-dev", "none"], tmp_path).communicate(timeout=120)
    with start_worker() as worker:
        answer = chat(target, tiny_draft, ["-dev", worker.device, "--cache-ratio", "0.5"], tmp_path)
        assert answer.stdout is not None
        said = b""
        while len(said) < 200 and (piece := answer.stdout.read(200 - len(said))):
            said += piece
        worker.process.send_signal(signal.SIGKILL)
        rest, errors = answer.communicate(timeout=120)
    text = errors.decode()
    assert answer.returncode == 0, text
    lost = [line for line in text.splitlines() if "lost" in line.lower()]
    assert len(lost) == 1, text
    assert 200 <= len(said) < len(said + rest)
    assert said + rest == stock_out


def test_a_worker_that_is_not_there(many: Path) -> None:
    assert "rpc://127.0.0.1:1" in refused("chat", "-m", many, "-p", "Hello there", "-dev", "rpc://127.0.0.1:1")
