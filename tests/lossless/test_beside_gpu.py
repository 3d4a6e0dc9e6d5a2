"""A worker on loopback: as the device of the experts, also when it dies in mid-answer, and in the place of a GPU.

As the latter llama.cpp keeps layers on it and we compute their experts: which nodes it gives us, and the tokens that
come out. For ggml's scheduler a worker is a GPU, since it supports all operations and no buffer but its own.
Needs a llama-cpp-python built with CMAKE_ARGS=-DGGML_RPC=on; skips visibly without.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from moeedge.engine.session import Session
from moeedge.hardware import devices as hardware_devices
from moeedge.hardware import rpc
from moeedge.llama import library
from moeedge.llama.model import Model
from moeedge.scheduler.config import ExecutionConfig
from tests.conftest import TinyFactory
from tests.lossless.conftest import LONG_PROMPT, PROMPT
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


# experts on it


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


# in the place of a GPU


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[str]]]]:
    """Backend and inputs of every split that ggml's scheduler makes while the test runs."""
    found: list[tuple[str, list[str]]] = []
    line = re.compile(r"## SPLIT #\d+: (\w+?)\d*(?:\[.*?\])? # \d+ inputs:?(.*)")

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if match := line.match(record.getMessage()):
                found.append((match[1], re.findall(r"\[(.+?)-?\d* \(", match[2])))

    monkeypatch.setenv("GGML_SCHED_DEBUG", "1")
    reader = Reader()
    level = library.logger.level
    library.logger.addHandler(reader)
    library.logger.setLevel(logging.DEBUG)
    yield found
    library.logger.setLevel(level)
    library.logger.removeHandler(reader)


@pytest.fixture(scope="module")
def gpu_device(needs_rpc: None) -> Iterator[int]:
    """A worker of these tests' own, as ggml knows it."""
    library.start()
    with start_worker() as process:
        yield library._device(rpc.add_worker(process.endpoint)[0])


@pytest.fixture
def gpu(gpu_device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's only device is that worker."""
    devices = (ctypes.c_void_p * 2)(gpu_device, None)
    monkeypatch.setattr(library, "device_list", lambda _name: devices)
    monkeypatch.setattr(hardware_devices, "read_memory", lambda *_, **__: None)  # a worker's free memory is unknown


@contextmanager
def session_beside_gpu(path: Path, draft_path: Path, *, draft_there: bool = False, **placed: Any) -> Iterator[Session]:
    """A session with experts on the emulated device; draft_there: the draft, too, is where a GPU would have it."""
    config = hybrid_config(path, draft_path, 0.5, gamma=4, device="emulated:threads=1", **placed)
    with ExitStack() as stack:
        model = stack.enter_context(Model.load(path, n_gpu_layers=-1, experts_on_cpu=True))
        draft = stack.enter_context(Model.load(draft_path, n_gpu_layers=-1)) if draft_there else None
        yield stack.enter_context(Session.open(config, model=model, draft_model=draft))


@pytest.mark.parametrize("case", MOE_CASES)
def test_one_split_per_block_that_gives_back_one_sum(
    case: str, tiny: TinyFactory, tiny_draft: Path, gpu: None, splits: list[tuple[str, list[str]]]
) -> None:
    path = case_model(tiny, case, experts=MANY_EXPERTS)
    with StockContext(path) as stock:
        stock.answer(LONG_PROMPT, N_PREDICT)
        with session_beside_gpu(path, tiny_draft) as session:
            splits.clear()
            assert_answers(session, stock, LONG_PROMPT, N_PREDICT, 2)
            hit_stats(session)
    ours = [inputs for backend, inputs in splits if backend == "MOEEDGE"]
    theirs = [name for backend, inputs in splits if backend == "RPC" for name in inputs if name.startswith("ffn_moe")]
    assert ours and all(len(inputs) <= 3 for inputs in ours)  # the block's input, ids and weights
    assert len(theirs) == len(ours)  # their sum; a copy for each of a token's experts would be as large as all together


@pytest.mark.parametrize("policy", ["fate", "sp-moe-prefetch", "hybrimoe"])
def test_hidden_states_next_to_a_gpu(policy: str, many: Path, tiny_draft: Path, stock: StockContext, gpu: None) -> None:
    """The GPU computes routers and draft: predictions use what the experts read; the draft's inputs are unknown."""
    loads = ExecutionConfig(misses="load")
    with session_beside_gpu(many, tiny_draft, draft_there=True, policy=policy, execution=loads) as session:
        assert_answers(session, stock, LONG_PROMPT, N_PREDICT, 2)
        assert session.placement is not None and session.placement.on_demand is not None
        assert session.placement.on_demand.loaded > 0
        share = session.placement.predicted_share
        assert (share is not None) == (policy != "sp-moe-prefetch"), session.info.notes
        assert share is None or share > 0.2
