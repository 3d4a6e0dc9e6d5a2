"""What single calls take on a ggml device: the constants of sim/data/handoffs.json, and expert matrices by table size.

    python -m tests.gpu.micro --device CUDA0 --out micro.json

Rows have `name`, its parameters, and microseconds: `median_us`, `p10_us`, `p90_us`, with all samples. The copies,
launches and waits are those of one layer of Qwen3-30B-A3B; `expert matmul` multiplies the pairs of 1, 9 and 64 tokens
with tables of 128 (a layer), 586 and 1,907 (pools of slots) experts, in rows ([1, n], as 0.6 divides a verification)
and in columns ([n, 1]). Works on any device of ggml's list; only a GPU's times mean anything.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from ctypes import c_bool, c_char_p, c_float, c_int, c_size_t, c_uint8
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from moeedge import native
from moeedge.hardware.provenance import read_provenance
from tests.support.raw_ggml import F32, I32, Q4_K, Graph, Queue, ggml
from tests.support.threads import meanwhile

SCHEMA = "moeedge-gpu-micro-1"
INPUT_BYTES, IDS_BYTES = 2048 * 4, 128 * 4  # a token's input of a layer, and its sorted experts
CHUNKS_BYTES = (256 << 10, 1 << 20)  # of the mover's uploads
TABLES = (128, 586, 1907)
EMBD, EXPERT_FF, N_USED = 2048, 768, 8


class Backend(Queue):
    """One instance of a device with tensors of its own. Close it after use."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tensors = Graph()
        self._pinned: list[int] = []

    def close(self) -> None:
        self.tensors.close()
        for buffer in self._pinned:
            ggml("ggml_backend_buffer_free", buffer, result=None)
        super().close()

    def pinned(self, n_bytes: int) -> int | None:
        """The address of host memory that the device reads without a copy; None where it has no such memory."""
        buffer_type = ggml("ggml_backend_dev_host_buffer_type", self.device)
        buffer = buffer_type and ggml("ggml_backend_buft_alloc_buffer", buffer_type, c_size_t(n_bytes))
        if not buffer:
            return None
        self._pinned.append(buffer)
        return ggml("ggml_backend_buffer_get_base", buffer)

    def allocate(self) -> None:
        """Gives the tensors device memory, all zeros. Raises MemoryError."""
        self.tensors.allocate(ggml("ggml_backend_dev_buffer_type", self.device))
        if not self.tensors.buffer:
            raise MemoryError("the device has no memory for it")
        ggml("ggml_backend_buffer_clear", self.tensors.buffer, c_uint8(0), result=None)

    def ask_name(self) -> None:
        """Does nothing with the device: what a call from Python takes."""
        ggml("ggml_backend_name", self.handle, result=c_char_p)

    def copy(self, direction: str, tensor: int, memory: int, n_bytes: int, *, queued: bool = False) -> None:
        """direction: "set", host to device, or "get"; blocking unless queued."""
        name, sizes = f"ggml_backend_tensor_{direction}", (c_size_t(0), c_size_t(n_bytes))
        if queued:
            ggml(f"{name}_async", self.handle, tensor, memory, *sizes, result=None)
        else:
            ggml(name, tensor, memory, *sizes, result=None)

    def run(self) -> None:
        """Computes the graph and waits for it. Raises RuntimeError."""
        if ggml("ggml_backend_graph_compute", self.handle, self.tensors.graph, result=c_int) != 0:
            raise RuntimeError("the device failed to compute")

    def launch(self) -> None:
        """Computes the graph without waiting for it. Raises RuntimeError."""
        if self.compute(self.tensors.graph) != 0:
            raise RuntimeError("the device failed to compute")


