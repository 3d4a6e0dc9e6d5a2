"""Routing traces written in the layouts of other tools, as moeedge.trace_import reads them.

  npz        our own format, everything
  arrays     .npz with ids [tokens, layers, k] and lengths [sequences]: the decoded text
  positions  .csv with pos,layer,id0,id1,...: the decoded text, positions counted from 0 in every text
  route      .csv "route_trace v1": turn,phase,step,layer,slot,expert,weight: the prompt and the decoded text

The decoded text is what speculation does not change: accepted tokens of decode and verification steps. Refused drafts
have no place in the foreign layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.native.abi import Phase
from moeedge.paths import replace_file
from moeedge.trace.format import Trace


def write_trace(trace: Trace, path: Path, layout: str) -> int:
    """Writes the file in one of `LAYOUTS` and returns how many tokens it holds. Raises InputError."""
    if path.name == "-":
        raise InputError("A trace is written to a file, not to standard output.", "Name one, or /dev/stdout for csv.")
    try:
        with replace_file(path) as beside:
            return LAYOUTS[layout](trace, beside)
    except OSError as error:
        reason = error.strerror or "write error"
        raise InputError(f"Cannot write the trace {path}: {reason}.", "Name another file.") from None


def layout_of(path: Path) -> str:
    """What the name of a file to be written asks for: its own format for .npz, positions for .csv.

    Raises InputError for any other ending.
    """
    layouts = {".npz": "npz", ".csv": "positions"}
    if path.suffix.lower() not in layouts:
        raise InputError(
            f"{path} ends neither in .npz nor in .csv.", f"Name the layout with --to ({', '.join(LAYOUTS)})."
        )
    return layouts[path.suffix.lower()]


def _write_npz(trace: Trace, path: Path) -> int:
    trace.save(path)
    return trace.n_tokens


def _write_arrays(trace: Trace, path: Path) -> int:
    rows = _text(trace)
    ids: NDArray[np.integer[Any]] = trace.ids[rows]
    missing = ids == trace.sentinel
    if missing.any():  # the layout's "not recorded" is -1
        ids = np.where(missing, -1, ids.astype(np.int32))
    lengths = np.bincount(trace.sequence[rows])
    with path.open("wb") as file:  # a file object: numpy appends .npz to names
        np.savez_compressed(file, ids=ids, lengths=lengths[lengths > 0])
    return int(rows.size)


def _write_positions(trace: Trace, path: Path) -> int:
    rows = _text(trace)
    sequence = trace.sequence[rows]
    position = np.arange(rows.size) - np.searchsorted(sequence, sequence)
    token, layer = _recorded(trace, rows)
    ids = trace.ids[rows[token], layer].astype(np.int64)
    ids[ids == trace.sentinel] = -1
    columns = ",".join(["pos", "layer", *(f"id{slot}" for slot in range(ids.shape[1]))])
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(columns + "\n")
        _write_rows(file, np.column_stack((position[token], layer, ids)))
    return int(rows.size)


def _write_route(trace: Trace, path: Path) -> int:
    """Weights that were not recorded are written as 0; `step` counts tokens, as in the files of BigMoeOnEdge."""
    meta = trace.meta
    rows = np.union1d(np.flatnonzero((trace.phase == Phase.PREFILL) & trace.accepted), _text(trace))
    sequence = trace.sequence[rows]
    step = np.arange(rows.size) - np.searchsorted(sequence, sequence)
    prefill = trace.phase[rows] == Phase.PREFILL
    token, layer = _recorded(trace, rows)
    ids = trace.ids[rows[token], layer].astype(np.int64)  # [lines / k, k]
    if trace.weights is None:
        weights = np.zeros(ids.shape)
    else:
        weights = np.nan_to_num(trace.weights[rows[token], layer].astype(np.float64))
    used = ids != trace.sentinel
    place, slot = np.nonzero(used)
    numbers = np.column_stack(
        (sequence[token], ~prefill[token], step[token], layer)  # turn, phase, step, layer
    )[place]
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write("# route_trace v1\n")
        name = meta.model.replace(" ", "_") or "unknown"
        file.write(
            f"# model={name} arch={meta.architecture or 'unknown'} n_layer={meta.n_layers} n_expert={meta.n_experts} "
            f"n_expert_used={meta.n_expert_used}\n"
        )
        sizes = trace.expert_bytes()
        for index, size in enumerate([] if sizes is None else sizes.tolist()):
            file.write(f"# layer={index} expert_bytes={size}\n")
        file.write("turn,phase,step,layer,slot,expert,weight\n")
        lines = zip(numbers.tolist(), slot.tolist(), ids[used].tolist(), weights[used].tolist(), strict=True)
        file.writelines(f"{','.join(map(str, row))},{s},{expert},{weight:.6g}\n" for row, s, expert, weight in lines)
    return int(rows.size)


LAYOUTS: dict[str, Callable[[Trace, Path], int]] = {
    "npz": _write_npz,
    "arrays": _write_arrays,
    "positions": _write_positions,
    "route": _write_route,
}


def _text(trace: Trace) -> NDArray[np.int64]:
    rows = trace.text_rows()
    if rows.size == 0:
        raise InputError(
            "The trace holds no decoded text: there is nothing to write.", "Its own format (.npz) keeps prompts, too."
        )
    return rows


def _recorded(trace: Trace, rows: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices into `rows` and layers of which at least one expert is known, in reading order."""
    token, layer = np.nonzero((trace.ids[rows] != trace.sentinel).any(axis=2))
    return token, layer


def _write_rows(file: TextIO, numbers: NDArray[np.int64]) -> None:
    file.writelines(f"{','.join(map(str, row))}\n" for row in numbers.tolist())
