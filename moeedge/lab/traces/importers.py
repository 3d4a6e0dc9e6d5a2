"""Reads routing traces of other tools into `Trace`; docs/lab/traces.md describes their layouts.

Only route_trace v1 states the model's number of experts; for the others it is the largest id + 1 unless it is given.
Every token of such a trace counts as accepted; vocabulary ids are unknown (-1).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.native.abi import Phase
from moeedge.trace.format import (
    MAX_EXPERTS,
    Ids,
    Trace,
    TraceMeta,
    ids_dtype,
    read_npy,
    read_npz,
    reading,
    unusable_trace,
)

_MAX_GRID_BYTES = 1 << 31  # a few damaged digits in a csv must not ask for terabytes


def read_trace(path: Path, n_experts: int | None = None) -> Trace:
    """A trace in moeedge's own format or in a foreign one, told apart by content.

    n_experts: of a foreign trace whose file does not state it. Raises InputError for an unusable file, ValueError for
    an impossible `n_experts`.
    """
    if n_experts is not None and not 1 <= n_experts <= MAX_EXPERTS:
        raise ValueError(f"the number of experts must be in 1..{MAX_EXPERTS}, not {n_experts}")
    if path.suffix.lower() == ".csv":
        return _from_csv(path, n_experts)
    if path.suffix.lower() == ".npy":
        return _from_arrays(path, {"ids": read_npy(path)}, n_experts)
    arrays = read_npz(path)
    return Trace.from_arrays(path, arrays) if "meta" in arrays else _from_arrays(path, arrays, n_experts)


def _read_comments(lines: list[str]) -> tuple[dict[str, str], dict[int, int]]:
    """The values of comments, `# key=value ...`, and of `# layer=0 expert_bytes=4336640` the bytes by layer."""
    values: dict[str, str] = {}
    expert_bytes: dict[int, int] = {}
    for line in lines:
        found: dict[str, str] = dict(re.findall(r"(\w+)=(\S+)", line))
        layer, size = _count(found, "layer"), _count(found, "expert_bytes")
        if layer is not None and size is not None:
            expert_bytes[layer] = size
        values |= found
    return values, expert_bytes


def _count(values: dict[str, str], name: str) -> int | None:
    """The count of that name; None where there is none."""
    text = values.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _from_csv(path: Path, n_experts: int | None) -> Trace:
    """A trace in one of the two csv layouts. Raises InputError with the number of the row that it cannot use."""
    with reading(path):
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            comments = [line for line in lines if line.startswith("#")]
            lines = [line for line in lines if not line.startswith("#")]
            if not any(line.strip() for line in lines):
                raise unusable_trace(path, "it is empty")
            columns = next(csv.reader(lines[:1]), [])
            if columns[:2] == ["pos", "layer"] and len(columns) > 2:
                return _from_positions(path, _table(path, lines[1:], len(columns)), n_experts)
            if columns[:7] == ["turn", "phase", "step", "layer", "slot", "expert", "weight"]:
                return _from_slots(path, _table(path, lines[1:], len(columns)), comments, n_experts)
            raise unusable_trace(path, "its first row is neither pos,layer,id0,... nor that of route_trace v1")
        except (UnicodeDecodeError, csv.Error) as error:
            raise unusable_trace(path, f"not a csv file ({error})") from None


def _table(path: Path, lines: list[str], n_columns: int) -> NDArray[np.float64]:
    """The rows below the column names, float64 [rows, columns]; there is at least one."""
    if not any(line.strip() for line in lines):
        raise unusable_trace(path, "it has no rows")
    try:
        table = np.loadtxt(lines, delimiter=",", comments=None, ndmin=2, dtype=np.float64)
        if table.shape[1] == n_columns and np.isfinite(table).all():
            return table
    except ValueError:
        pass
    rows = []  # quoted numbers, or one that cannot be used
    for number, texts in enumerate(csv.reader(lines), 2):
        try:
            values = [float(text) for text in texts]
        except ValueError:
            values = [np.nan]
        if len(values) not in (0, n_columns) or not np.isfinite(values).all():
            what = f"row {number} (comments not counted) does not have {n_columns} finite numbers"
            raise unusable_trace(path, what)
        rows += [values] if values else []
    return np.array(rows, dtype=np.float64)


def _from_arrays(path: Path, arrays: dict[str, NDArray[Any]], n_experts: int | None) -> Trace:
    ids = arrays.get("ids")
    if ids is None or ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise unusable_trace(path, "it has no integer array ids [tokens, layers, k]")
    n_rows = ids.shape[0]
    phase = np.full(n_rows, Phase.DECODE, dtype=np.uint8)
    sequence = np.zeros(n_rows, dtype=np.int32)
    if "lengths" in arrays:
        lengths = arrays["lengths"]
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any() or (lengths > n_rows).any():
            raise unusable_trace(path, "lengths is not a list of counts")
        if int(lengths.sum()) != n_rows:
            raise unusable_trace(path, f"lengths add up to {int(lengths.sum())}, ids has {n_rows} tokens")
        sequence = np.repeat(np.arange(lengths.size, dtype=np.int32), lengths.astype(np.int64))
    elif "phase" in arrays:
        phase = _phases(path, arrays["phase"], n_rows)
    if ids.dtype.kind == "u" and int(ids.max()) > np.iinfo(np.int64).max:
        raise unusable_trace(path, f"it names expert {int(ids.max())}")
    return _assemble(path, ids.astype(np.int64), phase, sequence, n_experts)


def _from_positions(path: Path, table: NDArray[np.float64], n_experts: int | None) -> Trace:
    """Columns pos, layer, id0, ...; a position that does not rise begins another text.

    Rows come token by token, or, where the layer never falls, layer by layer.
    """
    numbers = _integers(path, table)
    if (numbers[:, :2] < 0).any():
        raise unusable_trace(path, "a position or layer is negative")
    numbers = numbers[_by_token(numbers[:, 0], numbers[:, 1])]
    position, layer = numbers[:, 0], numbers[:, 1]
    is_new_token = np.r_[True, (np.diff(position) != 0) | (np.diff(layer) <= 0)]
    token = np.cumsum(is_new_token) - 1
    sequence = np.cumsum(np.r_[0, np.diff(position[is_new_token]) <= 0]).astype(np.int32)
    ids = _grid(path, (int(token[-1]) + 1, int(layer.max()) + 1, numbers.shape[1] - 2))
    ids[token, layer] = numbers[:, 2:]
    phase = np.full(ids.shape[0], Phase.DECODE, dtype=np.uint8)
    return _assemble(path, ids, phase, sequence, n_experts)


def _by_token(position: NDArray[np.int64], layer: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order of rows that puts each text's tokens one after the other, each with its layers."""
    if (np.diff(layer) < 0).any():
        return np.arange(layer.size)
    same_layer = np.diff(layer) == 0
    texts_before = np.cumsum(np.r_[0, same_layer & (np.diff(position) <= 0)])
    first_of_layer = np.searchsorted(layer, layer)
    text = texts_before - texts_before[first_of_layer]
    return np.lexsort((layer, position, text))


