"""Experts that are loaded from the file into RAM on demand: answers are stock's, whatever fits, of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, EngineInfo
from moeedge.errors import InputError
from moeedge.experts import Residency
from moeedge.llama import dense_weights
from moeedge.llama.dense_weights import DenseWeights
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.native.abi import Phase, ReadFault
from moeedge.policies.registry import POLICIES
from moeedge.run import Notification, Run, is_warning
from moeedge.scheduler import ram_tier
from moeedge.scheduler.calibration import write_measurement
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.disk import DiskCalibration, ReadRate, calibration_file
from moeedge.scheduler.governor import StepCost
from moeedge.scheduler.manager import PlacementManager
from moeedge.scheduler.ram_tier import describe_dense, free_for_slots
from moeedge.scheduler.slot_memory import LOST
from moeedge.ui.figures import live_cache_figures
from moeedge.units import format_bytes
from tests.lossless.conftest import PROMPT
from tests.support.experts import fail_reads
from tests.support.hybrid import MANY_EXPERTS, assert_answers, greedy_answer
from tests.support.machine import Here
from tests.support.ram_driver import ram_context
from tests.support.stock import StockContext

N_PREDICT = 24
TOKENS = np.random.default_rng(5).integers(0, 256, 150).tolist()
pytestmark = pytest.mark.usefixtures("cache_folder")


def config_of(path: Path, ratio: float, draft: Path | None = None, policy: str = "spac") -> EngineConfig:
    return EngineConfig(
        model=path,
        draft=draft,
        gamma=4 if draft else 0,
        n_ctx=512,
        n_threads=1,
        device="none",
        ram=int(ratio * expert_bytes(expert_tensors(path)[0]) + MANY_EXPERTS),
        placement=PlacementConfig(calibrate=False, policy=policy),
    )


@contextmanager
def opened(config: EngineConfig) -> Iterator[tuple[Session, PlacementManager]]:
    with Session.open(config) as session:
        assert session.info.device == "RAM" and session.placement is not None
        yield session, session.placement


def test_the_draft_length_follows_costs(
    many: Path, tiny_draft: Path, stock: StockContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The governor is told how long each step waited for experts."""
    with opened(replace(config_of(many, 0.3, tiny_draft, "lfu"), auto_gamma=True)) as (session, _):
        assert session.info.auto_gamma and session.governor is not None
        costs: list[StepCost] = []
        observe = session.governor.observe
        monkeypatch.setattr(session.governor, "observe", lambda cost: (costs.append(cost), observe(cost)))
        assert_answers(session, stock, PROMPT, N_PREDICT)
        stats = session.placement_stats()
        assert stats is not None
        assert 0 < sum(cost.loading_s for cost in costs) <= stats.wait_s
        assert all(0 <= cost.loading_s <= cost.target_s + cost.draft_s for cost in costs)
        session.set_draft_length(3)
        assert session.governor is None


@pytest.mark.parametrize("policy", POLICIES)
def test_any_policy(policy: str, many: Path, tiny_draft: Path, stock: StockContext) -> None:
    config = config_of(many, 0.3, tiny_draft, policy)
    if policy not in ram_tier.POLICIES:
        with pytest.raises(InputError):
            Session.open(config)
        return
    with opened(config) as (session, manager):
        assert_answers(session, stock, PROMPT, N_PREDICT)
        stats = manager.stats()
        assert (stats.lookahead, stats.blocks_unknown, stats.failed) == (None, 0, 0)
        assert 0 < stats.slots_used <= stats.slots_total


def test_the_counts_are_stocks(tiny_moe: Path) -> None:
    """What a policy observes does not depend on where the experts are."""
    config = config_of(tiny_moe, 0.5)
    counts = []
    for ram in (config.ram, "off"):
        with Session.open(replace(config, ram=ram)) as session:
            assert (session.info.device == "RAM") == (ram != "off")
            greedy_answer(session, TOKENS, 1)
            assert session.counts is not None
            counts.append(session.counts.copy())
    assert np.array_equal(*counts)


def test_the_lowest_utility_goes(tiny_moe: Path) -> None:
    """Experts of a high utility stay, once they are there."""
    with ram_context(tiny_moe, 0.5) as (context, cache):
        context.decode(TOKENS[:1], phase=Phase.DECODE)
        first = cache.copy_residency() == Residency.RESIDENT
        cache.set_utilities(first.astype(np.float32))
        for token in TOKENS[:40]:
            context.decode([token], phase=Phase.DECODE)
        assert cache.stats().evictions > 0
        assert (cache.copy_residency() == Residency.RESIDENT)[first].all()
        with pytest.raises(ValueError, match="utility"):
            cache.set_utilities(np.zeros((1, 1), dtype=np.float32))


