"""Expert budgets in the replay: cases counted by hand, the cap, and no change where there is nothing to cap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeedge.errors import InputError
from moeedge.lab.sim.expert_budgets import BudgetedTrace, StaticBudget
from moeedge.lab.sim.model_shape import ModelShape
from moeedge.lab.sim.replay import ReplayConfig, ReplayRow, replay
from moeedge.lab.sim.simulate import Range, SimulationConfig, simulate
from moeedge.lab.sim.step_costs import find_hardware, program_of, roofline_costs
from moeedge.lab.traces.schedule import Batch, cut_schedule
from moeedge.native.abi import Phase
from moeedge.policies.expert_budget import Coverage, ExpertBudget
from moeedge.policies.registry import BOUNDS, POLICIES, SIMULATED
from moeedge.trace.format import Trace, TraceMeta
from tests.support.commands import refused, run_json
from tests.support.traces import make_trace

ALL = tuple(name for name in POLICIES | SIMULATED if name not in BOUNDS)
FIGURES = {"experts_natural", "experts_kept", "experts_max", "kept_probability", "budget_weights"}


def one_layer(ids: list[list[int]], weights: list[list[float]] | None, n_experts: int = 6) -> Trace:
    """A text of one layer, token after token."""
    n = len(ids)
    return Trace(
        meta=TraceMeta(model="small", n_layers=1, n_experts=n_experts, n_expert_used=len(ids[0])),
        ids=np.array(ids, dtype=np.uint8)[:, None],
        phase=np.full(n, Phase.DECODE, dtype=np.uint8),
        sequence=np.zeros(n, dtype=np.int32),
        step=np.arange(n, dtype=np.int32),
        accepted=np.ones(n, dtype=np.bool_),
        token=np.full(n, -1, dtype=np.int32),
        position=np.arange(n, dtype=np.int32),
        weights=None if weights is None else np.array(weights, dtype=np.float16)[:, None],
    )


def verification(trace: Trace) -> Batch:
    """All tokens of the text in one batch."""
    (batch,) = cut_schedule(trace, gamma=trace.n_tokens - 1).batches()
    return batch


IDS, WEIGHTS = [[0, 1], [1, 2], [3, 1]], [[0.75, 0.25], [0.5, 0.25], [0.5, 0.25]]


def test_a_layer_that_uses_fewer_experts_keeps_to_the_budget() -> None:
    """Its ids end in one that says "not recorded"; the result is that of a trace with its own number."""
    narrow = one_layer(IDS, WEIGHTS)
    wide = replace(
        one_layer([[*ids, 255] for ids in IDS], [[*weights, 0.0] for weights in WEIGHTS]),
        meta=replace(narrow.meta, n_expert_used=3),
    )
    assert (narrow.used_per_layer, wide.used_per_layer) == ([2], [2])
    limits = [BudgetedTrace(trace, ExpertBudget(budget=2, ranking="router")) for trace in (narrow, wide)]
    one, other = (limit.limited(verification(limit.trace)) for limit in limits)
    assert other.ids[0, :, :2].tolist() == one.ids[0].tolist()
    assert (other.ids[0, :, 2] == -1).all()
    assert limits[0].row() == limits[1].row()


def test_the_shortlist_has_the_largest_sums_of_weights() -> None:
    """Sums: expert 0 0.75, 1 1.0, 2 0.25, 3 0.5; two are kept: 0 and 1, with 1.75 of 2.5."""
    limit = BudgetedTrace(one_layer(IDS, WEIGHTS), ExpertBudget(budget=2, ranking="router"))
    batch = limit.limited(verification(limit.trace))
    assert batch.ids[0].tolist() == [[0, 1], [1, 0], [1, 0]]  # own experts first, in the router's order
    assert batch.counts[0].tolist() == [3, 3, 0, 0, 0, 0]
    assert limit.row() == {
        "experts_natural": 4.0,
        "experts_kept": 2.0,
        "experts_max": 2,
        "kept_probability": 0.7,
        "budget_weights": "weights",
    }


def test_without_weights_all_places_count_alike() -> None:
    """Expert 1 is used three times, the others once: of them the lowest number is kept."""
    limit = BudgetedTrace(one_layer(IDS, None), ExpertBudget(budget=2, ranking="router"))
    assert limit.limited(verification(limit.trace)).counts[0].tolist() == [3, 3, 0, 0, 0, 0]
    assert limit.row()["kept_probability"] == round(4 / 6, 6)
    assert limit.source == "counts"


def test_a_replaced_expert_is_the_best_of_the_batch() -> None:
    """Sums: 0 0.75, 1 1.0, 2 0.25, 3 0.5; kept: 0, 1, 3. Token 1 loses expert 2 and gets 0, which has more than 3."""
    limit = BudgetedTrace(one_layer(IDS, WEIGHTS), ExpertBudget(budget=3, ranking="router"))
    assert limit.limited(verification(limit.trace)).ids[0].tolist() == [[0, 1], [1, 0], [3, 1]]


def test_truncation_computes_as_many_pairs() -> None:
    """A zeroed place names another expert of the shortlist, in its place of the token."""
    limit = BudgetedTrace(one_layer(IDS, WEIGHTS), ExpertBudget(budget=2, ranking="router", coverage="truncation"))
    assert limit.limited(verification(limit.trace)).ids[0].tolist() == [[0, 1], [1, 0], [0, 1]]


def test_a_static_order_decides_alone() -> None:
    order = np.array([[5, 3, 2, 1, 0, 4]], dtype=np.int32)
    limit = BudgetedTrace(one_layer(IDS, WEIGHTS), StaticBudget(budget=2, order=order))
    batch = limit.limited(verification(limit.trace))
    assert batch.ids[0].tolist() == [[3, 5], [3, 5], [3, 5]]
    assert limit.row()["kept_probability"] == 0.2


def test_missing_tokens_stay_missing() -> None:
    """A token that a layer did not record takes no part; sums: 0 0.75, 1 0.5, 3 0.5."""
    trace = one_layer([[0, 1], [255, 255], [3, 1]], WEIGHTS)
    batch = BudgetedTrace(trace, ExpertBudget(budget=2, ranking="router")).limited(verification(trace))
    assert batch.ids[0].tolist() == [[0, 1], [-1, -1], [1, 0]]
    assert batch.counts[0].tolist() == [2, 2, 0, 0, 0, 0]


def test_picks_are_shares_of_a_token() -> None:
    """The same trace, shares: 0 0.75, 3 2/3, 1 1/4 + 1/3."""
    trace = one_layer([[0, 1], [255, 255], [3, 1]], WEIGHTS)
    batch = BudgetedTrace(trace, ExpertBudget(budget=2, ranking="picks")).limited(verification(trace))
    assert batch.counts[0].tolist() == [2, 0, 0, 2, 0, 0]


def test_budgets_that_suit_no_trace_are_refused() -> None:
    trace = one_layer(IDS, WEIGHTS)
    with pytest.raises(InputError):
        BudgetedTrace(trace, ExpertBudget(budget=1, ranking="router"))


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


def rows_of(trace: Trace, **options: object) -> list[ReplayRow]:
    schedule = cut_schedule(trace, gamma=5, acceptance_chance=0.7)
    return replay(schedule, ReplayConfig(ratios=(0.1, 0.4), **options))  # type: ignore[arg-type]


def test_a_budget_of_all_experts_changes_nothing() -> None:
    trace = random_trace(3)
    plain = rows_of(trace, policies=ALL)
    budgeted = rows_of(trace, policies=ALL, budgets=(ExpertBudget(budget=12),))
    for without, with_all in zip(plain, budgeted, strict=True):
        assert replace(with_all, expert_budget=None) == without
        assert with_all.as_dict()["experts_kept"] == with_all.as_dict()["experts_natural"]
        assert not FIGURES & set(without.as_dict())


def test_budgets_are_rows_beside_policies_and_ratios() -> None:
    trace = random_trace(4)
    budgets = (None, ExpertBudget(budget=6), ExpertBudget(budget=3))
    rows = rows_of(trace, policies=("lfu", "lru"), budgets=budgets)
    assert len(rows) == 2 * len(budgets) * (2 + len(BOUNDS))
    plain = {(row.policy, row.cache_ratio): row for row in rows_of(trace, policies=("lfu", "lru"))}
    off = [row for row in rows if row.as_dict()["expert_budget"] is None]
    assert [replace(row, expert_budget=None) for row in off] == list(plain.values())
    figures = [row.as_dict() for row in rows if row.policy == "lfu" and row.cache_ratio == 0.4]
    lfu = {each["expert_budget"]: each for each in figures}
    assert lfu[3]["experts_kept"] == lfu[3]["experts_max"] == 3
    assert lfu[3]["kept_probability"] < lfu[6]["kept_probability"] < lfu[None]["kept_probability"] == 1


def test_a_loading_cache_loads_no_more_than_the_budget() -> None:
    """A cache without slots loads every expert of a step."""
    trace = random_trace(5)
    rows = rows_of(trace, policies=("llama-cpp-cache", "vllm"), budgets=(ExpertBudget(budget=3),))
    assert all(row.uploads_per_layer_step <= 3 for row in rows)


SMALL = ModelShape(
    name="small",
    n_layers=3,
    n_expert_layers=3,
    n_experts=12,
    k=2,
    expert_bytes=1e6,
    expert_flops=1e6,
    dense_layer_bytes=1e6,
    head_bytes=1e6,
)


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
    assert few.chosen.tpot_s < plain.chosen.tpot_s


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
    rows = run_json(
        "lab", "replay", tmp_path / "t.npz", "--policy", "lfu", "--profile-texts", "1", *lists,
        "--budget-ranking", "picks,static",
    )  # fmt: skip
    labels = dict.fromkeys(row["budget"] for row in rows)
    assert list(labels)[:2] == [None, "budget 12 (lossy)"]
    assert len(labels) == 1 + 2 * 4
    rows = run_json(
        "lab",
        "simulate",
        "--max-steps",
        "4",
        "--no-ranges",
        "--policy",
        "lfu",
        *lists,
        "--rejected-token-model",
        "optimistic",
    )
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
