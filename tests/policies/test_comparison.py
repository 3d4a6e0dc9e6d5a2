"""The default policy predicts more than the others, on recorded routing and with transfers that take no time.

Slices small enough for every run of the suite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.data import load_dataset
from moeedge.engine.recording import record_routing
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.native.abi import Phase
from moeedge.policies.base import Policy, PolicyConfig
from moeedge.policies.cost_model import CostModel
from moeedge.policies.registry import make_policy
from moeedge.sim.batches import cache_shape
from moeedge.sim.replay import PolicyReplay, ReplayConfig
from moeedge.sim.replay import replay as replay_all
from moeedge.trace.importers import read_trace
from moeedge.trace.schedule import Schedule, cut_schedule, recorded_schedule, texts_of
from moeedge.trace.steps import RejectedTokenModel

RATIO = 0.17
OTHERS = ("spac-paper", "lru", "static")
MODELS: tuple[RejectedTokenModel, ...] = ("optimistic", "pessimistic")


@dataclass(frozen=True)
class Replayed:
    """Share of the pairs found resident; uploads per layer and step."""

    pair_hit: float
    uploads: float


def windows_of(
    folder: Path,
    name: str,
    model: RejectedTokenModel,
    n_texts: int | None = None,
    *,
    prompts: bool = True,
    seed: int = 0,
) -> Schedule:
    trace = texts_of(read_trace(folder / "traces" / f"{name}.npz"), 0, n_texts)
    if not prompts:
        rows = trace.phase != Phase.PREFILL
        columns = ("ids", "phase", "sequence", "step", "accepted", "token", "position")
        trace = replace(trace, **{column: getattr(trace, column)[rows] for column in columns}, weights=None)
    return cut_schedule(trace, gamma=8, acceptance_chance=0.8, rejected_token_model=model, seed=seed)


def replay(policy: Policy, schedule: Schedule, ratio: float = RATIO) -> Replayed:
    """With every plan checked."""
    shape = cache_shape(schedule.trace, ratio)
    lane = PolicyReplay(policy, shape, checked_cap=4)
    for chunk in schedule.chunks():
        lane.run(chunk)
    hits = lane.stats.hits
    return Replayed(hits.hit_rate_pairs, hits.uploads / schedule.n_steps / shape.n_layers)


def run(name: str, schedule: Schedule, config: PolicyConfig | None = None, ratio: float = RATIO) -> Replayed:
    return replay(make_policy(name, cache_shape(schedule.trace, ratio), config), schedule, ratio)


def compare(schedule: Schedule, names: tuple[str, ...]) -> dict[str, Replayed]:
    return {name: run(name, schedule) for name in names}


def oracle(schedule: Schedule) -> float:
    """Pair hit of the best residency for every single step."""
    rows = replay_all(schedule, ReplayConfig(policies=("none",), ratios=(RATIO,)))
    return rows[0].oracle_hit_rate_pairs


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.slow if model == "pessimistic" else ()) for model in MODELS]
)
def test_gpt_oss_20b(data_folder: Path, model: RejectedTokenModel) -> None:
    found = compare(windows_of(data_folder, "gptoss20b_decode", model, 8), ("spac", *OTHERS))
    assert found["spac"].pair_hit > 0.03 + max(found[name].pair_hit for name in OTHERS)
    assert found["spac"].uploads < min(found["lru"].uploads, found["spac-paper"].uploads)


@pytest.mark.slow
def test_gpt_oss_20b_with_five_of_32(data_folder: Path) -> None:
    """A single decayed count hits 0.51 of the pairs with 0.36 uploads, each layer with slots of its own."""
    found = run("spac", windows_of(data_folder, "gptoss20b_decode", "pessimistic", 30), ratio=5 / 32)
    assert found.pair_hit >= 0.50
    assert found.uploads <= 0.4


@pytest.mark.parametrize("model", MODELS)
def test_gemma_of_one_prompt(data_folder: Path, model: RejectedTokenModel) -> None:
    """128 decoded tokens: 32 steps, mostly cold. No policy leads by more than another draw of acceptances changes.

    (Where the prompt is seen, too, and on the 14 steps of gpt-oss-120b, lru is ahead by 0.01, optimistic model.)
    """
    steps = [windows_of(data_folder, "bigmoeonedge_gemma", model, prompts=False, seed=seed) for seed in range(3)]
    mean = {name: np.mean([run(name, each).pair_hit for each in steps]) for name in ("spac", *OTHERS)}
    assert mean["spac"] > max(mean[name] for name in OTHERS) - 0.005


@pytest.fixture(scope="module")
def bundled_steps(bundled_pair: tuple[Path, Path]) -> Schedule:
    """The bundled pair answering its own sample prompts."""
    target, draft = bundled_pair
    prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in load_dataset("sample").limited(12).prompts]
    config = EngineConfig(model=target, draft=draft, n_ctx=1024, gamma=8, n_threads=1, device="none")
    with Session.open(config) as session:
        recording = record_routing(session, prompts, n_predict=96, sampling=SamplingConfig(temperature=0.0))
    schedule = recorded_schedule(recording.trace)
    assert schedule is not None
    return schedule


def test_predictions_from_tokens_on_the_bundled_pair(bundled_steps: Schedule) -> None:
    """The same text once more, its table filled by the first round, comes within a tenth of the oracle."""
    best = oracle(bundled_steps)
    found = compare(bundled_steps, ("spac", *OTHERS))
    assert found["spac"].pair_hit > 0.1 + max(found[name].pair_hit for name in OTHERS)
    assert found["spac"].pair_hit > 0.8 * best

    policy = make_policy("spac", cache_shape(bundled_steps.trace, RATIO))
    replay(policy, bundled_steps)
    assert replay(policy, bundled_steps).pair_hit >= 0.9 * best


def test_without_them_the_bundled_pair_is_hard_to_predict(bundled_steps: Schedule) -> None:
    blind = run("spac", bundled_steps, PolicyConfig(predictor_bytes=0))
    assert run("spac", bundled_steps).pair_hit > blind.pair_hit + 0.05


def test_predictions_do_no_harm_where_routing_ignores_tokens(data_folder: Path) -> None:
    """gpt-oss-20b with random token ids: the table's trust goes, and with it its influence."""
    rng = np.random.default_rng(0)
    blind = windows_of(data_folder, "gptoss20b_decode", "pessimistic", 8)
    names = rng.integers(0, 50, blind.trace.n_tokens).astype(blind.trace.token.dtype)
    misled = replace(blind, trace=replace(blind.trace, token=names))
    assert run("spac", misled).pair_hit > run("spac", blind).pair_hit - 0.01


