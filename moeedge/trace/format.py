"""Routing traces: the experts of every token, in the format that the profiler writes and every other command reads.

A trace file is a NumPy .npz archive of T rows in the order of computation, with the arrays of `Trace` and "meta", the
JSON of `TraceMeta` with "format" and "schema"; docs/lab/traces.md describes each for other tools.
"""

from __future__ import annotations

import errno
import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from moeedge.errors import InputError, require
from moeedge.native.abi import Phase
from moeedge.paths import write_file
from moeedge.records import as_dict, figure, figures
from moeedge.schemas import json_schema, read_json
from moeedge.speculation import check_gamma

FORMAT = "moeedge.trace"
SCHEMA = 1
MAX_EXPERTS = 65535  # ids are uint16 at most and one value is the sentinel

Ids = NDArray[np.uint8] | NDArray[np.uint16]

_OPTIONAL = ("weights", "hidden_states")
# names in the file that differ from those of the fields; other tools read it
_IN_FILE = {"hidden_states": "states", "n_expert_used": "n_experts_used"}
_IN_MEMORY = {in_file: name for name, in_file in _IN_FILE.items()}


@dataclass(frozen=True, kw_only=True)
class TextDescription:
    """A text of a trace, in its parameter "texts"."""

    is_open: ClassVar[bool] = True

    id: str = figure("Id of the prompt", optional=True)
    dataset: str = figure("Name of the dataset", optional=True)
    category: str = figure("Category of the prompt", optional=True)
    language: str = figure("Language of the prompt", optional=True)


@dataclass(frozen=True, kw_only=True)
class TraceParameters:
    """The keys that moeedge writes into a trace's parameters, all optional."""

    is_open: ClassVar[bool] = True

    expert_bytes: float | list[float | None] | None = figure(
        "Size of one expert, in bytes: a number, or one for each layer; null: not known", optional=True
    )
    dataset: str = figure("Names of the data sets, separated by commas; prompt: a text of -p", optional=True)
    prompts: int = figure("Number of prompts", optional=True)
    dataset_sha256: str | None = figure("Hashes of the data sets' files, separated by commas", optional=True)
    mode: str = figure("Mode of moeedge bench whose answers these are", optional=True)
    n_predict: int = figure("Most tokens of an answer", optional=True, least=None)
    temperature: float = figure("Of sampling; 0: greedy", optional=True)
    seed: int | None = figure("Seed of the random numbers; null: greedy", optional=True)
    n_ctx: int = figure("Context size, in tokens", optional=True)
    n_threads: int = figure("Threads of the contexts", optional=True)
    texts: list[TextDescription] = figure("A description of each text, in order", optional=True)


@dataclass(frozen=True, kw_only=True)
class TraceMeta:
    """The model and the run that a trace is of. Raises ValueError for impossible values."""

    is_open: ClassVar[bool] = True

    model: str = figure("File of the model, or the name that the source gives")
    n_layers: int = figure("Layers with and without experts", least=1)
    n_experts: int = figure("Experts of a layer", least=1, most=MAX_EXPERTS)
    n_expert_used: int = figure("Experts that a token uses in a layer (k)", least=1, key="n_experts_used")
    architecture: str = figure("llama.cpp's name of the architecture; empty: not known", default="", optional=True)
    gamma: int = figure("Most drafts of a step, in tokens; 0: no speculation", default=0, optional=True)
    draft: str = figure('Source of drafts; "none" without', default="none", optional=True)
    source: str = figure("The program that wrote the file", default="", optional=True)
    parameters: dict[str, Any] = figure(
        "What else is known of the run", default_factory=dict, optional=True, kind=TraceParameters
    )

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_experts", "n_expert_used", "gamma"):
            value = getattr(self, name)
            require(not isinstance(value, bool) and isinstance(value, int), f"{name} must be an integer, not {value!r}")
        for name in ("model", "architecture", "draft", "source"):
            require(isinstance(getattr(self, name), str), f"{name} must be a string, not {getattr(self, name)!r}")
        require(isinstance(self.parameters, dict), "parameters must be a JSON object")
        require(self.n_layers >= 1, f"n_layers must be >= 1, not {self.n_layers}")
        require(1 <= self.n_experts <= MAX_EXPERTS, f"n_experts must be in 1..{MAX_EXPERTS}, not {self.n_experts}")
        is_top_k = 1 <= self.n_expert_used <= self.n_experts
        require(is_top_k, f"n_expert_used must be in 1..{self.n_experts}, not {self.n_expert_used}")
        check_gamma(self.gamma)


