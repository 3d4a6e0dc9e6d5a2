"""The Vulkan lane: moeedge on ggml's Vulkan backend and Mesa's software driver, case by case.

    python -m tests.gpu.vulkan_checks --folder DIR [--slice | --fuzz 200] [--model NAME] [--out FILE]

A process per model runs that model's cases, since kernels are compiled at their first use; a case that crashes or
hangs ends its process, counts as failed, and the next one gets a new process. The record is written after each case,
and a further call goes on where the last one stopped. run_vulkan_checks.sh calls this and documents the record.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from moeedge.hardware.provenance import read_provenance
from tests.gpu.vulkan_cases import MODELS, Case, all_cases, slice_cases
from tests.gpu.vulkan_fuzz import fuzz_cases
from tests.support import vulkan

SCHEMA = "moeedge-vulkan-checks-1"
ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "benchmarks" / "vulkan-checks.json"
SKIPPED = 77  # exit status, as automake's
CASE_LIMIT_S = 900.0  # a software driver on two shared cores


class Child:
    """A process that runs the cases of one model."""

    def __init__(self, model: str, folder: Path, environment: dict[str, str]) -> None:
        self.model = model
        self._log = (folder / f"{model}.log").open("ab")
        command = [sys.executable, "-m", "tests.gpu.vulkan_cases", model, str(folder / model)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])},
            cwd=ROOT,
            start_new_session=True,  # a group of its own, which a hanging case is ended with
        )

    def run(self, case: Case, limit_s: float) -> dict[str, Any]:
        """The result of a case; one that ends the process is described by how it ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        start_s = time.monotonic()
        try:
            self._process.stdin.write(json.dumps(asdict(case)).encode() + b"\n")
            self._process.stdin.flush()
            line = _read_line(self._process.stdout, limit_s)
        except BrokenPipeError:
            line = b""
        if line:
            result: dict[str, Any] = json.loads(line)
            return result
        error = f"no result within {limit_s:.0f} s" if line is None else f"the process ended: {self._ending()}"
        self.close()
        return asdict(case) | {"error": error, "seconds": round(time.monotonic() - start_s, 2)}

    def _ending(self) -> str:
        status = self._process.wait(timeout=60)
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    @property
    def ended(self) -> bool:
        """Whether another process is needed."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends the process and what it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _read_line(stream: IO[bytes], limit_s: float) -> bytes | None:
    """The next line; empty at the end of the stream, None after `limit_s` seconds."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(limit_s):
            return None
    return stream.readline()


def run_cases(cases: list[Case], folder: Path, library: Path, record: Record, limit_s: float) -> None:
    """Runs what the record does not have yet."""
    environment = vulkan.environment(library, folder)
    child: Child | None = None
    for case in cases:
        if record.has(case):
            continue
        if child is None or child.ended or child.model != case.model:
            if child is not None:
                child.close()
            child = Child(case.model, folder, environment)
        result = child.run(case, limit_s)
        record.add(result)
        print(f"{result['seconds']:7.1f} s  {'FAILED' if result['error'] else 'passed'}  {case.id}", file=sys.stderr)
        if result["error"]:
            print(f"           {result['error'][-300:]}", file=sys.stderr)
    if child is not None:
        child.close()


class Record:
    """The file with every result so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content: dict[str, Any] = {"schema": SCHEMA, "environment": {}, "cases": []}
        if path.exists():
            self._content = json.loads(path.read_text())
        self._content["environment"] = asdict(read_provenance()) | {"cores": len(os.sched_getaffinity(0))}
        self._content["driver"] = str(vulkan.find_driver())
        self._done = {_key(result) for result in self.results}

    @property
    def results(self) -> list[dict[str, Any]]:
        """The cases with error, seconds and figures."""
        results: list[dict[str, Any]] = self._content["cases"]
        return results

    def has(self, case: Case) -> bool:
        """Whether the case has run."""
        return _key(asdict(case)) in self._done

    def add(self, result: dict[str, Any]) -> None:
        """Takes a result in and writes the file anew."""
        self.results.append(result)
        self._done.add(_key(result))
        unfinished = self.path.with_suffix(".part")
        rows = ",\n".join(json.dumps(one) for one in self.results)
        head = json.dumps(self._content | {"cases": []}, default=str)
        unfinished.write_text(head.replace('"cases": []', f'"cases": [\n{rows}\n]') + "\n")
        unfinished.replace(self.path)


def _key(case: dict[str, Any]) -> str:
    return json.dumps([case["model"], case["kind"], case["settings"]], sort_keys=True)


def summarize(results: list[dict[str, Any]]) -> str:
    """A table in Markdown: cases and seconds by model and kind, then what failed."""
    lines = ["| model | kind | cases | passed | near-ties | seconds |", "|---|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
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


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="models, logs, the unpacked library")
    parser.add_argument("--slice", action="store_true", help="only what the default suite runs")
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="N random settings instead of the list")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of --fuzz")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one; may be repeated")
    parser.add_argument("--kind", action="append", help="only cases of this kind; may be repeated")
    parser.add_argument("--limit-s", type=float, default=CASE_LIMIT_S, help="seconds for a case")
    parser.add_argument("--out", type=Path, default=None, help=f"the record; {RECORD.relative_to(ROOT)} unless given")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if reason := vulkan.missing():
        print(f"skipped: {reason}")
        return SKIPPED
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    library = vulkan.find_library(folder)
    assert library is not None
    cases = slice_cases() if options.slice else fuzz_cases(options.fuzz, options.seed) if options.fuzz else all_cases()
    cases = [case for case in cases if not options.model or case.model in options.model]
    cases = [case for case in cases if not options.kind or case.kind in options.kind]
    record = Record((options.out or RECORD).resolve())
    run_cases(cases, folder, library, record, options.limit_s)
    wanted = {_key(asdict(case)) for case in cases}
    results = [result for result in record.results if _key(result) in wanted]
    print(summarize(results))
    return 1 if any(result["error"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