def _from_slots(path: Path, table: NDArray[np.float64], comments: list[str], n_experts: int | None) -> Trace:
    """Columns turn, phase, step, layer, slot, expert, weight, ...: one row per chosen expert, `step` counts tokens."""
    values, expert_bytes = _read_comments(comments)
    numbers = _integers(path, table[:, :6])
    if (numbers < 0).any():
        raise unusable_trace(path, "a column is negative")
    order = np.lexsort((numbers[:, 3], numbers[:, 2], numbers[:, 0]))  # files list all tokens layer by layer
    turn, phase, step, layer, slot, expert = numbers[order].T
    is_new_token = np.r_[True, (np.diff(step) != 0) | (np.diff(turn) != 0)]
    token = np.cumsum(is_new_token) - 1
    n_layers = max(_count(values, "n_layer") or 0, int(layer.max()) + 1)
    ids = _grid(path, (int(token[-1]) + 1, n_layers, int(slot.max()) + 1))
    weights = np.full(ids.shape, np.nan, dtype=np.float16)
    ids[token, layer, slot] = expert
    weights[token, layer, slot] = np.clip(table[order, 6], -60000, 60000)
    phases = _phases(path, phase, phase.size)[is_new_token]
    sequence = np.unique(turn[is_new_token], return_inverse=True)[1].astype(np.int32)
    n_experts = n_experts or _count(values, "n_expert")
    return _assemble(path, ids, phases, sequence, n_experts, weights, values, expert_bytes)


