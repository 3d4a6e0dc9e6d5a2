"""Slots in RAM in front of a disk, against times and hits worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeedge.experts import Residency
from moeedge.lab.sim.clock import Clock, Log
from moeedge.lab.sim.execution import CAUSES, Execution
from moeedge.lab.sim.model_shape import find_model
from moeedge.lab.sim.noisy_predictor import NoisyPredictor, PredictorAccuracy
from moeedge.lab.sim.ram_tier import RamSlots, RamTierConfig
from moeedge.lab.sim.simulate import SimulationConfig, simulate, synthetic_trace
from moeedge.lab.sim.step_costs import find_hardware, program_of, roofline_costs
from moeedge.lab.traces.schedule import Batch
from moeedge.policies.base import CacheShape, ExecutionModel, PolicyConfig
from moeedge.policies.lru import Lfu
from tests.lab.sim.test_simulate_events import CPU, DENSE, DEVICE, HEAD, SYNC, Fixed, costs
from tests.support.commands import refused, run_json

LOAD = 2500  # ns


def tier(**changes: float) -> RamTierConfig:
    return RamTierConfig(**({"ratio": 0.5, "disk_bytes_per_s": 1e9, "expert_bytes": float(LOAD)} | changes))  # type: ignore[arg-type]


def batch(*experts: int, prefill: bool = False, is_first: bool = False) -> Batch:
    """A token that uses these experts, or a prompt with an expert for each token, in one layer of four experts."""
    counts = np.bincount(experts, minlength=4)[None].astype(np.int32)
    ids = np.array(experts, dtype=np.int32).reshape((1, -1, 1) if prefill else (1, 1, -1))
    return Batch(ids, counts, None, 0, prefill=prefill, is_first=is_first)


def execute(
    batches: list[Batch], *, n_slots: int = 2, on_device: tuple[int, ...] = (), warm_steps: int = 0
) -> tuple[Execution, dict[str, int]]:
    """The execution, and its nanoseconds by cause that are not 0."""
    shape = CacheShape.uniform(1, 4, 4)

    def slots(clock: Clock, log: Log) -> RamSlots:
        ram = CacheShape.uniform(1, 4, n_slots)
        return RamSlots(clock, log, costs(), ram, Lfu(ram, PolicyConfig()), tier())

    execution = Execution(
        costs(transfer_ns=0, latency_ns=0),
        shape,
        Fixed(shape, [(0, expert) for expert in on_device], ExecutionModel()),
        batches,
        predictor=NoisyPredictor(np.ones((1, 4)), PredictorAccuracy(), 0),
        warm_steps=warm_steps,
        ram=slots,
    )
    time = execution.run()
    assert sum(time.ns[cause] for cause in CAUSES) == time.total_ns
    return execution, {cause: ns for cause, ns in time.ns.items() if ns}


def resident(execution: Execution) -> list[int]:
    assert execution.ram is not None
    return np.flatnonzero(execution.ram.resident[0] == Residency.RESIDENT).tolist()


def test_absent_experts_are_read_one_after_the_other_and_computed_as_they_arrive() -> None:
    """Empty slots: the CPU computes the first expert while the second one is read."""
    execution, ns = execute([batch(0, 1, is_first=True)])
    assert execution.ram is not None
    assert ns == {"dense": DENSE + HEAD, "disk": LOAD + (LOAD - CPU), "cpu": 2 * CPU}
    assert (execution.ram.hits.unique, execution.ram.hits.unique_hit) == (2, 0)
    assert execution.log.busy_ns["disk"] == 2 * LOAD
    assert resident(execution) == [0, 1]


def test_resident_experts_are_computed_meanwhile() -> None:
    execution, ns = execute([batch(0, is_first=True), batch(0, 1)], warm_steps=1)
    assert ns == {"dense": DENSE + HEAD, "cpu": 2 * CPU, "disk": LOAD - CPU}
    assert execution.ram is not None and execution.ram.hits.hit_rate_experts == 0.5
    _, ns = execute([batch(0, is_first=True), batch(0)], warm_steps=1)
    assert ns == {"dense": DENSE + HEAD, "cpu": CPU}


def test_the_expert_with_the_lowest_score_leaves_unless_it_is_in_use() -> None:
    """Expert 0 was used twice, 1 once: 2 takes the slot of 1. In the last step 0 is in use, so 1 takes that of 2."""
    steps = [batch(0, is_first=True), batch(0), batch(1), batch(2)]
    assert resident(execute(steps)[0]) == [0, 2]
    assert resident(execute([*steps, batch(0, 1)])[0]) == [0, 1]
    # three in use and two slots: the third is computed and kept nowhere
    execution, _ = execute([batch(0, 1, 2, is_first=True), batch(0, 1)], warm_steps=1)
    assert execution.ram is not None and execution.ram.hits.unique_hit == 2


def test_a_prompt_loads_what_it_uses_in_no_time() -> None:
    first = batch(3, 3, 1, prefill=True, is_first=True)
    execution, ns = execute([first, batch(1, 3)])
    assert execution.ram is not None and execution.ram.hits.unique_hit == 2
    assert ns == {"dense": DENSE + HEAD, "cpu": 2 * CPU}
    assert resident(execute([first, batch(2, prefill=True)])[0]) == [2, 3], "the scores are those before the prompt"


def test_of_equal_scores_the_one_used_longest_ago_leaves() -> None:
    """Without a step between them, the prompt's experts have no score yet."""
    prompt = batch(3, 1, prefill=True, is_first=True)
    assert resident(execute([prompt, batch(0, 3)])[0]) == [0, 3]


