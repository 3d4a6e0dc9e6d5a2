"""What the governor makes of recorded drafts at given costs, next to all fixed lengths.

    python -m tests.benchmarks.draft_chains --repeat 4
    python -m tests.benchmarks.draft_chains --accept .5,.7,.8,.9

The record has greedy answers of the bundled target and, after each of their tokens, what the draft model would draft
next: the confidences of 16 tokens and how many are right, and the same of n-grams, whatever the load of the machine.
Costs are those of a curve: measured ones (docs/benchmarks/speculation-fit-f16.json.gz), or formulas. Each step
of the replay takes the seconds of its curve, with noise for the governor's eyes alone. With --accept drafts are right
at these rates instead, and costs are those of full shapes with drafts of two sizes (surface-*th.json.gz).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeedge import speculation
from moeedge.scheduler.governor import GAMMA_MAX, DraftGovernor, StepCost

RECORD = Path(__file__).parents[2] / "docs" / "benchmarks" / "draft-chains.json.gz"
FIT = RECORD.with_name("speculation-fit-f16.json.gz")
N_EXPERTS, N_USED = 128, 8


@dataclass(frozen=True)
class Position:
    """What can be drafted after one token. n_left: tokens of the answer that follow."""

    confidences: Sequence[float]
    n_right: int
    ngram: float | None  # confidence; None: no n-gram was found
    ngram_right: int
    n_left: int


@dataclass(frozen=True)
class Costs:
    """target_s: T_T(1), T_T(2), ..., T_T(17). draft_s: T_D."""

    target_s: Sequence[float]
    draft_s: float

    def step_s(self, n_drafted: int, n_computed: int) -> float:
        return self.target_s[n_drafted] + n_computed * self.draft_s


def experts(t: int) -> float:
    """Distinct experts of t tokens over those of one; neighbouring tokens share more than independent ones."""
    return float((speculation.uniform_unique(N_EXPERTS, N_USED, t) / N_USED) ** 0.8)


def curves() -> dict[str, Costs]:
    """Names and costs, in units of a plain step."""
    sizes = range(1, GAMMA_MAX + 2)
    times = json.loads(gzip.decompress(FIT.read_bytes()))["times"]
    measured = {
        row["n_tokens"]: row["seconds"]
        for row in times["target"]
        if row["n_sequences"] == 1 and row["n_used"] == N_USED and row["n_tokens"] <= 32
    }
    target_s = np.interp(sizes, list(measured), list(measured.values())) / measured[1]
    found = {"measured, F16": Costs(target_s.tolist(), 0.1)}
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        found[f"experts {share:.0%}"] = Costs([1 - share + share * experts(t) for t in sizes], 0.05)
    found["experts 50%, dear draft"] = Costs([0.5 + 0.5 * experts(t) for t in sizes], 0.25)
    found["dense"] = Costs([1 + 0.02 * (t - 1) for t in sizes], 0.1)
    return found


def surfaces() -> dict[str, Costs]:
    """Costs of moeedge's steps in records of `bench --accept`, in units of its plain step."""
    found = {}
    for path in sorted(RECORD.parent.glob("surface-*th.json.gz")):
        rows = [row for row in json.loads(gzip.decompress(path.read_bytes())) if row["mode"].startswith("moeedge")]
        sums: dict[int, Any] = {}  # by draft length: seconds of steps and of drafting, steps, drafted tokens
        for row in rows:
            for sample in [] if row["auto_gamma"] else row["samples"]:
                figures = [sample[name] for name in ("verify_s", "draft_s", "steps", "drafted")]
                sums[row["gamma"]] = sums.get(row["gamma"], 0) + np.array(figures)
        lengths = sorted(sums)
        times = [sums[n][0] / sums[n][2] for n in lengths]
        slope = (times[-1] - times[-2]) / (lengths[-1] - lengths[-2])  # beyond the longest that was measured
        lengths, times = [*lengths, GAMMA_MAX], [*times, times[-1] + slope * (GAMMA_MAX - lengths[-1])]
        target_s = np.interp(range(GAMMA_MAX + 1), lengths, times) / times[0]
        longest = sums[lengths[-2]]
        found[path.name.removesuffix(".json.gz")] = Costs(target_s.tolist(), longest[1] / longest[3] / times[0])
    return found


def scripted(rate: float, n_tokens: int = 4096) -> list[list[Position]]:
    """A text whose drafts are right at a rate; their confidences do not tell which."""
    n_right = np.random.default_rng(0).geometric(1 - rate, n_tokens) - 1
    return [[Position([rate] * GAMMA_MAX, int(n), None, 0, n_tokens - i) for i, n in enumerate(n_right)]]


def positions(record: dict[str, Any]) -> list[list[Position]]:
    """The texts of a record."""
    return [
        [Position(*position, len(text) - i) for i, position in enumerate(text)]  # its last token ends the answer
        for text in record["texts"]
    ]


