"""Sessions with experts on the emulated device: plans, figures, notes, and when placement is off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeedge.native.cache as cache_module
from moeedge.engine import loading
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError, InputError, ModelFileError
from moeedge.experts import Resident, count_ids
from moeedge.hardware import devices
from moeedge.hardware.devices import VramReading
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import from_c
from moeedge.native.cache import CacheInfo, ExpertCache
from moeedge.policies.base import ExpertPrediction, Observation, Plan, Policy
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.records import as_dict
from moeedge.run import Level, Notification, is_warning
from moeedge.scheduler import opening
from moeedge.scheduler.cache_governor import CacheGovernor
from moeedge.scheduler.calibration import Calibration
from moeedge.scheduler.config import PlacementConfig
from tests.scheduler.conftest import N_PREDICT, PROMPT
from tests.support.answers import assert_equal_answers as check
from tests.support.hybrid import NeverPays
from tests.support.machine import GIB, gpu_of
from tests.support.sessions import GREEDY, answered

N_LAYERS, N_EXPERTS = 3, 16  # of the tiny model
Pair = tuple[Path, Path]


def config(pair: Pair, ratio: float | None = 0.5, **changes: Any) -> EngineConfig:
    placement = {"cache_ratio": ratio, "calibrate": False} | changes.pop("placement", {})
    values = {"draft": pair[1], "gamma": 4, "n_ctx": 512, "n_threads": 1, "device": "emulated:threads=1"} | changes
    return EngineConfig(model=pair[0], placement=PlacementConfig(**placement), **values)


@pytest.fixture
def session(pair: Pair) -> Iterator[Session]:
    with Session.open(config(pair)) as session:
        yield session


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    """The emulated device passes for a GPU of 1 GiB."""
    gpu, reading = gpu_of(GIB, ggml_name="emulated", llama_device="auto"), VramReading(0, GIB, GIB, "ggml")
    monkeypatch.setattr(loading, "resolve_device", lambda config, model=None, run=None: gpu)
    monkeypatch.setattr(devices, "read_memory", lambda device, **sizes: reading)


def answer(session: Session, prompt: Sequence[int] = PROMPT, n_predict: int = N_PREDICT) -> list[int]:
    return answered(session, prompt, n_predict).tokens


def has_note(session: Session, *words: str) -> bool:
    """Whether a note has all of the words."""
    return any(all(word in note for word in words) for note in session.info.notes)


def drain(session: Session) -> None:
    """Waits for the transfers; on a busy machine a short answer is over before the first one."""
    assert session.placement.cache.drain(10.0)


class Recorder:
    """A policy that passes everything on to another one and keeps what it saw."""

    def __init__(self, policy: Policy) -> None:
        self.observations: list[Observation] = []
        self.upcoming: list[list[int]] = []
        self.predictions: list[ExpertPrediction | None] = []
        self.resets = 0
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def observe(self, observation: Observation) -> None:
        self.observations.append(replace(observation, counts=observation.counts.copy()))
        self._policy.observe(observation)

    def plan(self, resident: Resident, upcoming: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        self.upcoming.append(list(upcoming))
        self.predictions.append(prediction)
        return self._policy.plan(resident, upcoming, prediction)

    def reset(self) -> None:
        self.resets += 1
        self._policy.reset()


def record(session: Session) -> Recorder:
    recorder = Recorder(session.placement.driver.policy)
    session.placement.driver.policy = recorder
    return recorder


def test_what_the_session_reports(session: Session) -> None:
    info = session.info
    assert not has_note(session, "pinned")
    assert "emulated" in info.device and info.policy == "spac"
    assert (info.cache_slots, info.cache_ratio) == (24, 0.5)
    assert info.pool_bytes > 0 and info.vram_bytes is not None
    assert has_note(session, "Experts are cached on emulated", "24 of 48", "50.0%", "policy spac")


def test_counters(session: Session) -> None:
    before = session.placement_stats()
    assert (before.steps, before.pairs, before.uploads, before.slots_used) == (0, 0, 0, 0)
    n_steps = 0
    for _ in range(2):
        n_steps += answered(session, PROMPT, N_PREDICT).stats.steps
        drain(session)
    stats = session.placement_stats()
    assert stats.steps == n_steps
    assert 0 < stats.pairs_hit <= stats.pairs and 0 < stats.unique_hit <= stats.unique
    assert stats.uploads - stats.evictions == stats.slots_used <= stats.slots_total == 24
    assert stats.bytes_moved > 0 and stats.link_bytes_per_s is not None
    assert len(stats.tau) == N_LAYERS and min(stats.tau) >= 1
    assert 0 < stats.schedule_s < stats.decode_s and 0 < stats.draft_s < stats.decode_s
    assert 0 < stats.partition_s < stats.decode_s
    assert 0 < stats.hit_rate_pairs <= 1
    interval = session.placement_stats() - stats
    assert (interval.steps, interval.pairs, interval.slots_used) == (0, 0, stats.slots_used)
    assert set(as_dict(stats)) >= {"hit_rate_pairs", "partition_s", "tau", "lost"}


def test_the_policy_sees_every_batch(session: Session) -> None:
    """The prompt, every verification with its tokens and routing, and each batch again before it is verified."""
    recorder = record(session)
    text = [*PROMPT]
    batches = []
    for step in session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True):
        if step.n_verified:
            batches.append([text[-1], *step.drafts])
        text.extend(step.tokens)
    session.placement.wait()
    prompt, *steps = recorder.observations
    assert prompt.prefill and prompt.tokens.tolist() == PROMPT
    assert [step.tokens.tolist() for step in steps] == batches
    for seen in recorder.observations:
        assert seen.ids.shape == (N_LAYERS, seen.n_tokens, 4) == seen.weights.shape
        assert np.array_equal(count_ids(seen.ids, N_EXPERTS), seen.counts)
    # only the token that the target added is known before the draft; without drafts nothing is planned anew
    assert [upcoming for upcoming in recorder.upcoming if len(upcoming) > 1] == [b for b in batches if len(b) > 1]
    assert sum(len(upcoming) == 1 for upcoming in recorder.upcoming) == 1 + len(batches)


def test_the_policy_gets_the_drafts_hidden_states(pair: Pair, reference: list[int]) -> None:
    """One per token of a batch but the last draft, and none while stock computes, or without a draft model."""
    with Session.open(config(pair)) as session:
        assert has_note(session, "from the draft's hidden states")
        recorder = record(session)
        for step in session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True):
            assert (0 if step.hidden_states is None else len(step.hidden_states)) == len(step.drafts)
        session.placement.wait()
        found = [each.hidden_states for each in recorder.predictions if each is not None]
        sizes = [len(states) + 1 for states in found if states is not None]
        assert sizes == [len(upcoming) for upcoming in recorder.upcoming if len(upcoming) > 1] and sizes
        session.set_mode("stock")
        session.reset()
        steps = list(session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True))
        assert any(step.drafts for step in steps) and all(step.hidden_states is None for step in steps)
    with Session.open(config(pair, placement={"ablations": frozenset({"no-spec-ue"})})) as session:
        assert not has_note(session, "predicts experts")  # and so it does not
        assert not session.placement.wants_hidden_states
    with Session.open(config(pair, draft="ngram")) as session:
        assert has_note(session, "tokens alone")
        recorder = record(session)
        check(session, PROMPT, reference, answer(session))
        session.placement.wait()
        assert not any(recorder.predictions)


def test_a_long_prompt_is_observed_in_pieces(pair: Pair) -> None:
    """The sensor keeps the newest 8 graphs; the graphs before them are one sum."""
    prompt = np.random.default_rng(6).integers(0, 256, 10 * 32 + 7).tolist()
    with Session.open(config(pair, n_ubatch=32)) as session:
        recorder = record(session)
        answer(session, prompt, 2)
        session.placement.wait()
        pieces = [seen for seen in recorder.observations if seen.prefill]
        assert [piece.n_tokens for piece in pieces] == [3 * 32, *[32] * 7, 7]
        # the last layer computes nothing for pieces without requested logits
        assert pieces[0].ids is None and pieces[0].counts.sum() == 3 * 32 * (N_LAYERS - 1) * 4
        assert [token for piece in pieces[1:] for token in piece.tokens.tolist()] == prompt[3 * 32 :]


@pytest.mark.parametrize("governed", [False, True])
def test_experts_stay_for_a_new_conversation_and_unused_in_stock_mode(
    pair: Pair, reference: list[int], governed: bool
) -> None:
    with Session.open(config(pair, placement={"governed": governed})) as session:
        check_stock_mode(session, reference)


def check_stock_mode(session: Session, reference: list[int]) -> None:
    recorder = record(session)
    answer(session)
    drain(session)
    used = session.placement_stats().slots_used
    session.reset()
    assert recorder.resets == 1
    assert session.placement_stats().slots_used == used > 0
    session.set_mode("stock")
    before = session.placement_stats()
    assert answer(session) == reference
    interval = session.placement_stats() - before
    assert (interval.pairs, interval.steps, interval.uploads) == (0, 0, 0)
    session.set_mode("moeedge")
    session.reset()
    assert answer(session) == reference
    assert (session.placement_stats() - before).pairs_hit > 0


def test_policy_none_moves_nothing(pair: Pair, reference: list[int]) -> None:
    with Session.open(config(pair, placement={"policy": "none"})) as session:
        assert answer(session) == reference
        assert (session.placement_stats().uploads, session.placement_stats().pairs_hit) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ratio": 0.0}, "The expert cache is off, as asked"),
        ({"ratio": None, "placement": {"vram_bytes": 1000}}, "cannot hold one expert per layer"),
        ({"ratio": 0.01}, "cannot hold one expert per layer"),
        ({"device": "CPU"}, "as with -dev none"),
    ],
)
def test_why_it_is_off(pair: Pair, reference: list[int], changes: dict[str, Any], sentence: str) -> None:
    with Session.open(config(pair, **changes)) as session:
        assert has_note(session, sentence), session.info.notes
        assert session.placement_stats() is None
        assert (session.info.device, session.info.policy, session.info.cache_slots) == ("none", "none", 0)
        assert answer(session) == reference


def test_what_cannot_be_opened(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the device for experts"):
        Session.open(config(pair, None, placement={"vram_bytes": 1 << 50}))
    missing = tmp_path / "missing.gguf"  # the policy is checked before anything is loaded
    with pytest.raises(InputError, match="'best'"):
        Session.open(EngineConfig(model=missing, placement=PlacementConfig(policy="best")))


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("asked", [False, True])
def test_a_cache_that_does_not_pay(
    pair: Pair, reference: list[int], monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """It is switched off with a line, unless the user gave it a size."""
    monkeypatch.setattr(Calibration, "pays", False)
    asked_for = config(pair, 0.5 if asked else None, draft=None, placement={"calibrate": True})
    with Session.open(asked_for) as session:
        assert has_note(session, "expert cache: off") != asked
        assert (session.info.device == "GPU0") == asked == (session.placement is not None)
        assert "stream" in session.calibration.prefill_ts
        assert answer(session) == reference


def test_memory_that_cannot_be_pinned_is_noted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpinned(kind: Any, raw: Any) -> Any:
        found = from_c(kind, raw)
        return replace(found, unpinned=True) if kind is CacheInfo else found

    monkeypatch.setattr(cache_module, "from_c", unpinned)
    with Session.open(config(pair)) as session:
        assert has_note(session, "no pinned (page-locked) memory")


@pytest.mark.parametrize(
    ("change", "sentence"), [({"lost": True}, "is lost"), ({"blocks_unknown": 5}, "does not recognise")]
)
def test_trouble_is_reported_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], sentence: str
) -> None:
    """During an answer: a notification and a note, and no further plans for a lost device."""
    recorder, cache = record(session), session.placement.cache
    received: list[Notification] = []
    session.run.show = received.append
    answer(session, n_predict=8)
    assert received == []
    real = cache.stats
    monkeypatch.setattr(cache, "stats", lambda: replace(real(), **change))
    monkeypatch.setattr(cache, "trouble", lambda: (cache.stats().lost, cache.stats().blocks_unknown))
    generation = session.generate(PROMPT, n_predict=30, sampling=GREEDY, ignore_eos=True)
    next(iter(generation))
    session.placement.wait()
    n_plans = len(recorder.upcoming)
    for _ in generation:
        pass
    assert len(received) == 1 and sentence in received[0] and received[0].level is Level.WARNING
    assert session.info.notes[-1] == received[0]
    lost = "lost" in change
    assert session.placement_stats().lost == lost == (not session.placement.active)
    assert (len(recorder.upcoming) == n_plans) == lost


def test_a_gpu_is_measured_after_batches_of_every_size(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on the emulated device: target and draft compute, and are as empty afterwards as before."""
    sizes: list[tuple[bool, int]] = []
    decode = Context.decode

    def remember(self: Context, tokens: Any, **options: Any) -> Any:
        sizes.append((self is session.target, len(tokens)))
        return decode(self, tokens, **options)

    monkeypatch.setattr(Context, "decode", remember)
    opening.warm_up_gpu(session.target, session.draft_context, 4)
    assert sizes == [(True, 65), (True, 5), (True, 1), (False, 65), (False, 5), (False, 1)]
    assert [context.sequences[0].tokens for context in (session.target, session.draft_context)] == [[], []]
    assert not session.target.sensor.read_counts().any()


