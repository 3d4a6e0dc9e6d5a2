"""The GPU benchmark: stock with its experts on the CPU, stock with the same VRAM filled layer by layer, moeedge.

    python -m tests.gpu.checks --folder DIR --device CUDA0 --out record.json

Each with and without speculation, on a file of the shape of Qwen3-30B-A3B: the bundled target widened, or random
weights. The lanes take turns in an order that rotates; every repetition has a prompt of its own. run_gpu_checks.sh
calls this and documents the record.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import xml.etree.ElementTree
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeedge import paths
from moeedge.bench.output_check import NEAR_TIE_GAP
from moeedge.bench.records import read_environment
from moeedge.data.datasets import load_toy
from moeedge.engine.session import Session
from moeedge.llama.model import Model
from moeedge.widen.layout import make_wide_plan
from moeedge.widen.shape import RequestedSizes
from moeedge.widen.writer import check_space, write
from tests.gpu.lanes import (
    Answer,
    Settings,
    describe_gpu,
    forced_logits,
    layers_on_device,
    open_moeedge,
    open_stock,
    run_answer,
    vram_bytes,
)
from tests.support import tiny

SCHEMA = "moeedge-gpu-checks-1"
ROOT = Path(__file__).parents[2]
PROMPT_TOKENS = 256  # of a random model
REFERENCE = "cpu-moe"


@dataclass(frozen=True)
class Lane:
    """One row of the result."""

    name: str
    session: Session
    gamma: int
    vram_bytes: int  # that loading took
    what: str


def write_models(folder: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """The target and its draft, kept between runs.

    widened: the bundled target in the wide shape, which routes and answers as it does, and its draft. random: random
    weights, of any number of layers, and a draft of one layer; such a model soon repeats itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    embd, expert_ff = (256, 64) if options.dry_run else (2048, 768)
    if options.source == "widened":
        target, draft = folder / f"widened-{embd}.gguf", paths.bundled_draft()
        if not target.exists():
            plan = make_wide_plan(paths.bundled_target(), RequestedSizes(embd=embd, ff=expert_ff))
            check_space(plan, target, sparse=True)
            write(plan, target, sparse=True)
        return target, draft
    target, draft = (folder / f"random-{kind}-{options.layers}-{embd}.gguf" for kind in ("target", "draft"))
    common = ["--embd", embd, "--dense-type", "Q8_0", "--seed", options.seed]
    experts = ["--experts", 128, "--used", 8, "--expert-ff", expert_ff]
    wanted = {
        target: ["--arch", "qwen3moe", "--layers", options.layers, *common, *experts],
        draft: ["--arch", "qwen3", "--layers", 1, "--ff", 2 * embd, *common],
    }
    for path, arguments in wanted.items():
        if not path.exists():
            unfinished = path.with_suffix(".part")
            tiny.main([*map(str, arguments), "--out", str(unfinished)])
            unfinished.rename(path)
    return target, draft


def prompt_of(model: Model, repetition: int, options: argparse.Namespace) -> list[int]:
    """A question that the bundled pair can answer; of a random model a random text."""
    if options.source == "random":
        rng = np.random.default_rng([options.seed, repetition + 1])
        return rng.integers(0, 256, PROMPT_TOKENS).tolist()
    prompts = load_toy().prompts
    chosen = prompts[(options.seed + repetition) % len(prompts)]
    return model.tokenize(model.render_chat([message.as_dict() for message in chosen.turns[0]]))


def open_lanes(settings: Settings, stack: ExitStack) -> list[Lane]:
    """Every lane, loaded at once: they take turns."""
    n_device, n_layers = layers_on_device(settings.model, settings.ratio)
    device = settings.device if settings.gpu else "none"
    draft = stack.enter_context(Model.load(settings.draft, n_gpu_layers=-1 if settings.gpu else 0, device=device))
    openers = {
        "cpu-moe": (lambda: open_stock(settings, n_layers, draft), "stock, all experts on the CPU"),
        "n-cpu-moe": (
            lambda: open_stock(settings, n_layers - n_device, draft),
            f"stock, the experts of {n_device} of {n_layers} layers on the device",
        ),
        "moeedge": (lambda: open_moeedge(settings), f"single experts on the device, cache ratio {settings.ratio}"),
    }
    lanes = []
    for name, (opener, what) in openers.items():
        before = vram_bytes(settings.device)
        session = opener()
        if name != "moeedge":  # its model was given, so that the session leaves it open
            stack.callback(session.model.close)
        stack.enter_context(session)
        taken = vram_bytes(settings.device) - before
        stats = session.placement_stats()
        taken = taken or (stats.pool_bytes if stats is not None else 0)
        lanes.append(Lane(name, session, 0, taken, what))
        lanes.append(Lane(f"{name}-sd", session, settings.gamma, taken, f"{what}; drafts of {settings.gamma}"))
    return lanes


def measure(lanes: list[Lane], options: argparse.Namespace) -> dict[str, list[Answer]]:
    """All answers by lane; each repetition asks every lane the same."""
    answers: dict[str, list[Answer]] = {lane.name: [] for lane in lanes}
    for repetition in range(-1, options.repeats):  # the first round warms caches up and is not kept
        prompt = prompt_of(lanes[0].session.model, repetition, options)
        shift = repetition % len(lanes)
        for order, lane in enumerate(lanes[shift:] + lanes[:shift]):
            answer = run_answer(lane.session, lane.gamma, prompt, options.n_predict, repetition=repetition, order=order)
            print(f"{repetition:3d} {lane.name:12s} {answer.tg_ts:8.2f} t/s", file=sys.stderr)
            if repetition >= 0:
                answers[lane.name].append(answer)
    return answers


