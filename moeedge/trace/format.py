"""Routing traces: the experts of every token, in the format that the profiler writes and every other command reads.

A trace file is a NumPy .npz archive of T rows in the order of computation, with the arrays of `Trace` and "meta", the
JSON of `TraceMeta` with "format" and "schema"; docs/lab/traces.md describes each for other tools.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.native.abi import Phase
from moeedge.paths import write_file

FORMAT = "moeedge.trace"
SCHEMA = 1
MAX_EXPERTS = 65535  # ids are uint16 at most and one value is the sentinel

Ids = NDArray[np.uint8] | NDArray[np.uint16]

_ROW_TYPES: dict[str, np.dtype[Any]] = {
    "phase": np.dtype(np.uint8),
    "sequence": np.dtype(np.int32),
    "step": np.dtype(np.int32),
    "accepted": np.dtype(np.bool_),
    "token": np.dtype(np.int32),
    "position": np.dtype(np.int32),
}
_REQUIRED = ("ids", *_ROW_TYPES)
_OPTIONAL = ("weights", "hidden_states")
# names in the file that differ from those of the fields; other tools read it
_IN_FILE = {"hidden_states": "states", "n_expert_used": "n_experts_used"}
_IN_MEMORY = {in_file: name for name, in_file in _IN_FILE.items()}


@dataclass(frozen=True, kw_only=True)
class TraceMeta:
    """The model and the run that a trace is of. Raises ValueError for impossible values."""

    model: str  # file name, or the name that the source gives
    n_layers: int  # with and without experts
    n_experts: int  # N of each MoE layer
    n_expert_used: int  # k
    architecture: str = ""
    gamma: int = 0  # draft length; 0: no speculation
    draft: str = "none"
    source: str = ""  # the program that made the trace
    parameters: dict[str, Any] = field(default_factory=dict)  # anything else: prompts, sampling, versions, expert_bytes

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_experts", "n_expert_used", "gamma"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, not {value!r}")
        for name in ("model", "architecture", "draft", "source"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, not {getattr(self, name)!r}")
        if not isinstance(self.parameters, dict):
            raise ValueError("parameters must be a JSON object")
        if self.n_layers < 1:
            raise ValueError(f"n_layers must be >= 1, not {self.n_layers}")
        if not 1 <= self.n_experts <= MAX_EXPERTS:
            raise ValueError(f"n_experts must be in 1..{MAX_EXPERTS}, not {self.n_experts}")
        if not 1 <= self.n_expert_used <= self.n_experts:
            raise ValueError(f"n_expert_used must be in 1..{self.n_experts}, not {self.n_expert_used}")
        if self.gamma < 0:
            raise ValueError(f"gamma must be >= 0, not {self.gamma}")


def ids_dtype(n_experts: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds all expert ids and the sentinel."""
    return np.dtype(np.uint8 if n_experts <= 255 else np.uint16)


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Trace:
    """A routing trace in memory. Raises ValueError where its arrays do not fit each other."""

    meta: TraceMeta
    ids: Ids  # [T, n_layers, k], the router's first choice first; the largest value of the type: not recorded
    phase: NDArray[np.uint8]  # [T], of native.abi.Phase
    sequence: NDArray[np.int32]  # [T], the text (prompt and answer) of the token
    step: NDArray[np.int32]  # [T], of the sequence: 0 is the prefill
    accepted: NDArray[np.bool_]  # [T], the token is part of the text
    token: NDArray[np.int32]  # [T], -1 where unknown
    position: NDArray[np.int32]  # [T], -1 where unknown
    weights: NDArray[np.float16] | None = None  # [T, n_layers, k], the router's; NaN where not recorded
    hidden_states: NDArray[np.float16] | None = None  # [T, d], of the draft; NaN where not recorded

    def __post_init__(self) -> None:
        shape = (self.ids.shape[0] if self.ids.ndim else 0, self.meta.n_layers, self.meta.n_expert_used)
        for name, dtype in ({"ids": ids_dtype(self.meta.n_experts)} | _ROW_TYPES).items():
            array = getattr(self, name)
            expected = shape if name == "ids" else shape[:1]
            if array.dtype != dtype or array.shape != expected:
                raise ValueError(f"{name} must be {dtype} {list(expected)}, not {array.dtype} {list(array.shape)}")
        if self.weights is not None and (self.weights.dtype != np.float16 or self.weights.shape != shape):
            raise ValueError(f"weights must be float16 {list(shape)}")
        states = self.hidden_states
        if states is not None and (
            states.dtype != np.float16 or states.ndim != 2 or states.shape[0] != shape[0] or states.shape[1] < 1
        ):
            raise ValueError(f"states must be float16 [{shape[0]}, d], d at least 1")
        if np.any((self.ids >= self.meta.n_experts) & (self.ids != self.sentinel)):
            raise ValueError(f"an expert id is not below n_experts = {self.meta.n_experts}")
        if np.any((self.phase < Phase.PREFILL) | (self.phase > Phase.VERIFY)):
            raise ValueError(f"a phase is not in {Phase.PREFILL:d}..{Phase.VERIFY:d}")
        if np.any(np.diff(self.sequence) < 0) or np.any(self.sequence < 0) or np.any(self.step < 0):
            raise ValueError("sequences must be numbered upwards from 0, steps be >= 0")
        same_sequence = np.diff(self.sequence) == 0
        if np.any(np.diff(self.step)[same_sequence] < 0):
            raise ValueError("the steps of a sequence must not go back")

    @property
    def n_tokens(self) -> int:
        """T, the number of rows."""
        return int(self.ids.shape[0])

    @property
    def sentinel(self) -> int:
        """The id that means "not recorded"."""
        return int(np.iinfo(self.ids.dtype).max)

    def layer_ids(self, layer: int) -> NDArray[np.int32]:
        """Experts of one layer, int32 [T, k], -1 where not recorded."""
        ids = self.ids[:, layer].astype(np.int32)
        ids[ids == self.sentinel] = -1
        return ids

    def expert_layers(self) -> list[int]:
        """The layers with any recorded expert."""
        return [int(layer) for layer in np.flatnonzero((self.ids != self.sentinel).any(axis=(0, 2)))]

    @cached_property
    def used_per_layer(self) -> list[int]:
        """Experts per token of each layer, [n_layers]: fewer than k where layers differ, k where none is recorded."""
        n_used = np.count_nonzero(self.ids != self.sentinel, axis=2)
        return [int(most) or self.meta.n_expert_used for most in n_used.max(axis=0, initial=0)]

    def expert_bytes(self) -> NDArray[np.int64] | None:
        """Bytes of one expert of each layer, int64 [n_layers]; None where the source does not say."""
        stated = self.meta.parameters.get("expert_bytes")
        sizes = stated if isinstance(stated, list) else [stated] * self.meta.n_layers
        valid = all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 48 for size in sizes)
        return np.array(sizes, dtype=np.int64) if valid and len(sizes) == self.meta.n_layers else None

    def rows_of(self, rows: NDArray[np.bool_]) -> Trace:
        """The trace of the chosen rows, bool [T]."""
        chosen: dict[str, Any] = {name: array[rows] for name, array in self._arrays().items()}
        return replace(self, **chosen)

    def text_rows(self) -> NDArray[np.int64]:
        """Rows of the decoded text, in reading order: accepted tokens of decode and verification steps."""
        decoded = (self.phase == Phase.DECODE) | (self.phase == Phase.VERIFY)
        return np.flatnonzero(decoded & self.accepted)

    def save(self, path: Path) -> None:
        """Writes the .npz file. Raises InputError where the path cannot be written."""
        arrays: dict[str, Any] = {_IN_FILE.get(name, name): array for name, array in self._arrays().items()}
        header: dict[str, Any] = {"format": FORMAT, "schema": SCHEMA}
        header |= {_IN_FILE.get(name, name): value for name, value in asdict(self.meta).items()}
        arrays["meta"] = np.array(json.dumps(header, ensure_ascii=False))
        with (
            write_file(path, "trace") as temporary,
            temporary.open("wb") as file,
        ):  # a file object: numpy appends .npz to names
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Reads a file that `save` wrote. Raises InputError, with the reason, for anything else."""
        return cls.from_arrays(path, read_npz(path))

    @classmethod
    def from_arrays(cls, path: Path, arrays: dict[str, NDArray[Any]]) -> Trace:
        """The trace in the arrays of a file. Raises InputError, with the reason, where they are none."""
        arrays = {_IN_MEMORY.get(name, name): array for name, array in arrays.items()}
        if "meta" not in arrays:
            raise unusable_trace(path, "it holds no metadata")
        meta = _parse_meta(path, arrays["meta"])
        missing = [name for name in _REQUIRED if name not in arrays]
        if missing:
            raise unusable_trace(path, f"the array {missing[0]!r} is missing")
        try:
            return cls(meta=meta, **{name: arrays[name] for name in (*_REQUIRED, *_OPTIONAL) if name in arrays})
        except ValueError as error:
            raise unusable_trace(path, str(error)) from None

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that the trace has, by field."""
        arrays = {name: getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL)}
        return {name: array for name, array in arrays.items() if array is not None}


