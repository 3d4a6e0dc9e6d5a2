"""The draft length by measured cost against a record of choices, step by step.

`python -m tests.scheduler.test_governor_choices` records the choices of the present code. Do so only where they are
meant to change.
"""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.scheduler.governor import GAMMA_MAX, DraftGovernor, StepCost
from tests.scheduler.test_confident_drafts import MIXED, Text, n_right
from tests.scheduler.test_governor import COLD, N_EXPERTS, N_USED, TRACES, Trace

RECORD = Path(__file__).with_name("governor-choices.json.gz")
N_STEPS = 160
COPIES = Text(sure=0.2, otherwise=0.6, ngram=lambda n: 0.95 if n % 200 > 100 else 0.1)
CASES: dict[str, tuple[Trace, Text | None]] = {
    **{name: (trace, None) for name, trace in TRACES.items()},
    "cold": (COLD, None),
    **{f"{name}, by confidence": (TRACES[name], MIXED) for name in ("best 0", "best 2", "best 8", "jump")},
    "best 2, n-grams": (TRACES["best 2"], COPIES),
}


def chosen(governor: DraftGovernor) -> list[Any]:
    choice = governor.choice
    return [choice.gamma, choice.best, choice.source, choice.is_trial, choice.ends_early, choice.other]


def played(trace: Trace, text: Text | None, seed: int) -> list[dict[str, Any]]:
    """Steps as the governor chooses them: the n-grams' confidence, its choice, what the step took."""
    rng = np.random.default_rng(seed)
    governor = DraftGovernor(n_experts=N_EXPERTS, n_used=N_USED)
    steps, n = [], 0
    for _ in range(N_STEPS):
        chance = None if text is None else text.ngram(n)
        choice = governor.choose(None if chance is None else 1.0)
        if text is None:
            cost = trace.step(choice.gamma, n, rng)
        else:
            found = 0 if chance is None else n_right(chance, GAMMA_MAX, rng)
            by_ngrams = choice.source == "ngram"
            n_drafted, n_accepted, confidences = (
                (choice.gamma, min(found, choice.gamma), [])
                if by_ngrams
                else text.draft(governor.stop, choice.gamma, rng)
            )
            n_compared = 0 if chance is None else min(GAMMA_MAX, n_accepted + 1)
            cost = StepCost(
                n_drafted=n_drafted,
                n_accepted=int(n_accepted),
                draft_s=trace.draft_s * len(confidences),
                target_s=trace.target_s(n_drafted + 1) * math.exp(rng.normal(0.0, trace.noise)),
                by_ngrams=by_ngrams,
                confidences=confidences,
                ngram_confidences=[1.0] * n_compared,
                ngram_accepted=min(found, n_compared),
            )
        steps.append({"ngram": chance is not None, "choice": chosen(governor), "cost": asdict(cost)})
        governor.observe(cost)
        n += cost.n_accepted + 1
    return steps


@pytest.mark.parametrize("name", CASES)
def test_choices_are_those_of_the_record(name: str) -> None:
    """Lengths, sources and trials; and each draft ends where it did."""
    governor = DraftGovernor(n_experts=N_EXPERTS, n_used=N_USED)
    for i, step in enumerate(json.loads(gzip.decompress(RECORD.read_bytes()))[name]):
        governor.choose(1.0 if step["ngram"] else None)
        assert chosen(governor) == step["choice"], i
        cost = StepCost(**step["cost"])
        n_kept = 0
        for confidence in cost.confidences:
            if not governor.stop.keeps(confidence):
                break
            n_kept += 1
            if not governor.stop.goes_on():
                break
        if cost.confidences:
            assert n_kept == cost.n_drafted, i
        governor.observe(cost)


if __name__ == "__main__":
    record = {name: played(trace, text, seed) for seed, (name, (trace, text)) in enumerate(CASES.items())}
    RECORD.write_bytes(gzip.compress(json.dumps(record).encode(), mtime=0))
