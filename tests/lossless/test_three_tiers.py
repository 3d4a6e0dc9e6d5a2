"""Experts on a device, in RAM and in the file at once: answers are those of the mapped file, which is not read.

The contexts' own model has zeros instead of experts, so that whatever read the mapped file would show.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.loading import resolve_device
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import BackendError
from moeedge.experts import Residency
from moeedge.hardware.host import default_reserve
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.llama.sequence import Cancelled
from moeedge.native.abi import DevicePath, Phase, PrefillPath, ReadFault
from moeedge.native.cache import ExpertCache
from moeedge.records import as_dict
from moeedge.run import Level, Notification, Run
from moeedge.scheduler import ram_tier
from moeedge.scheduler.manager import PlacementManager
from moeedge.scheduler.slot_memory import LOST
from moeedge.ui.figures import cache_rows
from tests.lossless.conftest import PROMPT, Loaded, each_case
from tests.support.cases import MOE_CASES
from tests.support.counting import DEVICE, CountingDevice
from tests.support.experts import ask, assert_bytes, fail_reads, model_experts
from tests.support.hybrid import MANY_EXPERTS, RandomPlans, assert_answers, greedy_answer, hybrid_config
from tests.support.machine import FreeMemory, Here, files_of_at_most
from tests.support.ram_driver import file_context
from tests.support.stock import StockContext

TOKENS = np.random.default_rng(5).integers(0, 256, 160).tolist()
BATCHES = (TOKENS[:1], TOKENS[1:6], TOKENS[6:120], TOKENS[120:121], TOKENS[121:150], *([t] for t in TOKENS[150:]))


def without_experts(path: Path, folder: Path) -> Path:
    """A copy of the model whose experts are zeros."""
    copy = Path(shutil.copy(path, folder / f"empty-{path.name}"))
    with copy.open("r+b") as file:
        for tensor in model_experts(path).tensors:
            file.seek(tensor.offset)
            file.write(bytes(tensor.stride * tensor.n_experts))
    return copy


@contextmanager
def three_tiers(
    path: Path,
    folder: Path,
    *,
    device: str = "emulated",
    device_ratio: float = 0.3,
    ram_ratio: float = 0.2,
    n_gpu_layers: int = 0,
    n_stage: int = 0,
    n_threads: int = 1,
) -> Iterator[tuple[Context, ExpertCache, ExpertCache]]:
    """A context whose own experts are zeros, its cache on the device and its cache in RAM, both of `path`'s experts."""
    library.start()
    experts = model_experts(path)
    gpu = {"n_gpu_layers": n_gpu_layers, "experts_on_cpu": True, "device": device} if n_gpu_layers else {}
    with (
        Model.load(without_experts(path, folder), storage="on demand", **{"device": "none"} | gpu) as model,
        Context(model, n_ctx=512, n_threads=n_threads, op_offload=False) as context,
        ExpertCache(experts.config(ram_ratio, device="ram")) as ram,
        ExpertCache(experts.config(device_ratio, device=device, n_stage=n_stage)) as cache,
    ):
        assert context.sensor is not None
        ram.attach(context.sensor)
        cache.attach(context.sensor)
        cache.read_from(ram)
        yield context, cache, ram
        cache.detach()
        ram.detach()


def assert_as_mapped(path: Path, context: Context, cache: ExpertCache, *, tolerance: float = 0.0) -> None:
    """The same logits as a context that computes from the mapped file, while experts move at random.

    tolerance: where the sum of a token's experts is made in another order.
    """
    plans = RandomPlans(cache, seed=3)
    with file_context(path, n_threads=context.n_threads) as stock:
        for i, batch in enumerate(BATCHES):
            plans.fill() if i % 3 == 0 else plans.push(5)
            expected = stock.decode(batch, phase=Phase.AUTO, logits="all")
            found = context.decode(batch, phase=Phase.AUTO, logits="all")
            assert np.abs(found - expected).max() <= tolerance, f"batch {i}"