def test_what_is_said_of_a_lost_cache(tiny_moe: Path) -> None:
    """The mapped file is read: there is no device that could be lost."""
    with opened(config_of(tiny_moe, 2.0)) as (session, manager):
        fail_reads(manager.cache, ReadFault.THREADS, 1)
        greedy_answer(session, PROMPT[:4], 3)
        assert [note for note in session.info.notes if is_warning(note)] == [LOST]
        assert not manager.active and not manager.loads_on_demand
        stats = session.placement_stats()
        assert stats is not None and stats.lost
        assert "mapped file" in live_cache_figures(stats)[0].value


def test_without_slots_the_file_is_read_ahead(tiny_moe: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(
        dense_weights.mapping, "advise_normal", lambda pages: advised.extend((p.offset, p.n_bytes) for p in pages)
    )
    here.set_memory(1 << 20, 1 << 40)
    with Session.open(config_of(tiny_moe, 2.0)) as session:
        assert session.placement is None
    page = 4096  # pages with dense weights are not the file's
    for tensor in expert_tensors(tiny_moe)[0]:
        if tensor.n_experts * tensor.stride >= 3 * page:
            middle = tensor.offset + tensor.n_experts * tensor.stride // 2
            assert any(at <= middle < at + size for at, size in advised)


def dense_weights_of(own_bytes: int, locked_bytes: int) -> DenseWeights:
    return DenseWeights(n_bytes=60, host_bytes=40, own_bytes=own_bytes, locked_bytes=locked_bytes, files={})


def test_dense_weights_that_the_kernel_may_drop_leave_less_for_slots() -> None:
    assert free_for_slots(100, dense_weights_of(own_bytes=0, locked_bytes=0)) == 60
    assert free_for_slots(100, dense_weights_of(own_bytes=0, locked_bytes=40)) == 100
    assert free_for_slots(100, dense_weights_of(own_bytes=40, locked_bytes=10)) == 100
    described = {describe_dense(dense_weights_of(*each)) for each in ((0, 0), (0, 10), (40, 10), (40, 40))}
    assert len(described) == 4
    assert all(format_bytes(40) in each for each in described), "a GPU has the others"


@pytest.fixture
def in_ram(tiny_moe: Path) -> EngineConfig:
    return config_of(tiny_moe, 0.3)


def _short_answer(config: EngineConfig, notes: list[Notification]) -> EngineInfo:
    with Session.open(config, run=Run(notes.append)) as session:
        greedy_answer(session, PROMPT, 4)
        return session.info


def test_a_run_begins_with_what_earlier_ones_used(in_ram: EngineConfig) -> None:
    first, second = _short_answer(in_ram, []), _short_answer(in_ram, [])
    assert first.earlier_runs is None
    assert second.earlier_runs is not None
    assert second.earlier_runs.n_tokens > 4 and 0 < second.earlier_runs.n_first <= second.cache_slots
    cold = replace(in_ram, placement=replace(in_ram.placement, warm_start=False))
    kept = Path(second.earlier_runs.file).read_bytes()
    assert _short_answer(cold, []).earlier_runs is None
    assert Path(second.earlier_runs.file).read_bytes() == kept, "and keeps nothing"


def test_no_cache_folder(in_ram: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "file"))
    info = _short_answer(in_ram, [])
    assert info.earlier_runs is None and any("MOEEDGE_CACHE" in note for note in info.notes)


def test_reads_are_those_that_were_measured(in_ram: EngineConfig) -> None:
    with opened(in_ram) as (_, manager):
        unmeasured = manager.cache.reader()
    rates = tuple(ReadRate(depth, 2**18, 1e8 * depth, 9) for depth in (1, 2, 8))
    sizes = {"file_bytes": 2**30, "expert_bytes": 2**20, "matrix_bytes": 2**19}
    about = {"model": "m.gguf", "mount": "/dev/sda", "file_system": "ext4", "direct": True}
    disk = DiskCalibration(**about, **sizes, rates=rates, seconds=1.0)
    write_measurement(calibration_file(in_ram.model), disk)
    with opened(in_ram) as (_, manager):
        reader = manager.cache.reader()
    assert unmeasured.n_threads == 4 and disk.best.depth == 8
    assert (reader.n_threads, reader.piece_bytes) == (8, 2**18)
