"""Experts on a device, in RAM and in the file at once: answers are those of the mapped file, which is not read.

The contexts' own model has zeros instead of experts, so that whatever read the mapped file would show.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeedge.engine import loading
from moeedge.engine.loading import resolve_device
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import BackendError
from moeedge.experts import Residency
from moeedge.hardware.devices import VramReading
from moeedge.hardware.memory import default_reserve
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.llama.sequence import Cancelled
from moeedge.native.abi import DevicePath, Phase, PrefillPath, ReadFault
from moeedge.native.cache import CacheConfig, ExpertCache
from moeedge.records import as_dict
from moeedge.run import Level, Notification, Run
from moeedge.scheduler import kept_activations, ram_tier
from moeedge.scheduler.slot_memory import LOST, MemoryWatch
from moeedge.ui.figures import cache_rows
from tests.conftest import TinyFactory
from tests.lossless.conftest import PROMPT, Loaded, each_case
from tests.support.cases import MOE_CASES
from tests.support.counting import DEVICE, CountingDevice
from tests.support.hybrid import MANY_EXPERTS, RandomPlans, assert_greedy, greedy_answer, hybrid_config
from tests.support.stock import StockContext

N_PREDICT = 1  # of the fixture `loaded`
TOKENS = np.random.default_rng(5).integers(0, 256, 160).tolist()
BATCHES = (TOKENS[:1], TOKENS[1:6], TOKENS[6:120], TOKENS[120:121], TOKENS[121:150], *([t] for t in TOKENS[150:]))


@pytest.fixture
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No run's kept activations warm another."""
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def without_experts(path: Path, folder: Path) -> Path:
    """A copy of the model whose experts are zeros."""
    copy = folder / f"empty-{path.name}"
    shutil.copy(path, copy)
    tensors, files = expert_tensors(path)
    assert len(files) == 1
    with copy.open("r+b") as file:
        for tensor in tensors:
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
) -> Iterator[tuple[Context, ExpertCache, ExpertCache]]:
    """A context whose own experts are zeros, its cache on the device and its cache in RAM, both of `path`'s experts."""
    library.start()
    with ExitStack() as stack:
        gpu = {"n_gpu_layers": n_gpu_layers, "experts_on_cpu": True} if n_gpu_layers else {}
        empty = without_experts(path, folder)
        model = stack.enter_context(
            Model.load(empty, storage="on demand", device=device if n_gpu_layers else "none", **gpu)
        )
        context = stack.enter_context(Context(model, n_ctx=512, n_threads=1, op_offload=False))
        tensors, files = expert_tensors(path, n_layers=model.info.n_layers)
        shape = {"files": files, "tensors": tensors, "n_layers": model.info.n_layers, "n_experts": model.info.n_experts}
        on_device = CacheConfig(device=device, ratio=device_ratio, n_stage=n_stage, **shape)
        ram = stack.enter_context(ExpertCache(CacheConfig(device="ram", ratio=ram_ratio, **shape)))
        cache = stack.enter_context(ExpertCache(on_device))
        assert context.sensor is not None
        ram.attach(context.sensor)
        cache.attach(context.sensor)
        cache.read_from(ram)
        stack.callback(ram.detach)
        stack.callback(cache.detach)
        yield context, cache, ram


def assert_as_mapped(path: Path, context: Context, cache: ExpertCache, *, tolerance: float = 0.0) -> None:
    """The same logits as a context that computes from the mapped file, while experts move at random.

    tolerance: where the sum of a token's experts is made in another order.
    """
    plans = RandomPlans(cache, seed=3)
    with (
        Model.load(path, storage="mapped", device="none") as mapped,
        Context(mapped, n_ctx=512, n_threads=1, mode="stock") as stock,
    ):
        for i, batch in enumerate(BATCHES):
            plans.fill() if i % 3 == 0 else plans.push(5)
            expected = stock.decode(batch, phase=Phase.AUTO, logits="all")
            found = context.decode(batch, phase=Phase.AUTO, logits="all")
            assert np.abs(found - expected).max() <= tolerance, f"batch {i}"


@each_case(MOE_CASES, "ram_ratio", (0.04, 0.5), quick=(0.04,))
def test_bit_identical_to_the_mapped_file(loaded: Loaded, ram_ratio: float, tmp_path: Path) -> None:
    with three_tiers(loaded.path, tmp_path, ram_ratio=ram_ratio) as (context, cache, ram):
        assert_as_mapped(loaded.path, context, cache)
        on_device, in_ram = cache.stats(), ram.stats()
        assert on_device.pairs_hit > 0 and in_ram.pairs > 0
        assert on_device.blocks_unknown == in_ram.blocks_unknown == 0
        assert on_device.failed == in_ram.failed == 0
        assert in_ram.evictions > 0
        # a pair that the device does not compute is computed from RAM, and no other
        assert on_device.pairs - on_device.pairs_hit == in_ram.pairs


