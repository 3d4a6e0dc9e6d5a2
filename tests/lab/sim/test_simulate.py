"""Simulations: every policy runs, figures add up, a seed gives the same events; and the constants behind them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.hub.catalog import load_catalog
from moeedge.lab.sim.execution import CAUSES
from moeedge.lab.sim.model_shape import ModelShape, Routing, builtin_models, entry_of, find_model, pick, read_data
from moeedge.lab.sim.simulate import SimulationConfig, simulate, stock_config, synthetic_trace
from moeedge.lab.sim.step_costs import (
    Framework,
    StepCosts,
    builtin_hardware,
    find_hardware,
    measured_costs,
    program_of,
    roofline_costs,
)
from moeedge.policies.registry import BOUNDS, TABLE
from moeedge.trace.format import Trace
from tests.lab.sim.test_simulate_events import fixed_s

QWEN3 = find_model("qwen3-30b-a3b")
SMALL = ModelShape(
    name="small", n_layers=4, n_expert_layers=4, n_experts=16, k=2, expert_bytes=9.4e6, expert_flops=9.4e6,
    dense_layer_bytes=3.8e7, head_bytes=6e8, draft=QWEN3.draft, routing=QWEN3.routing,
)  # fmt: skip
LINK = 25e9  # bytes/s
RANGE = {"low": 1.0, "chosen": 2.0, "high": 4.0}
CONFIG = SimulationConfig(policy="spac", cache_ratio=0.25, gamma=4)


@pytest.fixture(scope="module")
def texts() -> Trace:
    """Two texts, cut from one."""
    return replace(synthetic_trace(SMALL, 240, seed=0), sequence=np.repeat(np.arange(2, dtype=np.int32), 120))


@pytest.fixture(scope="module")
def costs() -> StepCosts:
    return roofline_costs(find_hardware("rtx4090-pcie4"), SMALL)


@pytest.mark.parametrize("policy", [name for name in TABLE if name not in BOUNDS])
def test_every_policy_runs_and_its_parts_add_up(policy: str, texts: Trace, costs: StepCosts) -> None:
    result = simulate(costs, texts, replace(CONFIG, policy=policy))
    assert sum(result.time.ns[cause] for cause in CAUSES) == result.time.total_ns
    row = result.row(hardware="h", model="m", trace="t")
    parts = ("draft_s", "dense_s", "device_s", "stall_cpu_s", "stall_load_s", "stall_link_s", "host_s")
    assert sum(row[part] for part in parts) == pytest.approx(row["tpot_s"])
    assert row["policy"] == policy and row["tg_ts"] == pytest.approx(1 / row["tpot_s"])
    assert 0 <= row["hit_rate_pairs"] <= 1


@pytest.mark.parametrize("policy", ["spac", "sp-moe", "fate"])
def test_the_same_seed_gives_the_same_events(policy: str, costs: StepCosts) -> None:
    found = []
    for seed in (0, 0, 1):
        text = synthetic_trace(SMALL, 80, seed)
        result = simulate(costs, text, replace(CONFIG, policy=policy, seed=seed))
        found.append(result.row())
    assert found[0] == found[1] != found[2]


def test_a_faster_link_and_a_larger_cache_help(texts: Trace, costs: StepCosts) -> None:
    by_link = [simulate(costs, texts, replace(CONFIG, policy="sp-moe", link_factor=f)).tg_ts for f in (0.25, 1, 4)]
    by_ratio = [simulate(costs, texts, replace(CONFIG, policy="static", cache_ratio=r)).tg_ts for r in (0.1, 0.5, 1)]
    assert by_link == sorted(by_link)
    assert by_ratio == sorted(by_ratio)


def test_llama_cpp_takes_as_long_as_its_bytes(texts: Trace, costs: StepCosts) -> None:
    """Two of four layers on the CPU: k experts each at the machine's speed, and nothing else to wait for."""
    row = simulate(costs, texts, replace(CONFIG, policy="llama-cpp", cache_ratio=0.5)).row()
    hardware = find_hardware("rtx4090-pcie4")
    expected_s = 2 * SMALL.k * SMALL.expert_bytes / hardware.cpu_bytes_per_s
    assert row["stall_cpu_s"] == pytest.approx(expected_s, rel=1e-5)  # times are integers
    assert row["gamma"] == 0  # it has no draft


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bound_has_no_time(bound: str, texts: Trace, costs: StepCosts) -> None:
    with pytest.raises(ValueError, match="replay only"):
        simulate(costs, texts, replace(CONFIG, policy=bound))


