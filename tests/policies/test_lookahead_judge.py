"""The judge keeps predictions that find more activations, and rests those that do not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.spac.spac import LookaheadJudge

N, N_SLOTS = 400, 60


def run(judge: LookaheadJudge, n_steps: int, *, informed: bool, seed: int = 0) -> NDArray[np.bool_]:
    """Whether each step had predictions: of the coming step where `informed`, otherwise noise."""
    rng = np.random.default_rng(seed)
    on = np.zeros(n_steps, dtype=np.bool_)
    for step in range(n_steps):
        on[step] = judge.on
        now = rng.poisson(0.4, N).astype(np.float32)
        counts = np.full(N, 0.4, dtype=np.float32) + rng.random(N, dtype=np.float32) * 0.01
        ahead = now if informed else rng.poisson(0.4, N).astype(np.float32)
        if judge.wants_judgement:
            judge.judge(counts + ahead, counts, now)
        judge.end_step()
    return on


def test_predictions_that_are_right_stay() -> None:
    judge = LookaheadJudge(N_SLOTS)
    assert run(judge, 400, informed=True).all()
    assert judge.status.used and judge.status.reads_drafts
    assert judge.status.gain is not None and judge.status.gain > 0.5


def test_noise_is_switched_off_and_tried_again_more_and_more_rarely() -> None:
    judge = LookaheadJudge(N_SLOTS)
    on = run(judge, 4000, informed=False)
    assert on[:40].all() and not on[60:200].any()
    changes = np.flatnonzero(np.diff(on.astype(int)) > 0)  # another chance
    assert 2 <= changes.size <= 4
    assert (np.diff(np.diff(changes)) > 0).all()
    assert not judge.status.used and not judge.status.reads_drafts and judge.status.reason


def test_predictions_that_become_right_return() -> None:
    judge = LookaheadJudge(N_SLOTS)
    run(judge, 100, informed=False)
    assert not judge.on
    assert run(judge, 700, informed=True)[-1]


def test_nothing_is_judged_before_a_prediction() -> None:
    judge = LookaheadJudge(N_SLOTS)
    for _ in range(100):
        judge.end_step()
    assert judge.on and not judge.status.used and judge.status.gain is None


def test_caches_that_hold_all_or_nothing_judge_nothing() -> None:
    for n_slots in (0, N):
        judge = LookaheadJudge(n_slots)
        run(judge, 100, informed=False)
        assert judge.on and judge.status.gain is None
