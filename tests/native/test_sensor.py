"""The sensor reports the experts that llama.cpp's routers selected, compared with llama.cpp's evaluation callback."""

from __future__ import annotations

import threading
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from moeedge.errors import BackendError
from moeedge.native import Frame, OffloadScope, Sensor
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES, case_model
from tests.support.sensed import sensed_context
from tests.support.stock import RouterTap, StockContext, tap_context

PROMPT = np.random.default_rng(2).integers(0, 256, 24).tolist()
LONG = np.random.default_rng(3).integers(0, 256, 80).tolist()
SENSING = [OffloadScope.MOE, OffloadScope.ALL]
by_scope = pytest.mark.parametrize("scope", SENSING, ids=lambda scope: scope.name.lower())


def count_ids(frames: list[Frame], n_experts: int) -> np.ndarray:
    """Activations [n_layers, n_experts], recomputed from the ids in the frames."""
    counts = np.zeros((len(frames[0].layer_tokens), n_experts), np.uint32)
    for frame in frames:
        for layer, n_tokens in enumerate(frame.layer_tokens):
            ids = frame.ids[layer, :n_tokens]
            np.add.at(counts[layer], ids[ids >= 0], 1)
    return counts


def assert_as_tapped(frame: Frame, tap: RouterTap) -> None:
    """The callback keeps the last graph."""
    assert tap.ids, "the callback saw no router"
    for layer, n_tokens in enumerate(frame.layer_tokens):
        if layer not in tap.ids:
            assert n_tokens == 0
            continue
        assert n_tokens == len(tap.ids[layer])
        n_used = tap.ids[layer].shape[1]  # of this layer
        assert np.array_equal(frame.ids[layer, :n_tokens, :n_used], tap.ids[layer])
        assert np.array_equal(frame.weights[layer, :n_tokens, :n_used], tap.weights[layer])
        assert (frame.ids[layer, :n_tokens, n_used:] == -1).all()


@by_scope
@pytest.mark.parametrize("case", MOE_CASES)
def test_frames_equal_the_evaluation_callback(case: str, scope: OffloadScope, tiny: TinyFactory) -> None:
    """Also where the last layer has only rows with outputs; counts are those of the frames."""
    path = case_model(tiny, case)
    stock, tap = tap_context(path)
    ours, sensor = sensed_context(path, scope)
    with stock, ours:
        short = ((PROMPT, True), (PROMPT[:1], True), (PROMPT[:9], True), (PROMPT[9:20], False))
        for tokens, every in (*short, (LONG, True), (LONG, False)):
            tap.clear()
            stock.decode(tokens, every=every)
            ours.decode(tokens, every=every)
            (frame,) = sensor.frames()
            assert frame.n_tokens == len(tokens)
            assert_as_tapped(frame, tap)
            counts = sensor.read_counts()
            assert np.array_equal(counts, count_ids([frame], sensor.n_experts))
            most = frame.layer_tokens.sum() * sensor.n_used
            assert counts.sum() < most if "per_layer" in MOE_CASES[case][1] else counts.sum() == most


def test_counts_and_frames_of_several_graphs(tiny_moe: Path) -> None:
    context, sensor = sensed_context(tiny_moe, OffloadScope.ALL, n_ubatch=16)
    with context:
        before = sensor.stats()
        context.decode(PROMPT)  # two graphs
        context.decode(PROMPT[:9])
        frames, after = sensor.frames(), sensor.stats()
        assert [(frame.serial, frame.n_tokens) for frame in frames] == [(1, 16), (2, 8), (3, 9)]
        assert after.graphs - before.graphs == 3, "the whole graph in one piece"
        assert after.blocks - before.blocks == 3 * 3
        assert 0 < after.sense_s < after.compute_s
        assert np.array_equal(sensor.read_counts(), count_ids(frames, sensor.n_experts))
        assert not sensor.read_counts().any(), "reading clears"
        assert sensor.frames() == [], "frames are reported once"
        for token in PROMPT[:11]:
            context.decode([token])
        assert [frame.serial for frame in sensor.frames()] == list(range(7, 15)), "the last eight graphs"
        assert sensor.read_counts().sum(axis=1).tolist() == [44, 44, 44], "counts miss nothing"


