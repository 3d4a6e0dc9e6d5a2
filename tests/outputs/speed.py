"""Decoding speed and scheduling time of two versions, interleaved: python tests/outputs/speed.py OLD_PYTHON NEW_PYTHON

Each version runs in a process of its own, with its own interpreter, and keeps one session open per set-up. Both answer
the same prompts in alternating order; figures are medians over pairs of the same turn. The last line is JSON. With
experts on the device answers may differ at near-ties; moeedge bench checks those.
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

SETUPS: dict[str, dict[str, Any]] = {
    "no device, gamma 0": {"gamma": 0, "device": "none"},
    "no device, gamma 4": {"gamma": 4, "device": "none"},
    "emulated, spac, gamma 8": {"gamma": 8, "device": "emulated", "cache_ratio": 0.17, "policy": "spac"},
    "emulated, lru, gamma 4": {"gamma": 4, "device": "emulated", "cache_ratio": 0.17, "policy": "lru"},
}
PROMPTS = ("What is 17 + 25?", "Tell me a story about a lighthouse.", "Who are you?", "Sort: pear, apple, fig, plum")
WORKER = """
import dataclasses, json, os, sys
from moeedge import paths
try:
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.engine.types import EngineConfig, SamplingConfig
except ImportError:
    from moeedge.engine.types import EngineConfig, PlacementConfig, SamplingConfig
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
    result = {"decode_s": stats.decode_s, "steps": stats.steps, "observe_s": stats.observe_s, "schedule_s": schedule_s,
              "prefill_s": stats.prefill_s, "tokens": answer.tokens}
    print("RESULT " + json.dumps(result), flush=True)
"""


class Version:
    """One version of moeedge in its process."""

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, setup: dict[str, Any], prompt: str, n_predict: int) -> dict[str, Any]:
        """One answer's times."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([setup, prompt, n_predict]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return dict(json.loads(line.removeprefix("RESULT ")))
        raise SystemExit("A version ended early.")


def main() -> None:
    """Prints a line per set-up."""
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 12
    versions = {"old": Version(sys.argv[1]), "new": Version(sys.argv[2])}
    report: dict[str, dict[str, float]] = {}
    for name, setup in SETUPS.items():
        pairs = []
        for number in range(rounds + 1):
            prompt = PROMPTS[number % len(PROMPTS)]
            order = ("old", "new") if number % 2 else ("new", "old")
            pair = {which: versions[which].ask(setup, prompt, 96) for which in order}
            if pair["old"]["tokens"] != pair["new"]["tokens"]:
                print(f"{name}: the answers to {prompt!r} differ")
            if number:  # the first round warms up
                pairs.append(pair)
        row = {}
        for key in ("decode_s", "observe_s", "schedule_s", "prefill_s"):
            ratios = [pair["new"][key] / pair["old"][key] for pair in pairs if pair["old"][key] > 0]
            if ratios:
                row[f"{key}_ratio"] = round(median(ratios), 4)
        for which in ("old", "new"):
            total = sum(pair[which]["observe_s"] for pair in pairs)
            row[f"{which}_observe_us_per_step"] = round(total / sum(pair[which]["steps"] for pair in pairs) * 1e6, 1)
        report[name] = row
        print(name, row, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
