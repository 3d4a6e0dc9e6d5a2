"""The GPU benchmark: stock with its experts on the CPU, stock with the same VRAM filled layer by layer, moeedge.

    python -m tests.gpu.checks --folder DIR --device CUDA0 --out FOLDER

Each with and without speculation, on a file of the shape of Qwen3-30B-A3B: the bundled target widened, or random
weights. Two further lanes decode with a cache that does not change, with the link idle and while another queue uploads
chunks of the mover's size. The lanes take turns in an order that rotates; every repetition has a prompt of its own. The
record is written after each round; a lane that fails is named in it. run_gpu_checks.sh documents the record.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeedge import paths
from moeedge.bench.output_check import NEAR_TIE_GAP
from moeedge.data.datasets import load_toy
from moeedge.engine.session import Session
from moeedge.hardware.provenance import read_provenance
from moeedge.lab.widen.layout import make_wide_plan
from moeedge.lab.widen.shape import RequestedSizes
from moeedge.lab.widen.writer import check_space, write
from moeedge.llama.model import Model
from tests.gpu.ggml_device import traffic
from tests.gpu.lanes import (
    Answer,
    Settings,
    describe_gpu,
    forced_logits,
    layers_on_device,
    open_moeedge,
    open_static,
    open_stock,
    run_answer,
    vram_bytes,
)
from tests.support import tiny

SCHEMA = "moeedge-gpu-checks-2"
PROMPT_TOKENS = 256  # of a random model
REFERENCE = "cpu-moe"
CHUNK_BYTES = 256 << 10  # of the uploads next to the lane "static-busy"


Answers = dict[str, list[Answer]]  # by lane


@dataclass(frozen=True)
class Lane:
    """One row of the result."""

    name: str
    session: Session
    gamma: int
    vram_bytes: int  # that loading took
    what: str
    chunk_bytes: int = 0  # of uploads by another queue meanwhile


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
    sizes = {
        target: ("qwen3moe", tiny.moe_dims(embd, layers=options.layers, expert_ff=expert_ff)),
        draft: ("qwen3", tiny.moe_dims(embd, layers=1, ff=2 * embd, experts=0, residual=0.2)),
    }
    for path, (arch, dims) in sizes.items():
        if not path.exists():
            unfinished = path.with_suffix(".part")
            tiny.write_model(unfinished, arch, dims, seed=options.seed)
            unfinished.rename(path)
    return target, draft


def prompt_of(model: Model, repetition: int, options: argparse.Namespace) -> list[int]:
    """A question that the bundled pair can answer; of a random model a random text."""
    if options.source == "random":
        rng = np.random.default_rng([options.seed, repetition + 1])
        return rng.integers(0, 256, PROMPT_TOKENS).tolist()
    prompts = load_toy().prompts
    chosen = prompts[(options.seed + repetition) % len(prompts)]
    return model.tokenize(model.render_chat(chosen.messages(0)))


def open_lanes(settings: Settings, stack: ExitStack, failures: dict[str, str]) -> list[Lane]:
    """Every lane, loaded at once: they take turns. Those that cannot be opened are in `failures`."""
    n_device, n_layers = layers_on_device(settings.model, settings.ratio)
    device = settings.device if settings.gpu else "none"
    draft = stack.enter_context(Model.load(settings.draft, n_gpu_layers=-1 if settings.gpu else 0, device=device))
    opened: dict[str, Session] = {}
    openers = {
        "cpu-moe": (lambda: open_stock(settings, n_layers, draft), "stock, all experts on the CPU"),
        "n-cpu-moe": (
            lambda: open_stock(settings, n_layers - n_device, draft),
            f"stock, the experts of {n_device} of {n_layers} layers on the device",
        ),
        "moeedge": (lambda: open_moeedge(settings), f"single experts on the device, cache ratio {settings.ratio}"),
        "static": (lambda: open_static(settings, opened["moeedge"]), "experts on the device that do not change"),
    }
    lanes = []
    for name, (opener, what) in openers.items():
        before = vram_bytes(settings.device)
        try:
            session = opened[name] = opener()
        except Exception as error:  # the other lanes are worth their time
            failures[name] = repr(error)
            continue
        if name in ("cpu-moe", "n-cpu-moe"):  # its model was given, so that the session leaves it open
            stack.callback(session.model.close)
        stack.enter_context(session)
        taken = vram_bytes(settings.device) - before
        stats = session.placement_stats()
        taken = taken or (stats.pool_bytes if stats is not None else 0)
        lanes.append(Lane(name, session, 0, taken, what))
        if name == "static":
            busy = f"{what}, while another queue uploads chunks of {CHUNK_BYTES >> 10} KiB"
            lanes.append(Lane("static-busy", session, 0, taken, busy, CHUNK_BYTES))
        else:
            lanes.append(Lane(f"{name}-sd", session, settings.gamma, taken, f"{what}; drafts of {settings.gamma}"))
    return lanes


def measure(
    lanes: list[Lane], options: argparse.Namespace, failures: dict[str, str], keep: Callable[[Answers], None]
) -> Answers:
    """All answers by lane; each repetition asks every lane the same. keep: called after each round."""
    answers: Answers = {lane.name: [] for lane in lanes}
    ggml_device = options.device if not options.device.startswith("emulated") else "CPU"
    for repetition in range(-1, options.repeats):  # the first round warms caches up and is not kept
        prompt = prompt_of(lanes[0].session.model, repetition, options)
        shift = repetition % len(lanes)
        for order, lane in enumerate(lanes[shift:] + lanes[:shift]):
            if lane.name in failures:
                continue
            try:
                with traffic(ggml_device, lane.chunk_bytes) if lane.chunk_bytes else nullcontext():
                    answer = run_answer(
                        lane.session, lane.gamma, prompt, options.n_predict, repetition=repetition, order=order
                    )
            except Exception as error:  # the other lanes are worth their time
                failures[lane.name] = repr(error)
                continue
            print(f"{repetition:3d} {lane.name:12s} {answer.tg_ts:8.2f} t/s", file=sys.stderr)
            if repetition >= 0:
                answers[lane.name].append(answer)
        if repetition >= 0:
            keep(answers)
    return answers


def check_output(lanes: list[Lane], answers: Answers, options: argparse.Namespace) -> Any:
    """Whether the lanes say the same; where not, by how much stock's own logits prefer their token.

    Stock's logits on CPU and GPU differ, too; how far, on the reference's answers, bounds a near-tie.
    """
    sessions = {lane.name: lane.session for lane in lanes}
    equal, departures, scatter = 0, [], 0.0
    for repetition, reference in enumerate(answers[REFERENCE]):
        prompt = prompt_of(lanes[0].session.model, repetition, options)
        rows = forced_logits(sessions[REFERENCE], prompt, reference.tokens)
        if "n-cpu-moe" in sessions:
            other = forced_logits(sessions["n-cpu-moe"], prompt, reference.tokens)
            scatter = max(scatter, float(np.abs(rows - other).max()))
        for name, samples in answers.items():
            if repetition >= len(samples):
                continue
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


def median_or_none(values: Iterable[float]) -> float | None:
    """None without values."""
    found = list(values)
    return statistics.median(found) if found else None


def summarize(lane: Lane, samples: list[Answer], reference: list[Answer]) -> dict[str, Any]:
    """Medians next to the raw samples; `speed` pairs answers of the same repetition."""
    drafted = sum(sample.drafted for sample in samples)
    pairs = list(zip(samples, reference, strict=False))
    return {
        "what": lane.what,
        "gamma": lane.gamma,
        "vram_bytes": lane.vram_bytes,
        "tg_ts": median_or_none(sample.tg_ts for sample in samples),
        "pp_ts": median_or_none(sample.pp_ts for sample in samples),
        "speed": median_or_none(a.tg_ts / b.tg_ts for a, b in pairs),
        "speed_pp": median_or_none(a.pp_ts / b.pp_ts for a, b in pairs),
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
    parser.add_argument("--out", type=Path, required=True, help="folder of the record and the test report")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "record.json"
    start_s = time.monotonic()
    failures: dict[str, str] = {}
    build_s = options.folder / "build_s"
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "complete": False,
        "environment": asdict(read_provenance()) | {"cores": len(os.sched_getaffinity(0))},
        "gpu": describe_gpu(),
        "dry_run": options.dry_run,
        "build_s": int(build_s.read_text()) if build_s.exists() else None,
        "tests": read_tests(options.out / "tests.xml"),
        "settings": {key: value for key, value in vars(options).items() if key not in ("folder", "out")},
        "failures": failures,
        "lanes": {},
        "output": None,
    }

    def keep(**found: Any) -> None:
        record.update(found, seconds=time.monotonic() - start_s)
        path.write_text(json.dumps(record, default=str) + "\n")

    keep()
    target, draft = write_models(options.folder / "models", options)
    settings = Settings(target, draft, options.device, options.ratio, options.gamma, n_threads=options.threads)
    with ExitStack() as stack:
        lanes = open_lanes(settings, stack, failures)
        if not lanes:
            keep()
            sys.exit(f"error: no lane could be opened: {failures}")
        keep(model=asdict(lanes[0].session.model.info))

        def keep_round(answers: Answers) -> None:
            reference = answers.get(REFERENCE, [])
            keep(lanes={lane.name: summarize(lane, answers[lane.name], reference) for lane in lanes})

        answers = measure(lanes, options, failures, keep_round)
        if answers.get(REFERENCE):
            keep(output=check_output(lanes, answers, options))
        keep(complete=not failures)
    for key, row in record["lanes"].items():
        if row["samples"]:
            hits = [one["placement"]["hit_rate_pairs"] for one in row["samples"] if one["placement"]]
            hit = f", hit rate {statistics.median(hits):.1%}" if hits and None not in hits else ""
            speed = "" if row["speed"] is None else f", {row['speed']:5.2f} x {REFERENCE}"
            print(f"{key:14s} {row['tg_ts']:8.2f} t/s{speed}, pp {row['pp_ts']:8.1f} t/s{hit}")
    for name, error in failures.items():
        print(f"{name} failed: {error}")
    n_answers, output = sum(map(len, answers.values())), record["output"]
    if output is not None:
        print(f"{output['equal']} of {n_answers} answers equal, {len(output['different'])} beyond a near-tie; {path}")
    return 1 if failures or output is None or output["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
