"""A policy finds as much in a replay as in the engine, on the run that the engine recorded while that policy ran.

A replay's plans and transfers take no time. The engine's do, so these tests wait for each plan and its uploads, between
the layers, too; what is left between engine and replay is the order of calls and the rules of residency.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.data.datasets import load_toy
from moeedge.data.prompts import Prompt
from moeedge.engine.recording import TraceCollector
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.lab.sim.policy_replay import HitStats, PolicyReplay
from moeedge.lab.traces.schedule import cache_shape, recorded_schedule
from moeedge.native.cache import ExpertCache
from moeedge.policies.base import Plan, PolicyConfig
from moeedge.policies.registry import make_policy
from moeedge.records import filled
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.driver import ExpertStore
from moeedge.scheduler.manager import PlacementManager
from moeedge.trace.format import Trace, TraceMeta

GREEDY = SamplingConfig(temperature=0)
GAMMA, RATIO, N_PREDICT, TIMEOUT_S = 8, 0.17, 48, 10.0
WITHIN = 0.002  # of the engine's hit rate
POLICIES_COMPARED = ("moe-infinity", "spac-paper", "spac-program", "lru", "lfu", "spac")


class WaitingStore:
    """The engine's cache, whose transfers are over when `push` returns."""

    def __init__(self, store: ExpertStore, cache: ExpertCache) -> None:
        self._store, self._cache = store, cache
        self.residency = store.residency

    def push(self, plan: Plan) -> None:
        self._store.push(plan)
        assert self._cache.drain(TIMEOUT_S)


def wait_for_plans_and_transfers(session: Session) -> None:
    """Makes the session plan and move experts before it goes on, instead of at the same time."""
    placement = session.placement
    placement.driver.store = WaitingStore(placement.driver.store, placement.cache)

    def before_verification(*arguments: Any) -> None:
        PlacementManager.before_verification(placement, *arguments)
        placement.wait()

    def after_verification(*arguments: Any) -> None:
        PlacementManager.after_verification(placement, *arguments)
        placement.wait()

    placement.before_verification = before_verification
    placement.after_verification = after_verification


def run_engine(pair: tuple[Path, Path], policy: str, prompts: list[list[int]] | list[Prompt]) -> tuple[HitStats, Trace]:
    """Answers each prompt (its tokens, or the first turn of a conversation), from an empty cache, and records it."""
    target, draft = pair
    config = EngineConfig(
        model=target,
        draft=draft,
        gamma=GAMMA,
        n_ctx=512,
        n_threads=1,
        device="emulated:threads=1",
        placement=PlacementConfig(policy=policy, cache_ratio=RATIO, calibrate=False),
    )
    hits = HitStats()
    with Session.open(config) as session:
        wait_for_plans_and_transfers(session)
        collector = TraceCollector(filled(TraceMeta, session.info, source="test"))
        session.observers.append(collector)
        for prompt in prompts:
            session.reset()
            tokens = prompt if isinstance(prompt, list) else tokens_of(session, prompt)
            session.target.sensor.frames()  # drops those of an earlier answer
            collector.begin(tokens)
            generation = session.generate(tokens, n_predict=N_PREDICT, sampling=GREEDY)
            next(iter(generation), None)  # the first token ends the prefill, whose pairs are not those of a step
            before = session.placement_stats()
            for _ in generation:
                pass
            after = session.placement_stats()
            interval = after - before
            hits.pairs += interval.pairs
            hits.pairs_hit += interval.pairs_hit
        return hits, collector.trace()


def tokens_of(session: Session, prompt: Prompt) -> list[int]:
    return session.model.chat_tokens(prompt.messages(0))


def run_replay(trace: Trace, policy: str) -> HitStats:
    """The same from empty slots."""
    schedule = recorded_schedule(trace)
    shape = cache_shape(trace, RATIO)
    planned = make_policy(policy, shape, PolicyConfig(gamma=GAMMA))
    planned.execution_model = replace(planned.execution_model, refills_within_step=False)  # as in the engine
    replayed = PolicyReplay(planned, shape)
    for batch in schedule.batches():
        replayed.run(batch)
    return replayed.stats.hits


def check_as_much_is_found(policy: str, engine: HitStats, trace: Trace) -> None:
    replayed = run_replay(trace, policy)
    assert replayed.pairs == engine.pairs and engine.pairs_hit > 0
    assert replayed.hit_rate_pairs == pytest.approx(engine.hit_rate_pairs, rel=WITHIN)


@pytest.mark.parametrize("policy", ["moe-infinity", "spac-paper"])
def test_a_small_model(policy: str, tiny_moe: Path, tiny_draft: Path) -> None:
    prompts = [np.random.default_rng(seed).integers(0, 256, 12).tolist() for seed in range(3)]
    check_as_much_is_found(policy, *run_engine((tiny_moe, tiny_draft), policy, prompts))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES_COMPARED)
def test_the_bundled_pair(policy: str, bundled_pair: tuple[Path, Path]) -> None:
    check_as_much_is_found(policy, *run_engine(bundled_pair, policy, list(load_toy().prompts)[:8]))
