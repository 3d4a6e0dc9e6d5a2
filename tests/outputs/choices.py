"""What the parts that decide by measured costs choose, on fixed costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from tests.outputs.values import plain

N_STEPS = 240
# seconds of a verification of t tokens at the n-th token, of a draft token, and the chance that a draft is accepted
COSTS: dict[str, tuple[Any, float, Any]] = {
    "drafts pay": (lambda t, n: 0.1 + 0.004 * t, 0.003, lambda n: 0.85),
    "drafts lose": (lambda t, n: 0.05 * t, 0.02, lambda n: 0.3),
    "experts cost": (lambda t, n: 0.02 + 0.03 * t**0.7, 0.004, lambda n: 0.7),
    "the text changes": (lambda t, n: 0.06 + 0.01 * t, 0.005, lambda n: 0.9 if n % 160 < 80 else 0.2),
    "the cache fills": (lambda t, n: (0.05 + 0.02 * t) * (1 + 3 * math.exp(-n / 40)), 0.004, lambda n: 0.6),
    "stalls": (lambda t, n: 0.05 + 0.01 * t + (0.4 if n % 37 == 0 else 0.0), 0.004, lambda n: 0.75),
}


class Chance:
    """Numbers from 0 to 1 that are the same everywhere."""

    def __init__(self, seed: int) -> None:
        self._state = seed * 7919 + 1

    def __call__(self) -> float:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) / 2**31


def cases() -> Iterator[tuple[str, Any]]:
    """Name and choices of every case."""
    for seed, (name, costs) in enumerate(COSTS.items()):
        for way in ("fixed", "confident", "ngrams", "loading"):
            yield f"draft length, {name}, {way}", _draft_lengths(costs, way, seed)
    for seed, speed in enumerate((0.5, 0.95, 1.0, 1.05, 1.5, 3.0)):
        yield f"cache, a step with it has {speed} times the speed", _cache(speed, seed)
    for minimum in (0.0, 0.4, 0.8):
        yield f"draft ends below {minimum}", _endings(minimum)
    yield "acceptance by confidence", _acceptance()
    for gain in (-0.2, 0.0, 0.02, 0.5):
        yield f"lookahead brings {gain}", _lookahead(gain)
    yield from _budgets()


def _draft_lengths(costs: Any, way: str, seed: int) -> list[Any]:
    module_ = import_module("moeedge.scheduler.governor")
    target_s, draft_s, acceptance = costs
    chance, governor = Chance(seed), module_.DraftGovernor(n_experts=128, n_used=8)
    found, n = [], 0
    for step in range(N_STEPS):
        copies = way == "ngrams" and (step // 40) % 2 == 1
        choice = governor.choose(0.9 if copies else None)
        confidences: list[float] = []
        n_drafted, n_accepted = choice.gamma, 0
        if way == "confident" and choice.source == "draft":
            n_drafted = 0
            while n_drafted < choice.gamma:
                confidences.append(0.15 + 0.85 * chance())
                if not governor.stop.keeps(confidences[-1]):
                    break
                n_drafted += 1
                if not governor.stop.goes_on():
                    break
        rate = 0.97 if choice.source == "ngram" else acceptance(n)
        while n_accepted < n_drafted and chance() < (confidences[n_accepted] if confidences else rate):
            n_accepted += 1
        seconds = target_s(n_drafted + 1, n) * (0.9 + 0.2 * chance())
        governor.observe(
            module_.StepCost(
                n_drafted=n_drafted,
                n_accepted=n_accepted,
                draft_s=0.0 if choice.source == "ngram" else draft_s * max(n_drafted, len(confidences)),
                target_s=seconds,
                loading_s=seconds / 4 if way == "loading" else 0.0,
                by_ngrams=choice.source == "ngram",
                confidences=confidences,
                ngram_confidences=[0.9] * (n_accepted + 1) if copies else [],
                ngram_accepted=n_accepted if copies else 0,
            )
        )
        n += n_accepted + 1
        flags = "".join(letter for letter, on in (("t", choice.is_trial), ("e", choice.ends_early)) if on)
        found.append(f"{choice.gamma} {choice.best} {choice.other} {choice.source[0]} {flags} {n_drafted}")
    last = governor.choice
    return [*found, plain(last.speed_up), plain(last.other_speed_up), last.n_measured]


def _cache(speed: float, seed: int) -> list[Any]:
    governor, chance = import_module("moeedge.scheduler.cache_governor").CacheGovernor(), Chance(seed)
    found = ""
    for step in range(4 * N_STEPS):
        if step % 200 == 0:
            governor.begin_text()
        if step % 50 == 0:
            governor.begin_answer()
        choice = governor.choice
        n_tokens = 1 + int(chance() * 5)
        warm = 1 + math.exp(-step / 60)
        governor.observe(n_tokens, (0.1 + 0.01 * n_tokens) * (0.95 + 0.1 * chance()) * (warm if choice.on else speed))
        found += "cC-+"[choice.on + 2 * choice.is_trial]
    return [found, plain(governor.choice)]


def _gains(where: Any) -> list[Any]:
    tokens = [sum(0.8**i for i in range(1, n + 1)) for n in range(9)]
    return [where.ExpectedGain([base + slope * n for n in range(9)], part, tokens)
            for base, slope, part in ((1.0, 0.3, 0.1), (1.0, 0.7, 0.3), (0.5, 0.1, 0.05))]  # fmt: skip


def _endings(minimum: float) -> list[Any]:
    where, chance = import_module("moeedge.scheduler.stopping"), Chance(3)
    found = []
    for gain in (None, *_gains(where)):
        chances = None if gain is None else [0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99]
        for _ in range(24):
            stop = where.DraftStop(gain, chances)
            stop.minimum = minimum
            drafted = ""
            for _ in range(8):
                kept = stop.keeps(1 - chance() ** 2)
                drafted += "k" if kept else "."
                if not kept or not stop.goes_on():
                    break
            found.append(drafted)
    for gain in _gains(where):
        shares, chances = [0.1, 0.1, 0.2, 0.2, 0.2, 0.1, 0.1], [0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99]
        found.append(plain([gain.of_looking(chances, shares), gain.of_equals(0.7), gain.of_more(2, 0.5)]))
        found.append(plain([gain.of_next(n, 0.9**n) for n in range(8)]))
    return found


def _acceptance() -> list[Any]:
    counted, chance = import_module("moeedge.scheduler.stopping").AcceptanceByConfidence(), Chance(5)
    found = []
    for step in range(60):
        confidences = [chance() for _ in range(step % 6)]
        counted.observe(confidences, min(len(confidences), int(6 * chance())))
        found += [plain(counted.chances(deviations)) for deviations in (0.0, 1.0) if step % 10 == 9]
    return found


def _lookahead(gain: float) -> list[Any]:
    judge, chance = import_module("moeedge.policies.spac").LookaheadJudge(6), Chance(7)
    found = ""
    for _ in range(700):
        wanted = judge.wants_judgement
        found += ("w" if wanted else ".") if judge.on else "-"
        if wanted:
            now = np.array([float(int(4 * chance())) for _ in range(24)])
            noise = np.array([chance() for _ in range(24)])
            judge.judge(now * max(1 + gain, 0) + 3 * noise, now + 3 * noise[::-1], now)
        judge.end_step()
    return [found, plain(judge.status)]


def _budgets() -> Iterator[tuple[str, Any]]:
    where, chance = import_module("moeedge.bench.budget_choice"), Chance(11)
    base = where.BudgetTrial(None, 0.8, 0.05, 40, 10.0, 1.0, 3.0, 24.0)
    for number in range(12):
        trials = [
            where.BudgetTrial(n, 0.8 - 0.12 * chance(), 0.05, 40 - 10 * (chance() < 0.2), 11.0, 0.95 + 0.2 * chance())
            for n in (8, 12, 16, 20)[: number % 5]
        ]
        kind = ("tasks", "likelihood")[number % 2]
        about = {"score_kind": kind, "calibrated_on": "sample", "gamma": 4, "seconds": 12.5}
        choice = where.BudgetChoice(trials=(base, *trials), **about, kept_from="2026-11-28" * (number % 3 == 0))
        yield f"budget {number}", plain([choice.best, choice.allowed, choice.least_score, choice.decision.sentence()])
    for used in (1, 2, 4, 8):
        yield f"budgets of {used}", plain([where.candidate_budgets(used, n) for n in (1.0, 8.5, 24.0, 61.3, 128.0)])
    scores = [[float((i * k) % 3 > 0) for i in range(k + 5)] for k in range(1, 12)]
    yield "lost too many", [where.lost_too_many(each[: len(each) // 2], [1.0] * (len(each) // 2), 9) for each in scores]
