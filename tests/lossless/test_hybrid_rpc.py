"""The device in another process, over llama.cpp's own RPC on loopback: the same tokens; its death in mid-answer, too.

Needs a llama-cpp-python built with CMAKE_ARGS=-DGGML_RPC=on; skips visibly without.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.llama import library
from moeedge.llama.model import Model
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES
from tests.support.hybrid import (
    GAMMAS,
    MANY_EXPERTS,
    RATIOS,
    assert_greedy,
    free_port,
    greedy_answer,
    hybrid_config,
)
from tests.support.stock import StockContext
from tests.support.worker import WorkerProcess, start_worker

ROOT = Path(__file__).parents[2]
PROMPT = np.random.default_rng(4).integers(0, 256, 10).tolist() * 2
N_PREDICT = 32

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_rpc")]


@pytest.fixture(scope="module")
def worker(needs_rpc: None) -> Iterator[WorkerProcess]:
    """One for the tests that only compute: llama.cpp never forgets a worker, and asking a dead one ends the process."""
    with start_worker() as worker:
        yield worker


@pytest.mark.parametrize("case", MOE_CASES)
def test_greedy_equals_stock(case: str, tiny: TinyFactory, tiny_draft: Path, worker: WorkerProcess) -> None:
    arch, dimensions = MOE_CASES[case]
    path = tiny(arch, **(dimensions | {"experts": MANY_EXPERTS}))
    library.start()
    with StockContext(path) as stock, Model.load(path, device="none") as model:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        for ratio in RATIOS[1:]:
            config = hybrid_config(path, tiny_draft, ratio, device=worker.device)
            with Session.open(config, model=model) as session:
                for gamma in (*GAMMAS, 0):
                    session.gamma = gamma
                    tokens = greedy_answer(session, PROMPT, N_PREDICT)
                    assert_greedy(stock, PROMPT, tokens, expected, f"ratio {ratio}, gamma {gamma}")
                stats = session.placement_stats()
                assert stats is not None and stats.pairs_hit > 0
                assert stats.blocks_unknown == 0
                assert not stats.lost


def chat(target: Path, draft: Path, device: list[str], n_predict: int, cache: Path) -> subprocess.Popen[bytes]:
    """One greedy answer by the real command; standard output unbuffered as it comes."""
    options = ["-m", target, "-md", draft, "--draft-max", "4", "-t", "1", "-c", "4096", "-n", n_predict]
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
    target = tiny("qwen3moe", experts=MANY_EXPERTS, expert_type="F32")
    n_predict = 1500
    stock_out, _ = chat(target, tiny_draft, ["-dev", "none"], n_predict, tmp_path).communicate(timeout=120)
    with start_worker() as worker:
        answer = chat(target, tiny_draft, ["-dev", worker.device, "--cache-ratio", "0.5"], n_predict, tmp_path)
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


def test_a_worker_that_is_not_there(tiny: TinyFactory, tiny_draft: Path, tmp_path: Path) -> None:
    target = tiny("qwen3moe", experts=MANY_EXPERTS)
    device = ["-dev", f"rpc://127.0.0.1:{free_port()}"]
    answer = chat(target, tiny_draft, device, 8, tmp_path)
    _, errors = answer.communicate(timeout=60)
    assert answer.returncode == 2
    assert "rpc://127.0.0.1" in errors.decode()
    assert "Traceback" not in errors.decode()
