"""The default on the bundled pair, away from what flatters it: `docs/make_held_out.py FRESH.npz FRESH.jsonl OTHER.npz`.

Recorded before (docs/policies.md has the commands): FRESH, chats domain after domain, with the prompts they came from,
and OTHER, chats of another seed, domains in turn. Every policy is replayed with its memory carried from text to text,
with its memory emptied at each text, on the first texts of each domain, and on the other seed, all with free transfers
and with at most one upload per layer and step. Its first steps are simulated on an RTX 4090 with links of several
speeds, where the model has the size of Qwen3-30B-A3B. Prints a Markdown table, and writes all figures with the sums of
each text to docs/benchmarks/held-out-bundled.json.gz.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.lab.sim.curves import CurvePanel, trace_curves
from moeedge.lab.sim.model_shape import find_model
from moeedge.lab.sim.replay import ReplayConfig, ReplayInput
from moeedge.lab.sim.simulate import SimulationConfig, simulate
from moeedge.lab.sim.step_costs import find_hardware, roofline_costs
from moeedge.lab.traces.importers import read_trace
from moeedge.lab.traces.schedule import recorded_schedule
from moeedge.policies.registry import BOUNDS

OUT = Path(__file__).parent / "benchmarks" / "held-out-bundled.json.gz"
RATIO, GAMMA = 0.17, 8
FIRST_TEXTS = 12  # of each domain
LIMIT = 1.0  # uploads per layer and step, besides none
HARDWARE, MODEL = "rtx4090-pcie4", "qwen3-30b-a3b:F16"
LINKS_GB_PER_S = (1, 4, 12, 25)
POLICIES = ("spac", "lfu", "spac-program", "lru", "spac-paper", "static")
SIMULATED, MAX_STEPS = ("spac", "lfu"), 400
Figures = dict[str, dict[str, float]]  # column -> policy -> figure


def panel_of(path: Path, *, fresh_memory: bool, n_processes: int) -> CurvePanel:
    """All policies on a recording."""
    schedule = recorded_schedule(read_trace(path))
    assert schedule is not None, f"{path} has no drafts"
    config = ReplayConfig(policies=POLICIES, ratios=(RATIO,), fresh_memory=fresh_memory)
    return trace_curves([ReplayInput(schedule, path.name)], config, (LIMIT,), n_processes=n_processes)[0]


def shares(panel: CurvePanel, limit: float | None, texts: np.ndarray | None = None) -> dict[str, float]:
    """Share of the one-step oracle's pairs by policy, on all texts or those of these numbers."""
    chosen = slice(None) if texts is None else texts
    hits = {
        point.policy: float(point.pairs_hit[chosen].sum())
        for point in panel.points
        if point.max_uploads == limit or point.policy == "oracle"
    }
    return {name: round(value / hits["oracle"], 4) for name, value in hits.items() if name not in BOUNDS}


def first_texts(prompts: Path, n: int) -> np.ndarray:
    """Numbers of the first n texts of each domain after the first; a text is a turn of a chat."""
    chats = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    found: list[int] = []
    start = 0
    for index, (_, group) in enumerate(groupby(chats, key=lambda chat: chat["category"])):
        length = sum(len(chat["turns"]) for chat in group)
        if index:  # before the first domain, the memory is empty
            found += range(start, start + min(n, length))
        start += length
    return np.array(found)


def simulated(task: tuple[Path, str, float]) -> dict[str, Any]:
    """One policy with one link."""
    path, policy, link = task
    shape = find_model(MODEL)
    costs = roofline_costs(find_hardware(HARDWARE), shape)
    config = SimulationConfig(policy=policy, cache_ratio=RATIO, gamma=GAMMA, link_factor=link, max_steps=MAX_STEPS)
    result = simulate(costs, read_trace(path), config)
    return result.row(hardware=HARDWARE, model=MODEL, trace=path.name)


def main(fresh: Path, prompts: Path, other: Path) -> None:
    n_processes = len(os.sched_getaffinity(0))
    panels = {
        "carried": panel_of(fresh, fresh_memory=False, n_processes=n_processes),
        "emptied": panel_of(fresh, fresh_memory=True, n_processes=n_processes),
        "other seed": panel_of(other, fresh_memory=False, n_processes=n_processes),
    }
    new_domain = first_texts(prompts, FIRST_TEXTS)
    columns: Figures = {}
    for limit, suffix in ((None, ""), (LIMIT, f", {LIMIT:g} upload")):
        columns |= {name + suffix: shares(panel, limit) for name, panel in panels.items()}
        columns[f"first {FIRST_TEXTS} of a domain{suffix}"] = shares(panels["carried"], limit, new_domain)
    base = find_hardware(HARDWARE).link_bytes_per_s
    tasks = [(fresh, name, gb * 1e9 / base) for gb in LINKS_GB_PER_S for name in SIMULATED]
    with ProcessPoolExecutor(n_processes, get_context("spawn")) as pool:
        rows = list(pool.map(simulated, tasks))
    for gb in LINKS_GB_PER_S:
        columns[f"t/s at {gb} GB/s"] = {
            row["policy"]: row["tg_ts"] for row in rows if np.isclose(row["link_factor"], gb * 1e9 / base)
        }
    record = {
        "columns": columns,
        "panels": {name: panel.as_dict() for name, panel in panels.items()},
        "first_texts": new_domain.tolist(),
        "simulated": rows,
    }
    with gzip.GzipFile(OUT, "wb", mtime=0) as file:
        file.write(json.dumps(record).encode())
    names = sorted(columns["carried"], key=lambda name: -columns["carried"][name])
    print("| policy |", " | ".join(columns), "|")
    print("|---|" + "--:|" * len(columns))
    for name in names:
        cells = [
            "" if name not in column else f"{column[name]:.1f}" if "t/s" in title else f"{column[name]:.3f}"
            for title, column in columns.items()
        ]
        print(f"| `{name}` |", " | ".join(cells), "|")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