def check_output(lanes: list[Lane], answers: dict[str, list[Answer]], options: argparse.Namespace) -> Any:
    """Whether the lanes say the same; where not, by how much stock's own logits prefer their token.

    Stock's logits on CPU and GPU differ, too; how far, on the reference's answers, bounds a near-tie.
    """
    sessions = {lane.name: lane.session for lane in lanes}
    equal, departures, scatter = 0, [], 0.0
    for repetition, reference in enumerate(answers[REFERENCE]):
        prompt = prompt_of(lanes[0].session.model, repetition, options)
        rows = forced_logits(sessions[REFERENCE], prompt, reference.tokens)
        other = forced_logits(sessions["n-cpu-moe"], prompt, reference.tokens)
        scatter = max(scatter, float(np.abs(rows - other).max()))
        for name, samples in answers.items():
            tokens = samples[repetition].tokens
            if tokens == reference.tokens:
                equal += 1
                continue
            first = next(i for i, pair in enumerate(zip(tokens, reference.tokens, strict=True)) if pair[0] != pair[1])
            gap = float(rows[first].max() - rows[first, tokens[first]])
            departures.append({"lane": name, "repetition": repetition, "position": first, "gap": gap})
    limit = max(NEAR_TIE_GAP, 2 * scatter)
    faults = [one for one in departures if one["gap"] > limit]
    return {"equal": equal, "near_ties": departures, "stock_scatter": scatter, "limit": limit, "different": faults}


def summarize(lane: Lane, samples: list[Answer], reference: list[Answer]) -> dict[str, Any]:
    """Medians next to the raw samples; `speed` pairs answers of the same repetition."""
    drafted = sum(sample.drafted for sample in samples)
    return {
        "what": lane.what,
        "gamma": lane.gamma,
        "vram_bytes": lane.vram_bytes,
        "tg_ts": statistics.median(sample.tg_ts for sample in samples),
        "pp_ts": statistics.median(sample.pp_ts for sample in samples),
        "speed": statistics.median(a.tg_ts / b.tg_ts for a, b in zip(samples, reference, strict=True)),
        "speed_pp": statistics.median(a.pp_ts / b.pp_ts for a, b in zip(samples, reference, strict=True)),
        "acceptance_rate": sum(sample.accepted for sample in samples) / drafted if drafted else None,
        "notes": list(lane.session.info.notes),
        "samples": [{key: value for key, value in asdict(sample).items() if key != "tokens"} for sample in samples],
    }


def read_tests(path: Path) -> dict[str, Any] | None:
    """Counts and times from pytest's report; None where no tests ran."""
    if not path.exists():
        return None
    suite = xml.etree.ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    cases = {f"{one.get('classname')}.{one.get('name')}": float(one.get("time", "0")) for one in suite.iter("testcase")}
    return counts | {"seconds": float(suite.get("time", "0")), "cases_s": cases}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="models and test reports")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, no GPU")
    parser.add_argument("--source", choices=("widened", "random"), default="widened")
    parser.add_argument("--layers", type=int, default=24, help="of a random model; the widened one has 48")
    parser.add_argument("--ratio", type=float, default=0.17)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--n-predict", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    gpu = describe_gpu()
    start_s = time.monotonic()
    target, draft = write_models(options.folder / "models", options)
    settings = Settings(target, draft, options.device, options.ratio, options.gamma, n_threads=options.threads)
    with ExitStack() as stack:
        lanes = open_lanes(settings, stack)
        answers = measure(lanes, options)
        output = check_output(lanes, answers, options)
        build_s = options.folder / "build_s"
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_environment()) | {"cores": len(os.sched_getaffinity(0))},
            "gpu": gpu,
            "dry_run": options.dry_run,
            "build_s": int(build_s.read_text()) if build_s.exists() else None,
            "tests": read_tests(options.folder / "tests.xml"),
            "model": asdict(lanes[0].session.model.info),
            "settings": {key: value for key, value in vars(options).items() if key not in ("folder", "out")},
            "lanes": {lane.name: summarize(lane, answers[lane.name], answers[REFERENCE]) for lane in lanes},
            "output": output,
            "seconds": time.monotonic() - start_s,
        }
    name = (gpu or {}).get("name", "dry-run" if options.dry_run else "unknown").lower().replace(" ", "-")
    out = options.out or ROOT / "docs" / "benchmarks" / f"gpu-{name}.json"
    if options.dry_run and options.out is None:
        out = options.folder / "record.json"  # measures nothing worth keeping
    out.write_text(json.dumps(record, default=str) + "\n")
    for key, row in record["lanes"].items():
        hits = [one["placement"]["hit_rate_pairs"] for one in row["samples"] if one["placement"]]
        hit = f", hit rate {statistics.median(hits):.1%}" if hits and None not in hits else ""
        print(f"{key:14s} {row['tg_ts']:8.2f} t/s, {row['speed']:5.2f} x cpu-moe, pp {row['pp_ts']:8.1f} t/s{hit}")
    n_answers = sum(map(len, answers.values()))
    print(f"{output['equal']} of {n_answers} answers equal, {len(output['different'])} beyond a near-tie; {out}")
    return 1 if output["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