def test_no_transfer_runs_after_draining(pair: Pair) -> None:
    """Over a link that needs seconds for the plan: uploads that have not arrived in time are dropped."""
    with Session.open(config(pair, 1.0, device="emulated:threads=1,link=30KB/s")) as session:
        answer(session, n_predict=2)
        manager, cache = session.placement, session.placement.cache
        assert cache.stats().queued > 0
        manager.drain_transfers(0.05)
        drained = cache.stats()
        assert drained.queued == drained.in_flight == 0
        assert drained.cancelled > 0
        assert answer(session)  # and planning goes on
        assert cache.stats().plans > drained.plans
        answer(session, PROMPT[:3], 2)
        manager.wait()
        assert cache.stats().queued > 0
        manager.governor = NeverPays()
        manager.begin_step()
        stats = cache.stats()  # a transfer would slow down the steps without the cache
        assert not manager.active and (stats.queued, stats.in_flight) == (0, 0)


@pytest.mark.parametrize("op_offload", [False, True])
def test_a_cache_that_is_off_computes_prompts_unless_llama_cpp_does(session: Session, op_offload: bool) -> None:
    manager = session.placement
    manager.governor, manager._op_offload = NeverPays(), op_offload
    for _ in range(2):
        manager.begin_step()
        assert not manager.active
        manager.begin_prompt()
        assert manager.active != op_offload