@pytest.mark.parametrize("prefill", [PrefillPath.CPU, PrefillPath.RESIDENT, PrefillPath.STREAM])
def test_prompts(prefill: PrefillPath, tiny: TinyFactory, tmp_path: Path) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with three_tiers(path, tmp_path, n_stage=8) as (context, cache, ram):
        cache.set_prefill(prefill, 16)
        assert_as_mapped(path, context, cache)
        assert cache.stats().blocks_unknown == ram.stats().blocks_unknown == 0


@pytest.mark.parametrize("device_ratio", [0.2, 0.5])
def test_a_prompt_reads_ahead_what_is_not_on_the_device(device_ratio: float, tiny: TinyFactory, tmp_path: Path) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with three_tiers(path, tmp_path, device_ratio=device_ratio, ram_ratio=0.6) as (context, cache, ram):
        cache.set_prefill(PrefillPath.RESIDENT, 16)
        RandomPlans(cache, seed=3).fill()
        context.decode(TOKENS, phase=Phase.PREFILL)
        assert ram.drain(10.0) and ram.stats().ahead_used > 0
        in_both = (ram.copy_residency() == Residency.RESIDENT) & (cache.copy_residency() == Residency.RESIDENT)
        assert not in_both.any()


def test_a_streamed_prompt_stops_between_two_experts(tiny: TinyFactory, tmp_path: Path) -> None:
    """And not after all that are staged together: here all that a layer misses, about twenty."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with three_tiers(path, tmp_path, n_stage=2 * MANY_EXPERTS) as (context, cache, ram):
        cache.set_prefill(PrefillPath.STREAM, 16)
        ram.set_read_faults(ReadFault.DELAY, 1, 0.1)
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
        ram.set_read_faults(ReadFault.DELAY, 0)
        assert_as_mapped(path, context, cache)


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize("device_path", list(DevicePath))
def test_next_to_attention_on_a_gpu(
    device_path: DevicePath, late: bool, tiny: TinyFactory, tmp_path: Path, counting: CountingDevice
) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with three_tiers(path, tmp_path, device=DEVICE, n_gpu_layers=99) as (context, cache, ram), ExitStack() as stack:
        if late:
            stack.enter_context(counting.late())
        cache.set_device_path(device_path)
        assert_as_mapped(path, context, cache, tolerance=1e-4 if device_path is DevicePath.AHEAD else 0.0)
        assert cache.stats().pairs_hit > 0 and ram.stats().pairs > 0
        assert cache.stats().blocks_unknown == ram.stats().blocks_unknown == 0
        counting.check()


def test_a_lost_device_leaves_its_experts_to_ram(tiny: TinyFactory, tmp_path: Path, counting: CountingDevice) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with three_tiers(path, tmp_path, device=DEVICE) as (context, cache, ram):
        with counting.failing(12, mode=1), suppress(BackendError):  # of plans of a lost device
            assert_as_mapped(path, context, cache)
        assert cache.stats().lost
        n_before = ram.stats().pairs
        with (
            Model.load(path, storage="mapped", device="none") as mapped,
            Context(mapped, n_ctx=512, n_threads=1, mode="stock") as stock,
        ):
            context.clear()
            expected = stock.decode(TOKENS[:5], phase=Phase.AUTO, logits="all")
            assert np.array_equal(context.decode(TOKENS[:5], phase=Phase.AUTO, logits="all"), expected)
        assert ram.stats().pairs > n_before


def test_uploads_come_from_slots_or_past_the_page_cache(tiny: TinyFactory, tmp_path: Path) -> None:
    """A resident expert is not read again; reads that fail leave it absent on the device."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with three_tiers(path, tmp_path, device_ratio=1.0, ram_ratio=0.3) as (context, cache, ram):
        context.decode(TOKENS[:8], phase=Phase.AUTO)
        ram.drain(10.0)
        resident = np.argwhere(ram.copy_residency() == Residency.RESIDENT).astype(np.int32)
        absent = np.argwhere(ram.copy_residency() == Residency.ABSENT).astype(np.int32)
        none, no_victims = np.zeros(0, dtype=np.float32), np.zeros((0, 2), dtype=np.int32)

        def upload(experts: np.ndarray) -> None:
            cache.plan(experts, np.ones(len(experts), dtype=np.uint8), no_victims, none)
            assert cache.drain(10.0)

        n_read, n_loaded = ram.reader().bytes_read, ram.stats().uploads
        upload(resident[:6])
        assert ram.reader().bytes_read == n_read
        upload(absent[:6])
        assert ram.reader().bytes_read > n_read
        assert ram.stats().uploads == n_loaded, "an upload takes no slot in RAM"
        tensors, _ = expert_tensors(path)
        contents = path.read_bytes()
        for layer, expert in [*resident[:6], *absent[:6]]:
            for tensor in (tensor for tensor in tensors if tensor.layer == layer):
                begin = tensor.offset + int(expert) * tensor.stride
                on_device = cache.read(int(layer), int(expert), tensor.role, tensor.stride)
                assert on_device == contents[begin : begin + tensor.stride]
        ram.set_read_faults(ReadFault.EIO, 1)
        upload(absent[6:8])
        assert cache.stats().failed == 2
        ram.set_read_faults(ReadFault.EIO, 0)


