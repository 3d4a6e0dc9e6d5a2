"""The JSON of every command, on the bundled pair, synthetic traces, and a cache of the hub without network."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.outputs.program import outcome, run, scratch
from tests.outputs.values import compact, digest, plain

CACHED = "granite-3.1-1b-a400m"  # a model of the catalog that the cache holds
_SHORT = {
    "BENCH": "bench --dataset toy --limit 1 -n 8 -r 1",
    "CHAT": "chat -p 'What is 3 + 4?' --temp 0 -n 16",
    "CPU": "-t 1 -dev none",
    "EMULATED": "-t 1 -dev emulated --no-calibrate",
    "POLICIES": "spac,spac-paper,spac-program,lru,lfu,static,moe-infinity,fate,adapmoe,hybrimoe,fiddler,"
    "sp-moe-prefetch",
}


def _table(text: str) -> dict[str, list[str]]:
    """Name and arguments of each line "NAME: ARGUMENTS"."""
    for short, long in _SHORT.items():
        text = text.replace(short, long)
    rows = (line.partition(": ") for line in text.replace("\\\n", "").strip().splitlines())
    return {name: shlex.split(arguments) for name, _, arguments in rows}


FAST = _table(r"""
replay: lab replay trace.npz --policy all --cache-ratio 0.2,0.5
replay uploads: lab replay trace.npz --policy POLICIES --max-uploads 2 --cache-ratio 0.3
replay drafts: lab replay plain.npz --policy spac,lfu --draft-max 3 --acceptance-chance 0.6 \
  --rejected-token-model both --predictor-accuracy default -s 3
replay budget: lab replay trace.npz --policy lfu --expert-budget 3,5 --budget-policy truncation
simulate: lab simulate -n 24 --policy all --draft-max 0,4 --max-steps 4
simulate trace: lab simulate -n 32 --model qwen3-30b-a3b --hardware h200 --policy spac,sp-moe --cache-ratio 0.17,0.5 \
  --max-steps 6 --ranges
