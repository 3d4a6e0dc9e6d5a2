"""Outputs of two versions of moeedge side by side: record them with each, then compare.

    python tests/outputs/compare.py record FOLDER [moeedge]    runs COMMANDS with a program, writes FOLDER/NAME.json
    python tests/outputs/compare.py compare OLD NEW            exit 1 where they differ

`recorded/` holds outputs (gzipped): of 0.12.0 for `replay`, `trace` and `bench` (figures of `replay` as in 0.6.0, of
`oracle` and `belady` as in 0.11.0), of 0.4.0 for the other commands. Figures that depend on the clock or the machine
count by their keys alone; all other values must be equal. RENAMED lists the keys that have got another name since, as
docs/changelog.md does.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRACE = "traces/gptoss20b_decode.npz"  # below $MOEEDGE_DATA
GEMMA = "traces/bigmoeonedge_gemma.npz"
COMMANDS: dict[str, list[str]] = {
    "replay-gptoss": ["replay", f"{{data}}/{TRACE}", "--limit", "24", "--policy", "all", "--cache-ratio", "0.08,0.16"],
    "replay-predicted": [
        "replay", f"{{data}}/{TRACE}", "--limit", "8", "--policy", "fate,adapmoe,sp-moe,hybrimoe",
        "--hint-accuracy", "default", "--max-uploads", "2", "--gamma", "4",
    ],
    "replay-gemma": [
        "replay", f"{{data}}/{GEMMA}", "--policy", "spac,lfu,moe-infinity", "--cache-ratio", "0.2", "-s", "3",
    ],
    "replay-recorded": ["replay", "{scratch}/routing.npz", "--policy", "all"],
    "trace-info": ["trace", "info", f"{{data}}/{TRACE}"],
    "trace-info-recorded": ["trace", "info", "{scratch}/routing.npz"],
    "simulate-all": ["simulate", "-n", "96", "--policy", "all", "--gamma", "4,8", "--max-steps", "12"],
    "simulate-trace": [
        "simulate", "--trace", f"{{data}}/{TRACE}", "--model", "gpt-oss-20b", "--policy", "spac,lru,sp-moe,llama-cpp",
        "--cache-ratio", "0.17,0.5", "--max-steps", "20", "--tail", "pessimistic",
    ],
    "validate-papers": ["validate", "papers", "--part", "table2"],
    "profile-layer": ["profile", "--layer", "47", "--dataset", "toy", "--limit", "3", "-n", "24", "-t", "1"],
    "profile-layers": [
        "profile", "--layers", "0,5,40-47", "--dataset", "sample", "--limit", "2", "-n", "16", "-t", "1",
    ],
    "plan": ["plan", "--vram", "8G", "--ram", "32G", "-c", "2048"],
    "chat": ["chat", "-p", "What is 3 + 4?", "--temp", "0", "-n", "24", "-dev", "none", "-t", "1"],
    "chat-emulated": [
        "chat", "-p", "Who are you?", "--temp", "0", "-n", "24", "-dev", "emulated", "--cache-ratio", "0.17", "-t", "1",
    ],
    "bench": ["bench", "--dataset", "toy", "--limit", "2", "-n", "16", "-r", "1", "-t", "1", "-dev", "none"],
    "bench-synthetic": ["bench", "-p", "32", "-n", "8", "-r", "1", "-t", "1", "-dev", "none"],
    "bench-sweep": [
        "bench", "--dataset", "toy", "--limit", "1", "-n", "16", "-r", "1", "-t", "1", "-dev", "emulated",
        "--policy", "spac,lru", "--cache-ratio", "0.17", "--draft-max", "8",
    ],
    "list": ["list", "--all"],
    "devices": ["devices"],
}  # fmt: skip
# made first: the routing of a real run, for the commands that read one
SET_UP = ["profile", "--layer", "0", "--dataset", "toy", "--limit", "3", "-n", "24", "-t", "1"]
RENAMED: dict[str, str] = {  # by version 0.5.0: old key -> new key
    "tail": "rejected_token_model",
    "hints": "prediction_source",
    "hints_accuracy": "predictor_accuracy",
    "draft_states": "draft_hidden_states",
    "refused_tokens": "rejected_tokens",
    "has_states": "has_hidden_states",
    # by version 0.12.0
    "hit_rate_unique": "hit_rate_experts",
    "ram_hit_rate_unique": "ram_hit_rate_experts",
    "belady_hit_rate_unique": "belady_hit_rate_experts",
    "uploads_per_step": "uploads_per_layer_step",
    "evictions_per_step": "evictions_per_layer_step",
}
REMOVED = {"partition_us_median_1", "partition_us_median_9"}  # by version 0.5.0
# measured, of this machine, or a wording: compared by key and type alone
_MEASURED = re.compile(
    r"(.*(_s|_ts|_us|_ns|_ms|_bytes)|bytes_moved|seconds|spread|.*ratio.*|.*_ts_.*|samples|speed.*|.*per_s|free.*|used.*|"
    r"n_ctx|overhead_share|notes?|remark|started|date|time|commit|dirty|build.*|version|cpu|environment|moeedge.*|path|"
    r"file|where|seed|warm|.*load.*|upload.*|evict.*|cancelled|transfers|.*hit.*|tau|partition.*|blocks|vram.*|slots_used|"
    r"advice|steps_us.*|total_bytes)$"
)
_FOLDERS = re.compile(r'"/(?:[^"/]*/)+')  # of absolute paths, which differ between machines
_VERSION = re.compile(r"moeedge \d+\.\d+\.\d+")
_ALWAYS_EXACT = ("replay", "trace", "simulate", "validate")


def run(program: list[str], arguments: list[str]) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([*program, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def record(folder: Path, program: list[str]) -> None:
    """Writes the output of every command, but for those that are there already."""
    data = os.environ.get("MOEEDGE_DATA")
    if not data:
        raise SystemExit("MOEEDGE_DATA must name the folder with prompts and traces.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        run(program, [*SET_UP, "--trace-out", f"{scratch}/routing.npz", "-o", "json"])
        for name, arguments in COMMANDS.items():
            if (folder / f"{name}.json").exists():
                continue
            filled = [text.format(data=data, scratch=scratch) for text in arguments]
            output = _FOLDERS.sub('"', run(program, [*filled, "-o", "json"]))
            (folder / f"{name}.json").write_text(output, encoding="utf-8")
            print(f"{name}: {len(output):,} characters", flush=True)


def load(folder: Path, name: str) -> Any:
    """The JSON value of one output."""
    packed = folder / f"{name}.json.gz"
    if packed.exists():
        return json.loads(gzip.decompress(packed.read_bytes()))
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def differences(old: Any, new: Any, exact: bool, at: str = "") -> Iterator[str]:
    """A line for each key that is missing or new, and for each value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        expected = {RENAMED.get(key, key): value for key, value in old.items() if key not in REMOVED}
        yield from (f"{at}.{key}: missing" for key in expected.keys() - new.keys())
        yield from (f"{at}.{key}: new" for key in new.keys() - expected.keys())
        for key in sorted(expected.keys() & new.keys()):
            if exact or not _MEASURED.match(key):
                yield from differences(expected[key], new[key], exact, f"{at}.{key}")
            elif type(expected[key]) is not type(new[key]) and None not in (expected[key], new[key]):
                yield f"{at}.{key}: {type(expected[key]).__name__} became {type(new[key]).__name__}"
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{at}: {len(old)} entries became {len(new)}"
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from differences(before, after, exact, f"{at}[{index}]")
    elif isinstance(old, str) and isinstance(new, str):
        if _VERSION.sub("", old) != _VERSION.sub("", new):
            yield f"{at}: {old!r} became {new!r}"
    elif old != new:
        yield f"{at}: {old!r} became {new!r}"


def compare(old: Path, new: Path) -> int:
    """Prints every difference; how many there are."""
    n_found = 0
    for name in COMMANDS:
        exact = name.startswith(_ALWAYS_EXACT)
        found = list(differences(load(old, name), load(new, name), exact))
        n_found += len(found)
        print(f"{name}: {'equal' if not found else f'{len(found)} differences'}")
        for line in found[:40]:
            print(f"  {line}")
    return n_found


def main() -> None:
    """See the module."""
    match sys.argv[1:]:
        case ["record", folder, *program]:
            record(Path(folder), program or ["moeedge"])
        case ["compare", old, new]:
            raise SystemExit(1 if compare(Path(old), Path(new)) else 0)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