@contextmanager
def traffic(name: str, chunk_bytes: int) -> Iterator[None]:
    """Uploads chunk after chunk from another thread and queue, as the engine's mover does."""
    mover = Backend(name)
    target = mover.tensors.tensor(F32, chunk_bytes // 4)
    mover.allocate()
    source = mover.pinned(chunk_bytes)
    memory = (c_uint8 * chunk_bytes)()
    address = source or ctypes.addressof(memory)

    def move() -> None:
        mover.copy("set", target, address, chunk_bytes, queued=source is not None)
        mover.synchronize()

    try:
        with meanwhile(move):
            yield
    finally:
        mover.close()


def measure(run: Callable[[], None], n: int, *, n_warm: int = 5) -> dict[str, Any]:
    """Microseconds of a call: median, tenths and all samples."""
    samples = []
    for index in range(-n_warm, n):
        begin_ns = time.perf_counter_ns()
        run()
        if index >= 0:
            samples.append((time.perf_counter_ns() - begin_ns) * 1e-3)
    p10, median, p90 = np.percentile(samples, (10, 50, 90))
    return {"median_us": median, "p10_us": p10, "p90_us": p90, "samples_us": [round(value, 2) for value in samples]}


def calls(device: str, n: int) -> Iterator[dict[str, Any]]:
    """Copies, launches and waits, with the link idle and while chunks are uploaded."""
    backend = Backend(device)
    small, ids, wide = (backend.tensors.tensor(F32, n // 4) for n in (INPUT_BYTES, IDS_BYTES, 8 * INPUT_BYTES))
    backend.tensors.expand(backend.tensors.op("scale", small, c_float(0.5)))
    backend.allocate()
    pageable = (c_uint8 * (8 * INPUT_BYTES))()
    ordinary, pinned = ctypes.addressof(pageable), backend.pinned(8 * INPUT_BYTES)

    def blocking_get() -> None:
        backend.copy("get", small, ordinary, INPUT_BYTES)

    def launch_and_wait() -> None:
        backend.launch()
        backend.synchronize()

    def round_trip(memory: int, *, queued: bool) -> Callable[[], None]:
        def run() -> None:  # a launch, input, ids and weights down, the sum up, and the next launch
            backend.launch()
            if not queued:
                backend.synchronize()
            for source, n_bytes in ((small, INPUT_BYTES), (ids, IDS_BYTES), (ids, IDS_BYTES)):
                backend.copy("get", source, memory, n_bytes, queued=queued)
            backend.synchronize()
            backend.copy("set", small, memory, INPUT_BYTES, queued=queued)
            backend.launch()
            backend.synchronize()

        return run

    runs: dict[str, Callable[[], None]] = {
        "no work, a call from Python": backend.ask_name,
        "launch and wait": launch_and_wait,
        "synchronize": backend.synchronize,
        "get, pageable": blocking_get,
        "set, pageable": lambda: backend.copy("set", small, ordinary, INPUT_BYTES),
        "set of all columns, pageable": lambda: backend.copy("set", wide, ordinary, 8 * INPUT_BYTES),
        "layer, blocking copies, pageable": round_trip(ordinary, queued=False),
    }
    if pinned is not None:
        address = pinned

        def queued_get() -> None:
            backend.copy("get", small, address, INPUT_BYTES, queued=True)
            backend.synchronize()

        runs |= {
            "get, pinned": lambda: backend.copy("get", small, address, INPUT_BYTES),
            "set, pinned": lambda: backend.copy("set", small, address, INPUT_BYTES),
            "queued get and wait, pinned": queued_get,
            "layer, blocking copies, pinned": round_trip(address, queued=False),
            "layer, queued copies, pinned": round_trip(address, queued=True),
        }
    for chunk_bytes in (0, *CHUNKS_BYTES):
        with traffic(device, chunk_bytes) if chunk_bytes else nullcontext():
            for name, run in runs.items():
                yield {"name": name, "upload_chunk_bytes": chunk_bytes, **measure(run, n)}
    backend.close()


def matmuls(device: str, n: int, shrink: int) -> Iterator[dict[str, Any]]:
    """One matrix of the experts by table size, tokens and layout; `error` where the device cannot."""
    for n_experts in TABLES:
        table_size = max(n_experts // shrink, N_USED)
        for n_tokens in (1, 9, 64):
            for layout in ("rows", "columns"):
                about = {"name": "expert matmul", "ne02": table_size, "n_tokens": n_tokens, "layout": layout}
                try:
                    yield about | _matmul(device, n, table_size, n_tokens * N_USED, layout, shrink)
                except (MemoryError, RuntimeError) as error:
                    yield about | {"error": str(error)}


def _matmul(device: str, n: int, n_experts: int, n_pairs: int, layout: str, shrink: int) -> dict[str, Any]:
    backend = Backend(device)
    try:
        d1, d2 = (1, n_pairs) if layout == "rows" else (n_pairs, 1)
        table = backend.tensors.tensor(Q4_K, EMBD, EXPERT_FF // min(shrink, 3), n_experts)
        columns, ids = backend.tensors.tensor(F32, EMBD, d1, d2), backend.tensors.tensor(I32, d1, d2)
        product = backend.tensors.expand(backend.tensors.op("mul_mat_id", table, columns, ids))
        if not ggml("ggml_backend_dev_supports_op", backend.device, product, result=c_bool):
            raise RuntimeError("the device does not support it")
        backend.allocate()
        # as in a verification: a token uses different experts, neighbours share some; pairs are sorted by expert
        rng = np.random.default_rng(n_pairs)
        pool = rng.permutation(n_experts)[: max(N_USED, min(n_experts, n_pairs // 3))]
        chosen = np.sort(np.concatenate([rng.permutation(pool)[:N_USED] for _ in range(n_pairs // N_USED)]))
        numbers = chosen.astype(np.int32)
        backend.copy("set", ids, numbers.ctypes.data, numbers.nbytes)
        return {"experts_used": int(np.unique(numbers).size), **measure(backend.run, n)}
    finally:
        backend.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CUDA0", help="as ggml names it")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--dry-run", action="store_true", help="small tables, few repetitions")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    native.attach()
    n, shrink = (5, 16) if options.dry_run else (options.repeats, 1)
    rows: list[dict[str, Any]] = []
    record = {"schema": SCHEMA, "environment": asdict(read_provenance()), "device": options.device}
    record |= {"dry_run": options.dry_run, "rows": rows}
    for source in (calls(options.device, n), matmuls(options.device, n, shrink)):
        for row in source:
            rows.append(row)
            about = ", ".join(f"{key} {value}" for key, value in row.items() if not key.endswith("_us"))
            print(f"{row.get('median_us', float('nan')):10.1f} us  {about}", file=sys.stderr)
            options.out.write_text(json.dumps(record) + "\n")  # what is there if the rest takes too long
    return 0


if __name__ == "__main__":
    sys.exit(main())
