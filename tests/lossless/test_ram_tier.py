"""Experts that are loaded from the file into RAM on demand: answers are stock's, whatever fits, of any kind."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, EngineInfo
from moeedge.errors import InputError
from moeedge.experts import Residency
from moeedge.llama import dense_weights
from moeedge.llama.context import Context
from moeedge.llama.dense_weights import DenseWeights
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.native.cache import CacheConfig, ExpertCache
from moeedge.policies.registry import POLICIES
from moeedge.run import Level, Notification, Run, is_warning
from moeedge.scheduler import kept_activations, ram_tier
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.disk import DiskCalibration, ReadRate
from moeedge.scheduler.governor import StepCost
from moeedge.scheduler.ram_tier import describe_dense, free_for_slots
from moeedge.scheduler.slot_memory import LOST
from moeedge.ui.figures import live_cache_figures
from moeedge.units import format_bytes
from tests.lossless.conftest import PROMPT, Loaded, each_case
from tests.support.cases import MOE_CASES
from tests.support.hybrid import MANY_EXPERTS, assert_greedy, greedy_answer
from tests.support.stock import StockContext

N_PREDICT = 24
RATIOS = (0.04, 0.3, 1.0)
TOKENS = np.random.default_rng(5).integers(0, 256, 150).tolist()


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run's kept activations warm another."""
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "cache"))


def config_of(loaded: Loaded, ratio: float, gamma: int, policy: str = "lfu") -> EngineConfig:
    tensors, _ = expert_tensors(loaded.path)
    return EngineConfig(
        model=loaded.path,
        draft=loaded.draft_path if gamma else None,
        gamma=gamma,
        n_ctx=512,
        n_threads=1,
        device="none",
        ram=max(1, int(ratio * expert_bytes(tensors) + MANY_EXPERTS)),
        placement=PlacementConfig(calibrate=False, policy=policy),
    )


@each_case(MOE_CASES, "ratio", RATIOS, quick=(0.3,))
def test_answers_are_stocks(loaded: Loaded, ratio: float) -> None:
    with Session.open(config_of(loaded, ratio, gamma=4)) as session:
        assert session.info.device == "RAM"
        answer = greedy_answer(session, PROMPT, N_PREDICT)
        stats = session.placement_stats()
        assert stats is not None
        assert stats.blocks_unknown == 0, "every kind of expert is computed from the slots"
        assert stats.failed == 0
        assert stats.slots_used <= stats.slots_total
    assert_greedy(loaded.stock, PROMPT, answer, loaded.expected, f"{ratio} of the experts")


