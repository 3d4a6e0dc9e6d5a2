"""Writes routing traces in the layouts of other tools, as moeedge.lab.traces.importers reads them.

  npz        moeedge's own format, everything
  arrays     .npz with ids [tokens, layers, k] and lengths [sequences]: the decoded text
  positions  .csv with pos,layer,id0,id1,...: the decoded text, positions counted from 0 in every text
  route      .csv "route_trace v1": turn,phase,step,layer,slot,expert,weight: the prompt and the decoded text

The decoded text is the same with and without speculation: the accepted tokens of decode and verification steps. Foreign
layouts have no place for rejected drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.native.abi import Phase
from moeedge.paths import write_file
from moeedge.trace.format import Trace


def write_trace(trace: Trace, path: Path, layout: str) -> int:
    """Writes the file in one of `LAYOUTS` and returns the number of tokens in it. Raises InputError."""
    if path.name == "-":
        raise InputError("A trace is written to a file, not to standard output.", "Name one, or /dev/stdout for csv.")
    with write_file(path, "trace") as temporary:
        return LAYOUTS[layout](trace, temporary)


def layout_of(path: Path) -> str:
    """The layout for a file name: npz for .npz, positions for .csv. Raises InputError for any other ending."""
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
    place, layer, ids = _recorded(trace, rows)
    ids[ids == trace.sentinel] = -1
    numbers = np.column_stack((_position(trace, rows)[place], layer, ids))
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(["pos", "layer", *(f"id{slot}" for slot in range(ids.shape[1]))]) + "\n")
        file.writelines(f"{','.join(map(str, row))}\n" for row in numbers.tolist())
    return int(rows.size)


def _write_route(trace: Trace, path: Path) -> int:
    """Writes 0 for weights that were not recorded; `step` counts tokens, as in the files of BigMoeOnEdge."""
    meta = trace.meta
    rows = np.union1d(np.flatnonzero((trace.phase == Phase.PREFILL) & trace.accepted), _text(trace))
    is_decoded = trace.phase[rows] != Phase.PREFILL
    place, layer, ids = _recorded(trace, rows)
    weights = np.zeros(ids.shape)
    if trace.weights is not None:
        weights = np.nan_to_num(trace.weights[rows[place], layer].astype(np.float64))
    turn, step = trace.sequence[rows[place]], _position(trace, rows)[place]
    columns = np.column_stack((turn, is_decoded[place], step, layer))  # turn, phase, step, layer
    is_used = ids != trace.sentinel
    line, slot = np.nonzero(is_used)
    lines = zip(columns[line].tolist(), slot.tolist(), ids[is_used].tolist(), weights[is_used].tolist(), strict=True)
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


def _position(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each row among those of its text, from 0."""
    sequence = trace.sequence[rows]
    return np.arange(rows.size) - np.searchsorted(sequence, sequence)


def _recorded(trace: Trace, rows: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
    """Indices into `rows` [n] and layers [n] with at least one known expert, in reading order; their ids [n, k]."""
    place, layer = np.nonzero((trace.ids[rows] != trace.sentinel).any(axis=2))
    return place, layer, trace.ids[rows[place], layer].astype(np.int64)
