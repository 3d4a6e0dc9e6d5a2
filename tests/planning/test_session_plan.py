"""The plan of a model larger than the memory, against figures computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moeedge.lab.sim.model_shape import find_model
from moeedge.lab.sim.replay import ReplayArm, ReplayConfig, ReplayInput, replay_arms
from moeedge.lab.sim.simulate import synthetic_trace
from moeedge.lab.traces.schedule import cut_schedule
from moeedge.planning.memory_map import MemoryItem, MemoryMap, MemoryPool
from moeedge.planning.session_plan import Disk, RamTierRequest, assumed_hits, kept_hits, plan_ram_tier
from moeedge.policies.base import Observation
from moeedge.scheduler.ram_tier import KeptActivations
from moeedge.scheduler.sizing import CacheBudget
from tests.support.commands import refused, run, run_json
from tests.support.machine import GIB
from tests.support.published import write_qwen3_30b_a3b

EXPERTS = 16 * GIB  # 4 layers of 16 experts, 256 MiB each


def memory(free_bytes: int) -> MemoryMap:
    lines = (
        MemoryItem("experts", EXPERTS, EXPERTS),
        MemoryItem("dense weights", 2 * GIB, 2 * GIB),
        MemoryItem("KV cache", GIB // 2),
        MemoryItem("compute buffers", GIB // 4),
    )
    ram = MemoryPool("RAM", free_bytes, free_bytes, lines)
    return MemoryMap(4096, GIB // 2, GIB // 4, (ram,), CacheBudget(0.0, 0, 0), 0.0, 0.0, 0, False)


def plan(free_bytes: int, *, request: RamTierRequest | None = None):  # type: ignore[no-untyped-def]
    request = request or RamTierRequest((Disk(1e9, "given"),))
    shape = {"n_expert_layers": 4, "n_experts": 16, "n_expert_used": 2}
    return plan_ram_tier(memory(free_bytes), request, expert_bytes=EXPERTS, **shape)


def test_slots_bytes_and_limit_by_hand() -> None:
    """8 GiB free: 2.75 GiB for the rest, 256 MiB reserve, so 5 GiB or 20 of 64 experts; a step uses 8 experts."""

    def hits(ratios: Sequence[float]) -> np.ndarray:
        return np.where(np.array(ratios) < 0.5, 0.75, 1.0)

    tier = plan(8 * GIB, request=RamTierRequest((Disk(1e9, "measured"),), hits=hits, source="kept"))
    row = tier.machine
    assert (row.n_slots, row.ratio, row.slots_bytes) == (20, 20 / 64, 5 * GIB)
    read_bytes, dense_s = 8 * GIB / 4 * 0.25, 2 * GIB / 20e9
    assert row.bytes_per_token == pytest.approx(read_bytes)
    assert row.limit_ts == pytest.approx(1 / (dense_s + read_bytes / 1e9))
    assert (row.limited_by, row.disk.source, tier.source) == ("disk", "measured", "kept")
    assumed = plan(8 * GIB).machine
    assert assumed.bytes_per_token == pytest.approx(2 * GIB * (1 - assumed_hits([20 / 64])[0]))
    # with 12 GiB, of which 384 MiB are reserve, 35 of 64 are in RAM: nothing is read
    more = tier.rows[1]
    assert (more.ram_free_bytes, more.n_slots, more.bytes_per_token) == (12 * GIB, 35, 0.0)
    assert more.limit_ts == pytest.approx(1 / (dense_s + 2 * GIB / 20e9)) and more.limited_by == "memory"


def test_hits_by_what_earlier_runs_used() -> None:
    counts = np.zeros((3, 4))  # the first layer has no experts
    counts[1:] = [[8, 4, 2, 2], [10, 6, 0, 0]]
    assert kept_hits(counts)((0.0, 0.25, 0.5, 1.0)) == pytest.approx([0, 18 / 32, 28 / 32, 1])


def test_rows_end_where_everything_fits_or_are_those_asked_for() -> None:
    tier = plan(12 * GIB, request=RamTierRequest((Disk(1e9, "given"), Disk(4e9, "given"))))
    sizes = [row.ram_free_bytes // GIB for row in tier.rows]
    assert sizes == [12, 12, 18, 18, 24, 24]  # not 36: 24 GiB hold all experts
    assert tier.rows[-1].ratio == 1.0 and tier.rows[-1].bytes_per_token == 0
    assert tier.rows[1].limit_ts > tier.rows[0].limit_ts
    asked = RamTierRequest((Disk(1e9, "given"),), sizes=(12 * GIB, 64 * GIB, 10 * GIB))
    assert [row.ram_free_bytes // GIB for row in plan(12 * GIB, request=asked).rows] == [12, 64, 10]
    # one expert per layer takes 1 GiB, next to 2.75 and the reserve
    assert plan(4 * GIB) is not None
    assert plan(4 * GIB - 1) is None


def test_assumed_hits_are_not_above_what_a_replay_gives() -> None:
    """The table against Qwen3-30B-A3B's synthetic routing; it has the lowest of three."""
    trace = synthetic_trace(find_model("qwen3-30b-a3b"), 256, 0)
    ratios = (0.35, 0.5)
    schedule = cut_schedule(trace, gamma=0, acceptance_chance=0.8)
    config = ReplayConfig(policies=("lfu",), ratios=ratios)
    replays = replay_arms(ReplayInput(schedule), [ReplayArm("lfu", ratio) for ratio in ratios], config)
    for assumed, found in zip(assumed_hits(ratios), replays, strict=True):
        assert assumed - 0.02 < found.hits.hit_rate_experts < assumed + 0.12
    assert assumed_hits((0.0, 1.0)).tolist() == [0.0, 1.0]


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_30b_a3b(tmp_path_factory.mktemp("header") / "30b.gguf")


