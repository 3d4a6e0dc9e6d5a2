"""llama.cpp keeps layers on a GPU and we compute their experts: which nodes it gives us, and the tokens that come out.

A worker stands for the GPU: for ggml's scheduler it is one, since it supports all operations and no buffer but its own.
Needs a llama-cpp-python built with CMAKE_ARGS=-DGGML_RPC=on; skips visibly without.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.hardware import devices as hardware_devices
from moeedge.hardware import rpc
from moeedge.llama import library
from moeedge.llama.model import Model
from moeedge.scheduler.config import ExecutionConfig
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES
from tests.support.hybrid import MANY_EXPERTS, assert_greedy, greedy_answer, hybrid_config
from tests.support.stock import StockContext
from tests.support.worker import start_worker

PROMPT = np.random.default_rng(4).integers(0, 256, 40).tolist()
N_PREDICT = 24

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_rpc")]


@pytest.fixture(scope="module")
def gpu(needs_rpc: None) -> Iterator[str]:
    """Its name in this process."""
    library.start()
    with start_worker() as worker:
        yield rpc.add_worker(worker.endpoint)[0]


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


@pytest.mark.parametrize("case", MOE_CASES)
def test_one_split_per_block_that_gives_back_one_sum(
    case: str,
    tiny: TinyFactory,
    tiny_draft: Path,
    gpu: str,
    splits: list[tuple[str, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arch, dimensions = MOE_CASES[case]
    path = tiny(arch, **(dimensions | {"experts": MANY_EXPERTS}))
    devices = (ctypes.c_void_p * 2)(library._device(gpu), None)
    monkeypatch.setattr(library, "device_list", lambda _name: devices)
    monkeypatch.setattr(hardware_devices, "read_memory", lambda *_, **__: None)  # a worker's free memory is unknown
    with StockContext(path) as stock, Model.load(path, n_gpu_layers=-1, experts_on_cpu=True) as model:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        config = hybrid_config(path, tiny_draft, 0.5, gamma=4, device="emulated:threads=1")
        with Session.open(config, model=model) as session:
            splits.clear()
            for turn in range(2):
                tokens = greedy_answer(session, PROMPT, N_PREDICT)
                assert_greedy(stock, PROMPT, tokens, expected, f"turn {turn}")
            stats = session.placement_stats()
            assert stats is not None and stats.pairs_hit > 0 and stats.blocks_unknown == 0
    ours = [inputs for backend, inputs in splits if backend == "MOEEDGE"]
    theirs = [name for backend, inputs in splits if backend == "RPC" for name in inputs if name.startswith("ffn_moe")]
    assert ours and all(len(inputs) <= 3 for inputs in ours)  # the block's input, ids and weights
    assert len(theirs) == len(ours)  # their sum; a copy for each of a token's experts would be as large as all together


@pytest.mark.parametrize("policy", ["fate", "sp-moe-prefetch", "hybrimoe"])
def test_hidden_states_next_to_a_gpu(
    policy: str, tiny: TinyFactory, tiny_draft: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU computes routers and draft: predictions use what the experts read; the draft's inputs are unknown."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    devices = (ctypes.c_void_p * 2)(library._device(gpu), None)
    monkeypatch.setattr(library, "device_list", lambda _name: devices)
    monkeypatch.setattr(hardware_devices, "read_memory", lambda *_, **__: None)
    with StockContext(path) as stock, Model.load(path, n_gpu_layers=-1, experts_on_cpu=True) as model:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        execution = ExecutionConfig(misses="load")
        config = hybrid_config(
            path, tiny_draft, 0.5, gamma=4, device="emulated:threads=1", policy=policy, execution=execution
        )
        with (
            Model.load(tiny_draft, n_gpu_layers=-1) as draft,
            Session.open(config, model=model, draft_model=draft) as session,
        ):
            for turn in range(2):
                tokens = greedy_answer(session, PROMPT, N_PREDICT)
                assert_greedy(stock, PROMPT, tokens, expected, f"turn {turn}")
            assert session.placement is not None and session.placement.on_demand is not None
            assert session.placement.on_demand.loaded > 0
            share = session.placement.predicted_share
            assert (share is not None) == (policy != "sp-moe-prefetch"), session.info.notes
            assert share is None or share > 0.2