@each_case(MOE_CASES, "ram_ratio", (0.04, 0.5), quick=(0.04,))
def test_bit_identical_to_the_mapped_file(loaded: Loaded, ram_ratio: float, tmp_path: Path) -> None:
    with three_tiers(loaded.path, tmp_path, ram_ratio=ram_ratio, n_threads=2) as (context, cache, ram):
        assert_as_mapped(loaded.path, context, cache)
        on_device, in_ram = cache.stats(), ram.stats()
        assert on_device.pairs_hit > 0 and in_ram.pairs > 0
        assert on_device.blocks_unknown == in_ram.blocks_unknown == 0
        assert on_device.failed == in_ram.failed == 0
        assert in_ram.evictions > 0
        # a pair that the device does not compute is computed from RAM, and no other
        assert on_device.pairs - on_device.pairs_hit == in_ram.pairs
        cache.detach()
        context.clear()
        assert_as_mapped(loaded.path, context, cache)
        assert cache.stats().pairs == on_device.pairs and ram.stats().blocks_unknown == 0, "from RAM alone"


@pytest.mark.parametrize("prefill", [PrefillPath.CPU, PrefillPath.RESIDENT, PrefillPath.STREAM])
def test_prompts(prefill: PrefillPath, many: Path, tmp_path: Path) -> None:
    with three_tiers(many, tmp_path, n_stage=8) as (context, cache, ram):
        cache.set_prefill(prefill, 16)
        assert_as_mapped(many, context, cache)
        assert cache.stats().blocks_unknown == ram.stats().blocks_unknown == 0


@pytest.mark.parametrize("device_ratio", [0.2, 0.5])
def test_a_prompt_reads_ahead_what_is_not_on_the_device(device_ratio: float, many: Path, tmp_path: Path) -> None:
    with three_tiers(many, tmp_path, device_ratio=device_ratio, ram_ratio=0.6) as (context, cache, ram):
        cache.set_prefill(PrefillPath.RESIDENT, 16)
        RandomPlans(cache, seed=3).fill()
        context.decode(TOKENS, phase=Phase.PREFILL)
        assert ram.drain(10.0) and ram.stats().ahead_used > 0
        in_both = (ram.copy_residency() == Residency.RESIDENT) & (cache.copy_residency() == Residency.RESIDENT)
        assert not in_both.any()


def test_a_streamed_prompt_stops_between_two_experts(many: Path, tmp_path: Path) -> None:
    """And not after all that are staged together: here all that a layer misses, about twenty."""
    with three_tiers(many, tmp_path, n_stage=2 * MANY_EXPERTS) as (context, cache, ram):
        cache.set_prefill(PrefillPath.STREAM, 16)
        fail_reads(ram, ReadFault.DELAY, 1, 0.1)
        n_expert_bytes = int(ram.groups()[2].max()) + 3 * 8192  # each matrix is read in entire blocks
        stopped_at: list[int] = []

        def stop() -> bool:
            n_read = ram.reader().bytes_read
            if n_read > 0:
                stopped_at.append(n_read)
            return bool(stopped_at)

        with pytest.raises(Cancelled):
            context.decode(TOKENS, phase=Phase.PREFILL, run=Run(cancelled=stop))
        assert ram.reader().bytes_read - stopped_at[0] <= 2 * n_expert_bytes
        fail_reads(ram, ReadFault.DELAY, 0)
        assert_as_mapped(many, context, cache)


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize("device_path", list(DevicePath))
def test_next_to_attention_on_a_gpu(
    device_path: DevicePath, late: bool, many: Path, tmp_path: Path, counting: CountingDevice
) -> None:
    with (
        three_tiers(many, tmp_path, device=DEVICE, n_gpu_layers=99) as (context, cache, ram),
        counting.late() if late else nullcontext(),
    ):
        cache.set_device_path(device_path)
        assert_as_mapped(many, context, cache, tolerance=1e-4 if device_path is DevicePath.AHEAD else 0.0)
        assert cache.stats().pairs_hit > 0 and ram.stats().pairs > 0
        assert cache.stats().blocks_unknown == ram.stats().blocks_unknown == 0
        counting.check()


