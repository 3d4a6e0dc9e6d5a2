"""The expert cache on the emulated device: slots, their bytes, and how the mover executes a plan."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge import native
from moeedge.errors import BackendError, DeviceError, EngineError, ModelFileError
from moeedge.experts import Residency
from moeedge.native import OffloadScope
from moeedge.native.abi import PrefillPath
from moeedge.native.cache import ExpertCache
from tests.conftest import TinyFactory
from tests.support.experts import (
    NO_PAIRS,
    ExpertFile,
    acquire,
    ask,
    assert_balanced,
    assert_bytes,
    carry_out,
    drain,
    model_experts,
    read,
    release,
    resident,
    write_experts,
)
from tests.support.sensed import sensed_context

OPEN_S = 20.0  # far longer than anything here takes


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + OPEN_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


# slots and bytes


@pytest.mark.parametrize(
    ("arch", "options"),
    [("qwen3moe", {}), ("gpt-oss", {}), ("llama4", {}), ("deepseek2", {"merged": True}), ("llama", {})],
)
def test_slots_hold_the_models_bytes(tiny: TinyFactory, arch: str, options: dict[str, bool]) -> None:
    model = model_experts(tiny(arch, **options))
    with ExpertCache(model.config(1.0)) as cache:
        carry_out(cache, model.everything)
        assert assert_bytes(cache, model) == len(model.everything) == cache.info.n_slots
        assert cache.stats().bytes_moved == sum(tensor.stride * tensor.n_experts for tensor in model.tensors)
        assert cache.info.pool_bytes >= cache.stats().bytes_moved


def test_a_resize_without_memory_leaves_no_slots(experts: ExpertFile, monkeypatch: pytest.MonkeyPatch) -> None:
    open_cache, ratios = ExpertCache._open, []

    def fail_once(cache: ExpertCache) -> None:
        ratios.append(cache._config.ratio)
        if len(ratios) == 1:
            raise EngineError("There is no memory.")
        open_cache(cache)

    with ExpertCache(dataclasses.replace(experts.config(0.5), n_stage=2)) as cache:
        carry_out(cache, [(0, 0)])
        monkeypatch.setattr(ExpertCache, "_open", fail_once)
        cache.resize(0.25)
        assert ratios == [0.25, 0.0]
        assert (cache.info.n_slots, cache.info.n_stage, cache.stats().uploads) == (0, 0, 1)


@pytest.mark.parametrize(("ratio", "n_slots"), [(0.0, 0), (0.001, 1), (0.17, 5), (0.5, 16), (1.0, 32)])
def test_capacity_is_the_requested_share(experts: ExpertFile, ratio: float, n_slots: int) -> None:
    with ExpertCache(experts.config(ratio)) as cache:
        layer_group, capacity, expert_bytes = cache.groups()
        assert layer_group.tolist() == [0] * 4
        assert capacity.tolist() == [n_slots]
        assert expert_bytes.tolist() == [experts.expert_bytes]
        assert (cache.info.n_slots, cache.info.slots_wanted) == (n_slots, n_slots)
        carry_out(cache, experts.everything)
        assert len(resident(cache)) == n_slots
        assert_balanced(cache)


def test_layers_of_different_shape_have_separate_pools(tmp_path: Path) -> None:
    mixed = write_experts(tmp_path / "mixed.bin", n_layers=6, wide_layers=(1, 4), dense_layers=(0,))
    with ExpertCache(mixed.config(0.5)) as cache:
        layer_group, capacity, expert_bytes = cache.groups()
        assert layer_group.tolist() == [-1, 0, 1, 1, 0, 1]
        assert capacity.tolist() == [8, 12]
        assert expert_bytes[0] == 2 * expert_bytes[1]
        carry_out(cache, mixed.everything)
        assert assert_bytes(cache, mixed) == 20
        found = resident(cache)
        assert sum(layer in (1, 4) for layer, _ in found) == 8, "slots of one group are not another's"
        with pytest.raises(BackendError, match="expert that the model does not have"):
            ask(cache, [(0, 0)])


@pytest.mark.parametrize("ratio", [0.25, 0.4, 1.0])
def test_layers_have_pools_of_their_own_where_one_would_be_too_large(ratio: float, tmp_path: Path) -> None:
    mixed = write_experts(tmp_path / "mixed.bin", n_layers=12, wide_layers=(1, 4), dense_layers=(0,))
    slot_bytes = mixed.tensors[3].stride  # of the largest role of an expert that is not wide
    with (
        ExpertCache(mixed.config(ratio)) as plain,
        ExpertCache(mixed.config(ratio, n_stage=4, pool_bytes_max=16 * slot_bytes)) as cut,
    ):
        layer_group, capacity, expert_bytes = cut.groups()
        assert cut.info.n_slots == cut.info.slots_wanted == plain.info.n_slots
        assert cut.info.n_groups == plain.info.n_groups + {0.25: 1, 0.4: 1, 1.0: 5}[ratio]
        narrow = [group for layer, group in enumerate(layer_group.tolist()) if layer not in (0, 1, 4)]
        assert narrow == sorted(narrow), "a pool has neighbouring layers"
        for group in set(narrow):
            n_experts = narrow.count(group) * 8
            assert capacity[group] <= 16
            assert abs(capacity[group] - ratio * n_experts) <= 1
        assert (expert_bytes[narrow] * 2 == expert_bytes[layer_group[1]]).all()
        staging_bytes = 4 * int(expert_bytes[narrow[0]] + expert_bytes[layer_group[1]])
        assert cut.info.pool_bytes == plain.info.pool_bytes + staging_bytes
        carry_out(cut, mixed.everything)
        assert assert_bytes(cut, mixed) == cut.info.n_slots


def test_a_pool_of_one_layer_takes_the_slots_that_fit(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "model.bin", n_layers=3)
    slot_bytes = model.tensors[0].stride
    with ExpertCache(model.config(1.0, n_stage=8, pool_bytes_max=5 * slot_bytes)) as cache:
        assert cache.groups()[1].tolist() == [5, 5, 5]
        assert cache.info.slots_wanted == 24
        assert cache.info.n_stage == 5


# how the mover executes a plan


def test_uploads_go_by_priority_then_layer_then_given_order(experts: ExpertFile) -> None:
    # 5 slots: the experts that get one show the order
    uploads = [(3, 7), (2, 2), (2, 1), (0, 0), (0, 5), (1, 1), (3, 3), (1, 6)]
    priority = [4, 1, 1, 2, 1, 2, 2, 1]
    with ExpertCache(experts.config(5 / 32)) as cache:
        carry_out(cache, uploads, priority=priority)
        assert resident(cache) == {(3, 7), (0, 0), (1, 1), (3, 3), (0, 5)}
        assert cache.stats().queued == 3
    with ExpertCache(experts.config(1 / 32)) as cache:
        carry_out(cache, [(2, 2), (2, 1)])
        assert resident(cache) == {(2, 2)}


def test_only_the_lowest_utility_is_evicted(experts: ExpertFile) -> None:
    old = list(product(range(2), range(4)))
    with ExpertCache(experts.config(0.25)) as cache:
        carry_out(cache, old)
        # victims out of order, one of them named twice, one that is not resident, one without a number
        victims = [(1, 0), (0, 3), (0, 1), (0, 3), (3, 3), (1, 2)]
        carry_out(cache, [(2, 0), (2, 1)], victims=victims, utility=[3, 1, 2, 0, -1, float("nan")])
        assert resident(cache) == set(old) - {(0, 3), (0, 1)} | {(2, 0), (2, 1)}
        # one victim for two uploads: the second has to wait
        carry_out(cache, [(3, 0), (3, 1)], victims=[(1, 0)])
        assert (3, 0) in resident(cache)
        assert (3, 1) not in resident(cache)
        assert cache.stats().queued == 1
        assert cache.stats().evictions == 3
        assert_balanced(cache)
        assert_bytes(cache, experts)


def test_resident_experts_are_not_uploaded_again(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(0.5)) as cache:
        for _ in range(3):
            carry_out(cache, [(0, 0), (1, 1), (0, 0)])
        assert cache.stats().uploads == 2
        assert cache.stats().cancelled == 0


def test_pinned_experts_stay_until_they_are_released(experts: ExpertFile) -> None:
    old = [(0, expert) for expert in range(4)]
    with ExpertCache(experts.config(4 / 32)) as cache:
        carry_out(cache, old)
        slots = acquire(cache, 0, [0, 7, 1, 1, 2])
        assert slots[1] == -1
        assert slots[2] == slots[3]
        assert len(set(slots[[0, 2, 4]].tolist())) == 3
        assert cache.stats().pinned == 4
        ask(cache, [(1, expert) for expert in range(4)], victims=old)
        wait_for(lambda: (1, 0) in resident(cache))
        assert not cache.drain(0.05), "three uploads wait for pinned slots"
        assert resident(cache) == {(0, 0), (0, 1), (0, 2), (1, 0)}
        release(cache, 0, slots[[1, 2]])  # expert 1 is pinned once more
        assert not cache.drain(0.05)
        assert (0, 1) in resident(cache)
        release(cache, 0, slots[[0, 3]])
        wait_for(lambda: {(1, 1), (1, 2)} <= resident(cache))
        assert (0, 2) in resident(cache)
        release(cache, 0, slots[4:])
        drain(cache)
        assert resident(cache) == {(1, expert) for expert in range(4)}
        assert cache.stats().pinned == 0
        assert_balanced(cache)


@pytest.mark.flaky(reruns=2)
def test_a_new_plan_replaces_the_queue(experts: ExpertFile) -> None:
    rate = experts.expert_bytes / 0.2
    with ExpertCache(experts.config(1.0, link_bytes_per_s=rate)) as cache:
        ask(cache, [(0, expert) for expert in range(6)])
        wait_for(lambda: cache.stats().in_flight == 1)
        assert cache.residency()[0, 0] == Residency.IN_FLIGHT
        ask(cache, [(0, 1), (3, 3)], priority=[1, 2])
        stats = cache.stats()
        assert stats.cancelled == 4, "five were queued, and one of them is asked for again"
        assert stats.queued == 2
        drain(cache)
        assert resident(cache) == {(0, 0), (3, 3), (0, 1)}
        ask(cache, [(1, expert) for expert in range(8)])
        wait_for(lambda: cache.stats().in_flight == 1)
        begin_s = time.monotonic()
        carry_out(cache, [])
        assert time.monotonic() - begin_s < 0.6, "cancelled uploads take no time"
        assert cache.stats().cancelled == 11
        ask(cache, [(2, expert) for expert in range(8)])
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < 0.6, "closing does not wait for the queue"


@pytest.mark.flaky(reruns=2)
def test_a_paced_link_keeps_its_rate(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "large.bin", width=96)
    rate = 40e6
    with ExpertCache(model.config(1.0, link_bytes_per_s=rate)) as cache:
        begin_s = time.monotonic()
        carry_out(cache, model.everything)
        duration_s = time.monotonic() - begin_s
        stats = cache.stats()
    assert stats.uploads == 32
    assert duration_s >= 0.9 * stats.bytes_moved / rate
    assert duration_s <= 3 * stats.bytes_moved / rate, "and is not much slower"
    assert stats.transfer_s == pytest.approx(duration_s, rel=0.2)


def test_groups_share_one_queue(tmp_path: Path) -> None:
    """A group without room does not hold up another; otherwise the order holds across groups."""
    mixed = write_experts(tmp_path / "mixed.bin", wide_layers=(1, 3))
    with ExpertCache(mixed.config(2 / 16, link_bytes_per_s=200e3)) as cache:
        ask(cache, [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)], priority=[1, 1, 2, 2, 2])
        seen: list[tuple[int, int]] = []
        while len(seen) < 4:
            seen += sorted(resident(cache) - set(seen))
        assert seen == [(0, 1), (2, 0), (3, 0), (1, 0)]
        assert cache.stats().queued == 1


# emptying, failing, closing


def test_clear_gives_up_and_leaves_the_slots_as_they_are(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(0.25)) as cache:
        carry_out(cache, [(0, 0), (1, 1)])
        slots = acquire(cache, 0, [0])
        with pytest.raises(BackendError):
            cache.clear(0.01)
        assert resident(cache) == {(0, 0), (1, 1)}
        carry_out(cache, [(2, 2)])
        assert (2, 2) in resident(cache), "plans go on"
        release(cache, 0, slots)
        cache.clear(0.01)
        assert resident(cache) == set()


def test_clear_waits_for_pins_and_empties_everything(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(0.5)) as cache:
        carry_out(cache, [(0, expert) for expert in range(8)])
        slots = acquire(cache, 0, [3])
        clearing = threading.Thread(target=cache.clear)
        clearing.start()
        time.sleep(0.05)
        assert clearing.is_alive()
        release(cache, 0, slots)
        clearing.join(OPEN_S)
        assert not clearing.is_alive()
        assert not cache.residency().any()
        assert cache.stats().slots_used == 0
        assert cache.stats().evictions == 8
        carry_out(cache, experts.everything)
        assert assert_bytes(cache, experts) == 16, "all slots are in use again"


def test_an_expert_that_cannot_be_read_stays_absent(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "short.bin")
    with ExpertCache(model.config(1.0)) as cache:
        with model.path.open("r+b") as file:
            file.truncate(model.tensors[-1].offset)
        carry_out(cache, [(0, 0), (3, 0), (3, 1), (1, 1)])
        assert resident(cache) == {(0, 0), (1, 1)}
        assert cache.stats().failed == 2
        assert_balanced(cache)
        carry_out(cache, list(product(range(3), range(8))))
        assert assert_bytes(cache, model) == 24


def test_a_closed_cache_raises(experts: ExpertFile) -> None:
    cache = ExpertCache(experts.config(0.5))
    cache.close()
    cache.close()
    for refused in (cache.residency, cache.stats, cache.clear, cache.groups, cache.blocks, lambda: cache.drain(1)):
        with pytest.raises(BackendError, match="closed"):
            refused()


def test_closing_detaches(tiny_moe: Path) -> None:
    config = model_experts(tiny_moe).config(0.5)
    context, sensor = sensed_context(tiny_moe, OffloadScope.ALL)
    with context:
        with ExpertCache(config) as cache:
            cache.attach(sensor)
            carry_out(cache, list(product(range(3), range(8))))
            context.decode([1, 2, 3])
            records = cache.blocks()
            assert records["layer"].tolist() == [0, 1, 2]
            assert (records["pairs_cpu"] + records["pairs_device"]).tolist() == [12, 12, 12]
            assert len(cache.blocks()) == 0
            assert cache.stats().blocks == 3
            assert cache.stats().pinned == 0
        context.decode([4])
        second = ExpertCache(config)
        second.attach(sensor)
    second.detach()  # of a context that is closed
    second.close()


@pytest.mark.parametrize("n_tokens", [1, 32, 48, 64])
def test_blocks_without_resident_experts_are_misses(tiny_moe: Path, n_tokens: int) -> None:
    context, sensor = sensed_context(tiny_moe, OffloadScope.ALL, n_ubatch=64)
    with context, ExpertCache(model_experts(tiny_moe).config(0.5)) as cache:
        cache.attach(sensor)
        context.decode(list(range(n_tokens)), every=True)
        stats = cache.stats()
        assert (stats.blocks, stats.pairs, stats.pairs_hit) == (3, 3 * 4 * n_tokens, 0)


# bad input


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": "CUDA7"}, DeviceError, "CUDA7.*emulated"),
        ({"device": "CPU"}, DeviceError, "device CPU"),
        ({"ratio": 1.5}, BackendError, "ratio from 0 to 1"),
        ({"ratio": float("nan")}, BackendError, "ratio from 0 to 1"),
        ({"tensors": []}, BackendError, "expert tensors"),
        ({"n_experts": 9}, BackendError, "number of experts"),
        ({"n_layers": 3}, BackendError, r"blk\.3\.ffn_up_exps\.weight cannot be cached"),
        ({"files": [Path("absent.bin")]}, ModelFileError, "absent.bin cannot be opened"),
        ({"files": [Path(__file__)]}, ModelFileError, "ends before the experts of layer"),
    ],
)
def test_bad_configurations(experts: ExpertFile, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ExpertCache(dataclasses.replace(experts.config(0.5), **changes))


def test_bad_plans_change_nothing(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(0.5)) as cache:
        for uploads, victims in (([(4, 0)], []), ([(0, 8)], []), ([(-1, 0)], []), ([], [(0, -1)])):
            with pytest.raises(BackendError, match="does not have"):
                ask(cache, uploads, victims=victims)
        with pytest.raises(ValueError, match="one priority per upload"):
            cache.plan(NO_PAIRS, np.zeros(1, np.uint8), NO_PAIRS, np.zeros(0, np.float32))
        with pytest.raises(BackendError, match="not resident"):
            read(cache, 0, 0, "ffn_up_exps.weight", 4096)
        with pytest.raises(BackendError, match="prefill path"):
            cache.set_prefill(PrefillPath.RESIDENT, 0)
        assert native.load().moeedge_cache_set_prefill(cache._cache, 3, 65) < 0
        assert cache.stats().plans == 0
        assert acquire(cache, 9, [0, 1]).tolist() == [-1, -1]
        assert acquire(cache, 0, [-1, 8]).tolist() == [-1, -1]


SHORT_OF_MEMORY = """\
import resource, sys
from pathlib import Path
from moeedge import native
from moeedge.native.cache import ExpertCache
from tests.support.experts import ask, assert_bytes, write_experts

native.attach()
folder = Path(sys.argv[1])
model = write_experts(folder / "many.bin", n_layers=2, n_experts=512, width=512, sparse=True)  # 2 GiB of experts
huge = write_experts(folder / "huge.bin", n_layers=1, n_experts=1, width=1 << 15, sparse=True)  # 8 GiB
used_kib = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
limit = used_kib * 1024 + (400 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with ExpertCache(model.config(1.0)) as cache:
    assert 20 < cache.info.n_slots < 200 and cache.info.slots_wanted == 1024, cache.info
    assert cache.info.pool_bytes < 400 << 20
    ask(cache, model.everything)
    assert cache.drain(60)
    assert assert_bytes(cache, model) == cache.info.n_slots
try:
    ExpertCache(huge.config(1.0))
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits and reads the address space as Linux does")
def test_short_memory_gives_fewer_slots_or_an_error(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("The device emulated has no memory for even one expert")
