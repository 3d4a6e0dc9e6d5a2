"""What policies are told in a replay, what is counted, and its predictors. Bounds: tests/lab/policies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.errors import InputError
from moeedge.experts import Resident
from moeedge.lab.sim.noisy_predictor import NoisyPredictor, PredictorAccuracy
from moeedge.lab.sim.policy_replay import HitStats, PolicyReplay
from moeedge.lab.sim.replay import ReplayConfig, ReplayInput, ReplayRow, profile_of, replay
from moeedge.lab.traces.importers import read_trace
from moeedge.lab.traces.schedule import Schedule, cache_shape, cut_schedule, recorded_schedule, schedules, texts_of
from moeedge.native.abi import Phase
from moeedge.policies.base import CacheShape, ExpertPrediction, Observation, Plan, Policy, PolicyConfig
from moeedge.policies.registry import POLICIES, SIMULATED, make_policy
from moeedge.trace.format import Trace
from moeedge.trace.steps import RejectedTokenModel
from tests.support.progress import SeenProgress
from tests.support.traces import make_trace, published_trace, two_texts


def walk(n_tokens: int, seed: int, *, n_layers: int = 2, n_experts: int = 8, n_texts: int = 1) -> Trace:
    """Texts whose tokens keep some of the last token's experts, each with a prompt of two tokens."""
    rows = [
        (Phase.PREFILL if step < 2 else Phase.DECODE, text, max(step - 1, 0), True)
        for text in range(n_texts)
        for step in range(n_tokens + 2)
    ]
    trace = make_trace(rows, n_layers=n_layers, n_experts=n_experts, gamma=0, seed=seed)
    rng = np.random.default_rng(seed)
    for row in range(1, trace.n_tokens):
        stays = rng.random(n_layers) < 0.6
        trace.ids[row, stays] = trace.ids[row - 1, stays]
    return trace


def rows_of(given: ReplayInput | Schedule, *policies: str, ratio: float = 0.4, **config: Any) -> dict[str, ReplayRow]:
    """The rows of policies and bounds by name."""
    given = ReplayInput(given) if isinstance(given, Schedule) else given
    rows = replay(given, ReplayConfig(policies=policies, ratios=(ratio,), **config))
    return {row.policy: row for row in rows}


def literal(schedule: Schedule, name: str, ratio: float) -> tuple[float, float, int]:
    """Pair and unique hit rates and uploads, by a replay without arrays of batches or slots."""
    trace, shape = schedule.trace, cache_shape(schedule.trace, ratio)
    policy = make_policy(name, shape, PolicyConfig(gamma=schedule.gamma))
    resident: set[tuple[int, int]] = set()
    loaded: set[tuple[int, int]] = set()  # on demand, in the last batch
    hits, uploads = HitStats(), 0

    def mask() -> np.ndarray:
        array = np.zeros((trace.meta.n_layers, trace.meta.n_experts), dtype=np.uint8)
        for expert in resident:
            array[expert] = 1
        return array

    def push(plan: Plan) -> None:
        nonlocal uploads
        victims = [tuple(pair) for pair in plan.victims.tolist()]
        for expert in map(tuple, plan.uploads.tolist()):
            if len(resident) >= int(shape.capacity[0]):
                if not victims:
                    continue
                resident.remove(victims.pop(0))
            resident.add(expert)
            uploads += expert not in loaded  # an expert that was just loaded stays without another transfer
            loaded.discard(expert)

    for batch in range(schedule.prefill.size):
        rows = schedule.rows[schedule.starts[batch] : schedule.starts[batch + 1]]
        ids = np.stack([trace.layer_ids(layer)[rows] for layer in range(trace.meta.n_layers)])
        counts = np.zeros((trace.meta.n_layers, trace.meta.n_experts), dtype=np.uint32)
        for layer, token, slot in itertools.product(*map(range, ids.shape)):
            if ids[layer, token, slot] >= 0:
                counts[layer, ids[layer, token, slot]] += 1
        tokens = trace.token[rows]
        prefill, is_first = bool(schedule.prefill[batch]), bool(schedule.is_first[batch])
        if batch > 0:  # the plan after the batch before
            push(policy.plan(mask(), [] if is_first else tokens[:1].tolist()))
            loaded.clear()
        if is_first:
            policy.reset()
            if not prefill:
                push(policy.plan(mask(), tokens[:1].tolist()))
        if not prefill:
            if schedule.rejected_token_model == "recorded" and len(tokens) > 1:  # otherwise the drafts are unknown
                push(policy.plan(mask(), tokens.tolist()))
            loads: set[tuple[int, int]] = set()
            for layer in range(trace.meta.n_layers):
                if policy.execution_model.prefetch_within_step or policy.execution_model.refills_within_step:
                    push(policy.plan_layer(layer, mask()))
                used = np.flatnonzero(counts[layer])
                found = {(layer, expert) for expert in used.tolist()} & resident
                if policy.execution_model.keeps_loads:
                    before, uploads_before = resident.copy(), uploads
                    load = policy.plan_load(layer, counts[layer], mask())
                    if load is None:  # the layer bypasses the cache
                        found = set()
                    else:
                        push(load)
                    assert found <= resident and resident - before <= {(layer, expert) for expert in used.tolist()}
                    uploads = uploads_before
                for expert in used.tolist():
                    is_hit = (layer, expert) in found
                    if policy.execution_model.device_only and not is_hit:
                        loads.add((layer, expert))
                        uploads += 1
                    hits.add(counts[layer, expert], np.bool_(is_hit))
            loaded = loads
        elif policy.execution_model.keeps_loads:
            uploads_before = uploads
            for layer in range(trace.meta.n_layers):
                load = policy.plan_load(layer, counts[layer], mask())
                if load is not None:
                    push(load)
            uploads = uploads_before  # a prompt's are not counted
        n_accepted = 0 if prefill else int(schedule.n_text[batch]) - 1
        if not prefill and schedule.rejected_token_model != "recorded":
            tokens = np.where(np.arange(len(tokens)) <= n_accepted, tokens, -1)
        policy.observe(Observation(counts, len(rows), n_accepted, tokens, ids, None, prefill=prefill))
    return hits.hit_rate_pairs, hits.hit_rate_experts, uploads


