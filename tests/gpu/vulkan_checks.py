"""The Vulkan lane: moeedge on ggml's Vulkan backend and Mesa's software driver, case by case.

    python -m tests.gpu.vulkan_checks --folder DIR [--slice | --fuzz 200] [--model NAME] [--out FILE]

A process per model runs that model's cases, since kernels are compiled at their first use; a case that crashes or
hangs ends its process, counts as failed, and those after it get a new one. The record is written after each process,
and a further call goes on where the last one stopped. run_vulkan_checks.sh calls this and documents the record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moeedge.hardware.provenance import read_provenance
from tests.gpu.vulkan_cases import MODELS, Case, all_cases, fuzz_cases, slice_cases
from tests.support import vulkan

SCHEMA = "moeedge-vulkan-checks-1"
ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "benchmarks" / "vulkan-checks.json"
SKIPPED = 77  # exit status, as automake's
CASE_LIMIT_S = 900  # a software driver on two shared cores

Results = list[dict[str, Any]]  # cases with error, seconds and figures


def run_model(cases: list[Case], folder: Path, environment: dict[str, str], limit_s: int) -> Results:
    """The results of a process that runs cases of one model; the last one is that of a case that ended it."""
    model = cases[0].model
    command = [sys.executable, "-m", "tests.gpu.vulkan_cases", model, str(folder / model), str(limit_s)]
    environment = environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])}
    lines = "".join(f"{json.dumps(asdict(case))}\n" for case in cases)
    with (folder / f"{model}.log").open("ab") as log:
        process = subprocess.run(
            command, input=lines.encode(), stdout=subprocess.PIPE, stderr=log, env=environment, cwd=ROOT
        )
    results: Results = [json.loads(line) for line in process.stdout.splitlines()]
    if len(results) < len(cases):
        ending = f"the process ended with {process.returncode}, or {limit_s} s were over"
        results.append(asdict(cases[len(results)]) | {"error": ending, "seconds": 0.0})
    for result in results:
        state = f"FAILED: {result['error'][-300:]}" if result["error"] else "passed"
        case = Case(result["model"], result["kind"], result["settings"])
        print(f"{result['seconds']:7.1f} s  {case.id} {state}", file=sys.stderr)
    return results


def write_record(path: Path, results: Results) -> None:
    """All results so far, a line for each."""
    environment = asdict(read_provenance()) | {"cores": len(os.sched_getaffinity(0))}
    head = json.dumps({"schema": SCHEMA, "environment": environment, "driver": str(vulkan.find_driver())}, default=str)
    rows = ",\n".join(json.dumps(one) for one in results)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(f'{head[:-1]}, "cases": [\n{rows}\n]}}\n')
    unfinished.replace(path)


def _key(case: dict[str, Any]) -> str:
    return json.dumps([case["model"], case["kind"], case["settings"]], sort_keys=True)


def summarize(results: Results) -> str:
    """A table in Markdown: cases and seconds by model and kind, then what failed."""
    lines = ["| model | kind | cases | passed | near-ties | seconds |", "|---|---|---|---|---|---|"]
    groups: dict[tuple[str, str], Results] = {}
    for result in results:
        groups.setdefault((result["model"], result["kind"]), []).append(result)
    for (model, kind), members in groups.items():
        passed = sum(one["error"] is None for one in members)
        ties = sum(len(one.get("figures", {}).get("near_ties", ())) for one in members)
        seconds = sum(one["seconds"] for one in members)
        lines.append(f"| {model} | {kind} | {len(members)} | {passed} | {ties} | {seconds:.0f} |")
    failed = [one for one in results if one["error"]]
    lines += [f"failed: {one['model']} {one['kind']} {one['settings']}: {one['error']}" for one in failed]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="models, logs, the unpacked library")
    parser.add_argument("--slice", action="store_true", help="only what the default suite runs")
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="N random settings instead of the list")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of --fuzz")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one; may be repeated")
    parser.add_argument("--kind", action="append", help="only cases of this kind; may be repeated")
    parser.add_argument("--limit-s", type=int, default=CASE_LIMIT_S, help="seconds for a case")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record; docs/benchmarks has it unless given")
    options = parser.parse_args(arguments)
    if reason := vulkan.missing():
        print(f"skipped: {reason}")
        return SKIPPED
    options.folder.mkdir(parents=True, exist_ok=True)
    folder, out = options.folder.resolve(), options.out.resolve()
    library = vulkan.find_library(folder)
    assert library is not None
    environment = vulkan.environment(library, folder)
    cases = slice_cases() if options.slice else fuzz_cases(options.fuzz, options.seed) if options.fuzz else all_cases()
    cases = [case for case in cases if not options.model or case.model in options.model]
    wanted = {_key(asdict(case)): case for case in cases if not options.kind or case.kind in options.kind}
    results: Results = json.loads(out.read_text())["cases"] if out.exists() else []
    done = {_key(result) for result in results}
    left = [case for key, case in wanted.items() if key not in done]
    while left:
        mine = [case for case in left if case.model == left[0].model]
        results += (ended := run_model(mine, folder, environment, options.limit_s))
        write_record(out, results)
        left = [case for case in left if case not in mine[: len(ended)]]
    found = [result for result in results if _key(result) in wanted]
    print(summarize(found))
    return 1 if any(result["error"] for result in found) else 0


if __name__ == "__main__":
    sys.exit(main())