def test_a_lost_device_leaves_its_experts_to_ram(many: Path, tmp_path: Path, counting: CountingDevice) -> None:
    with three_tiers(many, tmp_path, device=DEVICE) as (context, cache, ram), file_context(many) as stock:
        with counting.failing(12, mode=1), suppress(BackendError):  # of plans of a lost device
            assert_as_mapped(many, context, cache)
        assert cache.stats().lost
        n_before = ram.stats().pairs
        context.clear()
        expected = stock.decode(TOKENS[:5], phase=Phase.AUTO, logits="all")
        assert np.array_equal(context.decode(TOKENS[:5], phase=Phase.AUTO, logits="all"), expected)
        assert ram.stats().pairs > n_before


def test_uploads_come_from_slots_or_past_the_page_cache(many: Path, tmp_path: Path) -> None:
    """A resident expert is not read again; reads that fail leave it absent on the device."""
    with three_tiers(many, tmp_path, device_ratio=1.0, ram_ratio=0.3) as (context, cache, ram):
        context.decode(TOKENS[:8], phase=Phase.AUTO)
        ram.drain(10.0)
        resident, absent = (
            np.argwhere(ram.copy_residency() == state).tolist() for state in (Residency.RESIDENT, Residency.ABSENT)
        )

        def upload(experts: list[tuple[int, int]]) -> None:
            ask(cache, experts)
            assert cache.drain(10.0)

        n_read, n_loaded = ram.reader().bytes_read, ram.stats().uploads
        upload(resident[:6])
        assert ram.reader().bytes_read == n_read
        upload(absent[:6])
        assert ram.reader().bytes_read > n_read
        assert ram.stats().uploads == n_loaded, "an upload takes no slot in RAM"
        assert assert_bytes(cache, model_experts(many)) == 12
        fail_reads(ram, ReadFault.EIO, 1)
        upload(absent[6:8])
        assert cache.stats().failed == 2
        fail_reads(ram, ReadFault.EIO, 0)


def test_either_cache_leaves_alone(many: Path, tmp_path: Path) -> None:
    """Resizing or detaching one of them keeps the other."""
    with three_tiers(many, tmp_path) as (context, cache, ram):
        for reader, source in ((ram, cache), (cache, cache)):  # only a cache in RAM of the same experts
            with pytest.raises(BackendError):
                reader.read_from(source)
        cache.resize(0.5)
        assert_as_mapped(many, context, cache)
        ram.resize(0.1)
        cache.read_from(ram)
        context.clear()
        assert_as_mapped(many, context, cache)
        assert cache.stats().pairs_hit > 0
        cache.detach()
        n_blocks = cache.stats().blocks
        context.clear()
        assert_as_mapped(many, context, cache)
        assert cache.stats().blocks == n_blocks and ram.stats().blocks_unknown == 0


def test_a_gpu_that_is_not_used(many: Path, tmp_path: Path, counting: CountingDevice) -> None:
    """llama.cpp leaves large batches to a GPU's op offload, which is off: they are computed from RAM all the same."""
    with three_tiers(many, tmp_path) as (context, cache, ram):
        cache.detach()
        assert_as_mapped(many, context, cache)
        assert ram.stats().blocks_unknown == 0


# whole sessions


def tier_config(
    path: Path, draft: Path | None = None, *, ratio: float = 0.3, device: str = "emulated:threads=1", **options: Any
) -> EngineConfig:
    """A session with that share of the experts on the device, and about as many in RAM."""
    config = hybrid_config(path, draft, ratio, gamma=4 if draft else 0, device=device)
    gpu = {"n_gpu_layers": 99, "cpu_fallback": True} if device == DEVICE else {}
    ram = int(0.3 * expert_bytes(expert_tensors(path)[0]))
    return replace(config, **{"ram": ram} | gpu | options)