@pytest.mark.parametrize("name", POLICIES | SIMULATED)
def test_equals_a_literal_replay(name: str) -> None:
    text = walk(30, 3, n_texts=2)
    cut = cut_schedule(text, gamma=2, acceptance_chance=0.7, rejected_token_model="pessimistic", seed=1)
    for schedule in (cut, recorded_schedule(two_texts(seed=5))):
        pairs, experts, uploads = literal(schedule, name, 0.4)
        row = rows_of(schedule, name)[name]
        assert row.hit_rate_pairs == pytest.approx(pairs, abs=1e-6)
        assert row.hit_rate_experts == pytest.approx(experts, abs=1e-6)
        assert row.uploads_per_layer_step == pytest.approx(uploads / schedule.n_steps / 2, abs=1e-6)


def test_recorded_batches_keep_gamma_and_acceptance() -> None:
    schedule = recorded_schedule(two_texts())
    assert (schedule.gamma, schedule.rejected_token_model) == (2, "recorded")
    assert schedule.acceptance_chance == pytest.approx(0.5)
    assert (schedule.n_steps, schedule.n_texts) == (6, 2)
    assert schedule.prefill.tolist() == [True, False, False, False, True, False, False, False]
    batches = list(schedule.batches())
    assert [batch.n_accepted for batch in batches] == [0, 0, 2, 1, 0, 0, 1, 0]
    assert [batch.is_first for batch in batches] == [True, False, False, False, True, False, False, False]
    assert batches[2].tokens.tolist() == [6, 7, 8]
    assert recorded_schedule(walk(5, 0)) is None


def test_batches_hold_the_known_hidden_states() -> None:
    trace = two_texts()
    hidden_states = np.arange(trace.n_tokens * 2, dtype=np.float16).reshape(-1, 2)
    hidden_states[(trace.phase == Phase.PREFILL)] = np.nan
    starts = np.flatnonzero(np.diff(trace.step, prepend=-1) != 0)
    hidden_states[starts[2] + 1] = np.nan  # the second token of the second verification
    schedule = recorded_schedule(replace(trace, hidden_states=hidden_states))
    batches = list(schedule.batches())
    known = [0 if batch.hidden_states is None else len(batch.hidden_states) for batch in batches]
    assert known == [0, 2, 1, 2, 0, 2, 2, 0]  # never of the last draft, nor of a token alone
    np.testing.assert_array_equal(batches[1].hidden_states, hidden_states[3:5])


def test_the_default_hits_more_with_hidden_states_that_depend_on_the_context() -> None:
    """Experts depend on a context that the tokens do not show."""
    rng = np.random.default_rng(0)
    rows = [(Phase.VERIFY, 0, step, True) for step in range(1, 151) for _ in range(4)]
    context = np.repeat(rng.integers(0, 6, 150), 4)
    word = rng.integers(0, 3, 600)
    trace = make_trace(rows, n_layers=2, n_experts=32, gamma=3)
    used = rng.random((6, 3, 2, 32)).argsort(axis=3)[..., :2]
    centre = rng.standard_normal((6, 8))
    hidden_states = (centre[context] + 0.1 * rng.standard_normal((600, 8))).astype(np.float16)
    trace = replace(trace, ids=used[context, word].astype(np.uint8), token=word.astype(np.int32))
    hits = []
    for known in (trace, replace(trace, hidden_states=hidden_states)):
        schedule = recorded_schedule(known)
        hits.append(rows_of(schedule, "spac", ratio=0.15)["spac"].share_of_oracle or 0.0)
    assert hits[1] > 0.9 > hits[0] + 0.1


