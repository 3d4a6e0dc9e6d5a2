"""The figures of a profile, computed once more from a written trace: NumPy's reader, then loops over sets.

No code of moeedge is used, so that a test can compare the two.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.recomputed_predictors import Average, Utility, correlation, predictions, utility_curves


def assert_equal(shown: Any, expected: Any, where: str = "") -> None:
    """Compares numbers within the rounding of the JSON; both must have the same keys."""
    if isinstance(expected, dict):
        assert set(shown) == set(expected), where
        for key, value in expected.items():
            assert_equal(shown[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(shown) == len(expected), where
        for place, value in enumerate(expected):
            assert_equal(shown[place], value, f"{where}[{place}]")
    elif isinstance(expected, float) and shown is not None:
        assert shown == pytest.approx(expected, abs=1e-6, rel=1e-6), where
    else:
        assert shown == expected, where


Used = list[set[int]]  # per token: the experts of one layer
DECODE, VERIFY = 2, 4


@dataclass
class Step:
    """One decode or verification: rows of the trace, and how many of them became text."""

    sequence: int
    rows: list[int]
    n_text: int


class RecomputedProfile:
    """The figures of one trace file."""

    def __init__(self, path: Path, *, gamma: int | None = None, accepts: bool = True) -> None:
        """gamma: the text is cut into windows of gamma + 1 tokens whose drafts are all accepted, or none of them."""
        with np.load(path) as saved:
            self.arrays = {name: saved[name] for name in saved.files}
        self.meta: dict[str, Any] = json.loads(str(self.arrays["meta"]))
        self.n_experts, self.k = self.meta["n_experts"], self.meta["n_experts_used"]
        phase, sequence, step = (self.arrays[name].tolist() for name in ("phase", "sequence", "step"))
        rows = [row for row, value in enumerate(phase) if value in (DECODE, VERIFY)]
        accepted = self.arrays["accepted"]
        self.steps = [
            Step(key[0], found := list(members), int(accepted[found].sum()))
            for key, members in groupby(rows, key=lambda row: (sequence[row], step[row]))
        ]
        self.text = [row for row in rows if accepted[row]]
        self.sequence = sequence
        unknown = np.iinfo(self.arrays["ids"].dtype).max
        self.used = [
            [{expert for expert in picks if expert != unknown} for picks in self.arrays["ids"][:, layer].tolist()]
            for layer in range(self.meta["n_layers"])
        ]
        self.measured = gamma is None
        self.gamma = self.meta["gamma"] if gamma is None else gamma
        self.speculative = self.gamma > 0
        if gamma is not None:
            self.steps = [step for _, rows in self._texts() for step in self._windows(rows, accepts)]
            self.text = [row for step in self.steps for row in step.rows[: step.n_text]]

    def _texts(self) -> list[tuple[int, list[int]]]:
        return [(text, list(rows)) for text, rows in groupby(self.text, key=lambda row: self.sequence[row])]

    def _windows(self, rows: list[int], accepts: bool) -> list[Step]:
        n_text = self.gamma + 1 if accepts else 1
        starts = range(0, len(rows) - self.gamma, n_text)
        return [Step(self.sequence[rows[0]], rows[start : start + self.gamma + 1], n_text) for start in starts]

    def complete(self, layer: int) -> dict[str, Any]:
        """The object of a layer of a trace with the model's profile: every key of it."""
        return self.layer(layer) | self.run() | {"model_profile": self.model()}

    def run(self) -> dict[str, Any]:
        names = ("model", "architecture", "n_layers", "n_experts", "n_experts_used", "gamma", "draft")
        return {name: self.meta[name] for name in names} | self.meta["parameters"]

    def model(self) -> dict[str, Any]:
        return {
            "by_layer": [self.curves(each) for each in range(self.meta["n_layers"])],
            "mean_of_layers": self.mean_curves(),
            "speculation": self.speculation(),
            "drafts": self.drafts(),
            "groups": self.groups(),
            "group_unique_tokens": 4,
        }

    # sharing

    def overlap(self, rows: Sequence[int], layer: int, distance: int = 1) -> float | None:
        shares = [
            len(self.used[layer][a] & self.used[layer][b]) / len(self.used[layer][a])
            for a, b in zip(rows, rows[distance:], strict=False)
            if self.sequence[a] == self.sequence[b] and self.used[layer][a] and self.used[layer][b]
        ]
        return statistics.fmean(shares) if shares else None

    def unique(self, rows: Sequence[int], layer: int, n_tokens: int) -> float | None:
        counts = []
        for start in range(len(rows) - n_tokens + 1):
            window = rows[start : start + n_tokens]
            sets = [self.used[layer][row] for row in window]
            if self.sequence[window[0]] == self.sequence[window[-1]] and all(sets):
                counts.append(len(set().union(*sets)))
        return statistics.fmean(counts) if counts else None

    def popularity(self, rows: Sequence[int], layer: int) -> list[float]:
        recorded = [row for row in rows if self.used[layer][row]]
        return [
            sum(expert in self.used[layer][row] for row in recorded) / max(len(recorded), 1)
            for expert in range(self.n_experts)
        ]

    def curves(self, layer: int) -> dict[str, Any]:
        p, n = self.popularity(self.text, layer), self.n_experts
        total = sum(p)
        entropy = -sum(x / total * math.log2(x / total) for x in p if x > 0)
        gini = sum(abs(a - b) for a in p for b in p) / (2 * n * total)
        n_hot = max(round(0.1 * n), 1)
        return {
            "layer": layer,
            "tokens": sum(bool(self.used[layer][row]) for row in self.text),
            "popularity": p,
            "overlap_by_distance": {str(j): self.overlap(self.text, layer, j) for j in range(1, 9)},
            "overlap_independence": sum(x * x for x in p) / total,
            "overlap_uniform": self.k / n,
            "unique_experts": {
                "empirical": {str(b): self.unique(self.text, layer, b) for b in range(1, 65)},
                "independence": {str(b): sum(1 - (1 - x) ** b for x in p) for b in range(1, 65)},
                "uniform": {str(b): n * (1 - (1 - self.k / n) ** b) for b in range(1, 65)},
            },
            "skew": {
                "top_ratio": max(p) / (self.k / n),
                "gini": gini,
                "entropy_bits": entropy,
                "effective_experts": 2**entropy,
                "hot_share": sum(sorted(p)[-n_hot:]) / total,
                "unused": sum(x == 0 for x in p),
            },
        }

    def mean_curves(self) -> dict[str, Any]:
        layers = [self.curves(layer) for layer in range(self.meta["n_layers"])]
        popularity = [sorted(layer["popularity"], reverse=True) for layer in layers]
        mean = _mean_of(layers)
        mean["popularity"] = [statistics.fmean(ranked) for ranked in zip(*popularity, strict=True)]
        mean["skew"]["unused"] = round(mean["skew"]["unused"])
        mean["tokens"] = max(layer["tokens"] for layer in layers)
        return mean | {"layer": None}

    def groups(self) -> list[dict[str, Any]]:
        found = []
        layers = range(self.meta["n_layers"])
        texts = self.meta["parameters"].get("texts", [])
        for kind in ("dataset", "category", "language"):
            names = list(dict.fromkeys(text[kind] for text in texts if text.get(kind)))
            for name in names if len(names) > 1 else []:
                own = {number for number, text in enumerate(texts) if text.get(kind) == name}
                rows = [row for row in self.text if self.sequence[row] in own]
                p = [self.popularity(rows, layer) for layer in layers]
                steps = [step for step in self.steps if step.sequence in own]
                drafted = sum(len(step.rows) - 1 for step in steps)
                found.append(
                    {
                        "kind": kind,
                        "name": name,
                        "texts": len({self.sequence[row] for row in rows}),
                        "tokens": len(rows),
                        "overlap": _mean_or_none([self.overlap(rows, layer) for layer in layers]),
                        "overlap_independence": statistics.fmean(sum(x * x for x in q) / sum(q) for q in p),
                        "unique": _mean_or_none([self.unique(rows, layer, 4) for layer in layers]),
                        "unique_independence": statistics.fmean(sum(1 - (1 - x) ** 4 for x in q) for q in p),
                        "acceptance_rate": sum(step.n_text - 1 for step in steps) / drafted if drafted else None,
                    }
                )
        return found

    def drafts(self) -> dict[str, Any] | None:
        drafted = [(len(step.rows) - 1, step.n_text - 1) for step in self.steps if len(step.rows) > 1]
        if not drafted:
            return None
        n_accepted = sum(accepted for _, accepted in drafted)
        return {
            "gamma": max(n for n, _ in drafted),
            "acceptance_rate": n_accepted / sum(n for n, _ in drafted),
            "acceptance_chance": n_accepted / sum(min(accepted + 1, n) for n, accepted in drafted),
        }

    def speculation(self) -> dict[str, Any]:
        mean, drafts = self.mean_curves()["unique_experts"], self.drafts()
        alpha = 0.8 if drafts is None else drafts["acceptance_chance"]
        gammas = list(range(13))
        empirical = [mean["empirical"][str(gamma + 1)] for gamma in gammas]
        return {
            "gamma": gammas,
            "acceptance": alpha,
            "measured": self.measured and drafts is not None,
            "omega": [g + 1 if alpha == 1 else (1 - alpha ** (g + 1)) / (1 - alpha) for g in gammas],
            "a_over_b": [None if value is None else value / mean["empirical"]["1"] for value in empirical],
            "a_over_b_independence": [mean["independence"][str(g + 1)] / mean["independence"]["1"] for g in gammas],
            "a_over_b_uniform": [mean["uniform"][str(g + 1)] / mean["uniform"]["1"] for g in gammas],
        }

    # prediction

    def step_counts(self, layer: int) -> list[list[int]]:
        return [
            [sum(expert in self.used[layer][row] for row in step.rows) for expert in range(self.n_experts)]
            for step in self.steps
        ]

    def token_counts(self, layer: int) -> list[list[int]]:
        return [[int(expert in self.used[layer][row]) for expert in range(self.n_experts)] for row in self.text]

    def layer(self, layer: int) -> dict[str, Any]:
        """Everything that the object of a layer has, except the run."""
        counts, curves = self.step_counts(layer), self.curves(layer)
        first_steps = [i == 0 or step.sequence != self.steps[i - 1].sequence for i, step in enumerate(self.steps)]
        first_tokens = [
            i == 0 or self.sequence[row] != self.sequence[self.text[i - 1]] for i, row in enumerate(self.text)
        ]
        predictors, by_step = self._predictors(layer, counts, first_steps, first_tokens)
        judged = [f for first, step in zip(first_steps, counts, strict=True) if not first for f in step]
        always_cold = sum(f == 0 for f in judged) / len(judged) if judged else None

        def accuracy(sensor: str, predicts: str) -> float | None:
            name = "alg1-printed"
            chosen = [s for s in predictors if (s["predictor"], s["sensor"], s["predicts"]) == (name, sensor, predicts)]
            return chosen[0]["accuracy"] if chosen else None

        weights = self.arrays.get("weights")
        order = sorted(range(self.n_experts), key=lambda expert: -curves["popularity"][expert])
        return {
            **curves,
            "steps": len(self.steps),
            "overlap": curves["overlap_by_distance"]["1"],
            "hot_cold_accuracy": {
                "sd": accuracy("sd", "step"),
                "ar": accuracy("ar", "step" if self.speculative else "token"),
                "always_cold": always_cold,
                "ar_next_token": accuracy("ar", "token"),
                "always_cold_next_token": 1 - statistics.fmean(curves["popularity"]),
                "predictors": predictors,
                "by_step": by_step,
                "by_step_smoothed": [_mean_known(by_step[max(i - 15, 0) : i + 1]) for i in range(len(by_step))],
            },
            "unique_experts_per_step": statistics.fmean(sum(f > 0 for f in step) for step in counts),
            "hottest": [
                {
                    "expert": expert,
                    "activations": sum(expert in self.used[layer][row] for row in self.text),
                    "share": curves["popularity"][expert],
                    "mean_weight": None if weights is None else self._mean_weight(weights, layer, expert),
                }
                for expert in order[:10]
                if curves["popularity"][expert] > 0
            ],
            "utility": utility_curves(counts, first_steps, self.gamma) if self.speculative else [],
            "persistence": {
                "sd": correlation(counts, first_steps) if self.speculative else None,
                "ar": correlation(self.token_counts(layer), first_tokens),
            },
            "activation_counts": {
                "step_tokens": [len(step.rows) for step in self.steps],
                "total": [sum(column) for column in zip(*counts, strict=True)],
                "per_step": counts,
            },
            "token_experts": [
                [
                    expert if expert in self.used[layer][row] else -1
                    for expert in self.arrays["ids"][row, layer].tolist()
                ]
                for row in self.text
            ],
        }

    def _mean_weight(self, weights: Any, layer: int, expert: int) -> float:
        found = [
            float(weights[row, layer, slot])
            for row in self.text
            for slot, used in enumerate(self.arrays["ids"][row, layer].tolist())
            if used == expert
        ]
        return statistics.fmean(found)

    def _predictors(
        self, layer: int, counts: list[list[int]], first_steps: list[bool], first_tokens: list[bool]
    ) -> tuple[list[dict[str, Any]], list[float | None]]:
        """Every score, and the accuracy of the first at each of its steps."""
        tokens = self.token_counts(layer)
        accepted = iter(tokens)
        tokens_of = [[next(accepted) for _ in range(step.n_text)] for step in self.steps]
        horizon = statistics.fmean(len(step.rows) for step in self.steps)
        runs: list[tuple[str, str, str, Any]] = []
        if self.speculative:
            gamma = self.gamma
            for kind in ("printed", "float", "fixed"):
                runs.append((f"alg1-{kind}", "sd", "step", lambda kind=kind: Utility(self.n_experts, gamma, kind)))
            runs.append(("count-ema", "sd", "step", lambda: Average(self.n_experts, 0.7, 0.5)))
            runs.append(("last-step", "sd", "step", lambda: Average(self.n_experts, 0.0, 0.5)))
            runs.append(("alg1-printed", "ar", "step", lambda: Average(self.n_experts, 0.0, 0.5)))
            threshold = 1 - 0.5 ** (1 / max(horizon, 1))
            runs.append(("count-ema", "ar", "step", lambda: Average(self.n_experts, 0.9, threshold)))
        runs.append(("alg1-printed", "ar", "token", lambda: Average(self.n_experts, 0.0, 0.5)))
        runs.append(("count-ema", "ar", "token", lambda: Average(self.n_experts, 0.9, 0.5)))
        scores, by_step = [], []
        for place, (name, sensor, predicts, make) in enumerate(runs):
            truth = counts if predicts == "step" else tokens
            first = first_steps if predicts == "step" else first_tokens
            reads = tokens_of if (sensor, predicts) == ("ar", "step") else [[each] for each in truth]
            anew = predictions(make, reads, first)
            right = [
                [hot == (f > 0) for hot, f in zip(predicted, step, strict=True)]
                for predicted, step in zip(anew, truth, strict=True)
            ]
            if place == 0:
                by_step = [None if begins else statistics.fmean(row) for begins, row in zip(first, right, strict=True)]
            pairs = [
                (hot, f > 0)
                for begins, predicted, step in zip(first, anew, truth, strict=True)
                if not begins
                for hot, f in zip(predicted, step, strict=True)
            ]
            hot_found = [hot for hot, true in pairs if true]
            cold_found = [not hot for hot, true in pairs if not true]
            scores.append(
                {
                    "predictor": name,
                    "sensor": sensor,
                    "predicts": predicts,
                    "accuracy": statistics.fmean(hot == true for hot, true in pairs) if pairs else None,
                    "balanced_accuracy": (
                        (statistics.fmean(hot_found) + statistics.fmean(cold_found)) / 2
                        if hot_found and cold_found
                        else None
                    ),
                }
            )
        return scores, by_step


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _mean_of(objects: list[Any]) -> Any:
    """The same object with the mean of each number; None where one is None."""
    if isinstance(objects[0], dict):
        return {key: _mean_of([each[key] for each in objects]) for key in objects[0]}
    if isinstance(objects[0], list):
        return [_mean_of(list(values)) for values in zip(*objects, strict=True)]
    return _mean_or_none(objects)