@contextmanager
def opened(config: EngineConfig, *, has_room: bool = True) -> Iterator[tuple[Session, PlacementManager, ExpertCache]]:
    """The session, its manager, and its cache in RAM; has_room: on the device, which has a cache of its own then."""
    with Session.open(config) as session:
        manager = session.placement
        assert manager is not None and manager.loads_on_demand, session.info.notes
        assert (len(manager.tiers) == 2) == has_room == (session.info.device != "RAM")
        yield session, manager, manager.tiers[-1].cache


@pytest.fixture
def copied(many: Path, cache_folder: Path) -> Path:
    """A copy of the model: one whose driver threw stays mapped."""
    return Path(shutil.copy(many, cache_folder.with_name("model.gguf")))


@pytest.mark.parametrize("policy", ["spac", "lru", "fate", "sp-moe-prefetch"])
def test_sessions(policy: str, many: Path, tiny_draft: Path, cache_folder: Path, stock: StockContext) -> None:
    config = tier_config(many, tiny_draft)
    with opened(replace(config, placement=replace(config.placement, policy=policy))) as (session, _, _):
        assert_answers(session, stock, PROMPT, 24, 2)
        stats = session.placement_stats()
        assert stats is not None and stats.ram is not None
        assert stats.device.startswith("emulated") and stats.ram.device == "RAM"
        assert stats.pairs_hit > 0 and stats.ram.pairs > 0
        assert stats.blocks_unknown == stats.ram.blocks_unknown == 0
        assert stats.ram.policy in ram_tier.POLICIES
        assert stats.ram.steps == stats.steps > 0
        assert as_dict(stats)["ram"]["pairs"] == stats.ram.pairs
        labels = {row.label for row in cache_rows(stats)}
        assert {"pair hits", "slots", "RAM pair hits", "RAM slots", "read/token"} <= labels
        notices = [note for note in session.info.notes if isinstance(note, Notification)]
        assert sum(note.level is Level.NOTICE for note in notices) == 2
        assert session.model.dense is not None and not session.target.op_offload


def test_detaching(many: Path, cache_folder: Path, stock: StockContext) -> None:
    with opened(tier_config(many)) as (session, manager, ram):
        session.set_mode("stock")
        assert not manager.loads_on_demand
        assert_answers(session, stock, PROMPT, 12, what="stock mode")
        assert ram.stats().blocks == 0
        session.set_mode("moeedge")
        assert_answers(session, stock, PROMPT, 12, what="attached again")
        assert ram.stats().slots_used > 8 and ram.stats().blocks > 0 and manager.loads_on_demand


def test_a_full_disk_is_reported_once(many: Path, cache_folder: Path) -> None:
    notes: list[Notification] = []
    with files_of_at_most(0), Session.open(tier_config(many), run=Run(notes.append)) as session:
        greedy_answer(session, PROMPT, 4)
    assert [note.level for note in notes if os.strerror(errno.EFBIG) in note] == [Level.INFO]


def test_a_lost_cache_in_ram_is_reported_once(
    many: Path, cache_folder: Path, stock: StockContext, counting: CountingDevice
) -> None:
    """The GPU is not blamed: it goes on, next to the mapped file."""
    notes: list[Notification] = []
    with opened(tier_config(many, device=DEVICE)) as (session, manager, ram):
        session.run.show = notes.append
        fail_reads(ram, ReadFault.THREADS, 1)
        assert_answers(session, stock, PROMPT, 12, 2)
        assert notes.count(LOST) == 1
        assert not manager.loads_on_demand and manager.active and session.model.uses_gpu


@pytest.mark.parametrize("ratio", [0.0, 0.17])
def test_the_cache_ratio_is_the_devices(ratio: float, many: Path, cache_folder: Path, stock: StockContext) -> None:
    """RAM takes what it has room for, here all experts, with any ratio of the device; without room there, alone."""
    with opened(tier_config(many, ratio=ratio, ram="on"), has_room=ratio > 0) as (session, _, ram):
        assert ram.info.n_slots == session.model.info.n_expert_layers * MANY_EXPERTS
        assert_answers(session, stock, PROMPT, 12)
        stats = session.placement_stats()
        assert stats is not None and stats.pairs > 0 and (stats.ram is not None) == (ratio > 0)
        assert ratio or len(set(session.info.notes)) == len(session.info.notes), "each is said once"