@pytest.mark.parametrize("ablation", ["no-spec-ue", "no-prefetch", "no-evict", "no-het-wb"])
def test_ablations_lose(bundled_steps: Schedule, ablation: str) -> None:
    cut = run("spac", bundled_steps, PolicyConfig(ablations=frozenset({ablation})))
    assert cut.pair_hit < run("spac", bundled_steps).pair_hit


def of_speed(device_s: float, transfer_s: float) -> PolicyConfig:
    """A machine whose CPU takes 80 us for an expert with one token."""
    units = CostModel(
        cpu_expert_s=np.r_[0.0, np.linspace(80e-6, 160e-6, 9)],
        device_expert_s=np.r_[0.0, np.linspace(1.0, 1.5, 9)] * device_s,
        transfer_expert_s=transfer_s,
        draft_token_s=4e-3,
        block_overhead_s=2e-5,
        r_c=np.linspace(0.2, 0.9, 5),
        r_g=np.linspace(0.9, 0.1, 5),
    )
    return PolicyConfig(cost_model=units)


def test_a_slow_device_gets_less_and_a_slow_link_moves_less(data_folder: Path) -> None:
    steps = windows_of(data_folder, "gptoss20b_decode", "optimistic", 8)

    def of(device_s: float, transfer_s: float) -> tuple[Replayed, float]:
        policy = make_policy("spac", cache_shape(steps.trace, RATIO), of_speed(device_s, transfer_s))
        found = replay(policy, steps)
        return found, float(policy.plan(np.zeros((24, 32), dtype=np.bool_), []).tau.mean())

    fast, fast_tau = of(8e-6, 110e-6)
    slow, slow_tau = of(800e-6, 110e-6)
    assert fast_tau == 1.0 < slow_tau
    assert slow.pair_hit < fast.pair_hit and slow.uploads < fast.uploads
    narrow, narrow_tau = of(8e-6, 20e-3)
    assert narrow_tau == 1.0
    assert narrow.uploads < 0.5 * fast.uploads
    assert narrow.pair_hit > 0.7 * fast.pair_hit  # few uploads, the best ones