@each_case(["qwen3moe"])
def test_the_draft_length_follows_costs(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The governor is told how long each step waited for experts."""
    config = replace(config_of(loaded, 0.3, gamma=4), auto_gamma=True)
    with Session.open(config) as session:
        assert session.info.auto_gamma and session.governor is not None
        costs: list[StepCost] = []
        observe = session.governor.observe
        monkeypatch.setattr(session.governor, "observe", lambda cost: (costs.append(cost), observe(cost)))
        answer = greedy_answer(session, PROMPT, N_PREDICT)
        stats = session.placement_stats()
        assert stats is not None
        assert 0 < sum(cost.loading_s for cost in costs) <= stats.wait_s
        assert all(0 <= cost.loading_s <= cost.target_s + cost.draft_s for cost in costs)
        session.set_draft_length(3)
        assert session.governor is None
    assert_greedy(loaded.stock, PROMPT, answer, loaded.expected, "auto")


@each_case(["qwen3moe"], "policy", POLICIES)
def test_any_policy(loaded: Loaded, policy: str) -> None:
    if policy not in ram_tier.POLICIES:
        with pytest.raises(InputError):
            Session.open(config_of(loaded, 0.3, gamma=4, policy=policy))
        return
    with Session.open(config_of(loaded, 0.3, gamma=4, policy=policy)) as session:
        assert session.placement is not None and session.placement.stats().lookahead is None
        assert_greedy(loaded.stock, PROMPT, greedy_answer(session, PROMPT, N_PREDICT), loaded.expected, policy)


@each_case(MOE_CASES, "ratio", (0.04, 0.5), quick=(0.04,))
def test_bit_identical_to_the_mapped_file(loaded: Loaded, ratio: float) -> None:
    """A model that does not fit is not repacked, so that stock has the same kernels."""
    path = loaded.path
    with (
        Model.load(path, storage="mapped") as mapped,
        Model.load(path, storage="on demand") as model,
        Context(mapped, n_ctx=512, n_threads=2, mode="stock") as stock,
        Context(model, n_ctx=512, n_threads=2) as context,
    ):
        info = model.info
        tensors, files = expert_tensors(path, n_layers=info.n_layers)
        cache_config = CacheConfig(
            device="ram",
            files=files,
            tensors=tensors,
            n_layers=info.n_layers,
            n_experts=info.n_experts,
            ratio=ratio,
        )
        with ExpertCache(cache_config) as cache:
            assert context.sensor is not None
            cache.attach(context.sensor)
            for batch in (TOKENS[:1], TOKENS[1:6], TOKENS[6:120], TOKENS[120:121], TOKENS[121:150]):
                expected = stock.decode(batch, phase=Phase.AUTO, logits="all").copy()
                found = context.decode(batch, phase=Phase.AUTO, logits="all")
                assert np.array_equal(found, expected)
            assert cache.stats().evictions > 0
            cache.detach()
        stock.clear()
        context.clear()
        expected = stock.decode(TOKENS, phase=Phase.AUTO, logits="all").copy()
        assert np.array_equal(context.decode(TOKENS, phase=Phase.AUTO, logits="all"), expected), (
            "without the cache, too"
        )


def test_the_counts_are_stocks(tiny_moe: Path) -> None:
    """What a policy observes does not depend on where the experts are."""
    tensors, _ = expert_tensors(tiny_moe)
    base = EngineConfig(model=tiny_moe, n_ctx=512, n_threads=1, gamma=0, device="none")
    counts = []
    for config in (base, replace(base, ram=expert_bytes(tensors) // 2)):
        with Session.open(config) as session:
            greedy_answer(session, TOKENS, 1)
            assert session.counts is not None
            counts.append(session.counts.copy())
    assert np.array_equal(*counts)


def test_the_lowest_utility_goes(tiny_moe: Path) -> None:
    """Experts of a high utility stay, once they are there."""
    with Model.load(tiny_moe, storage="on demand") as model, Context(model, n_ctx=512, n_threads=1) as context:
        info = model.info
        tensors, files = expert_tensors(tiny_moe, n_layers=info.n_layers)
        shape = (info.n_layers, info.n_experts)
        cache_config = CacheConfig(
            device="ram", files=files, tensors=tensors, n_layers=shape[0], n_experts=shape[1], ratio=0.5
        )
        with ExpertCache(cache_config) as cache:
            assert context.sensor is not None
            cache.attach(context.sensor)
            context.decode(TOKENS[:1], phase=Phase.DECODE)
            first = cache.copy_residency() == Residency.RESIDENT
            cache.set_utilities(first.astype(np.float32))
            for token in TOKENS[:40]:
                context.decode([token], phase=Phase.DECODE)
            assert cache.stats().evictions > 0
            assert (cache.copy_residency() == Residency.RESIDENT)[first].all()
            with pytest.raises(ValueError, match="utility"):
                cache.set_utilities(np.zeros((1, 1), dtype=np.float32))
            cache.detach()


def test_short_memory_takes_slots_that_hold_experts(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty slots give no memory back; one for each layer stays, so that more can be taken again."""
    tensors, _ = expert_tensors(tiny_moe)
    config = EngineConfig(model=tiny_moe, n_ctx=512, n_threads=1, gamma=0, device="none", ram=2 * expert_bytes(tensors))
    with StockContext(tiny_moe, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, 12)
        manager = session.placement
        assert manager is not None and manager.memory is not None
        notices = [note for note in session.info.notes if isinstance(note, Notification)]
        assert [note.level for note in notices[:2]] == [Level.NOTICE] * 2
        greedy_answer(session, PROMPT[:4], 2)
        n_used, n_slots = manager.cache.stats().slots_used, manager.cache.info.n_slots
        assert 10 < n_used < n_slots
        _, capacity, slot_bytes = manager.cache.groups()
        mean_bytes = int((capacity * slot_bytes).sum()) / n_slots
        watch, said = manager.memory.watch, len(session.info.notes)
        manager.memory._stop.set()
        for missing_bytes, least, most in ((4 * mean_bytes, n_used - 6, n_used - 4), (1 << 50, 1, 3)):
            monkeypatch.setattr(watch, "missing_bytes", lambda n=missing_bytes: round(n))
            manager.memory.update()
            monkeypatch.setattr(watch, "missing_bytes", lambda: 0)
            assert least <= manager.cache.info.n_slots <= most
            assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 12), expected, f"{most} slots")
        assert manager.active and manager.loads_on_demand
        monkeypatch.setattr(watch, "take_spare_bytes", lambda: 1 << 50)
        manager.memory.update()
        manager.watch_memory()
        assert manager.cache.info.n_slots == n_slots
        assert len(session.info.notes) == said + 3