class Spy(Policy):
    """Notes what it is given before each batch and after it; its plans are empty."""

    name = "spy"
    required_inputs = frozenset({"draft-states"})

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape, PolicyConfig())
        self.before: list[list[object]] = [[]]
        self.observed: list[Observation] = []
        self._planner = make_policy("none", shape)

    def observe(self, observation: Observation) -> None:
        self.observed.append(observation)
        self.before.append([])

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        hidden_states = None if prediction is None else prediction.hidden_states
        self.before[-1].append((tuple(tokens), hidden_states))
        return self._planner.plan(resident, tokens)


@pytest.mark.parametrize("model", ["optimistic", "pessimistic"])
def test_a_cut_window_tells_no_policy_how_many_drafts_will_be_accepted(model: RejectedTokenModel) -> None:
    """Before a window a policy knows its first token and no state, whatever was drawn; after it, the accepted part."""
    trace = walk(40, 3, n_texts=3)
    trace = replace(trace, hidden_states=np.ones((trace.n_tokens, 2), dtype=np.float16))
    told: dict[int, set[str]] = {}  # by the row of a window's first token: all that policies were given before it
    drawn: dict[int, set[int]] = {}
    for seed in range(12):
        schedule = cut_schedule(trace, gamma=3, acceptance_chance=0.6, rejected_token_model=model, seed=seed)
        assert not schedule.has_tokens and not schedule.has_hidden_states
        spy = Spy(cache_shape(trace, 0.5))
        replayed = PolicyReplay(spy, spy.shape)
        for each in schedule.batches():
            replayed.run(each)
        for batch, (before, observation) in enumerate(zip(spy.before[:-1], spy.observed, strict=True)):
            rows = schedule.rows[schedule.starts[batch] : schedule.starts[batch + 1]]
            if schedule.prefill[batch]:
                assert observation.tokens.tolist() == trace.token[rows].tolist()
                assert before in ([], [((), None)])  # the plan after the text before
                continue
            n_text = int(schedule.n_text[batch])
            assert observation.tokens.tolist() == [*trace.token[rows[:n_text]], *[-1] * (4 - n_text)]
            told.setdefault(int(rows[0]), set()).add(repr(before))
            drawn.setdefault(int(rows[0]), set()).add(n_text)
    assert max(len(lengths) for lengths in drawn.values()) == 4
    assert all(len(inputs) == 1 for inputs in told.values())
    assert all(f"(({trace.token[row]},), None)" in inputs.pop() for row, inputs in told.items())


def test_progress_says_what_is_done() -> None:
    schedule = cut_schedule(walk(60, 1), gamma=2)
    progress = SeenProgress()
    replay(ReplayInput(schedule), ReplayConfig(policies=("lru",), ratios=(0.3, 0.5)), progress)
    assert progress.phases == ["reading ahead", "replaying"]
    assert progress.amounts == [1] * schedule.prefill.size


@pytest.mark.parametrize("limit", [0.0, 0.25, 1.5])
def test_the_link_carries_no_more_than_it_can(limit: float) -> None:
    schedule = cut_schedule(walk(100, 4), gamma=3, acceptance_chance=0.7)
    free, tied = rows_of(schedule, "lru", "spac"), rows_of(schedule, "lru", "spac", max_uploads=limit)
    for name in ("lru", "spac"):
        assert tied[name].uploads_per_layer_step <= limit + 1e-6
        assert tied[name].hit_rate_pairs <= free[name].hit_rate_pairs or limit > 1


def test_noisy_predictions_have_the_stated_accuracy() -> None:
    trace = walk(400, 0, n_experts=64)
    schedule = cut_schedule(trace, gamma=3, acceptance_chance=0.7)
    predictor = NoisyPredictor(profile_of(schedule).astype(float), PredictorAccuracy(draft_router=0.7), 0)
    right = predicted = 0
    for batch in schedule.batches():
        if not batch.prefill:
            prediction = predictor.predict(batch.ids).of_draft(batch.n_tokens - 1)
            assert (prediction.layer_ids[:, -1] == -1).all()
            right += int((prediction.layer_ids == batch.ids)[:, :-1].sum())
            predicted += batch.ids[:, :-1].size
    assert right / predicted == pytest.approx(0.7, abs=0.03)


