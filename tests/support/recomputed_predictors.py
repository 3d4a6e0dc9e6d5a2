"""Predictors and their figures once more, for `recomputed_profile`: loops over lists, without moeedge's code."""

from __future__ import annotations

import math
import statistics
from typing import Any


class Utility:
    """Algorithm 1, expert by expert."""

    def __init__(self, n_experts: int, gamma: int, kind: str) -> None:
        self.kind, self.cap = kind, min(4, max(gamma, 1))
        self.s, self.f = [0] * n_experts, [0] * n_experts
        start = float(gamma // 2)
        self.up = [3.0 if kind == "fixed" else start] * n_experts
        self.down = [1.0 if kind == "fixed" else start] * n_experts

    def predict(self) -> list[bool]:
        return [s >= 1 for s in self.s]

    def observe(self, counts: list[int]) -> None:
        for e, f in enumerate(counts):
            change = f - self.f[e]
            if change >= self.up[e]:
                self.s[e] = min(self.cap, self.s[e] + 1)
            elif -change >= self.down[e]:
                self.s[e] = max(0, self.s[e] - 1)
            if self.kind != "fixed" and change > 0:
                self.up[e] = self._moved(self.up[e], change)
            if self.kind != "fixed" and change < 0:
                self.down[e] = self._moved(self.down[e], -change)
            self.f[e] = f

    def _moved(self, boundary: float, size: int) -> float:
        moved = (9 * boundary + size) / 10
        return math.floor(moved) if self.kind == "printed" else moved


class Average:
    """A decayed mean of the counts; with beta 0 "used last"."""

    def __init__(self, n_experts: int, beta: float, threshold: float) -> None:
        self.mean, self.beta, self.threshold = [0.0] * n_experts, beta, threshold

    def predict(self) -> list[bool]:
        return [mean >= self.threshold for mean in self.mean]

    def observe(self, counts: list[int]) -> None:
        self.mean = [self.beta * mean + (1 - self.beta) * f for mean, f in zip(self.mean, counts, strict=True)]


def predictions(make: Any, reads: list[list[list[int]]], first: list[bool]) -> list[list[bool]]:
    state, predictions = make(), []
    for begins, read in zip(first, reads, strict=True):
        if begins:
            state = make()
        predictions.append(state.predict())
        for counts in read:
            state.observe(counts)
    return predictions


def correlation(counts: list[list[int]], first: list[bool]) -> float | None:
    pairs = [
        pair
        for before, after, begins in zip(counts, counts[1:], first[1:], strict=False)
        if not begins
        for pair in zip(before, after, strict=True)
    ]
    if len({a for a, _ in pairs}) < 2 or len({b for _, b in pairs}) < 2:
        return None
    mean_a, mean_b = statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)
    covariance = math.fsum((a - mean_a) * (b - mean_b) for a, b in pairs)
    return covariance / math.sqrt(
        math.fsum((a - mean_a) ** 2 for a, _ in pairs) * math.fsum((b - mean_b) ** 2 for _, b in pairs)
    )


def utility_curves(counts: list[list[int]], first_steps: list[bool], gamma: int) -> list[dict[str, Any]]:
    n_experts, cap = len(counts[0]), min(4, gamma)
    curves = []
    for kind in ("printed", "float"):
        state = Utility(n_experts, gamma, kind)
        judged: list[tuple[list[int], list[int]]] = []
        for begins, step in zip(first_steps, counts, strict=True):
            if begins:
                state = Utility(n_experts, gamma, kind)
            else:
                judged.append((list(state.s), step))
            state.observe(step)
        frequency = []
        for score in range(cap + 1):
            found = [f for s, step in judged for each, f in zip(s, step, strict=True) if each == score]
            frequency.append(
                {
                    "score": score,
                    "experts": len(found),
                    "mean": statistics.fmean(found) if found else None,
                    "median": statistics.median(found) if found else None,
                    "used": statistics.fmean(f > 0 for f in found) if found else None,
                }
            )
        figures: dict[str, list[Any]] = {"r_c": [], "r_g": [], "r_c_stddev": [], "r_g_stddev": []}
        for tau in range(1, cap + 1):
            left = [sum(f for each, f in zip(s, step, strict=True) if each < tau) for s, step in judged]
            served = [sum(f > 0 for each, f in zip(s, step, strict=True) if each >= tau) for s, step in judged]
            pairs, distinct = [sum(step) for _, step in judged], [sum(f > 0 for f in step) for _, step in judged]
            for name, parts, totals in (("r_c", left, pairs), ("r_g", served, distinct)):
                ratios = [part / total for part, total in zip(parts, totals, strict=True) if total]
                figures[name].append(sum(parts) / sum(totals) if sum(totals) else None)
                figures[f"{name}_stddev"].append(statistics.pstdev(ratios) if ratios else None)
        curves.append({"predictor": f"alg1-{kind}", "steps": len(judged), "frequency": frequency, **figures})
    return curves