@pytest.mark.parametrize(("mode", "has_room"), [(0, True), (1, True), (2, True), (3, True), (0, False)])
def test_a_gpu_that_fails_leaves_ram(
    mode: int, has_room: bool, copied: Path, stock: StockContext, counting: CountingDevice
) -> None:
    """llama.cpp's GPU, and that of the cache where it has room for experts: answers go on from the slots in RAM."""
    config = tier_config(copied, device=DEVICE)
    if not has_room:
        config = replace(config, placement=replace(config.placement, cache_ratio=None, vram_bytes=1))
    with opened(config, has_room=has_room) as (session, _, ram):
        with counting.failing(30, mode):
            assert_answers(session, stock, PROMPT, 24, what="during the failure")
        n_blocks = ram.stats().blocks
        assert_answers(session, stock, PROMPT, 24, what="afterwards")
        assert ram.stats().blocks > n_blocks
        stats = session.placement_stats()
        assert stats is not None and (has_room or not stats.lost)


def test_a_gpu_that_fails_gets_room_from_full_slots(
    copied: Path, stock: StockContext, counting: CountingDevice
) -> None:
    """The models that are loaded into RAM instead take memory that slots hold; these are watched afterwards, too."""
    ram_bytes = expert_bytes(expert_tensors(copied)[0])
    with opened(tier_config(copied, device=DEVICE, ram=ram_bytes)) as (session, manager, ram):
        tier = manager.tiers[1]
        assert tier.slots is not None
        memory = tier.slots
        memory._stop.set()
        greedy_answer(session, PROMPT, 24)
        slot_bytes = int(ram.groups()[2].max())
        machine = FreeMemory(10 * slot_bytes, step_s=1.0)
        memory.watch = machine.watch(machine.free_bytes)
        n_used, n_opened = ram.stats().slots_used, ram.info.n_slots
        for _ in range(2):  # the first graph that fails may be one of the cache's own
            if ram.info.n_slots == n_opened:
                with counting.failing(30):
                    assert_answers(session, stock, PROMPT, 24, what="during the failure")
        dense, n_left = session.model.dense, ram.info.n_slots
        assert dense is not None and 0 < n_left <= max(3, n_used - dense.n_bytes // slot_bytes)
        assert session.placement is manager and tier.cache is ram and manager.first.state == "fallen back"
        machine.free_bytes = 1 << 40
        for _ in range(25):
            memory.update()
        assert ram.info.n_slots > n_left
        assert_answers(session, stock, PROMPT, 24, what="afterwards")
        assert "free again" in session.info.notes[-1], "watched next to the CPU's answers"


def test_on_by_itself_only_where_the_host_part_does_not_fit(many: Path, here: Here, counting: CountingDevice) -> None:
    config = replace(hybrid_config(many, None, 0.3, device=DEVICE), ram="auto", n_gpu_layers=None)
    reserve_bytes = default_reserve(1 << 40)
    here.set_memory(reserve_bytes + many.stat().st_size - 1, 1 << 40)
    assert not resolve_device(config).loads_misses, "the dense weights are on the GPU"
    assert resolve_device(replace(config, n_gpu_layers=0)).loads_misses
    here.set_memory(reserve_bytes + expert_bytes(expert_tensors(many)[0]), 1 << 40)
    assert resolve_device(config).loads_misses
    assert not resolve_device(replace(config, ram="off")).loads_misses


def test_next_to_whole_layers_on_the_gpu(
    many: Path, cache_folder: Path, stock: StockContext, counting: CountingDevice
) -> None:
    """RAM holds experts of the layers whose experts are in host memory, and no others."""
    with opened(tier_config(many, device=DEVICE, cpu_fallback=False, n_cpu_moe=1)) as (session, _, ram):
        assert_answers(session, stock, PROMPT, 12, what="one layer of three")
        assert ram.stats().pairs > 0
        assert not ram.copy_residency()[1:].any()
