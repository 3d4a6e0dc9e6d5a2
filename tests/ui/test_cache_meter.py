"""What one answer does to the expert cache, on a real session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moeedge.engine.session import Session
from moeedge.run import Notification, ignore
from moeedge.scheduler.config import PlacementConfig
from moeedge.ui.chat.single import CacheMeter
from tests.conftest import TinyFactory
from tests.support.sessions import GREEDY, answered, plain_config

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def session(tiny: TinyFactory) -> Iterator[Session]:
    placement = PlacementConfig(cache_ratio=0.5, calibrate=False)
    config = plain_config(tiny("qwen3moe"), tiny("qwen3"), device="emulated", placement=placement)
    with Session.open(config) as session:
        yield session


def test_the_prompt_is_not_counted(session: Session) -> None:
    meter = CacheMeter(session, interval_s=0)
    assert meter() is None
    generation = session.generate(PROMPT, n_predict=24, sampling=GREEDY)
    with meter:
        next(iter(generation))
        begun = meter()
        for _ in generation:
            pass
        running = meter()
    done = meter()
    assert begun is not None and running is not None and done is not None
    assert (begun.steps, begun.pairs, begun.decode_s) == (0, 0, 0)
    assert 0 < running.pairs <= done.pairs
    info = session.info
    # every step verifies at least its tokens, every token has k experts in every layer with experts
    assert done.steps == generation.stats.steps
    verified = generation.stats.steps + generation.stats.drafted
    assert done.pairs == verified * info.n_expert_used * info.n_expert_layers
    assert 0 <= done.pairs_hit <= done.pairs
    assert (done.slots_total, done.slots_used <= done.slots_total) == (info.cache_slots, True)
    assert session.observers == []
    assert meter() == done  # it stays what it was


def test_without_a_cache_there_is_nothing_to_count(opened: Session) -> None:
    with CacheMeter(opened) as meter:
        answered(opened, PROMPT, 4)
    assert opened.observers == [] and meter() is None


def test_what_goes_off_is_kept_for_after_the_answer(session: Session) -> None:
    with CacheMeter(session) as meter:
        session.run.show(Notification("gone"))
    assert meter.notes == ["gone"]
    assert session.run.show is ignore  # as before