def test_either_cache_leaves_alone(tiny: TinyFactory, tmp_path: Path) -> None:
    """Resizing or detaching one of them keeps the other."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with three_tiers(path, tmp_path) as (context, cache, ram):
        cache.resize(0.5)
        assert_as_mapped(path, context, cache)
        ram.resize(0.1)
        cache.read_from(ram)
        context.clear()
        assert_as_mapped(path, context, cache)
        assert cache.stats().pairs_hit > 0
        cache.detach()
        n_blocks = cache.stats().blocks
        context.clear()
        assert_as_mapped(path, context, cache)
        assert cache.stats().blocks == n_blocks and ram.stats().blocks_unknown == 0


def test_only_a_cache_in_ram_of_the_same_experts(tiny: TinyFactory, tmp_path: Path) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with three_tiers(path, tmp_path) as (_, cache, ram):
        for reader, source in ((ram, cache), (cache, cache)):
            with pytest.raises(BackendError):
                reader.read_from(source)


def tier_config(
    path: Path, draft: Path | None, *, ratio: float = 0.3, device: str = "", **options: Any
) -> EngineConfig:
    """A session with that share of the experts on the device, and about as many in RAM."""
    config = hybrid_config(path, draft, ratio, gamma=4 if draft else 0, device=device or "emulated:threads=1")
    tensors, _ = expert_tensors(path)
    return replace(config, ram=int(0.3 * expert_bytes(tensors)), **options)


@pytest.mark.parametrize("policy", ["spac", "lru", "fate", "sp-moe-prefetch"])
def test_sessions(policy: str, tiny: TinyFactory, tiny_draft: Path, own_cache_folder: Path) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    config = tier_config(path, tiny_draft)
    config = replace(config, placement=replace(config.placement, policy=policy))
    with StockContext(path, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, 24)
        for turn in range(2):
            assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 24), expected, f"turn {turn}")
        stats = session.placement_stats()
        assert stats is not None and stats.ram is not None
        assert stats.device.startswith("emulated") and stats.ram.device == "RAM"
        assert stats.pairs_hit > 0 and stats.ram.pairs > 0
        assert stats.blocks_unknown == stats.ram.blocks_unknown == 0
        assert stats.ram.policy in ram_tier.POLICIES
        assert stats.ram.steps == stats.steps > 0
        assert as_dict(stats)["ram"]["pairs"] == stats.ram.pairs
        assert {"pair hits", "slots", "RAM pair hits", "RAM slots", "read/token"} <= {
            row.label for row in cache_rows(stats)
        }
        notices = [note for note in session.info.notes if isinstance(note, Notification)]
        assert sum(note.level is Level.NOTICE for note in notices) == 2
        assert session.model.dense is not None and not session.target.op_offload


def test_detaching_and_short_memory(tiny: TinyFactory, own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with StockContext(path, n_ctx=512) as stock, Session.open(tier_config(path, None)) as session:
        expected, _ = stock.greedy(PROMPT, 12)
        manager = session.placement
        assert manager is not None and manager.ram is not None and manager.loads_on_demand
        session.set_mode("stock")
        assert not manager.loads_on_demand
        assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 12), expected, "stock mode")
        assert manager.ram.cache.stats().blocks == 0
        session.set_mode("moeedge")
        assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 12), expected, "attached again")
        n_used = manager.ram.cache.stats().slots_used
        n_blocks = manager.ram.cache.stats().blocks
        assert n_used > 8
        watch = manager.ram.memory.watch
        manager.ram.memory._stop.set()
        for missing_bytes in (4 * 1000, 1 << 50):
            monkeypatch.setattr(watch, "missing_bytes", lambda n=missing_bytes: n)
            manager.ram.memory.update()
            manager.watch_memory()
            monkeypatch.setattr(watch, "missing_bytes", lambda: 0)
            assert 0 < manager.ram.cache.info.n_slots < n_used
            assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 12), expected, f"{missing_bytes} less")
        assert manager.ram.cache.info.n_slots <= 3 and manager.loads_on_demand
        assert manager.ram.cache.stats().blocks > n_blocks
        assert sum("RAM" in note for note in session.info.notes) >= 2


def test_a_lost_cache_in_ram_is_reported_once(
    tiny: TinyFactory, own_cache_folder: Path, counting: CountingDevice
) -> None:
    """The GPU is not blamed: it goes on, next to the mapped file."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    config = tier_config(path, None, device=DEVICE, n_gpu_layers=99, cpu_fallback=True)
    notes: list[Notification] = []
    with StockContext(path, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, 12)
        manager = session.placement
        assert manager is not None and manager.ram is not None and manager.loads_on_demand
        session.run.show = notes.append
        manager.ram.cache.set_read_faults(ReadFault.THREADS, 1)
        for turn in range(2):
            assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 12), expected, f"turn {turn}")
        assert notes.count(LOST) == 1
        assert not manager.loads_on_demand and manager.active and session.model.uses_gpu