@by_scope
def test_phases(scope: OffloadScope, tiny_moe: Path) -> None:
    context, sensor = sensed_context(tiny_moe, scope)
    with context:
        context.decode(PROMPT)
        context.decode(PROMPT[:1])
        for phase in (Phase.PREFILL, Phase.DECODE, Phase.DRAFT, Phase.VERIFY, Phase.AUTO):
            sensor.set_phase(phase)
            context.decode(PROMPT[:2])
        phases = [frame.phase for frame in sensor.frames()]
    told = [Phase.PREFILL, Phase.DECODE, Phase.DRAFT, Phase.VERIFY]
    assert phases == [Phase.PREFILL, Phase.DECODE, *told, Phase.PREFILL], "untold, several tokens are prefill"


def test_scope_can_be_changed(tiny_moe: Path) -> None:
    """NONE, MOE, ALL and back on one context: the logits stay equal, and the sensor sees the graphs of its scope."""
    stock = StockContext(tiny_moe)
    context, sensor = sensed_context(tiny_moe, OffloadScope.NONE)
    none, moe, all_ = OffloadScope
    with stock, context:
        for i, scope in enumerate((none, moe, all_, none, all_, moe, none)):
            sensor.set_offload_scope(scope)
            n_before = sensor.stats().graphs
            tokens = PROMPT[: 3 + i]  # another size, so that llama.cpp builds a new graph
            assert np.array_equal(context.decode(tokens), stock.decode(tokens))
            is_sensed = scope is not none
            assert len(sensor.frames()) == sensor.read_counts().any() == is_sensed
            assert (sensor.stats().graphs > n_before) == is_sensed
        with pytest.raises(BackendError):
            sensor.set_phase(5)
        with pytest.raises(BackendError):
            sensor.set_offload_scope(3)  # type: ignore[arg-type]


def test_two_contexts_of_one_model(tiny_moe: Path) -> None:
    first, first_sensor = sensed_context(tiny_moe, OffloadScope.ALL)
    second, second_sensor = sensed_context(tiny_moe, OffloadScope.MOE)
    with second:
        with first:
            first.decode(PROMPT[:3])
        second.decode(PROMPT[:7])
        assert [frame.n_tokens for frame in second_sensor.frames()] == [7]
        with pytest.raises(BackendError, match="context is closed"):
            first_sensor.read_counts()


def test_contexts_in_threads(tiny: TinyFactory) -> None:
    """Four threads that each make a context at the same time: each sensor reports its own context."""
    paths = [tiny(arch) for arch in ("qwen3moe", "llama", "olmoe", "gpt-oss")]
    start = threading.Barrier(len(paths))
    failures: list[str] = []

    def answer(path: Path, scope: OffloadScope, n_times: int) -> list[np.ndarray]:
        context, sensor = sensed_context(path, scope)
        found: list[np.ndarray] = []
        with context:
            for _ in range(n_times):
                context.trim(0)
                found += [context.decode(PROMPT), sensor.frames()[0].ids.copy()]
        return found

    expected = [answer(path, OffloadScope.ALL, 1) for path in paths]

    def work(i: int) -> None:
        try:
            start.wait()
            for _ in range(5):
                assert all(map(np.array_equal, answer(paths[i], SENSING[i % 2], 5), expected[i] * 5))
        except Exception as error:
            failures.append(f"{paths[i].name}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_thread_count_follows_the_context(tiny_moe: Path) -> None:
    context, sensor = sensed_context(tiny_moe, OffloadScope.ALL, n_threads=2)
    with context:
        before = context.decode(PROMPT)
        assert sensor.threads() == 2
        llama_cpp.llama_set_n_threads(context.context, 1, 2)  # one for single tokens, two for batches
        context.decode(PROMPT[:1])
        assert sensor.threads() == 1
        context.decode(PROMPT[:2])
        assert sensor.threads() == 2
        context.trim(0)
        assert np.array_equal(context.decode(PROMPT), before)


def test_sensor_needs_a_context_of_this_thread() -> None:
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            Sensor(3, 16, 4, 256)
        except BackendError as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "not part of this context" in str(outcome[0])