simulate ablated: lab simulate -n 24 --policy spac --ablate no-sd --max-steps 4
trace info: lab trace info trace.npz
trace info plain: lab trace info plain.npz
validate formulas: lab validate formulas
list: list
list all: list --all
list fits: list --all --fits 12GB --ram 32GB
list none: list --all --fits none --ram 8GiB
show: show
show cached: show granite-3.1-1b-a400m
show absent: show qwen3-30b-a3b
pull: pull granite-3.1-1b-a400m --dry-run --no-draft
pull offline: pull qwen3-30b-a3b
ps: ps
plan: plan --vram 8GiB --ram 32GiB -c 2048
plan small: plan --vram 512MiB --ram 64MiB,1GiB --disk-rate 1GB/s -c 512 -md ngram
plan trace: plan --vram 600MiB --ram 64MiB -c 512 --draft-max 2 --cache-ratio 0.3
devices: devices
doctor: doctor
widen: lab widen out.gguf --embd 256 --dry-run
profile trace: profile --trace trace.npz --layers all
profile cut: profile --trace plain.npz --layer 1 --acceptance-chance 0.6 --draft-max 3
chat: CHAT CPU -md none
chat drafts: CHAT CPU --draft-max 3
chat budget: CHAT CPU --draft-max 3 --expert-budget 16
chat grammar: CHAT CPU --json-schema '{"type": "object", "properties": {"n": {"type": "integer"}}}' --draft-max 2
chat emulated: CHAT EMULATED --cache-ratio 0.17 --draft-max 3
chat raw: chat -p 'Once upon' --raw -s 3 -n 8 CPU -md ngram --draft-max 2
bench: BENCH CPU --draft-max 3
bench tests: bench -p 8 -n 4 -r 1 CPU
""")
SLOW = _table(r"""
bench sweep: BENCH EMULATED --policy spac,lru --cache-ratio 0.17,0.5 --draft-max 4
bench ram: BENCH CPU --ram 1GiB --draft-max 4
bench parallel: bench --dataset toy --limit 1 --limit 3 -n 8 -r 1 CPU --parallel 1,2 --draft-max 4
bench budgets: BENCH CPU --expert-budget 8,24 --draft-max 2,4 --perplexity none
bench score: BENCH CPU --score -md none
bench contexts: bench -p 8,16 -n 4 -d 0,16 -pg 8,4 -r 2 CPU -md none
profile: profile --layers 0,40-42 --dataset toy --limit 2 -n 12 CPU
profile layer: profile --layer 47 --dataset toy --limit 2 -n 12 CPU
profile report: profile --dataset toy --limit 1 -n 8 CPU --report report.json
budget: lab budget --dataset toy --limit 1 -n 8 -t 1 --layers 0,47 --budgets 16,32
fit: lab fit --batch-tokens 1,2,3,4,6,8 --draft-max 1,2 --limit 1 -n 8 -r 1 -t 1
calibrate: calibrate -t 1 -dev emulated --cache-ratio 0.17
calibrate disk: calibrate --disk
ablate: lab ablate -n 8 --limit 1 -r 1 -t 1 -dev emulated --cutoff 12
validate table2: lab validate papers --part table2 --rejected-token-model optimistic
validate measured: lab validate measured --policy lru --cache-ratio 0.5 --draft-max 2 -n 40 -r 1
replay curve: lab replay trace.npz --curve --policy lfu,lru --cache-ratio 0.3 -t 1
chat ram: CHAT CPU --ram 1GiB --draft-max 3
""")
# commands that print no JSON: their standard output and what they leave
PLAIN = _table(r"""
schema: lab schema
version: --version
trace import: lab trace import positions.csv imported.npz --n-experts 8 --model m
bench csv: bench -p 4 -n 2 -r 1 CPU -md none -o csv
devices library: devices --library
show template: show --template
rm: rm granite-3.1-1b-a400m --yes
rm absent: rm qwen3-30b-a3b --yes
widen: lab widen wide.gguf --embd 192 --layers 50
""")
# measured or of this machine throughout: the keys, of a fit, which may fail on a busy machine, those of the object
_KEYS_ONLY = (
    "doctor",
    "devices",
    "devices library",
    "bench csv",
    "version",
    "calibrate",
    "calibrate disk",
    "ablate",
)
_FEW_KEYS = ("fit", "ps")


def fast() -> Iterator[tuple[str, Any]]:
    """The cases of the default suite."""
    with scratch() as folder:
        write_files(folder)
        for name, arguments in FAST.items():
            yield name, _json(name, arguments)
        schemas = import_module("moeedge.lab.cli.schema")
        for name in schemas.SCHEMAS:
            yield f"schema {name}", dict(_described(json.loads(schemas.schema_text(name))))
        for name, arguments in PLAIN.items():
            yield name, _plain(name, arguments, folder)


def slow() -> Iterator[tuple[str, Any]]:
    """The others."""
    with scratch() as folder:
        write_files(folder)
        for name, arguments in SLOW.items():
            yield name, _json(name, arguments)
        yield "report.json", _shape(json.loads((folder / "report.json").read_text()))


def write_files(folder: Path) -> None:
    """Traces of two shapes, and a cache of the hub with a model of the catalog."""
    from tests.support.tiny import make_tiny
    from tests.support.traces import make_trace, plain_text

    phases = import_module("moeedge.native.abi").Phase
    rows = []
    for text in range(4):
        rows += [(phases.PREFILL, text, 0, True)] * 5
        rows += [
            (phases.VERIFY, text, step, place < 1 + (step + text) % 4) for step in range(1, 12) for place in range(4)
        ]
    parameters = {"expert_bytes": [1000, 2000, 3000]}
    trace = make_trace(rows, n_layers=3, n_used=2, gamma=3, seed=1, weights=True, parameters=parameters)
    trace.save(folder / "trace.npz")
    lines, text = ["pos,layer,id0,id1"], trace.text_rows().tolist()
    for row in text:
        place = sum(trace.sequence[other] == trace.sequence[row] for other in text if other < row)
        lines += [f"{place},{layer},{a},{b}" for layer, (a, b) in enumerate(trace.ids[row].tolist())]
    (folder / "positions.csv").write_text("\n".join(lines) + "\n")
    plain_text(64, n_layers=2, n_experts=16, n_used=4, seed=2, weights=True).save(folder / "plain.npz")
    variant = import_module("moeedge.hub.catalog").load_catalog().find(CACHED).variant
    model = folder / ".cache/huggingface/hub" / f"models--{variant.repo.replace('/', '--')}"
    commit = "0" * 40
    for place in ("blobs", f"snapshots/{commit}", "refs"):
        (model / place).mkdir(parents=True)
    make_tiny("granitemoe", folder).rename(model / "blobs" / "a")
    (model / "refs/main").write_text(commit)
    (model / f"snapshots/{commit}/{variant.files[0].path}").symlink_to(model / "blobs/a")


def _json(name: str, arguments: list[str]) -> Any:
    """The JSON of a command, or how it ended."""
    result = _run(arguments, "-o", "json")
    try:
        found = json.loads(result.stdout)
    except ValueError:
        return outcome(result) | {"lines": len(result.stdout.splitlines())}
    if name in _FEW_KEYS:
        return sorted(found) if isinstance(found, dict) else "a list"
    if name in _KEYS_ONLY:
        return _shape(found)
    found = compact(plain(found), 10**6)
    return found | {"exit": result.exit_code} if isinstance(found, dict) else found


def _plain(name: str, arguments: list[str], folder: Path) -> Any:
    before = {path for path in folder.iterdir() if path.is_file()}
    result = _run(arguments)
    made = sorted(path for path in folder.iterdir() if path.is_file() and path not in before)
    lines = result.stdout.splitlines()
    text = [len(lines)] if name in _KEYS_ONLY else [plain(line) for line in lines]
    return outcome(result) | {"printed": text, "made": [_content(path) for path in made]}


def _run(arguments: list[str], *more: str) -> Any:
    os.environ["MOEEDGE_CACHE"] = str(Path.cwd() / digest(" ".join(arguments)))  # no run warms another
    return run([*arguments, *more])


def _content(path: Path) -> Any:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return [path.name, {key: digest(str(arrays[key].tolist())) for key in sorted(arrays.files)}]
    return [path.name, digest(path.read_bytes().hex())]


def _keys(value: Any, at: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{at}.{key}"
            yield from _keys(item, f"{at}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item, at)


def _described(schema: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The path of every key that a JSON Schema describes."""
    if isinstance(schema, dict):
        for name, member in schema.get("properties", {}).items():
            yield f"{at}/{name}", True
            yield from _described(member, f"{at}/{name}")
        for key in schema.keys() - {"properties"}:
            yield from _described(schema[key], at)
    elif isinstance(schema, list):
        for item in schema:
            yield from _described(item, at)


def _shape(value: Any) -> list[str]:
    return sorted(set(_keys(value)))
