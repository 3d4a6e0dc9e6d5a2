"""Attention on a GPU and experts cached on it, where the counting device is the GPU: the tokens are stock's.

Stock has the same split: the same layers on the device, all experts on the CPU. With `late` the device executes nothing
before something waits for it, and reports operations that nothing orders. It also fails in mid-answer, at llama.cpp's
work or at the cache's, once, for good, or by an exception as Vulkan's backend does. tests/native/counting_device has
the details.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import DeviceFailedError
from moeedge.llama import library
from moeedge.native.abi import DevicePath, Phase, PrefillPath
from moeedge.run import is_warning
from moeedge.scheduler import sizing
from moeedge.scheduler.config import ExecutionConfig
from moeedge.scheduler.stats import StepRecord
from tests.conftest import TinyFactory
from tests.lossless.conftest import LONG_PROMPT as PROMPT
from tests.support.cases import ATTENTION_CASES, RARE_CASES, case_model
from tests.support.counting import DEVICE, CountingDevice, count
from tests.support.hybrid import (
    MANY_EXPERTS,
    AlternatingCache,
    assert_answers,
    greedy_answer,
    hit_stats,
    hybrid_config,
    random_prompt,
)
from tests.support.stock import StockContext, transcript

ALL = 99
N_PREDICT = 24
LATE = pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
ONCE, FOR_GOOD, THROWS = 0, 1, 3  # fail_mode
SHORT_PROMPT = list(range(40, 60))


@LATE
def test_stock_on_the_device_is_stock_on_the_cpu(late: bool, tiny_moe: Path, counting: CountingDevice) -> None:
    """Bit for bit: the device computes with the CPU's kernels, none of them for repacked weights."""
    with StockContext(tiny_moe, repack=False) as cpu:
        expected = transcript(cpu)
    with (
        counting.late() if late else nullcontext(),
        StockContext(tiny_moe, repack=False, gpu=DEVICE, n_gpu_layers=ALL) as gpu,
    ):
        assert np.array_equal(transcript(gpu), expected)


def gpu_config(
    path: Path, draft: Path | None, ratio: float = 0.5, gamma: int = 4, n_gpu_layers: int = ALL, **placement: Any
) -> EngineConfig:
    config = hybrid_config(path, draft, ratio, gamma=gamma, device=DEVICE, **placement)
    return dataclasses.replace(config, n_gpu_layers=n_gpu_layers)


def check(config: EngineConfig, counting: CountingDevice, *, late: bool, alternates: bool = False) -> None:
    """Two answers of a session: greedy decoding's, computed in part by the device, without hazards."""
    gpu: dict[str, Any] = {"gpu": DEVICE, "n_gpu_layers": config.n_gpu_layers, "experts_on_cpu": True}
    with StockContext(config.model, n_ctx=512, **gpu) as stock:
        stock.answer(PROMPT, N_PREDICT)
        with counting.late() if late else nullcontext(), Session.open(config) as session:
            assert session.placement is not None
            session.placement.governor = AlternatingCache() if alternates else None
            counting.reset()
            assert_answers(session, stock, PROMPT, N_PREDICT, 2)
            hit_stats(session)
            assert count(counting.timeline()).launches > 0
            counting.check()