def ids_dtype(n_experts: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds all expert ids and the sentinel."""
    return np.dtype(np.uint8 if n_experts <= 255 else np.uint16)


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Trace:
    """A routing trace in memory. Raises ValueError where its arrays do not fit each other."""

    meta: TraceMeta
    ids: Ids = figure(
        "Experts of the token in each layer, the router's first choice first; uint16: more than 255 experts; "
        "the type's largest value: not recorded, or a layer that uses fewer than k",
        kind="uint8 uint16 TLk",
    )
    phase: NDArray[np.uint8] = figure("1 prefill, 2 decode (one token), 3 draft, 4 verify", kind="uint8 T")
    sequence: NDArray[np.int32] = figure("Number of the text (a prompt and its answer), from 0 upwards", kind="int32 T")
    step: NDArray[np.int32] = figure("Number of the step in its text; 0 is the prefill", kind="int32 T")
    accepted: NDArray[np.bool_] = figure(
        "Whether the token is part of the text; of a verification the first token, emitted before, and accepted drafts",
        kind="bool T",
    )
    token: NDArray[np.int32] = figure("Vocabulary id, of rejected drafts too; -1: not known", kind="int32 T")
    position: NDArray[np.int32] = figure("Position in the text, in tokens; -1: not known", kind="int32 T")
    weights: NDArray[np.float16] | None = figure(
        "The router's weights of these experts, as the model applies them; NaN: not recorded; may be absent",
        default=None,
        kind="float16 TLk",
    )
    hidden_states: NDArray[np.float16] | None = figure(
        "The draft model's last hidden state of the token, where the policy reads it (spac); of a verification's "
        "tokens but the last draft, which the draft model has not decoded by then; NaN elsewhere; may be absent",
        default=None,
        kind="float16 Td",
    )

    def __post_init__(self) -> None:
        n_tokens = self.ids.shape[0] if self.ids.ndim else 0
        lengths = {"T": n_tokens, "L": self.meta.n_layers, "k": self.meta.n_expert_used}
        if self.hidden_states is not None:
            lengths["d"] = max(1, self.hidden_states.shape[-1]) if self.hidden_states.ndim else 1
        for name, array in self._arrays().items():
            *types, axes = figures(Trace)[name].kind.split()
            dtype = ids_dtype(self.meta.n_experts) if name == "ids" else np.dtype(types[0])
            shape = tuple(lengths[axis] for axis in axes)
            if array.dtype != dtype or array.shape != shape:
                in_file, given = _IN_FILE.get(name, name), f"{array.dtype} {list(array.shape)}"
                raise ValueError(f"{in_file} must be {dtype} {list(shape)}, not {given}")
        is_known = (self.ids < self.meta.n_experts) | (self.ids == self.sentinel)
        require(is_known.all(), f"an expert id is not below n_experts = {self.meta.n_experts}")
        is_phase = (self.phase >= Phase.PREFILL) & (self.phase <= Phase.VERIFY)
        require(is_phase.all(), f"a phase is not in {Phase.PREFILL:d}..{Phase.VERIFY:d}")
        is_upwards = (np.diff(self.sequence, prepend=0) >= 0).all() and (self.step >= 0).all()
        require(is_upwards, "sequences must be numbered upwards from 0, steps be >= 0")
        same_sequence = np.diff(self.sequence) == 0
        require(not np.any(np.diff(self.step)[same_sequence] < 0), "the steps of a sequence must not go back")

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
        header = {"format": FORMAT, "schema": SCHEMA, **as_dict(self.meta)}
        arrays["meta"] = np.array(json.dumps(header, ensure_ascii=False))
        with write_file(path, "trace") as temporary, temporary.open("wb") as file:  # numpy appends .npz to names
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
        names = (*_REQUIRED, *_OPTIONAL)
        return {name: array for name in names if (array := getattr(self, name)) is not None}


_REQUIRED = tuple(name for name in figures(Trace) if name not in _OPTIONAL)


def file_schema() -> dict[str, Any]:
    """The JSON Schema of a file: of the object in its array "meta", and each other array's type and axes."""
    about = (
        'Contents of a routing trace, a NumPy .npz archive: "meta" is the JSON text in the array of that name, each '
        "other property describes an array. T: tokens, in the order of computation; L: layers; k: experts of a token; "
        "d: values of a hidden state. Readers ignore unknown keys and arrays."
    )
    schema = json_schema(TraceMeta, "moeedge lab trace (.npz)", about)
    meta = {key: schema.pop(key) for key in ("type", "properties", "required")}
    for name, value, meaning in (
        ("format", FORMAT, "Name of the format."),
        ("schema", SCHEMA, "Version of the format; an incompatible change raises it."),
    ):
        meta["properties"][name] = {"description": meaning, "const": value}
        meta["required"].append(name)
    arrays = _array_schemas()
    required = ["meta", *(name for name in arrays if _IN_MEMORY.get(name, name) not in _OPTIONAL)]
    members = {**arrays, "meta": {"description": 'The JSON object in the array "meta".', **meta}}
    return schema | {"type": "object", "properties": members, "required": required}


def _array_schemas() -> dict[str, dict[str, Any]]:
    schemas = {}
    for name, declared in figures(Trace).items():
        *types, axes = declared.kind.split()
        lengths = {"items": {"type": "integer", "minimum": 0}, "minItems": len(axes), "maxItems": len(axes)}
        members = {
            "dtype": {"description": "NumPy's name of the elements' type.", "enum": types},
            "shape": {"description": f"Length of each axis: {', '.join(axes)}.", "type": "array", **lengths},
        }
        schema = {"type": "object", "additionalProperties": False, "properties": members, "required": [*members]}
        schemas[_IN_FILE.get(name, name)] = {"description": declared.description, **schema}
    return schemas


def unusable_trace(path: Path, reason: str) -> InputError:
    """The error of all readers: one sentence with the file and the reason."""
    hint = "Write one with moeedge profile --trace-out FILE, or convert one with moeedge lab trace import."
    return InputError(f"{path} is not a usable routing trace: {reason}.", hint)


@contextmanager
def reading(path: Path, damage: str = "") -> Iterator[None]:
    """Turns the errors of opening and reading a trace file into InputError; damage: the reason for all other errors."""
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise unusable_trace(path, "it is empty")
        yield
    except FileNotFoundError:
        raise InputError(f"The trace {path} does not exist.", "Check the path.") from None
    except OSError as error:
        is_ours = error.errno == errno.EINVAL  # a place before its beginning, which an archive names
        raise unusable_trace(path, (damage if is_ours else "") or error.strerror or "it cannot be read") from None
    except Exception as error:
        if not damage or isinstance(error, InputError):
            raise
        # zipfile, zlib and numpy's header parser raise a dozen unrelated types on damaged bytes
        raise unusable_trace(path, damage) from None


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file, without pickles. Raises InputError for anything else."""
    arrays = {}
    with reading(path, "it is not an .npz file, or it is damaged"), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as stream:
                arrays[member.filename.removesuffix(".npy")] = _read_array(stream, member.file_size)
    return arrays


def read_npy(path: Path) -> NDArray[Any]:
    """The array of an .npy file, without pickles. Raises InputError for anything else."""
    with reading(path, "an array in it is damaged"), path.open("rb") as file:
        return _read_array(file, path.stat().st_size)


def _read_array(stream: IO[bytes], n_bytes: int) -> NDArray[Any]:
    """One array. Raises ValueError for a header that promises more data than there is, before memory is allocated."""
    read_header = npy.read_array_header_1_0 if npy.read_magic(stream) == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    require(not dtype.hasobject and math.prod(shape) * dtype.itemsize <= n_bytes, "header and data disagree")
    stream.seek(0)
    return np.asarray(npy.read_array(stream, allow_pickle=False))


def _parse_meta(path: Path, array: NDArray[Any]) -> TraceMeta:
    try:
        header = read_json(str(array))
    except ValueError:
        raise unusable_trace(path, "its metadata is not JSON") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise unusable_trace(path, "its metadata is of another format")
    if header.get("schema") != SCHEMA:
        raise unusable_trace(path, f"its schema is {header.get('schema')!r}, this version reads {SCHEMA}")
    header = {_IN_MEMORY.get(key, key): value for key, value in header.items()}
    names = {item.name for item in fields(TraceMeta)}
    try:  # unknown keys are ignored: a later version may write more
        return TraceMeta(**{key: value for key, value in header.items() if key in names})
    except (TypeError, ValueError) as error:
        raise unusable_trace(path, f"its metadata is incomplete ({error})") from None