def _phases(path: Path, recorded: NDArray[Any], n_rows: int) -> NDArray[np.uint8]:
    """Phases of moeedge from 0 prefill and 1 decode."""
    if recorded.shape != (n_rows,) or not np.isin(recorded, (0, 1)).all():
        raise unusable_trace(path, "phase is not 0 or 1 for each token")
    return np.where(recorded == 0, Phase.PREFILL, Phase.DECODE).astype(np.uint8)


def _integers(path: Path, table: NDArray[np.float64]) -> NDArray[np.int64]:
    if (np.abs(table) > 2**31).any() or (table != np.floor(table)).any():
        raise unusable_trace(path, "a position, layer or expert is not an integer")
    return table.astype(np.int64)


def _grid(path: Path, shape: tuple[int, int, int]) -> NDArray[np.int64]:
    """Ids of that shape, none recorded."""
    if shape[0] * shape[1] * shape[2] * 8 > _MAX_GRID_BYTES:
        raise unusable_trace(path, f"it names {shape[0]} tokens x {shape[1]} layers x {shape[2]} experts")
    return np.full(shape, -1, dtype=np.int64)


def _assemble(
    path: Path,
    ids: NDArray[np.int64],
    phase: NDArray[np.uint8],
    sequence: NDArray[np.int32],
    n_experts: int | None,
    weights: NDArray[np.float16] | None = None,
    values: Mapping[str, str] = {},
    expert_bytes: Mapping[int, int] = {},
) -> Trace:
    """Numbers the steps and positions, narrows the ids, checks everything."""
    n_rows, n_layers, n_used = ids.shape
    n_named = int(ids.max(initial=-1)) + 1
    if n_named == 0 or ids.min() < -1:
        raise unusable_trace(path, f"it names expert {ids.min()}" if n_named else "it names no expert")
    n_experts = n_experts or max(n_named, n_used)
    if n_named > min(n_experts, MAX_EXPERTS):
        raise unusable_trace(path, f"it names expert {n_named - 1}, which is not below {min(n_experts, MAX_EXPERTS)}")
    is_prefill = phase == Phase.PREFILL
    if np.any(is_prefill[1:] & ~is_prefill[:-1] & (sequence[1:] == sequence[:-1])):
        raise unusable_trace(path, "a token of a prompt follows decoded text")
    dtype = ids_dtype(n_experts)
    narrow: Ids = np.where(ids < 0, np.iinfo(dtype).max, ids).astype(dtype)
    position = np.arange(n_rows) - np.searchsorted(sequence, sequence)
    n_prefill = np.bincount(sequence, weights=is_prefill).astype(np.int64)  # of each sequence
    step = np.where(is_prefill, 0, position - n_prefill[sequence] + 1)
    parameters: dict[str, Any] = {}
    if expert_bytes:
        parameters["expert_bytes"] = [expert_bytes.get(layer, 0) for layer in range(n_layers)]
    try:
        meta = TraceMeta(
            model=Path(values["model"]).name if "model" in values else path.stem,
            architecture=values.get("arch", ""),
            n_layers=n_layers,
            n_experts=n_experts,
            n_expert_used=n_used,
            source=f"imported from {path.name}",
            parameters=parameters,
        )
        return Trace(
            meta=meta,
            ids=narrow,
            phase=phase,
            sequence=sequence,
            step=step.astype(np.int32),
            accepted=np.ones(n_rows, dtype=np.bool_),
            token=np.full(n_rows, -1, dtype=np.int32),
            position=position.astype(np.int32),
            weights=weights,
        )
    except ValueError as error:
        raise unusable_trace(path, str(error)) from None