def unusable_trace(path: Path, reason: str) -> InputError:
    """The error of all readers: one sentence with the file and the reason."""
    hint = "Write one with moeedge profile --trace-out FILE, or convert one with moeedge lab trace import."
    return InputError(f"{path} is not a usable routing trace: {reason}.", hint)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the errors of opening and reading a trace file into InputError."""
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise unusable_trace(path, "it is empty")
        yield
    except FileNotFoundError:
        raise InputError(f"The trace {path} does not exist.", "Check the path.") from None
    except OSError as error:
        raise unusable_trace(path, error.strerror or "it cannot be read") from None


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file, without pickles. Raises InputError for anything else."""
    arrays = {}
    with reading(path):
        try:
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    with archive.open(member) as stream:
                        arrays[member.filename.removesuffix(".npy")] = _read_array(stream, member.file_size)
        except OSError:
            raise
        except Exception:
            # zipfile, zlib and numpy's header parser raise a dozen unrelated types on damaged bytes
            raise unusable_trace(path, "it is not an .npz file, or it is damaged") from None
    return arrays


def read_npy(path: Path) -> NDArray[Any]:
    """The array of an .npy file, without pickles. Raises InputError for anything else."""
    with reading(path):
        try:
            with path.open("rb") as file:
                return _read_array(file, path.stat().st_size)
        except OSError:
            raise
        except Exception:  # see read_npz
            raise unusable_trace(path, "an array in it is damaged") from None