def test_a_full_disk_is_reported(tiny: TinyFactory, own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kept_activations, "write_measurement", full)
    notes: list[Notification] = []
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with Session.open(tier_config(path, None), run=Run(notes.append)) as session:
        greedy_answer(session, PROMPT, 4)
    assert sum(os.strerror(errno.ENOSPC) in note for note in notes) == 1


def test_without_room_on_the_device_all_are_in_ram(tiny: TinyFactory, own_cache_folder: Path) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with StockContext(path, n_ctx=512) as stock, Session.open(tier_config(path, None, ratio=0.0)) as session:
        expected, _ = stock.greedy(PROMPT, 12)
        assert session.info.device == "RAM"
        assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 12), expected, "in RAM")
        stats = session.placement_stats()
        assert stats is not None and stats.ram is None and stats.pairs > 0
        assert len(set(session.info.notes)) == len(session.info.notes), "each is said once"


@pytest.mark.parametrize("ratio", [0.0, 0.17])
def test_the_cache_ratio_is_the_devices(
    ratio: float, tiny: TinyFactory, own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM takes what it has room for, here all experts, with any ratio of the device."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    config = replace(tier_config(path, None, ratio=ratio), ram="auto")
    monkeypatch.setattr(loading, "host_bytes", lambda _config, _device: 1 << 60)
    monkeypatch.setattr(ram_tier, "free_for_slots", lambda _free_bytes, _dense: 1 << 40)
    with Session.open(config) as session:
        manager = session.placement
        assert manager is not None and manager.loads_on_demand
        assert (manager.ram is None) == (ratio == 0)
        cache = manager.cache if manager.ram is None else manager.ram.cache
        assert cache.info.n_slots == session.model.info.n_expert_layers * MANY_EXPERTS


@pytest.mark.parametrize("mode", [0, 1, 3])
def test_a_gpu_that_fails_leaves_ram(
    mode: int, tiny: TinyFactory, own_cache_folder: Path, counting: CountingDevice
) -> None:
    """llama.cpp's GPU and that of the cache: the answer goes on, from the slots in RAM."""
    # a copy: a model whose driver threw stays mapped
    path = Path(shutil.copy(tiny("qwen3moe", experts=MANY_EXPERTS), own_cache_folder / "model.gguf"))
    config = tier_config(path, None, device=DEVICE, n_gpu_layers=99, cpu_fallback=True)
    with StockContext(path, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, 24)
        manager = session.placement
        assert manager is not None and manager.ram is not None
        with counting.failing(30, mode):
            tokens = greedy_answer(session, PROMPT, 24)
        assert_greedy(stock, PROMPT, tokens, expected, "during the failure")
        n_blocks = manager.ram.cache.stats().blocks
        assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 24), expected, "afterwards")
        assert manager.ram.cache.stats().blocks > n_blocks