def test_calibrated_times_are_taken_as_they_are(costs: StepCosts) -> None:
    again = measured_costs(costs.cost_model(4))
    for name in ("cpu_ns", "device_ns"):
        assert getattr(again, name)[1] == getattr(costs, name)[1]
    assert again.draft_ns == costs.draft_ns
    assert again.transfer_ns == costs.transfer_ns + costs.latency_ns


def unique_experts(ids: NDArray[np.int32], n_tokens: int) -> float:
    """Mean distinct experts per layer over windows of `n_tokens` consecutive tokens of ids [T, n_layers, k]."""
    windows = [ids[start : start + n_tokens] for start in range(0, len(ids) - n_tokens + 1, n_tokens)]
    return float(np.mean([np.unique(window[:, layer]).size for window in windows for layer in range(ids.shape[1])]))


def test_synthetic_routing_has_the_published_numbers_of_distinct_experts() -> None:
    """Qwen3-30B-A3B at k = 6, from the production study: within 5 %."""
    ids = QWEN3.routing.draw(12, 128, 6, 400, np.random.default_rng(3))
    published = {2: 9.72, 4: 15.56, 8: 23.56, 9: 25.13, 16: 33.48}
    for n_tokens, unique in published.items():
        assert unique_experts(ids, n_tokens) == pytest.approx(unique, rel=0.05)


def test_routing_without_memory_follows_the_uniform_formula() -> None:
    routing = Routing(popularity=0, topic=0, topic_tokens=1, phrase=0, phrase_tokens=1)
    ids = routing.draw(8, 64, 4, 400, np.random.default_rng(0))
    assert unique_experts(ids, 9) == pytest.approx(64 * (1 - (1 - 4 / 64) ** 9), rel=0.02)


def test_every_constant_names_its_source() -> None:
    programs = read_data("programs.json")
    for table in (read_data("hardware.json")["hardware"], programs["programs"]):
        for name in table:
            entry = entry_of(table, name)
            assert set(entry) - {"sources"} == set(entry["sources"]), name
    for name, entry in read_data("models.json")["models"].items():
        assert entry["source"], name
    assert set(programs["policies"].values()) | {programs["otherwise"]} == set(programs["programs"])
    assert {"rtx4090-pcie4", "rtx3090", "a100", "h200"} <= set(builtin_hardware())
    assert "qwen3-30b-a3b" in builtin_models()


def test_sizes_follow_from_the_configurations() -> None:
    """SP-MoE, section 2.2: 336, 150 and 16.5 MiB per expert."""
    for name, mib in (("mixtral-8x7b", 336), ("phi-3.5-moe", 150), ("deepseek-v2-lite", 16.5)):
        assert find_model(f"{name}:F16").expert_bytes == mib * 2**20


def test_a_name_means_the_catalog_s_quantization_and_a_suffix_another() -> None:
    catalog = load_catalog()
    for name, shape in builtin_models().items():
        choice = catalog.find(name.partition(":")[0])
        assert find_model(name.upper()) == shape
        assert (shape.quant == choice.variant.quant) == (":" not in name), name
    assert find_model("qwen3-30b-a3b:q4_k_m") == find_model("qwen3-30b-a3b") != find_model("qwen3-30b-a3b:F16")
    for wrong in ("qwen3-30b-a3b:IQ2_M", "qwen3"):
        with pytest.raises(InputError):
            find_model(wrong)