def test_gates_tell_of_the_next_layers_alone() -> None:
    """From n layers before, the accuracy is its n-th power."""
    trace = walk(600, 0, n_layers=5, n_experts=64)
    trace.ids[:, 2] = trace.sentinel  # a layer without experts
    schedule = cut_schedule(trace, gamma=3, acceptance_chance=0.7)
    predictor = NoisyPredictor(profile_of(schedule).astype(float), PredictorAccuracy(next_gate=0.8, reach=2), 0)
    right, predicted = np.zeros(3), np.zeros(3)
    for batch in schedule.batches():
        if batch.prefill:
            continue
        predictions = predictor.predict(batch.ids)
        gates = [each.layer_ids for layer in range(5) if (each := predictions.of_gates(layer)) is not None]
        seen = [np.flatnonzero((ids >= 0).any(axis=(1, 2))).tolist() for ids in gates]
        assert seen == [[1, 3], [3, 4], [3, 4], [4], []]
        for ahead, later in ((1, 1), (2, 3)):
            right[ahead] += np.count_nonzero(gates[0][later] == batch.ids[later])
            predicted[ahead] += batch.ids[later].size
    assert right[1:] / predicted[1:] == pytest.approx([0.8, 0.64], abs=0.03)


def test_layers_without_experts_get_no_slots() -> None:
    trace = walk(40, 0)
    trace.ids[:, 0] = trace.sentinel
    schedule = cut_schedule(trace, gamma=2, acceptance_chance=0.7)
    assert cache_shape(trace, 0.5).capacity.tolist() == [4]
    rows = rows_of(schedule, "spac", "lru", ratio=1.0)
    assert rows["oracle"].hit_rate_pairs == 1.0 and rows["lru"].hit_rate_pairs > 0.9


def test_a_trace_without_experts_is_refused() -> None:
    trace = two_texts()
    empty = replace(trace, ids=np.full_like(trace.ids, trace.sentinel))
    with pytest.raises(InputError, match="no experts"):
        schedules(empty)


def test_impossible_configurations_are_refused() -> None:
    for wrong in ({"ratios": (1.2,)}, {"ratios": ()}, {"max_uploads": -1.0}):
        with pytest.raises(ValueError):
            ReplayConfig(**({"policies": ("spac",), "ratios": (0.1,)} | wrong))
    with pytest.raises(ValueError, match="accuracy"):
        PredictorAccuracy(next_gate=2.0)


PUBLISHED = tuple(name for name in POLICIES | SIMULATED if name not in ("spac", "none"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["optimistic", "pessimistic"])
@pytest.mark.parametrize(
    "texts",
    [pytest.param((153, 183), marks=pytest.mark.slow), pytest.param((153, None), marks=pytest.mark.bench)],
    ids=["30", "all"],
)
def test_the_default_on_gpt_oss_20b(data_folder: Path, texts: tuple[int, int | None], model: str) -> None:
    """Where a link carries 0.4 uploads, above every published policy that moves no more, as `lab replay --policy all
    --max-uploads 0.4` runs them: by their caches, without hidden states. Systems that compute on the device alone
    load 8 and more experts on demand. And near the one-step oracle.
    """
    trace = read_trace(published_trace(data_folder))
    profile = profile_of(cut_schedule(texts_of(trace, 0, 30), gamma=0))
    schedule = cut_schedule(texts_of(trace, *texts), gamma=8, acceptance_chance=0.8, rejected_token_model=model, seed=0)
    rows = rows_of(ReplayInput(schedule, profile=profile), "spac", *PUBLISHED, ratio=0.16, max_uploads=0.4)
    spac = rows["spac"]
    peers = [name for name in PUBLISHED if rows[name].uploads_per_layer_step <= 0.41]
    best = max(peers, key=lambda name: rows[name].hit_rate_pairs)
    assert {"lfu", "lru", "spac-paper", "spac-program", "hybrimoe", "static"} <= set(peers)
    assert spac.hit_rate_pairs > rows[best].hit_rate_pairs, best
    assert spac.share_of_oracle >= 0.80


@pytest.mark.parametrize(("policy", "given"), [("moe-infinity", {}), ("hybrimoe", {"accuracy": PredictorAccuracy()})])
def test_what_was_expected_before_a_step_is_judged(policy: str, given: dict[str, Any]) -> None:
    """Plans for single layers, within the step, leave later layers alone a utility."""
    schedule = cut_schedule(walk(60, 3, n_layers=4), gamma=4, acceptance_chance=0.8, rejected_token_model="optimistic")
    row = rows_of(schedule, policy, **given)[policy]
    used = [(batch.counts > 0).mean() for batch in schedule.batches() if not (batch.prefill or batch.is_first)]
    assert row.hot_cold_accuracy is not None and row.hot_cold_accuracy > 1.05 - float(np.mean(used))  # of "always cold"