def fixed_s(text: Sequence[Position], costs: Costs, gamma: int) -> float:
    """Seconds of an answer with drafts of one length."""
    at, seconds = 0, 0.0
    while at < len(text):
        n_drafted = min(gamma, text[at].n_left - 1)
        seconds += costs.step_s(n_drafted, n_drafted)
        at += min(text[at].n_right, n_drafted) + 1
    return seconds


def governed_s(
    texts: Sequence[Sequence[Position]],
    costs: Costs,
    *,
    seed: int = 0,
    by_confidence: bool = True,
    ngrams: bool = True,
    noise: float = 0.15,
) -> tuple[float, float]:
    """Seconds of all answers, one after the other as in a chat, and the share of steps in which n-grams drafted."""
    rng = np.random.default_rng(seed)
    governor = DraftGovernor(n_experts=N_EXPERTS, n_used=N_USED)
    seconds, n_steps, n_by_ngrams = 0.0, 0, 0
    for text in texts:
        governor.begin_answer()
        at = 0
        while at < len(text):
            here = text[at]
            most = min(GAMMA_MAX, here.n_left - 1)
            ngram = here.ngram if ngrams and most > 0 else None
            choice = governor.choose(ngram)
            gamma = min(choice.gamma, most)
            by_ngrams = choice.source == "ngram"
            confidences: list[float] = []
            n_drafted = gamma
            if not by_ngrams and by_confidence:
                n_drafted, confidences = drafted(here.confidences[:gamma], governor)
            n_accepted = min(n_drafted, here.ngram_right if by_ngrams else here.n_right)
            n_computed = 0 if by_ngrams else max(n_drafted, len(confidences))
            step_s = costs.step_s(n_drafted, n_computed)
            scatter = math.exp(rng.normal(0.0, noise) - noise**2 / 2)
            n_compared = 0 if ngram is None else min(most, n_accepted + 1)
            governor.observe(
                StepCost(
                    n_drafted=n_drafted,
                    n_accepted=n_accepted,
                    draft_s=n_computed * costs.draft_s,
                    target_s=(step_s - n_computed * costs.draft_s) * scatter,
                    by_ngrams=by_ngrams,
                    confidences=confidences,
                    ngram_confidences=[ngram or 0.0] * n_compared,
                    ngram_accepted=min(here.ngram_right, n_compared),
                )
            )
            seconds += step_s
            n_steps, n_by_ngrams = n_steps + 1, n_by_ngrams + by_ngrams
            at += n_accepted + 1
    return seconds, n_by_ngrams / n_steps


def drafted(confidences: Sequence[float], governor: DraftGovernor) -> tuple[int, list[float]]:
    """How many drafts the governor keeps, and the confidences of those that are computed."""
    for n, confidence in enumerate(confidences):
        if not governor.stop.keeps(confidence):
            return n, list(confidences[: n + 1])
        if not governor.stop.goes_on():
            return n + 1, list(confidences[: n + 1])
    return len(confidences), list(confidences)


def compared(texts: Sequence[Sequence[Position]], costs: Costs, n_seeds: int = 5) -> dict[str, float]:
    """Speeds over plain decoding: of the best fixed length in hindsight, and of the governor with and without parts.

    regret: by which the governor takes longer than that length.
    """
    by_gamma = {gamma: sum(fixed_s(text, costs, gamma) for text in texts) for gamma in range(GAMMA_MAX + 1)}
    best = min(by_gamma, key=lambda gamma: by_gamma[gamma])

    def speed_up(**options: bool) -> float:
        seconds = [governed_s(texts, costs, seed=seed, **options)[0] for seed in range(n_seeds)]  # type: ignore[arg-type]
        return by_gamma[0] / float(np.mean(seconds))

    auto = speed_up()
    return {
        "best_gamma": best,
        "best_fixed": by_gamma[0] / by_gamma[best],
        "four": by_gamma[0] / by_gamma[4],
        "auto_length": speed_up(by_confidence=False, ngrams=False),
        "auto_confidence": speed_up(ngrams=False),
        "auto": auto,
        "regret": by_gamma[0] / by_gamma[best] / auto - 1,
        "ngram_share": governed_s(texts, costs)[1],
    }


def main() -> None:
    """Prints a table of speeds over plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, help="answer the prompts so many times over")
    parser.add_argument("--accept", type=lambda text: [float(part) for part in text.split(",")], default=[])
    options = parser.parse_args()
    recorded = positions(json.loads(gzip.decompress(RECORD.read_bytes()))) * options.repeat
    cases = [
        (f"{name}, {rate:g}", scripted(rate), costs) for name, costs in surfaces().items() for rate in options.accept
    ]
    for name, texts, costs in cases or [(name, recorded, costs) for name, costs in curves().items()]:
        row = compared(texts, costs)
        print(f"{name:30}", "  ".join(f"{key} {value:.3f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