def test_quantized_sizes_add_up_to_the_files_of_the_catalog() -> None:
    catalog = load_catalog()
    for name, shape in builtin_models().items():
        choice = None if shape.quant == "F16" else catalog.find(f"{name.partition(':')[0]}:{shape.quant}")
        if choice is None or choice.entry.shape is None:
            continue
        file_bytes = choice.variant.size_bytes or choice.variant.about_bytes
        weights = shape.n_expert_layers * shape.n_experts * shape.expert_bytes
        weights += shape.n_layers * shape.dense_layer_bytes + 2 * shape.head_bytes  # without vocabulary and biases
        assert weights == pytest.approx(file_bytes, rel=0.02), name


def test_stock_has_its_layers_from_the_first_step_on() -> None:
    """As in long runs of its policy, which uploads them first; these are too short to upload all layers."""
    shape = find_model("qwen3-30b-a3b")
    costs = roofline_costs(find_hardware("rtx4090-pcie4"), shape, program_of("llama-cpp"))
    for ratio, n_whole in ((0.0, 0), (0.3, 14), (1.0, 47)):
        config = stock_config(SimulationConfig(policy="spac", cache_ratio=ratio, gamma=8, seed=3), 48)
        assert (config.gamma, config.n_whole_layers, config.seed) == (0, n_whole, 3)
        short = simulate(costs, synthetic_trace(shape, 24, 3), config)
        full = simulate(costs, synthetic_trace(shape, 128, 3), replace(config, n_whole_layers=0))
        assert short.tg_ts == pytest.approx(full.tg_ts, rel=0.01) if ratio < 1 else short.tg_ts > full.tg_ts


def test_stock_of_a_trace_with_dense_layers_and_weights(texts: Trace, costs: StepCosts) -> None:
    """Whole layers are those with experts; the time is that of the layers, wherever dense ones lie."""
    config = stock_config(replace(CONFIG, cache_ratio=0.5), texts.meta.n_layers)
    ids = np.concatenate([np.full_like(texts.ids[:, :2], texts.sentinel), texts.ids], axis=1)
    weights = np.ones(ids.shape, dtype=np.float16)
    longer = replace(texts, ids=ids, weights=weights, meta=replace(texts.meta, n_layers=ids.shape[1]))
    plain, dense = simulate(costs, texts, config), simulate(costs, longer, config)
    assert dense.n_expert_layers == plain.n_expert_layers
    assert dense.busy_s["cpu"] == pytest.approx(plain.busy_s["cpu"], rel=1e-6)


def test_a_slower_link_takes_less_from_the_cpu() -> None:
    hardware = find_hardware("rtx4090-pcie4")
    slow = replace(hardware, link_bytes_per_s=hardware.link_bytes_per_s / 10)
    shape, program = find_model("qwen3-30b-a3b"), program_of("spac")
    scaled = roofline_costs(hardware, shape, program).with_link(0.1)
    assert scaled.busy_link_factor == pytest.approx(roofline_costs(slow, shape, program).busy_link_factor)


@pytest.mark.parametrize("wrong", [{"cache_ratio": 1.5}, {"gamma": -1}, {"acceptance": 2.0}, {"link_factor": 0.0}])
def test_an_impossible_configuration_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        replace(CONFIG, **wrong)


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


@pytest.mark.parametrize("policy", [name for name in TABLE if name not in BOUNDS])
def test_every_policy_has_a_program(policy: str) -> None:
    fast, chosen, slow = (program_of(policy, side) for side in ("fast", "chosen", "slow"))
    assert fast.schedule_s <= chosen.schedule_s <= slow.schedule_s
    if chosen.handoff is not None:
        assert fixed_s(fast.handoff, LINK) < fixed_s(chosen.handoff, LINK) < fixed_s(slow.handoff, LINK)


def test_planning_costs_time_in_this_engine_alone() -> None:
    assert program_of("hybrimoe").schedule_s > program_of("spac").schedule_s == program_of("lfu").schedule_s > 0
    assert program_of("llama-cpp").schedule_s == program_of("vllm").schedule_s == 0
    hardware = find_hardware("rtx4090-pcie4")
    costs = roofline_costs(hardware, QWEN3, program_of("spac"))
    assert costs.schedule_ns == pytest.approx(program_of("spac").schedule_s * 1e9)
    assert roofline_costs(hardware, QWEN3, Framework()).schedule_ns == 0