def test_what_is_said_of_a_lost_cache(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapped file is read: there is no device that could be lost."""
    tensors, _ = expert_tensors(tiny_moe)
    config = EngineConfig(model=tiny_moe, n_ctx=512, n_threads=1, gamma=0, device="none", ram=2 * expert_bytes(tensors))
    with Session.open(config) as session:
        manager = session.placement
        assert manager is not None
        monkeypatch.setattr(manager.cache, "trouble", lambda: (True, 5))
        greedy_answer(session, PROMPT[:4], 3)
        assert [note for note in session.info.notes if is_warning(note)] == [LOST]
        assert not manager.active and not manager.loads_on_demand
        stats = session.placement_stats()
        assert stats is not None and stats.lost
        assert "mapped file" in live_cache_figures(stats)[0].value


def test_without_slots_the_file_is_read_ahead(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    tensors, _ = expert_tensors(tiny_moe)
    monkeypatch.setattr(
        dense_weights.mapping, "advise_normal", lambda pages: advised.extend((p.offset, p.n_bytes) for p in pages)
    )
    monkeypatch.setattr(ram_tier, "free_for_slots", lambda _free_bytes, _dense: 0)
    config = EngineConfig(model=tiny_moe, n_ctx=512, n_threads=1, gamma=0, device="none", ram=1 << 20)
    with Session.open(config) as session:
        assert session.placement is None
    page = 4096  # pages with dense weights are not the file's
    for tensor in tensors:
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


def _short_answer(config: EngineConfig, notes: list[Notification]) -> EngineInfo:
    with Session.open(config, run=Run(notes.append)) as session:
        greedy_answer(session, PROMPT, 4)
        return session.info


@pytest.fixture
def in_ram(tiny_moe: Path) -> EngineConfig:
    tensors, _ = expert_tensors(tiny_moe)
    ram = int(0.3 * expert_bytes(tensors)) + MANY_EXPERTS
    return EngineConfig(model=tiny_moe, n_ctx=512, n_threads=1, device="none", ram=ram)


def test_a_run_begins_with_what_earlier_ones_used(in_ram: EngineConfig) -> None:
    first, second = _short_answer(in_ram, []), _short_answer(in_ram, [])
    assert first.earlier_runs is None
    assert second.earlier_runs is not None
    assert second.earlier_runs.n_tokens > 4 and 0 < second.earlier_runs.n_first <= second.cache_slots
    cold = replace(in_ram, placement=PlacementConfig(warm_start=False))
    kept = Path(second.earlier_runs.file).read_bytes()
    assert _short_answer(cold, []).earlier_runs is None
    assert Path(second.earlier_runs.file).read_bytes() == kept, "and keeps nothing"


def test_a_full_disk_costs_the_next_run_its_warm_start(in_ram: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kept_activations, "write_measurement", full)
    notes: list[Notification] = []
    assert _short_answer(in_ram, notes).earlier_runs is None
    assert [note.level for note in notes if os.strerror(errno.ENOSPC) in note] == [Level.INFO]


def test_no_cache_folder(in_ram: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "file"))
    info = _short_answer(in_ram, [])
    assert info.earlier_runs is None and any("MOEEDGE_CACHE" in note for note in info.notes)


def test_reads_are_those_that_were_measured(in_ram: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session.open(in_ram) as session:
        assert session.placement is not None
        unmeasured = session.placement.cache.reader()
    rates = tuple(ReadRate(depth, 2**18, 1e8 * depth, 9) for depth in (1, 2, 8))
    disk = DiskCalibration("m.gguf", 2**30, 2**20, 2**19, "/dev/sda", "ext4", True, rates, 1.0)
    monkeypatch.setattr(ram_tier, "read_kept", lambda _model: disk)
    with Session.open(in_ram) as session:
        assert session.placement is not None
        reader = session.placement.cache.reader()
    assert unmeasured.n_threads == 4 and disk.best.depth == 8
    assert (reader.n_threads, reader.piece_bytes) == (8, 2**18)