@pytest.mark.usefixtures("cache_folder")
def test_the_command(header: Path) -> None:
    small = ("plan", "-m", header, "-dev", "none", "--ram", "10GiB", "-c", "4096")
    assumed = run_json(*small)["ram_tier"]
    first = assumed["rows"][0]
    assert (first["disk_source"], first["disk_bytes_per_s"]) == ("assumed", 1e9)
    assert 0.3 < first["ratio"] < 0.6 and 0 < first["limit_ts"] < 10
    assert assumed["hits_source"] == "assumed"
    chosen = run_json(*small[:-2])
    assert (chosen["ram_tier"]["n_ctx"], chosen["plan"]["n_ctx"]) == (8192, 8192), "as in a chat"
    assert "-c 8192" in chosen["command"] and not any("again and again" in note for note in chosen["notes"])
    shown = run(*small)
    assert shown.exit_code == 0 and "limit t/s" in shown.stdout
    assert run_json("plan", "-m", header, "-dev", "none", "--ram", "64GiB")["ram_tier"] is None
    refused(*small, "--disk-rate", "fast")
    refused("plan", "-m", header, "-dev", "none", "--ram", "10GiB,much")


@pytest.mark.usefixtures("cache_folder")
def test_the_command_after_earlier_runs(header: Path) -> None:
    kept = KeptActivations.open(header, 48, 128)
    counts = np.random.default_rng(0).integers(0, 50, (48, 128)).astype(np.uint32)
    kept.add(Observation(counts=counts, n_tokens=300, n_accepted=0))
    kept.save()
    found = run_json("plan", "-m", header, "-dev", "none", "--ram", "10GiB", "-c", "4096")["ram_tier"]
    assert (found["hits_source"], found["n_kept_tokens"]) == ("kept", 300)
    (hits,) = kept_hits(counts.astype(float))([found["rows"][0]["ratio"]])
    assert found["rows"][0]["hit_rate_experts"] == pytest.approx(hits)
