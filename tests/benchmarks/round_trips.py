"""Round trips, launches, transfers and bytes per MoE layer next to a GPU, counted on the counting device.

    python -m tests.benchmarks.round_trips --out docs/benchmarks/round-trips.json

A qwen3moe with random weights and the widths of Qwen3-30B-A3B (embedding 2,048, 8 of 128 experts; thinner experts,
fewer layers) has attention and routers on the counting device (tests/native/counting_device), as with -ngl 99, and its
experts in host memory. Lanes: `device`, stock with the experts on the device too; `stock`, with the experts on the CPU
(--cpu-moe); `stock-mapped`, the same without repacked weights, so that llama.cpp streams them for large batches;
`moeedge-R`, the share R of the experts cached on the device, for 64 tokens by each prefill path, for fewer by each
device path; `-budget`, verification of 9 tokens under an expert budget.

Each lane decodes batches of 1, 9 and 64 random tokens after a prefix. `per_step` are the counts of a batch. `per_layer`
is what a lane does more than `device`, divided by the number of layers: what experts in host memory add to a layer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.hardware.devices import Storage
from moeedge.hardware.provenance import read_provenance
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_tensors
from moeedge.llama.model import Model
from moeedge.native.abi import DevicePath, Phase, PrefillPath
from moeedge.native.cache import CacheConfig, ExpertCache
from moeedge.policies.expert_budget import ExpertBudget
from tests.support import tiny
from tests.support.counting import DEVICE, CountingDevice, Counts, count, counting_device
from tests.support.hybrid import RandomPlans

SCHEMA = "moeedge-round-trips-1"
N_PREFIX = 64  # tokens in the KV cache before each batch
N_STAGE = 64  # staging slots of the streaming prefill
PHASES = {1: Phase.DECODE, 9: Phase.VERIFY, 64: Phase.PREFILL}
RATIOS = (0.0, 0.17, 0.5, 1.0)
PREFILL_TOKENS = 64  # batches from here on take a prefill path


@dataclass(frozen=True)
class Lane:
    """One way to place the experts."""

    name: str
    ratio: float | None = None  # of the experts cached; None: stock
    path: PrefillPath = PrefillPath.CPU
    on_device: bool = False
    repacked: bool = True
    sizes: tuple[int, ...] = tuple(PHASES)
    device_path: DevicePath = DevicePath.PAIRS
    budget: ExpertBudget | None = None


def lanes() -> list[Lane]:
    """`device` first: the others are compared with it."""
    found = [Lane("device", on_device=True), Lane("stock"), Lane("stock-mapped", repacked=False)]
    for ratio in RATIOS:
        found.append(Lane(f"moeedge-{ratio:g}", ratio))
        if ratio > 0:
            for device_path in (DevicePath.COLUMNS, DevicePath.AHEAD):
                name = f"moeedge-{ratio:g}-{device_path.name.lower()}"
                found.append(Lane(name, ratio, sizes=(1, 9), device_path=device_path))
            found.append(Lane(f"moeedge-{ratio:g}-resident", ratio, PrefillPath.RESIDENT, sizes=(PREFILL_TOKENS,)))
    for coverage in ("substitution", "truncation"):
        budget = ExpertBudget(budget=16, coverage=coverage)
        found.append(Lane(f"moeedge-0.5-budget-{coverage}", 0.5, sizes=(9,), budget=budget))
    found.append(Lane("moeedge-0.17-stream", 0.17, PrefillPath.STREAM, sizes=(PREFILL_TOKENS,)))
    return found


@dataclass(frozen=True)
class Row:
    """Means over the batches of one size in one lane."""

    lane: str
    n_tokens: int
    hit_rate_pairs: float | None  # of the (token, expert) pairs; None: stock
    per_step: dict[str, float]  # fields of Counts
    per_layer: dict[str, float]


def write_model(folder: Path, n_layers: int, embd: int) -> Path:
    """Writes the model, if it is not there."""
    path = folder / f"round-trips-{n_layers}-{embd}.gguf"
    if not path.exists():
        tiny.write_model(path, "qwen3moe", tiny.moe_dims(embd, layers=n_layers, expert_ff=64), seed=0)
    return path


@contextmanager
def open_cache(lane: Lane, path: Path, context: Context) -> Iterator[ExpertCache | None]:
    """The lane's cache, filled and attached; None for stock."""
    if lane.ratio is None:
        yield None
        return
    info = context.model.info
    tensors, files = expert_tensors(path, n_layers=info.n_layers)
    n_stage = N_STAGE if lane.path is PrefillPath.STREAM else 0
    config = CacheConfig(
        device=DEVICE,
        files=files,
        tensors=tensors,
        n_layers=info.n_layers,
        n_experts=info.n_experts,
        ratio=lane.ratio,
        n_stage=n_stage,
    )
    assert context.sensor is not None
    with ExpertCache(config) as cache:
        cache.attach(context.sensor)
        cache.set_prefill(lane.path, PREFILL_TOKENS)
        cache.set_device_path(lane.device_path)
        if lane.ratio > 0:
            RandomPlans(cache, seed=1).fill()
        yield cache
        cache.detach()


