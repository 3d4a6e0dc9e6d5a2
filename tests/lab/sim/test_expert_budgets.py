"""Expert budgets in the replay: cases counted by hand, the cap, and no change where there is nothing to cap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeedge.lab.sim.expert_budgets import BudgetedTrace, StaticBudget
from moeedge.lab.sim.model_shape import ModelShape
from moeedge.lab.sim.replay import ReplayConfig, ReplayInput, ReplayRow, replay
from moeedge.lab.sim.simulate import Range, SimulationConfig, simulate
from moeedge.lab.sim.step_costs import find_hardware, program_of, roofline_costs
from moeedge.lab.traces.schedule import Batch, cut_schedule
from moeedge.native.abi import Phase
from moeedge.policies.expert_budget import Coverage, ExpertBudget
from moeedge.policies.registry import BOUNDS, POLICIES, SIMULATED
from moeedge.trace.format import Trace
from tests.support.commands import refused, run_json
from tests.support.traces import make_trace, plain_text

ALL = tuple(name for name in POLICIES | SIMULATED if name not in BOUNDS)
FIGURES = {"experts_natural", "experts_kept", "experts_max", "kept_probability", "budget_weights"}


def one_layer(ids: list[list[int]], weights: list[list[float]] | None) -> Trace:
    """A text of one layer with six experts, token after token."""
    trace = plain_text(len(ids), n_layers=1, n_experts=6, n_used=len(ids[0]))
    stated = None if weights is None else np.array(weights, dtype=np.float16)[:, None]
    return replace(trace, ids=np.array(ids, dtype=np.uint8)[:, None], weights=stated)


def verification(trace: Trace) -> Batch:
    """All tokens of the text in one batch."""
    (batch,) = cut_schedule(trace, gamma=trace.n_tokens - 1).batches()
    return batch


IDS, WEIGHTS = [[0, 1], [1, 2], [3, 1]], [[0.75, 0.25], [0.5, 0.25], [0.5, 0.25]]
TWO, THREE = ExpertBudget(budget=2, ranking="router"), ExpertBudget(budget=3, ranking="router")
GAP = [[0, 1], [255, 255], [3, 1]]  # a token that the layer did not record


def test_a_layer_that_uses_fewer_experts_keeps_to_the_budget() -> None:
    """Its ids end in one that says "not recorded"; the result is that of a trace with its own number."""
    narrow = one_layer(IDS, WEIGHTS)
    wide = one_layer([[*ids, 255] for ids in IDS], [[*weights, 0.0] for weights in WEIGHTS])
    assert (narrow.used_per_layer, wide.used_per_layer) == ([2], [2])
    limits = [BudgetedTrace(trace, TWO) for trace in (narrow, wide)]
    one, other = (limit.limited(verification(limit.trace)) for limit in limits)
    assert other.ids[0, :, :2].tolist() == one.ids[0].tolist()
    assert (other.ids[0, :, 2] == -1).all()
    assert limits[0].row() == limits[1].row()


def test_layers_that_did_not_record_the_same_tokens_are_limited_alone() -> None:
    alone = [one_layer(ids, WEIGHTS) for ids in (IDS, GAP)]
    both = replace(plain_text(3, n_layers=2, n_experts=6, n_used=2), **{
        name: np.concatenate([getattr(trace, name) for trace in alone], axis=1) for name in ("ids", "weights")
    })  # fmt: skip
    limited = BudgetedTrace(both, TWO).limited(verification(both)).ids
    expected = [BudgetedTrace(trace, TWO).limited(verification(trace)).ids[0] for trace in alone]
    assert limited.tolist() == [ids.tolist() for ids in expected]


@pytest.mark.parametrize(
    ("ids", "weights", "budget", "expected", "kept_probability"),
    [
        # sums of weights: expert 0 0.75, 1 1.0, 2 0.25, 3 0.5; own experts first, in the router's order
        (IDS, WEIGHTS, TWO, [[0, 1], [1, 0], [1, 0]], 1.75 / 2.5),
        # token 1 loses expert 2 and gets 0, which has more than 3
        (IDS, WEIGHTS, THREE, [[0, 1], [1, 0], [3, 1]], 2.25 / 2.5),
        # a zeroed place names another expert of the shortlist, in its place of the token
        (IDS, WEIGHTS, replace(TWO, coverage="truncation"), [[0, 1], [1, 0], [0, 1]], 1.75 / 2.5),
        # all places count alike: expert 1 is used three times, of the others the lowest number is kept
        (IDS, None, TWO, [[0, 1], [1, 0], [1, 0]], 4 / 6),
        # a static order decides alone
        (IDS, WEIGHTS, StaticBudget(budget=2, order=np.array([[5, 3, 2, 1, 0, 4]], dtype=np.int32)), [[3, 5]] * 3, 0.2),
        # sums: 0 0.75, 1 0.5, 3 0.5
        (GAP, WEIGHTS, TWO, [[0, 1], [-1, -1], [1, 0]], 1.25 / 1.75),
        # shares of a token: 0 0.75, 3 2/3, 1 1/4 + 1/3
        (GAP, WEIGHTS, replace(TWO, ranking="picks"), [[0, 3], [-1, -1], [3, 0]], 1.25 / 1.75),
    ],
)
def test_budgets_by_hand(
    ids: list[list[int]],
    weights: list[list[float]] | None,
    budget: ExpertBudget,
    expected: list[list[int]],
    kept_probability: float,
) -> None:
    limit = BudgetedTrace(one_layer(ids, weights), budget)
    batch = limit.limited(verification(limit.trace))
    assert batch.ids[0].tolist() == expected
    used = [expert for row in expected for expert in row if expert >= 0]
    assert batch.counts[0].tolist() == [used.count(expert) for expert in range(6)]
    n_natural = len({expert for row in ids for expert in row} - {255})
    assert limit.row() == {
        "experts_natural": n_natural,
        "experts_kept": len(set(used)),
        "experts_max": len(set(used)),
        "kept_probability": round(kept_probability, 6),
        "budget_weights": "counts" if weights is None else "weights",
    }


def random_trace(seed: int, *, with_weights: bool = True) -> Trace:
    rows = [(Phase.PREFILL if step < 3 else Phase.DECODE, text, step, True) for text in range(2) for step in range(30)]
    trace = make_trace(rows, n_layers=3, n_experts=12, gamma=0, seed=seed)
    rng = np.random.default_rng(seed)
    weights = np.sort(rng.random(trace.ids.shape), axis=-1)[..., ::-1].astype(np.float16)
    return replace(trace, weights=weights if with_weights else None)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    budget=st.integers(2, 12),
    coverage=st.sampled_from(["substitution", "truncation"]),
    with_weights=st.booleans(),
)
def test_no_layer_exceeds_the_budget(seed: int, budget: int, coverage: Coverage, with_weights: bool) -> None:
    trace = random_trace(seed, with_weights=with_weights)
    limit = BudgetedTrace(trace, ExpertBudget(budget=budget, coverage=coverage))
    for batch in cut_schedule(trace, gamma=5, acceptance_chance=0.7).batches():
        after = limit.limited(batch)
        natural = np.count_nonzero(batch.counts, axis=1)
        if batch.prefill:
            assert after is batch
            continue
        assert (np.count_nonzero(after.counts, axis=1) <= np.minimum(budget, natural)).all()
        assert (after.counts.sum(axis=1) == batch.counts.sum(axis=1)).all()
        assert all(np.unique(token).size == token.size for layer in after.ids for token in layer)
        same = natural <= budget
        assert (after.ids[same] == batch.ids[same]).all()
    assert limit.stats.kept_max <= budget
    assert 0 < limit.row()["kept_probability"] <= 1


def rows_of(
    trace: Trace, policies: tuple[str, ...], budgets: tuple[ExpertBudget | None, ...] | None = None
) -> list[ReplayRow]:
    schedule = cut_schedule(trace, gamma=5, acceptance_chance=0.7)
    return replay(ReplayInput(schedule, budgets=budgets), ReplayConfig(policies=policies, ratios=(0.1, 0.4)))


def test_a_budget_of_all_experts_changes_nothing() -> None:
    trace = random_trace(3)
    plain = rows_of(trace, ALL)
    budgeted = rows_of(trace, ALL, budgets=(ExpertBudget(budget=12),))
    for without, with_all in zip(plain, budgeted, strict=True):
        assert replace(with_all, expert_budget=None) == without
        assert with_all.as_dict()["experts_kept"] == with_all.as_dict()["experts_natural"]
        assert not FIGURES & set(without.as_dict())


def test_budgets_are_rows_beside_policies_and_ratios() -> None:
    trace = random_trace(4)
    budgets = (None, ExpertBudget(budget=6), ExpertBudget(budget=3))
    rows = rows_of(trace, ("lfu", "lru"), budgets=budgets)
    assert len(rows) == 2 * len(budgets) * (2 + len(BOUNDS))
    plain = {(row.policy, row.cache_ratio): row for row in rows_of(trace, ("lfu", "lru"))}
    off = [row for row in rows if row.as_dict()["expert_budget"] is None]
    assert [replace(row, expert_budget=None) for row in off] == list(plain.values())
    figures = [row.as_dict() for row in rows if row.policy == "lfu" and row.cache_ratio == 0.4]
    lfu = {each["expert_budget"]: each for each in figures}
    assert lfu[3]["experts_kept"] == lfu[3]["experts_max"] == 3
    assert lfu[3]["kept_probability"] < lfu[6]["kept_probability"] < lfu[None]["kept_probability"] == 1


SMALL = ModelShape(
    name="small", n_layers=3, n_expert_layers=3, n_experts=12, k=2, expert_bytes=1e6, expert_flops=1e6,
    dense_layer_bytes=1e6, head_bytes=1e6,
)  # fmt: skip


def simulated(policy: str, budget: ExpertBudget | None, *, machine: str = "rtx4090-pcie4", ratio: float = 0.3) -> Range:
    config = SimulationConfig(policy=policy, cache_ratio=ratio, gamma=5, acceptance=0.7, budget=budget)
    result = simulate(roofline_costs(find_hardware(machine), SMALL, program_of(policy)), random_trace(6), config)
    return Range(result, result, result)


@pytest.mark.parametrize("policy", ["lfu", "llama-cpp-sd", "llama-cpp-cache", "sp-moe"])
def test_simulated_with_all_experts_and_with_few(policy: str) -> None:
    plain = simulated(policy, None)
    assert simulated(policy, ExpertBudget(budget=12)).row() == plain.row()
    few = simulated(policy, ExpertBudget(budget=3))
    assert few.chosen.experts["experts_max"] <= 3 < plain.chosen.experts["experts_max"]
    assert few.chosen.tg_ts > plain.chosen.tg_ts


def test_the_cpu_alone_takes_the_bytes_of_the_kept_experts() -> None:
    """All experts are as large as the layer without them: the time is that of the bytes, at the CPU's rate."""
    machine = replace(find_hardware("rtx4090-pcie4:cpu"), layer_overhead_s=0.0, cpu_flops=1e18, gpu_flops=1e18)
    config = SimulationConfig(policy="none", cache_ratio=0, gamma=5, acceptance=0.7, budget=ExpertBudget(budget=3))
    result = simulate(roofline_costs(machine, SMALL, program_of("none")), random_trace(6), config)
    n_bytes = 1e6 * (3 * (1 + result.experts["experts_kept"]) + 1)
    assert result.time.total_ns * 1e-9 / result.time.steps == pytest.approx(n_bytes / machine.cpu_bytes_per_s, rel=1e-4)