def test_a_gpu_that_fails_gets_room_from_full_slots(
    tiny: TinyFactory, own_cache_folder: Path, counting: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models that are loaded into RAM instead take memory that slots hold; these are watched afterwards, too."""
    path = Path(shutil.copy(tiny("qwen3moe", experts=MANY_EXPERTS), own_cache_folder / "model.gguf"))
    config = tier_config(path, None, device=DEVICE, n_gpu_layers=99, cpu_fallback=True)
    tensors, _ = expert_tensors(path)
    config = replace(config, ram=expert_bytes(tensors))
    with StockContext(path, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, 24)
        manager = session.placement
        assert manager is not None and manager.ram is not None
        memory = manager.ram.memory
        memory._stop.set()
        greedy_answer(session, PROMPT, 24)
        slot_bytes = int(memory.cache.groups()[2].max())
        reserve_bytes = 10 * slot_bytes
        free = [reserve_bytes]
        memory.watch = MemoryWatch(
            manager._device, reserve_bytes, read=lambda _device: VramReading(0, free[0], free[0], "test")
        )
        n_used, room = memory.cache.stats().slots_used, list[int]()
        make_room = memory.make_room
        monkeypatch.setattr(memory, "make_room", lambda n_bytes: (room.append(n_bytes), make_room(n_bytes)))
        for _ in range(2):  # the first graph that fails may be one of the cache's own
            if not room:
                with counting.failing(30):
                    tokens = greedy_answer(session, PROMPT, 24)
                assert_greedy(stock, PROMPT, tokens, expected, "during the failure")
        dense = session.model.dense
        assert dense is not None and room[0] > dense.n_bytes
        n_left = memory.cache.info.n_slots
        assert 0 < n_left <= max(3, n_used - room[0] // slot_bytes)
        assert session.placement is manager and manager.ram.cache.info.n_slots == n_left
        free[0] = 1 << 40
        monkeypatch.setattr(memory.watch, "take_spare_bytes", lambda: 1 << 40)
        memory.update()
        assert memory.cache.info.n_slots > n_left, "watched next to the CPU's answers"
        monkeypatch.setattr(memory.cache, "trouble", lambda: (True, 0))
        assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 24), expected, "afterwards")
        assert session.info.notes.count(LOST) == 1


def test_a_gpu_that_fails_next_to_all_experts_in_ram(
    tiny: TinyFactory, own_cache_folder: Path, counting: CountingDevice
) -> None:
    """llama.cpp's GPU, which had no room for experts."""
    path = Path(shutil.copy(tiny("qwen3moe", experts=MANY_EXPERTS), own_cache_folder / "model.gguf"))
    config = tier_config(path, None, device=DEVICE, n_gpu_layers=99, cpu_fallback=True)
    config = replace(config, placement=replace(config.placement, cache_ratio=None, vram_bytes=1))
    with StockContext(path, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, 24)
        manager = session.placement
        assert manager is not None and manager.ram is None and session.info.device == "RAM"
        with counting.failing(30):
            tokens = greedy_answer(session, PROMPT, 24)
        assert_greedy(stock, PROMPT, tokens, expected, "during the failure")
        n_blocks = manager.cache.stats().blocks
        assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 24), expected, "afterwards")
        assert manager.cache.stats().blocks > n_blocks
        stats = session.placement_stats()
        assert stats is not None and not stats.lost


def test_on_by_itself_only_where_the_host_part_does_not_fit(
    tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch, counting: CountingDevice
) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    tensors, _ = expert_tensors(path)
    config = replace(hybrid_config(path, None, 0.3, device=DEVICE), ram="auto", n_gpu_layers=None)
    reserve_bytes = default_reserve(1 << 40)
    free = SimpleNamespace(available=reserve_bytes + path.stat().st_size - 1, total=1 << 40)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    assert not resolve_device(config).loads_misses, "the dense weights are on the GPU"
    assert resolve_device(replace(config, n_gpu_layers=0)).loads_misses
    free.available = reserve_bytes + expert_bytes(tensors)
    assert resolve_device(config).loads_misses
    assert not resolve_device(replace(config, ram="off")).loads_misses


def test_a_gpu_that_is_not_used(tiny: TinyFactory, tmp_path: Path, counting: CountingDevice) -> None:
    """llama.cpp leaves large batches to a GPU's op offload, which is off: they are computed from RAM all the same."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with three_tiers(path, tmp_path) as (context, cache, ram):
        cache.detach()
        assert_as_mapped(path, context, cache)
        assert ram.stats().blocks_unknown == 0


def test_next_to_whole_layers_on_the_gpu(tiny: TinyFactory, own_cache_folder: Path, counting: CountingDevice) -> None:
    """RAM holds experts of the layers whose experts are in host memory, and no others."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    config = tier_config(path, None, device=DEVICE, n_gpu_layers=99, n_cpu_moe=1)
    with StockContext(path, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, 12)
        assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, 12), expected, "one layer of three")
        manager = session.placement
        assert manager is not None and manager.ram is not None, session.info.notes
        assert manager.ram.cache.stats().pairs > 0
        assert not manager.ram.cache.copy_residency()[1:].any()