def measure(lane: Lane, path: Path, device: CountingDevice, repeats: int) -> dict[int, tuple[Counts, float | None]]:
    """Mean counts per batch and the share of pairs that the device computed, by batch size."""
    rng = np.random.default_rng(3)
    found = {}
    storage: Storage = "loaded" if lane.repacked else "mapped"
    with (
        Model.load(path, n_gpu_layers=-1, device=DEVICE, experts_on_cpu=not lane.on_device, storage=storage) as model,
        Context(
            model,
            n_ctx=512,
            n_threads=1,
            has_budget=lane.budget is not None,
            mode="stock" if lane.ratio is None else "moeedge",
        ) as context,
        open_cache(lane, path, context) as cache,
    ):
        if lane.budget is not None:
            context.set_budget(lane.budget)
        context.decode(list(range(N_PREFIX)), phase=Phase.PREFILL, logits="last")

        def decode(n_tokens: int) -> None:
            context.trim(N_PREFIX)
            tokens = rng.integers(0, 256, n_tokens).tolist()
            phase = PHASES[n_tokens]
            context.decode(tokens, phase=phase, logits="last" if phase is Phase.PREFILL else "all")

        for n_tokens in lane.sizes:
            decode(n_tokens)  # plans and allocates
            decode(n_tokens)
            before = cache.stats() if cache else None
            device.reset()
            for _ in range(repeats):
                decode(n_tokens)
            counts = count(device.timeline()) / repeats
            device.check()
            after = cache.stats() if cache else None
            pairs = after.pairs - before.pairs if after and before else 0
            hits = after.pairs_hit - before.pairs_hit if after and before else 0
            found[n_tokens] = (counts, hits / pairs if pairs else None)
    return found


def rows_of(path: Path, device: CountingDevice, repeats: int) -> list[Row]:
    """All lanes, in turn."""
    rows = []
    reference: dict[int, Counts] = {}
    n_layers = 1
    for lane in lanes():
        for n_tokens, (counts, hit_rate) in measure(lane, path, device, repeats).items():
            if lane.on_device:
                reference[n_tokens] = counts
                tensors, _ = expert_tensors(path)
                n_layers = len({tensor.layer for tensor in tensors})
            added = (counts - reference[n_tokens]) / n_layers
            rows.append(Row(lane.name, n_tokens, hit_rate, _rounded(counts), _rounded(added)))
    return rows


def _rounded(counts: Counts) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(counts).items()}


COLUMNS = ("round_trips", "waits", "syncs", "launches", "gets", "sets", "gets_async", "sets_async", "copies")


def table(rows: list[Row]) -> Iterator[str]:
    """Lines of a table per layer."""
    yield (
        f"{'lane':22s} {'tokens':>6s} {'hits':>5s} " + " ".join(f"{name:>11s}" for name in COLUMNS) + "    KB down  up"
    )
    for row in rows:
        hits = "" if row.hit_rate_pairs is None else f"{row.hit_rate_pairs:.0%}"
        values = " ".join(f"{row.per_layer[name]:11.2f}" for name in COLUMNS)
        down, up = row.per_layer["bytes_down"] / 1e3, row.per_layer["bytes_up"] / 1e3
        yield f"{row.lane:22s} {row.n_tokens:6d} {hits:>5s} {values} {down:10.1f} {up:10.1f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--embd", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="keep the model here (default: a temporary folder)")
    parser.add_argument("--label", default="", help="of the record, for instance a version")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    library.start()
    with tempfile.TemporaryDirectory() as scratch, counting_device() as device:
        path = write_model(options.folder or Path(scratch), options.layers, options.embd)
        rows = rows_of(path, device, options.repeats)
    print("\n".join(table(rows)))
    if options.out:
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "label": options.label,
            "environment": asdict(read_provenance()),
            "settings": {"layers": options.layers, "embd": options.embd, "repeats": options.repeats},
            "rows": [asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