def _read_array(stream: IO[bytes], n_bytes: int) -> NDArray[Any]:
    """One array. Raises ValueError for a header that promises more data than there is, before memory is allocated."""
    version = npy.read_magic(stream)
    header = npy.read_array_header_1_0(stream) if version == (1, 0) else npy.read_array_header_2_0(stream)
    shape, _, dtype = header
    if dtype.hasobject or math.prod(shape) * dtype.itemsize > n_bytes:
        raise ValueError("header and data disagree")
    stream.seek(0)
    return np.asarray(npy.read_array(stream, allow_pickle=False))


def _parse_meta(path: Path, array: NDArray[Any]) -> TraceMeta:
    try:
        header = json.loads(str(array))
    except (ValueError, RecursionError):
        raise unusable_trace(path, "its metadata is not JSON") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise unusable_trace(path, "its metadata is of another format")
    if header.get("schema") != SCHEMA:
        raise unusable_trace(path, f"its schema is {header.get('schema')!r}, this version reads {SCHEMA}")
    header = {_IN_MEMORY.get(key, key): value for key, value in header.items()}
    known = {item.name for item in fields(TraceMeta)}
    try:  # unknown keys are ignored: a later version may write more
        return TraceMeta(**{key: value for key, value in header.items() if key in known})
    except (TypeError, ValueError) as error:
        raise unusable_trace(path, f"its metadata is incomplete ({error})") from None
