"""Ranges of constants, and the overheads of programs."""

from __future__ import annotations

import pytest

from moeedge.lab.sim.model_shape import entry_of, find_model, pick, read_data
from moeedge.lab.sim.step_costs import Framework, builtin_hardware, find_hardware, program_of, roofline_costs
from moeedge.policies.registry import BOUNDS, TABLE
from tests.lab.sim.test_handoff import fixed_s

LINK = 25e9  # bytes/s
RANGE = {"low": 1.0, "chosen": 2.0, "high": 4.0}


def test_an_entry_says_what_differs_from_the_one_that_it_is_like() -> None:
    table = {
        "a": {"x": 1, "y": 2, "sources": {"x": "X", "y": "Y"}},
        "b": {"like": "a", "y": 3, "sources": {"y": "Z"}},
        "c": {"like": "b", "x": 4},
    }
    assert entry_of(table, "b") == {"x": 1, "y": 3, "sources": {"x": "X", "y": "Z"}}
    assert entry_of(table, "c") == {"x": 4, "y": 3, "sources": {"x": "X", "y": "Z"}}


def test_a_rate_is_fast_where_it_is_high_and_a_time_where_it_is_low() -> None:
    entry = {"cpu_bytes_per_s": RANGE, "gpu_flops": RANGE, "sync_s": RANGE, "transfer_factor": RANGE, "whole": True}
    assert list(pick(entry, "fast").values()) == [4.0, 4.0, 1.0, 1.0, True]
    assert list(pick(entry, "slow").values()) == [1.0, 1.0, 4.0, 4.0, True]
    assert list(pick(entry, "chosen").values()) == [2.0, 2.0, 2.0, 2.0, True]
    with pytest.raises(ValueError, match="between"):
        pick({"sync_s": {"low": 2, "chosen": 1, "high": 3}}, "fast")


def test_every_constant_of_a_program_names_its_source() -> None:
    data = read_data("programs.json")
    for name in data["programs"]:
        entry = entry_of(data["programs"], name)
        assert set(entry) - {"sources"} == set(entry["sources"]), name
    used = set(data["policies"].values()) | {data["otherwise"]}
    assert used == set(data["programs"])


@pytest.mark.parametrize("policy", [name for name in TABLE if name not in BOUNDS])
def test_every_policy_has_a_program(policy: str) -> None:
    fast, chosen, slow = (program_of(policy, side) for side in ("fast", "chosen", "slow"))  # type: ignore[arg-type]
    assert fast.schedule_s <= chosen.schedule_s <= slow.schedule_s
    if chosen.handoff is not None:
        assert fast.handoff is not None and slow.handoff is not None
        assert fixed_s(fast.handoff, LINK) < fixed_s(chosen.handoff, LINK) < fixed_s(slow.handoff, LINK)


def test_planning_costs_time_in_this_engine_alone() -> None:
    assert program_of("hybrimoe").schedule_s > program_of("spac").schedule_s == program_of("lfu").schedule_s > 0
    assert program_of("llama-cpp").schedule_s == program_of("vllm").schedule_s == 0
    shape, hardware = find_model("qwen3-30b-a3b"), find_hardware("rtx4090-pcie4")
    costs = roofline_costs(hardware, shape, program_of("spac"))
    assert costs.schedule_ns == pytest.approx(program_of("spac").schedule_s * 1e9)
    assert roofline_costs(hardware, shape, Framework()).schedule_ns == 0


def test_the_chosen_constants_of_a_machine_are_between_the_others() -> None:
    fast, chosen, slow = (builtin_hardware(side) for side in ("fast", "chosen", "slow"))  # type: ignore[arg-type]
    for name, machine in chosen.items():
        assert slow[name].link_bytes_per_s <= machine.link_bytes_per_s <= fast[name].link_bytes_per_s
        assert slow[name].sync_s >= machine.sync_s >= fast[name].sync_s
    assert "h200" in chosen
