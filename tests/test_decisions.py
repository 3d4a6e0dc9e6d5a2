"""Every decision is told in the same order and words: what, chosen, how much faster than what, by what it is known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from moeedge.bench.budget_choice import BudgetChoice, BudgetTrial
from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.policies.base import LookaheadStatus
from moeedge.run import Decision
from moeedge.scheduler.cache_governor import CacheChoice
from moeedge.scheduler.disk import DiskCalibration, ReadRate
from moeedge.scheduler.governor import DraftChoice
from tests.engine.test_loading import CHOICE
from tests.scheduler.test_calibration import made

_BASIS = r"(by estimate|being measured|measured( in \d[\d.]* s| \d{4}-\d\d-\d\d)?|not compared|given by the user)"
_FORM = re.compile(rf"[a-z][\w ]+: [^;]+?(, \d+\.\d\d times as (fast|many hits) as [^;]+?)?(, {_BASIS})?(; .+)?")

DRAFTS = DraftChoice(gamma=4, gamma_max=16, best=4, speed_up=1.21, n_measured=40)
MEASURED = made(device_path_s=dict(zip(DevicePath, (0.017, 0.012, 0.010), strict=True)), kept_from="2026-11-28")
TRIALS = BudgetTrial(None, 0.9, 0.02, 72, ratio=1.0, experts=30.0), BudgetTrial(16, 0.89, 0.02, 72, ratio=1.4)
BUDGET = BudgetChoice(trials=TRIALS, score_kind="tasks", calibrated_on="c", gamma=8, seconds=12.0)
DISK = DiskCalibration(
    **{"model": "m", "file_bytes": 1, "expert_bytes": 1, "matrix_bytes": 1, "mount": "", "file_system": "ext4"},
    rates=tuple(ReadRate(n, 2**20, n * 1e9, 1) for n in (1, 2, 4)), direct=True, seconds=9.0, kept_from="2026-11-28",
)  # fmt: skip
DECISIONS = {
    "draft length: 4 of 16, 1.21 times as fast as plain decoding, by estimate": DRAFTS.decision,
    "draft length: off, 1.25 times as fast as drafts of 1, by estimate": (
        replace(DRAFTS, best=0, other=1, other_speed_up=0.8).decision
    ),
    "draft length: 4 of 16, being measured": replace(DRAFTS, n_measured=3).decision,
    "draft end: where another token does not pay, 1.21 times as fast as plain decoding, by estimate": (
        replace(DRAFTS, ends_early=True).decision
    ),
    "expert cache: on, 1.20 times as fast as without, measured": CacheChoice(gain=1.2).decision,
    "expert cache: on, being measured": CacheChoice().decision,
    "expert cache: off, 1.25 times as fast as with it, measured; tried again from time to time": (
        CacheChoice(on=False, pays=False, gain=0.8).decision
    ),
    "layers on GPU0: 6 of 48 and 1,100 experts, 1.32 times as fast as --n-cpu-moe 34, measured in 31 s": (
        CHOICE.decision
    ),
    "device path: ahead (before the CPU knows the experts), 1.20 times as fast as columns, measured 2026-11-28": (
        next(MEASURED.path_decisions())
    ),
    "prefill path: stream (all experts on the device), given by the user": (
        list(MEASURED.path_decisions(prefill=PrefillPath.STREAM))[1]
    ),
    "expert budget: 16 (lossy), 1.40 times as fast as without, measured in 12 s; 0.890 of the tasks solved, "
    "without a budget 0.900, limit 0.880": BUDGET.decision,
    "disk reads: 4 of 1 MiB at a time (3 GB/s), 2.00 times as fast as one, measured 2026-11-28; the fewest within "
    "5 % of the fastest": DISK.decision(4),
    "lookahead: on, 1.03 times as many hits as without, measured": LookaheadStatus(used=True, gain=0.03).decision,
    "lookahead: off, it is switched off": LookaheadStatus(used=False, reason="it is switched off").decision,
}


@pytest.mark.parametrize(("sentence", "decision"), DECISIONS.items())
def test_all_decisions_have_one_form(sentence: str, decision: Decision) -> None:
    assert decision.sentence() == sentence
    assert _FORM.fullmatch(sentence)
    assert (decision.gain is None) == ("times" not in decision.short)
    if decision.what in ("draft length", "draft end", "expert cache", "lookahead"):  # in panels, of 80 columns or more
        assert len(f"{decision.what} {decision.short}") <= 76