def test_with_experts_on_a_device_the_disk_brings_only_what_the_cpu_computes() -> None:
    """Expert 0 is on the device; the device computes it while the CPU waits for 1."""
    execution, ns = execute([batch(0, is_first=True), batch(0, 1)], on_device=(0,), warm_steps=1)
    assert execution.ram is not None
    assert (execution.ram.hits.unique, execution.ram.hits.unique_hit) == (1, 0)
    assert ns == {"dense": DENSE + HEAD, "device": DEVICE, "disk": LOAD - DEVICE, "cpu": CPU}
    assert SYNC > 0  # of blocks with a part on each side at once, which this is not


def test_policies_that_compute_on_the_device_alone_are_refused() -> None:
    shape = CacheShape.uniform(1, 4, 4)
    ram = CacheShape.uniform(1, 4, 2)
    with pytest.raises(ValueError, match="CPU"):
        Execution(
            costs(),
            shape,
            Fixed(shape, [], ExecutionModel(device_only=True)),
            [],
            predictor=NoisyPredictor(np.ones((1, 4)), PredictorAccuracy(), 0),
            ram=lambda clock, log: RamSlots(clock, log, costs(), ram, Lfu(ram, PolicyConfig()), tier()),
        )


@pytest.mark.parametrize("changes", [{"ratio": 0.0}, {"ratio": 1.1}, {"disk_bytes_per_s": 0.0}, {"latency_s": -1.0}])
def test_impossible_tiers_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        tier(**changes)


def test_loads_bytes_and_time_of_a_model_agree() -> None:
    """Qwen3-30B-A3B on a CPU: the time of the disk follows from the misses, and ends where everything is in RAM."""
    shape = find_model("qwen3-30b-a3b")
    machine = roofline_costs(find_hardware("rtx4090-pcie4:cpu"), shape, program_of("none"))
    trace = synthetic_trace(shape, 64, 1, 0)
    ram = RamTierConfig(ratio=0.4, disk_bytes_per_s=1e9, expert_bytes=shape.expert_bytes)
    config = SimulationConfig(policy="none", cache_ratio=0.0, gamma=0, ram=ram)
    slow = simulate(machine, trace, config)
    row = slow.row()
    assert slow.ram_hits is not None and slow.ram_hits.unique == row["tokens"] * 48 * 8
    n_loads = slow.ram_hits.unique - slow.ram_hits.unique_hit
    assert row["disk_bytes_per_token"] == pytest.approx(n_loads * shape.expert_bytes / row["tokens"])
    assert 0 < row["stall_disk_s"] <= row["disk_bytes_per_token"] / 1e9
    without = simulate(machine, trace, replace(config, ram=None))
    assert slow.tpot_s == pytest.approx(without.tpot_s + row["stall_disk_s"])  # waiting, and the same computing
    fast = simulate(machine, trace, replace(config, ram=replace(ram, disk_bytes_per_s=1e15)))
    assert fast.tpot_s == pytest.approx(without.tpot_s, rel=1e-3)
    assert "ram_ratio" not in without.row()


def test_the_command() -> None:
    cpu = (
        "lab",
        "simulate",
        "--hardware",
        "rtx4090-pcie4:cpu",
        "--cache-ratio",
        "0",
        "--policy",
        "none",
        "--draft-max",
        "0",
    )
    rows = run_json(*cpu, "-n", "24", "--no-ranges", "--ram-ratio", "0.5", "--disk-rate", "1GB/s,4GB/s")
    assert [row["disk_bytes_per_s"] for row in rows] == [1e9, 4e9]
    assert rows[0]["tg_ts"] < rows[1]["tg_ts"]
    assert rows[0]["disk_bytes_per_token"] == rows[1]["disk_bytes_per_token"] > 0
    refused(*cpu, "--ram-ratio", "0.5")
    refused(*cpu, "--ram-ratio", "2", "--disk-rate", "1GB/s")
    refused("lab", "simulate", "--policy", "sp-moe", "-n", "24", "--ram-ratio", "0.5", "--disk-rate", "1GB/s")


def test_a_prompt_that_needs_nearly_all_experts_takes_the_slots_of_passed_layers_first() -> None:
    """Four slots, two experts of each layer in them, those of layer 1 unused since: layer 0 needs its other two."""
    shape = CacheShape.uniform(2, 4, 4)
    slots = RamSlots(Clock(), Log(), costs(), shape, Lfu(shape, PolicyConfig()), tier())
    both = np.array([[1, 1, 0, 0]] * 2, dtype=np.int32)
    ids = np.full((2, 8, 2), -1, dtype=np.int32)
    slots.observe(Batch(ids, both, None, 0, prefill=True, is_first=True))
    slots.observe(Batch(ids, np.array([[9, 9, 0, 0], [0] * 4], dtype=np.int32), None, 0, prefill=False, is_first=False))
    slots.observe(Batch(ids, np.array([[0, 8, 4, 4], [0] * 4], dtype=np.int32), None, 0, prefill=True, is_first=False))
    assert np.argwhere(slots.resident == Residency.RESIDENT).tolist() == [[0, 1], [0, 2], [0, 3], [1, 1]]
