"""The plan of a model larger than the memory, against figures computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moeedge.planning.beyond_ram import (
    Disk,
    RamTierRequest,
    StepRouting,
    assumed_routing,
    kept_routing,
    plan_ram_tier,
)
from moeedge.planning.memory_map import MemoryItem, MemoryMap, MemoryPool
from moeedge.policies.base import Observation, PolicyConfig
from moeedge.policies.registry import make_policy
from moeedge.scheduler.kept_activations import KeptActivations
from moeedge.scheduler.sizing import CacheBudget
from moeedge.sim.batches import cache_shape
from moeedge.sim.model_shape import find_model
from moeedge.sim.policy_replay import PolicyReplay
from moeedge.sim.ram_hits import replay_ram_hits
from moeedge.sim.simulate import synthetic_trace
from moeedge.trace.schedule import cut_schedule
from tests.support.commands import refused, run, run_json
from tests.support.published import write_qwen3_30b_a3b

GIB = 2**30
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


def plan(free_bytes: int, *, draft_bytes: int = 0, request: RamTierRequest | None = None):  # type: ignore[no-untyped-def]
    return plan_ram_tier(
        memory(free_bytes),
        request or RamTierRequest((Disk(1e9, "given"),)),
        n_expert_layers=4,
        n_experts=16,
        n_expert_used=2,
        expert_bytes=EXPERTS,
        draft_bytes=draft_bytes,
    )


def test_slots_bytes_and_limit_by_hand() -> None:
    """8 GiB free: 2.75 GiB for the rest, 256 MiB reserve, so 5 GiB or 20 of 64 experts; a step uses 8 experts."""

    def forecast(ratios: Sequence[float]) -> list[StepRouting]:
        return [StepRouting(2.5, 2.0, 0.75 if ratio < 0.5 else 1.0) for ratio in ratios]

    request = RamTierRequest((Disk(1e9, "measured"),), drafted=forecast, n_drafts=3, source="trace", trace="trace.npz")
    tier = plan(8 * GIB, draft_bytes=GIB, request=request)
    row = tier.machine
    assert (row.n_slots, row.ratio, row.slots_bytes) == (20, 20 / 64, 5 * GIB)
    read_bytes = 8 * GIB / 4 * 0.25
    assert row.drafted.bytes_per_token == pytest.approx(read_bytes / 2.5)
    other_s = (2 * GIB + 3 * GIB) / 20e9
    assert row.drafted.limit_ts == pytest.approx(2.5 / (other_s + read_bytes / 1e9))
    assert (row.drafted.limited_by, row.disk.source) == ("disk", "measured")
    assert (tier.source, tier.tokens_per_step, tier.n_drafts) == ("trace", 2.5, 3)
    # one token at a time, with the assumed hits and no draft model
    (plain,) = assumed_routing(2)([20 / 64])
    plain_bytes = 2 * GIB * (1 - plain.hit_rate_experts)
    assert row.plain.bytes_per_token == pytest.approx(plain_bytes)
    assert row.plain.limit_ts == pytest.approx(1 / (2 * GIB / 20e9 + plain_bytes / 1e9))
    assert row.limit_ts == row.drafted.limit_ts
    # with 12 GiB, of which 384 MiB are reserve, 35 of 64 are in RAM: nothing is read
    more = tier.rows[1]
    assert (more.ram_free_bytes, more.n_slots, more.drafted.bytes_per_token) == (12 * GIB, 35, 0.0)
    assert more.drafted.limit_ts == pytest.approx(2.5 / (other_s + 2 * GIB / 20e9))
    assert more.drafted.limited_by == "memory"


def test_sizes_that_were_asked_for() -> None:
    tier = plan(12 * GIB, request=RamTierRequest((Disk(1e9, "given"),), sizes=(12 * GIB, 64 * GIB, 10 * GIB)))
    assert [row.ram_free_bytes // GIB for row in tier.rows] == [12, 64, 10]


def test_hits_by_what_earlier_runs_used() -> None:
    counts = np.zeros((3, 4))  # the first layer has no experts
    counts[1:] = [[8, 4, 2, 2], [10, 6, 0, 0]]
    steps = kept_routing(counts, 2)((0.0, 0.25, 0.5, 1.0))
    assert [step.hit_rate_experts for step in steps] == pytest.approx([0, 18 / 32, 28 / 32, 1])
    assert {(step.n_tokens, step.unique) for step in steps} == {(1.0, 2.0)}


def test_rows_end_where_everything_fits() -> None:
    tier = plan(12 * GIB, request=RamTierRequest((Disk(1e9, "given"), Disk(4e9, "given"))))
    sizes = [row.ram_free_bytes // GIB for row in tier.rows]
    assert sizes == [12, 12, 18, 18, 24, 24]  # not 36: 24 GiB hold all experts
    assert tier.rows[-1].ratio == 1.0 and tier.rows[-1].plain.bytes_per_token == 0
    assert tier.rows[1].limit_ts > tier.rows[0].limit_ts
    # one expert per layer takes 1 GiB, next to 2.75 and the reserve
    assert plan(4 * GIB) is not None
    assert plan(4 * GIB - 1) is None


def test_assumed_hits_are_not_above_what_a_replay_gives() -> None:
    """The table against Qwen3-30B-A3B's synthetic routing; it has the lowest of three."""
    trace = synthetic_trace(find_model("qwen3-30b-a3b"), 256, 1, 0)
    ratios = (0.35, 0.5)
    steps = assumed_routing(8)(ratios)
    for assumed, found in zip(steps, replay_ram_hits(trace, ratios, gamma=0), strict=True):
        assert (found.n_tokens, found.unique) == (1.0, 8.0)
        assert assumed.hit_rate_experts - 0.02 < found.hit_rate_experts < assumed.hit_rate_experts + 0.12
    assert [step.hit_rate_experts for step in assumed_routing(8)((0.0, 1.0))] == [0.0, 1.0]


