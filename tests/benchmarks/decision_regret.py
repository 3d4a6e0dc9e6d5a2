"""Regret of each decision by measurement: how much longer its choice takes than the best way in hindsight.

    python -m tests.benchmarks.decision_regret

The product's own rules decide, on times with noise of ways whose true times are known. Draft lengths and the cache:
step by step, on the streams of their tests, recorded drafts and costs of full shapes. What is measured once and kept:
with as many samples as the product takes, of ways that differ by 2, 5 and 20 % and with noise of 5, 15 and 30 % (of the
logarithm of a time). The disk: on recorded rates. Lookahead: lost hits, of texts that drafts predict more or less well.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean

import numpy as np

from moeedge.bench.budget_choice import BudgetChoice, BudgetTrial
from moeedge.engine.layer_choice import LayerChoice, LayerSplit
from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.policies.spac import LookaheadJudge
from moeedge.scheduler.calibration import UNMEASURED, parse_measurement
from moeedge.scheduler.disk import DiskCalibration
from moeedge.scheduler.microbench import fewest_readers
from tests.benchmarks import draft_chains
from tests.scheduler import test_cache_governor, test_governor

_GAPS, _NOISES, _N_SEEDS = (0.02, 0.05, 0.2), (0.05, 0.15, 0.3), 60
_RATES = (0.5, 0.7, 0.8, 0.9)  # of accepted drafts
_SESSION_NOISE = 0.03  # of sessions that are opened one after the other

Rng = np.random.Generator
Measure = Callable[[float, int], list[float]]  # a way's true time, how often -> times
Choose = Callable[[list[float], Measure, Rng], int]


def whole_layers(true: list[float], measure: Measure, rng: Rng) -> int:
    """The mean of the fastest nine tenths of 32 steps of a session for each division."""
    sessions = [s * float(np.exp(rng.normal(0, _SESSION_NOISE))) for s in true]
    means = [fmean(sorted(measure(s, 32))[:29]) for s in sessions]
    splits = tuple(LayerSplit(i, i, 1, mean_s) for i, mean_s in enumerate(means))
    return LayerChoice(device="", n_layers=3, splits=splits, free_bytes=0, seconds=0).best.n_whole


def device_path(true: list[float], measure: Measure, _rng: Rng) -> int:
    times = {path: min(measure(s, 4)) for path, s in zip(DevicePath, true, strict=True)}
    return list(DevicePath).index(replace(UNMEASURED, device_path_s=times).device_path)


def prefill_path(true: list[float], measure: Measure, _rng: Rng) -> int:
    paths = [PrefillPath.CPU, PrefillPath.RESIDENT, PrefillPath.STREAM]
    speeds = {path: 1 / min(measure(s, 3)) for path, s in zip(paths, true, strict=True)}
    return paths.index(replace(UNMEASURED, prefill_ts=speeds).prefill_path)


def upload_readers(true: list[float], measure: Measure, _rng: Rng) -> int:
    return fewest_readers({n: min(measure(s, 4)) for n, s in enumerate(true, start=1)}) - 1


def expert_budget(true: list[float], measure: Measure, _rng: Rng) -> int:
    """All keep the score; answers to 20 prompts, unbudgeted ones first."""
    sums = [sum(measure(s, 20)) for s in true]
    trials = tuple(BudgetTrial(i or None, 0.0, 1.0, 20, ratio=sums[0] / s) for i, s in enumerate(sums))
    choice = BudgetChoice(trials=trials, score_kind="tasks", calibrated_on="", gamma=4, seconds=0)
    return choice.budget or 0


def once(choose: Choose) -> Iterator[tuple[str, float]]:
    """The regret of a choice that is kept, for each gap and noise."""
    for gap, noise in product(_GAPS, _NOISES):
        lost = []
        for seed in range(_N_SEEDS):
            rng = np.random.default_rng(seed)
            true = rng.permutation([1.0, 1.0 + gap, 1.0 + 2 * gap]).tolist()

            def measure(seconds: float, n: int, rng: Rng = rng, noise: float = noise) -> list[float]:
                return [float(x) for x in seconds * np.exp(rng.normal(0, noise, n))]

            lost.append(true[choose(true, measure, rng)] / min(true) - 1)
        yield f"gap {gap:.0%}, noise {noise:.0%}", fmean(lost)


def disk_reads() -> Iterator[tuple[str, float]]:
    """Of three passes; up to 5 % are given up for fewer and smaller requests."""
    text = draft_chains.RECORD.with_name("disk-rates.json").read_text(encoding="utf-8")
    recorded = parse_measurement(DiskCalibration, text)
    true = {(rate.depth, rate.piece_bytes): rate.bytes_per_s for rate in recorded.rates}
    for noise in _NOISES:
        lost = []
        for seed in range(_N_SEEDS):
            scatter = np.exp(np.random.default_rng(seed).normal(0, noise, (len(true), 3)))
            rates = zip(recorded.rates, np.median(scatter, axis=1), strict=True)
            found = replace(recorded, rates=tuple(replace(r, bytes_per_s=r.bytes_per_s * float(x)) for r, x in rates))
            lost.append(max(true.values()) / true[found.best.depth, found.best.piece_bytes] - 1)
        yield f"noise {noise:.0%}", fmean(lost)


def draft_lengths() -> Iterator[tuple[str, float]]:
    traces = {**test_governor.TRACES, "code after prose": test_governor.CODE_AFTER_PROSE, "cold": test_governor.COLD}
    for name, trace in traces.items():
        yield name, test_governor.regret(trace)
    for (name, costs), rate in product(draft_chains.surfaces().items(), _RATES):
        yield f"{name}, {rate:g}", draft_chains.compared(draft_chains.scripted(rate), costs, 2)["regret"]


def draft_ends() -> Iterator[tuple[str, float]]:
    texts = draft_chains.positions(json.loads(gzip.decompress(draft_chains.RECORD.read_bytes())))
    for name, costs in draft_chains.curves().items():
        yield name, draft_chains.compared(texts, costs, 2)["regret"]


def cache() -> Iterator[tuple[str, float]]:
    for gain, noise in ((2.0, 0.1), (1.1, 0.1), (0.9, 0.1), (0.5, 0.1), (1.0, 0.25), (0.7, 0.25), (1.4, 0.25)):
        traces = [test_cache_governor.Trace(lambda _n, gain=gain: gain, noise) for _ in range(12)]  # type: ignore[misc]
        lost = [test_cache_governor.governed(trace, 1000, seed)[0] - 1 for seed, trace in enumerate(traces)]
        yield f"gain {gain:g}, noise {noise:.0%}", fmean(lost)


def lookahead(n_experts: int = 768, n_slots: int = 192, n_pairs: int = 96) -> Iterator[tuple[str, float]]:
    """Experts of a text by their frequency alone, or with some of those that come: told, and as many others for it."""
    for told in (0.0, 0.02, 0.1, 0.3):
        lost = []
        for seed in range(12):
            rng = np.random.default_rng(seed)
            frequency = rng.gamma(0.5, size=n_experts)
            frequency /= frequency.sum()
            judge, best, got = LookaheadJudge(n_slots), np.zeros(2), 0.0
            for _ in range(400):
                now = rng.multinomial(n_pairs, frequency).astype(np.float64)
                come = np.where(rng.random(n_experts) < told, now, rng.permutation(now))
                scores = frequency, frequency + come / n_pairs
                hits = [float(now[np.argsort(score)[-n_slots:]].sum()) for score in scores]
                best += hits
                got += hits[judge.on]
                if judge.wants_judgement:
                    judge.judge(scores[1], scores[0], now)
                judge.end_step()
            lost.append(best.max() / got - 1)
        yield f"{told:.0%} told", fmean(lost)


DECISIONS: dict[str, Callable[[], Iterator[tuple[str, float]]]] = {
    "draft length": draft_lengths,
    "draft end": draft_ends,
    "expert cache": cache,
    "whole layers": partial(once, whole_layers),
    "device path": partial(once, device_path),
    "prefill path": partial(once, prefill_path),
    "upload readers": partial(once, upload_readers),
    "disk reads": disk_reads,
    "expert budget": partial(once, expert_budget),
    "lookahead": lookahead,
}


def main() -> None:
    """Prints, of each decision, the mean regret and that of its worst stream."""
    for decision, streams in DECISIONS.items():
        found = dict(streams())
        worst = max(found, key=lambda name: found[name])
        print(f"{decision:15} {len(found):3} streams  mean {fmean(found.values()):6.2%}  {found[worst]:6.2%} {worst}")


if __name__ == "__main__":
    main()