@LATE
@pytest.mark.parametrize(
    ("path", "alternates"),
    [*((path, False) for path in DevicePath), (DevicePath.PAIRS, True), (DevicePath.AHEAD, True)],
)
def test_cached_experts_next_to_attention(
    path: DevicePath, alternates: bool, late: bool, many: Path, tiny_draft: Path, counting: CountingDevice
) -> None:
    """alternates: the cache goes off and on within an answer."""
    check(gpu_config(many, tiny_draft, device_path=path), counting, late=late, alternates=alternates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_gpu_layers", "path", "ratio", "gamma", "late"),
    [  # each pair of their values
        (n_gpu_layers, path, (0.17, 1.0)[(i + j) % 2], (0, 8)[(i // 2 + j) % 2], (i + i // 2 + j) % 2 == 1)
        for i, n_gpu_layers in enumerate((0, 1, 2, ALL))
        for j, path in enumerate((DevicePath.PAIRS, DevicePath.AHEAD))
    ],
)
def test_every_split(
    n_gpu_layers: int,
    path: DevicePath,
    ratio: float,
    gamma: int,
    late: bool,
    many: Path,
    tiny_draft: Path,
    counting: CountingDevice,
) -> None:
    check(gpu_config(many, tiny_draft, ratio, gamma, n_gpu_layers, device_path=path), counting, late=late)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "path", "late"),
    [
        (case, path, (i + j) % 2 == 0)
        for i, case in enumerate([*ATTENTION_CASES, *RARE_CASES])
        for j, path in enumerate(DevicePath)
    ],
)
def test_every_architecture(
    case: str, path: DevicePath, late: bool, tiny: TinyFactory, tiny_draft: Path, counting: CountingDevice
) -> None:
    model = case_model(tiny, case, experts=MANY_EXPERTS)
    check(gpu_config(model, tiny_draft, device_path=path), counting, late=late)


@pytest.mark.slow
@LATE
@pytest.mark.parametrize("prefill", ["resident", "stream"])
def test_prefill_paths(prefill: str, late: bool, many: Path, tiny_draft: Path, counting: CountingDevice) -> None:
    check(gpu_config(many, tiny_draft, prefill=prefill), counting, late=late)


@LATE
@pytest.mark.parametrize("pins_files", [False, True], ids=["copied", "pinned"])
def test_prompts_streamed_in_chunks(
    pins_files: bool, late: bool, many: Path, counting: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of five experts, the first staged while the layer before ends; a prompt of several batches."""
    monkeypatch.setattr(sizing, "_STAGING_EXPERTS", 5)
    config = gpu_config(many, None, 0.2, 0, prefill="stream", pins_files=pins_files)
    prompt = random_prompt(150, 5)
    with StockContext(config.model, n_ctx=512, gpu=DEVICE, n_gpu_layers=ALL, experts_on_cpu=True) as stock:
        stock.answer(prompt, N_PREDICT)
        with counting.late() if late else nullcontext(), Session.open(config) as session:
            assert session.placement is not None
            assert (session.placement.cache.info.pinned_bytes > 0) == pins_files
            assert_answers(session, stock, prompt, N_PREDICT, 2)
            blocks = session.placement.cache.blocks()
            large = blocks[blocks["n_tokens"] > 64]
            assert len(large) > 0 and (large["path"] == PrefillPath.STREAM.code).all()
            counting.check()


# what ggml's scheduler gives our backend


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
    library.logger.addHandler(Reader())  # tests/conftest.py takes it off
    library.logger.setLevel(logging.DEBUG)
    yield found


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(set(ATTENTION_CASES) - {"grovemoe"}))  # whose layers have two blocks
def test_one_split_per_block_that_gives_back_one_sum(
    case: str, tiny: TinyFactory, tiny_draft: Path, counting: CountingDevice, splits: list[tuple[str, list[str]]]
) -> None:
    path = case_model(tiny, case, experts=MANY_EXPERTS)
    with Session.open(gpu_config(path, tiny_draft)) as session:
        splits.clear()
        greedy_answer(session, SHORT_PROMPT, N_PREDICT)
        hit_stats(session)
    ours = [inputs for backend, inputs in splits if backend == "MOEEDGE"]
    theirs = [name for backend, inputs in splits if backend != "MOEEDGE" for name in inputs if "ffn_moe" in name]
    assert ours and all(len(inputs) <= 3 for inputs in ours)  # the block's input, ids and weights
    assert len(theirs) == len(ours)  # their sum; a copy for each of a token's experts would be as large as all together


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fate", "sp-moe-prefetch", "hybrimoe"])
def test_predictions_from_hidden_states(
    policy: str, many: Path, tiny_draft: Path, stock: StockContext, counting: CountingDevice
) -> None:
    """The GPU computes routers and draft: predictions use what the experts read; the draft's inputs are unknown."""
    loads = ExecutionConfig(misses="load")
    with Session.open(gpu_config(many, tiny_draft, policy=policy, execution=loads)) as session:
        assert_answers(session, stock, PROMPT, N_PREDICT, 2)
        assert session.placement is not None and session.placement.on_demand is not None
        assert session.placement.on_demand.loaded > 0
        share = session.placement.predicted_share
        assert (share is not None) == (policy != "sp-moe-prefetch"), session.info.notes
        assert share is None or share > 0.2


# a GPU that fails


@pytest.mark.parametrize(
    ("mode", "at_graph", "ratio"),
    [
        *((mode, at_graph, 0.5) for mode in (ONCE, THROWS) for at_graph in (1, 30)),
        *(  # each pair of their values
            pytest.param(mode, at_graph, (0.0, 0.17, 1.0)[(i + j) % 3], marks=pytest.mark.slow)
            for i, mode in enumerate((ONCE, FOR_GOOD, THROWS))
            for j, at_graph in enumerate((2, 5, 9, 17, 33, 65))
        ),
    ],
)
def test_a_gpu_that_fails(mode: int, at_graph: int, ratio: float, tiny: TinyFactory, counting: CountingDevice) -> None:
    """`at_graph` counts from the begin of the answer."""
    path = tiny("qwen3moe")
    config = dataclasses.replace(gpu_config(path, tiny("qwen3"), ratio, policy="lru"), cpu_fallback=True)
    with StockContext(path) as stock, ExitStack() as stack, Session.open(config) as session:
        n_before = len(session.info.notes)
        stack.enter_context(counting.failing(at_graph, mode))  # until the session is closed
        assert_answers(session, stock, SHORT_PROMPT, N_PREDICT, 2)
        warnings = [note for note in session.info.notes[n_before:] if is_warning(note)]
        assert 1 <= len(warnings) <= 2  # of the cache's device, of llama.cpp's
        stats = session.placement_stats()
        assert stats is None or stats.lost


def test_a_driver_that_throws_inside_our_backend_is_not_called_again(many: Path, counting: CountingDevice) -> None:
    """Contexts are abandoned at whichever launch the driver throws: those of a block are queued by our backend."""
    for at_graph in range(1, 6):
        with Session.open(gpu_config(many, None, device_path=DevicePath.AHEAD)) as session:
            greedy_answer(session, SHORT_PROMPT, 2)
            assert session.placement is not None
            session.placement.wait()
            session.placement.cache.drain(10.0)  # experts in every layer: each launches a half of its block
            with counting.failing(at_graph, THROWS), pytest.raises(DeviceFailedError):
                session.target.decode([1], phase=Phase.DECODE)
            assert session.target.is_closed


def test_experts_per_step_count_all_layers_afterwards(tiny_moe: Path, counting: CountingDevice) -> None:
    """One of three layers is in host memory before, all of them after."""
    config = gpu_config(tiny_moe, None, policy="lru")
    records: list[StepRecord] = []
    config = dataclasses.replace(config, n_cpu_moe=1, cpu_fallback=True)
    with ExitStack() as stack, Session.open(config) as session:
        assert session.info.n_whole_layers == 2
        session.observers.append(lambda record, _session: records.append(record))
        stack.enter_context(counting.failing(30, FOR_GOOD))  # until the session is closed
        greedy_answer(session, SHORT_PROMPT, N_PREDICT)
        assert (session.info.n_whole_layers, session.info.device) == (0, "none")
        used = [record.experts_unique for record in records if record.n_verified == 1]
        assert used and used == [session.info.n_expert_used] * len(used)