def test_hits_of_a_trace_are_those_of_a_replay() -> None:
    trace = synthetic_trace(find_model("qwen3-30b-a3b"), 64, 2, 0)
    (found,) = replay_ram_hits(trace, (0.3,), gamma=4)
    schedule = cut_schedule(trace, gamma=4, acceptance_chance=0.8)
    shape = cache_shape(trace, 0.3)
    replay = PolicyReplay(make_policy("lfu", shape, PolicyConfig(gamma=4)), shape)
    unique = 0
    for chunk in schedule.chunks():
        replay.run(chunk)
        unique += int(np.count_nonzero(chunk.counts[chunk.counted]))
    assert found.unique == pytest.approx(unique / schedule.n_steps / 48)
    assert found.hit_rate_experts == pytest.approx(replay.stats.hits.hit_rate_experts)
    assert found.n_tokens == pytest.approx(schedule.tokens_per_step) and found.n_tokens > 2


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_30b_a3b(tmp_path_factory.mktemp("header") / "30b.gguf")


def test_the_command(header: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path))
    small = ("plan", "-m", header, "-dev", "none", "--ram", "10GiB", "-c", "4096")
    assumed = run_json(*small)["ram_tier"]
    first = assumed["rows"][0]
    assert (first["disk_source"], first["disk_bytes_per_s"], assumed["trace"]) == ("assumed", 1e9, None)
    assert 0.3 < first["ratio"] < 0.6 and 0 < first["limit_ts"] < 10
    trace = tmp_path / "trace.npz"
    synthetic_trace(find_model("qwen3-30b-a3b"), 64, 1, 0).save(trace)
    two = run_json(*small, "--disk-rate", "500MB/s,2GB/s", "--trace", trace, "-md", "ngram")["ram_tier"]
    assert [row["disk_bytes_per_s"] for row in two["rows"][:2]] == [5e8, 2e9]
    assert two["trace"] == "trace.npz" and two["rows"][0]["hit_rate_experts"] != first["hit_rate_experts"]
    assert two["n_drafts"] > 0 and two["rows"][0]["draft_limit_ts"] > 0 and first["draft_limit_ts"] is None
    assert (assumed["hits_source"], two["hits_source"]) == ("assumed", "trace")
    sizes = run_json("plan", "-m", header, "-dev", "none", "--ram", "10GiB,16GiB", "-c", "4096")["ram_tier"]["rows"]
    assert [row["ram_free_bytes"] // GIB for row in sizes] == [10, 16] and sizes[0]["n_slots"] < sizes[1]["n_slots"]
    chosen = run_json(*small[:-2])
    assert (chosen["ram_tier"]["n_ctx"], chosen["plan"]["n_ctx"]) == (8192, 8192), "as in a chat"
    assert "-c 8192" in chosen["command"] and not any("again and again" in note for note in chosen["notes"])
    shown = run(*small)
    assert shown.exit_code == 0 and "limit t/s" in shown.stdout
    assert run_json("plan", "-m", header, "-dev", "none", "--ram", "64GiB")["ram_tier"] is None
    refused(*small, "--disk-rate", "fast")
    refused("plan", "-m", header, "-dev", "none", "--ram", "10GiB,much")
    refused(*small, "--trace", tmp_path / "none.npz")


def test_the_command_after_earlier_runs(header: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path))
    kept = KeptActivations.open(header, 48, 128)
    counts = np.random.default_rng(0).integers(0, 50, (48, 128)).astype(np.uint32)
    kept.add(Observation(counts=counts, n_tokens=300, n_accepted=0))
    kept.save()
    found = run_json("plan", "-m", header, "-dev", "none", "--ram", "10GiB", "-c", "4096")["ram_tier"]
    assert (found["hits_source"], found["n_kept_tokens"]) == ("kept", 300)
    (step,) = kept_routing(counts.astype(float), 8)([found["rows"][0]["ratio"]])
    assert found["rows"][0]["hit_rate_experts"] == pytest.approx(step.hit_rate_experts)


def test_a_trace_of_another_model_is_refused(header: Path, tmp_path: Path) -> None:
    trace = tmp_path / "other.npz"
    synthetic_trace(find_model("mixtral-8x7b"), 32, 1, 0).save(trace)
    refused("plan", "-m", header, "-dev", "none", "--ram", "10GiB", "--trace", trace)