def test_commands_take_lists(tmp_path: Path) -> None:
    random_trace(7).save(tmp_path / "t.npz")
    lists = ("--expert-budget", "off,12,8", "--budget-policy", "substitution,truncation")
    replayed = ("lab", "replay", tmp_path / "t.npz", "--policy", "lfu", "--profile-texts", "1")
    rows = run_json(*replayed, *lists, "--budget-ranking", "picks,static")
    labels = dict.fromkeys(row["budget"] for row in rows)
    assert list(labels)[:2] == [None, "budget 12 (lossy)"]
    assert len(labels) == 1 + 2 * 4
    timed = ("lab", "simulate", "--max-steps", "4", "--no-ranges", "--policy", "lfu")
    rows = run_json(*timed, *lists, "--rejected-token-model", "optimistic")
    assert [row["policy"] for row in rows] == ["llama-cpp", *["lfu"] * 5]
    assert {row["lossy"] for row in rows} == {False, True}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--expert-budget", "1"),  # below k
        ("--expert-budget", "auto"),
        ("--expert-budget", "4", "--budget-ranking", "oracle"),
        ("--expert-budget", "4", "--budget-ranking", "static", "--profile-texts", "0"),
        ("--budget-policy", "truncation"),
        ("--expert-budget", "4", "--budget-prefer-resident", "2"),
        ("--expert-budget", "4", "--curve"),
        ("--expert-budget", "4", "--budget-layers", "fitted"),
    ],
)
def test_bad_budgets_are_input_errors(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    random_trace(7).save(tmp_path / "t.npz")
    assert refused("lab", "replay", tmp_path / "t.npz", "--policy", "lfu", *arguments)


def test_a_machine_without_gpu_caches_nothing() -> None:
    assert refused("lab", "simulate", "--hardware", "h200:cpu")
