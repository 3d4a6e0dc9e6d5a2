"""Decoding speed and scheduling time of two versions, interleaved: python -m tests.outputs speed OLD NEW [PAIRS]

OLD, NEW: a Python interpreter in whose environment the version is installed, or the root of a tree, which runs with
this interpreter. Both versions answer the same prompts in alternating order; each pair has fresh processes, since the
places that one gets in memory make it a few per cent faster or slower for as long as it lives. Ratios are NEW's time
over OLD's: of a pair the median over its answers, which a stall of the machine does not change; geometric mean and 95 %
interval over the pairs. The last line is JSON. With experts on the device answers may differ at near-ties; moeedge
bench checks those.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from scipy.stats import t as student_t

N_PAIRS, N_ROUNDS = 20, 2  # of versions, and of the prompts in each pair

SETUPS: dict[str, dict[str, Any]] = {
    "no device, gamma 0": {"gamma": 0, "device": "none"},
    "no device, gamma 4": {"gamma": 4, "device": "none"},
    "emulated, spac, gamma 8": {"gamma": 8, "device": "emulated", "cache_ratio": 0.17, "policy": "spac"},
    "emulated, lru, gamma 4": {"gamma": 4, "device": "emulated", "cache_ratio": 0.17, "policy": "lru"},
}
PROMPTS = ("What is 17 + 25?", "Tell me a story about a lighthouse.", "Who are you?", "Sort: pear, apple, fig, plum")
WORKER = """
import dataclasses, json, os, sys
tree = os.environ.get("SPEED_TREE")
if tree:  # an editable installation would import the tree that it was made from
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
import moeedge
if tree and not moeedge.__file__.startswith(tree + os.sep):
    sys.exit(f"{moeedge.__file__} is not of {tree}")
from moeedge import paths
from moeedge.scheduler.config import PlacementConfig
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.engine.session import Session

sessions = {}
for line in sys.stdin:
    setup, prompt, n_predict = json.loads(line)
    key = json.dumps(setup)
    if key not in sessions:
        ratio, policy = setup.get("cache_ratio"), setup.get("policy", "spac")
        placement = PlacementConfig(cache_ratio=ratio, policy=policy, calibrate=False)
        sessions[key] = Session.open(EngineConfig(
            model=paths.bundled_target(), draft=paths.bundled_draft(), gamma=setup["gamma"], device=setup["device"],
            placement=placement, n_ctx=1024, n_threads=1))
    session = sessions[key]
    session.reset()
    tokens = session.model.tokenize(prompt)
    answer = session.generate(tokens, n_predict=n_predict, sampling=SamplingConfig(temperature=0.0), ignore_eos=True)
    before = session.placement_stats()
    for _ in answer:
        pass
    after = session.placement_stats()
    stats = answer.stats
    schedule_s = 0.0 if after is None else after.schedule_s - before.schedule_s
    result = {"decode_s": stats.decode_s, "observe_s": stats.observe_s, "schedule_s": schedule_s,
              "prefill_s": stats.prefill_s, "tokens": answer.tokens}
    print("RESULT " + json.dumps(result), flush=True)
"""


class Version:
    """One version of moeedge in its process."""

    def __init__(self, place: str) -> None:
        tree = Path(place).resolve() if Path(place).is_dir() else None
        others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [sys.executable if tree else place, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("SPEED_STDERR") else subprocess.DEVNULL,
            text=True,
            env=others | ({"PYTHONPATH": str(tree), "SPEED_TREE": str(tree)} if tree else {}),
            cwd=tree or "/",  # the folder is the first from which Python imports
        )

    def __enter__(self) -> Version:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def ask(self, setup: dict[str, Any], prompt: str, n_predict: int) -> dict[str, Any]:
        """One answer's times."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([setup, prompt, n_predict]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return dict(json.loads(line.removeprefix("RESULT ")))
        raise SystemExit("A version ended early; SPEED_STDERR=1 shows why.")


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of paired ratios, and its 95 % interval by Student's distribution of their logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    half = float(student_t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean(logs)), math.exp(mean(logs) - half), math.exp(mean(logs) + half)


def main(words: Sequence[str]) -> int:
    """Prints a line per set-up; exit code 1 where an interval excludes 1, or answers without a device differ."""
    if len(words) < 2:
        raise SystemExit(__doc__)
    n_pairs = max(4, int(words[2])) if len(words) > 2 else N_PAIRS
    pairs: dict[str, list[dict[str, list[dict[str, float]]]]] = {name: [] for name in SETUPS}
    n_different = Counter[str]()
    for number in range(n_pairs):
        with Version(words[0]) as old, Version(words[1]) as new:
            versions = {"old": old, "new": new}
            for name, setup in SETUPS.items():
                answers: dict[str, list[dict[str, float]]] = {which: [] for which in versions}
                for turn, prompt in enumerate((PROMPTS[0], *PROMPTS * N_ROUNDS)):  # the first answer warms up
                    tokens = []
                    for which in ("old", "new") if (number + turn) % 2 else ("new", "old"):
                        answer = versions[which].ask(setup, prompt, 96)
                        tokens.append(answer.pop("tokens"))
                        if turn:
                            answers[which].append(answer)
                    n_different[name] += tokens[0] != tokens[1]
                pairs[name].append(answers)
    report = {name: _row(found, n_different[name]) for name, found in pairs.items()}
    print(*(f"{name} {row}" for name, row in report.items()), json.dumps(report), sep="\n")
    agree = all(row["decode_s_ratio"][1] <= 1 <= row["decode_s_ratio"][2] for row in report.values())
    return 0 if agree and not any(n_different[name] for name in SETUPS if SETUPS[name]["device"] == "none") else 1


def _row(pairs: Sequence[dict[str, list[dict[str, float]]]], n_different: int) -> dict[str, Any]:
    """The ratios of one set-up."""
    row: dict[str, Any] = {"different_answers": n_different}
    for key in ("decode_s", "prefill_s", "observe_s", "schedule_s"):
        ratios = []
        for pair in pairs:
            both = zip(pair["new"], pair["old"], strict=True)
            if of_answers := [new[key] / old[key] for new, old in both if old[key] > 0 < new[key]]:
                ratios.append(median(of_answers))
        if len(ratios) > 3:
            row[f"{key}_ratio"] = [round(value, 4) for value in interval(ratios)]

    return row