def test_the_governor_knows_of_texts_and_prompts(session: Session) -> None:
    calls: list[str] = []

    class Governor(CacheGovernor):
        def begin_text(self) -> None:
            calls.append("begin_text")

        def begin_answer(self) -> None:
            calls.append("begin_answer")

    session.placement.governor = Governor()
    answer(session, n_predict=2)
    session.reset()
    answer(session, n_predict=2)
    assert calls == ["begin_answer", "begin_text", "begin_answer"]


def test_the_cache_is_closed_with_the_session_and_where_it_does_not_open(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[ExpertCache] = []
    close = ExpertCache.close

    def remember(cache: ExpertCache) -> None:
        closed.append(cache)
        close(cache)

    def fail(*_arguments: object) -> None:
        raise EngineError("no memory for the budget")

    monkeypatch.setattr(ExpertCache, "close", remember)
    with Session.open(config(pair)):
        assert not closed
    assert len(closed) == 1
    monkeypatch.setattr(Context, "set_budget", fail)
    with pytest.raises(EngineError, match="no memory"):
        Session.open(config(pair, expert_budget=ExpertBudget(budget=8)))
    assert len(closed) == 2


def test_several_texts_use_nothing_of_the_draft(pair: Pair) -> None:
    for policy in ("spac", "sp-moe-prefetch"):
        with Session.open(config(pair, placement={"policy": policy})) as session:
            manager = session.placement
            for n_texts in (1, 2, 3, 1):
                manager.n_texts = n_texts
                uses = manager.wants_hidden_states if policy == "spac" else manager.draft_prefetch.is_on()
                assert bool(uses) == (n_texts == 1)


def test_a_policy_without_its_predictor_says_so(
    pair: Pair, reference: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_model: Model) -> None:
        raise ModelFileError("the routers are of another kind")

    asked = config(pair, placement={"policy": "fate"})
    with Session.open(asked) as session:
        assert not any("the routers" in note for note in session.info.notes if is_warning(note))
        assert any("fate" in note for note in session.info.notes if not is_warning(note) and "predicts" in note)
    monkeypatch.setattr(opening, "NextGatePredictor", fail)
    with Session.open(asked) as session:
        (said,) = [note for note in session.info.notes if is_warning(note) and "predicts" in note]
        assert "fate" in said and "the routers are of another kind" in said
        assert answer(session) == reference


@pytest.mark.parametrize(("kind", "ratio"), [("gpu", None), ("gpu", 0.5), ("emulated", None)])
def test_a_gpu_s_memory_is_watched_unless_the_user_gave_the_size(
    pair: Pair, request: pytest.FixtureRequest, kind: str, ratio: float | None
) -> None:
    if kind == "gpu":
        request.getfixturevalue("emulated_gpu")
    with Session.open(config(pair, ratio)) as session:
        assert (session.placement.tiers[0].watch is not None) == (kind == "gpu" and ratio is None)
