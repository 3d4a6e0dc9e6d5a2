"""The shape of a wide file, every tensor with the source of its elements, and the metadata that changes.

Layers that the source does not have are copies of its layers, each placed before its original, with zeros in the
matrices that add to the residual stream: such a layer changes no result and routes nearly as its original.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType

from moeedge.errors import InputError, ModelFileError
from moeedge.lab.widen.architectures import MODELS
from moeedge.lab.widen.maps import (
    Bytes,
    GroupedHeads,
    Map,
    Rotary,
    RowMover,
    corner,
    product,
    repeated,
    repetitions,
    row_bytes,
)
from moeedge.lab.widen.quant_mix import QUANTS
from moeedge.lab.widen.writer import FilePlan
from moeedge.llama import gguf_file

BLOCK = 32  # weights per block of Q4_0 and Q8_0; widths are multiples
ARCHITECTURES = ("qwen3moe", "qwen3")
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_GROUP_BYTES = 32 * 2**20  # of rows in memory at once
_HEADER_ROOM = 2 * 2**20  # upper bound of a header's growth
_MAX_WIDTH = 2**17  # twice that of the widest models; catches mistyped sizes


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer; experts and used are 0 for a dense one."""

    embd: int
    ff: int  # of one expert, or of the dense feed-forward block
    heads: int
    heads_kv: int
    head_dim: int
    layers: int
    experts: int
    used: int  # experts per token
    vocab: int


def _known(name: str) -> Shape:
    d = MODELS[name][1]
    return Shape(d.embd, d.expert_ff or d.ff, d.heads, d.heads_kv, d.head_dim, d.layers, d.experts, d.used, d.vocab)


KNOWN: Mapping[str, Shape] = {
    name: _known(name) for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-0.6b", "qwen3-4b")
}

SIZE_NAMES = {
    "embd": "embedding width",
    "ff": "feed-forward width",
    "heads": "heads",
    "heads_kv": "KV heads",
    "head_dim": "head size",
    "layers": "layers",
    "experts": "experts",
    "used": "experts per token",
    "vocab": "vocabulary",
}


def read_shape(keys: Mapping[str, Any], name: str) -> Shape:
    """Reads the shape from a file's metadata. Raises InputError for another architecture and for missing keys."""
    arch = keys.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise InputError(
            f"{name} has the architecture {arch}; only {' and '.join(ARCHITECTURES)} can be widened.",
            "Choose the bundled pair, or a model of these architectures.",
        )
    lists = [key for key in keys if key.startswith(f"{arch}.") and isinstance(keys[key], list)]
    if lists:
        raise InputError(f"{name} has a number for each layer in {lists[0]}, which cannot be widened.")
    try:
        embd, heads = int(keys[f"{arch}.embedding_length"]), int(keys[f"{arch}.attention.head_count"])
        experts = int(keys.get(f"{arch}.expert_count", 0))
        ff = f"{arch}.expert_feed_forward_length" if experts else f"{arch}.feed_forward_length"
        shape = Shape(
            embd=embd,
            ff=int(keys[ff]),
            heads=heads,
            heads_kv=int(keys.get(f"{arch}.attention.head_count_kv", heads)),
            head_dim=int(keys.get(f"{arch}.attention.key_length", embd // heads)),
            layers=int(keys[f"{arch}.block_count"]),
            experts=experts,
            used=int(keys.get(f"{arch}.expert_used_count", 0)),
            vocab=len(keys["tokenizer.ggml.tokens"]),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"The metadata of {name} lacks its shape ({error}).", "Use another file.") from None
    if keys.get(f"{arch}.attention.value_length", shape.head_dim) != shape.head_dim:
        raise InputError(f"{name} has keys and values of different sizes, which cannot be widened.")
    return shape


def wider_shape(source: Shape, named: Mapping[str, int], like: str | None) -> tuple[Shape, list[str]]:
    """Returns the shape to write, and notes for the user.

    Sizes in `named` must be possible; sizes of the known shape `like` are taken if possible. Raises InputError.
    """
    _check_named(source, named)
    wide, notes = source, list[str]()
    if like is not None:
        wide, notes = _like(source, like, named)
    wide = replace(wide, **named)
    heads = GroupedHeads(source.heads, source.heads_kv, wide.heads, wide.heads_kv)
    if not heads.fits():
        raise InputError(
            f"{source.heads} heads over {source.heads_kv} KV heads do not fit {wide.heads} over {wide.heads_kv}.",
            "Make --heads a multiple of --heads-kv, and give at least as many KV heads as the source has.",
        )
    widest = max(wide.embd, wide.ff, wide.heads * wide.head_dim)
    if widest > _MAX_WIDTH:
        raise InputError(f"A width of {widest:,} is too large.", f"Give at most {_MAX_WIDTH:,}.")
    if wide.layers > MAX_LAYERS:
        raise InputError(f"llama.cpp cannot load {wide.layers:,} layers.", f"Give at most {MAX_LAYERS}.")
    if wide.head_dim != source.head_dim:
        notes.append(
            f"Heads grow from {source.head_dim} to {wide.head_dim}: attention sums in another order, and logits differ "
            f"by rounding. --head-dim {source.head_dim} keeps them bit for bit."
        )
    return wide, notes


def _check_named(source: Shape, named: Mapping[str, int]) -> None:
    for name, size in named.items():
        option, minimum = "--" + name.replace("_", "-"), getattr(source, name)
        if size < minimum:
            raise InputError(
                f"{option} {size} is less than the source's {minimum}.", "Give a size that is not smaller."
            )
        if name in ("embd", "ff") and size % BLOCK:
            raise InputError(
                f"{option} {size} is not a multiple of {BLOCK}.",
                "Choose a multiple: weights are packed in blocks of 32.",
            )
        if name == "head_dim" and size % minimum:
            raise InputError(
                f"{option} {size} is not a multiple of the source's {minimum}.",
                "Choose a multiple: positions rotate pairs of a head's values.",
            )


def _like(source: Shape, like: str, named: Mapping[str, int]) -> tuple[Shape, list[str]]:
    """Returns the source with every size of `like` that keeps the function, and notes on the others."""
    shape = KNOWN.get(like)
    if shape is None:
        raise InputError(f"Unknown shape '{like}'.", f"Choose from: {', '.join(KNOWN)}.")
    if bool(shape.experts) != bool(source.experts):
        fitting = [name for name, other in KNOWN.items() if bool(other.experts) == bool(source.experts)]
        kind = "experts" if source.experts else "no experts"
        raise InputError(f"The source has {kind}, unlike {like}.", f"Choose from: {', '.join(fitting)}.")
    notes = []
    wide, kept = source, []
    for name in ("embd", "ff", "layers"):
        if name in named or getattr(shape, name) >= getattr(source, name):
            wide = replace(wide, **{name: getattr(shape, name)})
        else:
            kept.append(name)
    head_dim = named.get("head_dim", shape.head_dim)
    if head_dim % source.head_dim:
        head_dim = source.head_dim
        kept.append("head_dim")
    # more, smaller heads keep the size of matrices and KV cache
    more = shape.head_dim // head_dim if shape.head_dim % head_dim == 0 else 1
    heads = GroupedHeads(source.heads, source.heads_kv, shape.heads * more, shape.heads_kv * more)
    wide = replace(wide, head_dim=head_dim)
    if heads.fits():
        wide = replace(wide, heads=heads.wide_heads, heads_kv=heads.wide_heads_kv)
    else:
        kept += [name for name in ("heads", "heads_kv") if name not in named]
    kept += [name for name in ("experts", "used", "vocab") if getattr(shape, name) != getattr(source, name)]
    if kept:
        listed = ", ".join(f"{SIZE_NAMES[name]} {getattr(source, name)} ({getattr(shape, name)})" for name in kept)
        notes.append(f"Kept from the source instead of {like} (in brackets), to keep the function: {listed}.")
    return wide, notes


_LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")


TYPES = {  # for feed-forward matrices; other tensors keep the source's types
    "q4_0": QUANTS["q4_0"],
    "q4_k": (GgmlType.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_S),
    "q8_0": QUANTS["q8_0"],
    "f16": QUANTS["f16"],
}


@dataclass(frozen=True)
class WideTensor:
    """One tensor of the wide file."""

    name: str
    source: Any  # gguf.ReaderTensor
    shape: tuple[int, ...]  # the slowest dimension first: [experts, rows, columns], [rows, columns] or [columns]
    rows: Map  # [rows of one matrix]: the source's row or -1; all -1 in a copied layer's outputs
    mover: RowMover

    @property
    def n_matrices(self) -> int:
        """Experts, or 1."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def type(self) -> GgmlType:
        return self.mover.type

    @property
    def n_bytes(self) -> int:
        """Bytes without padding."""
        return self.n_matrices * len(self.rows) * self.mover.n_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes up to each matrix's last row with a source, which no hole takes, rounded up to pages."""
        n_rows = 1 + int(max(np.flatnonzero(self.rows >= 0), default=-1))
        return self.n_matrices * (n_rows * self.mover.n_bytes + 4096)

    def groups(self, file: IO[bytes]) -> Iterator[Bytes]:
        """Yields the wide tensor in groups of rows: uint8 [rows, bytes of a row]. file: the source."""
        origin, mover = self.source, self.mover
        narrow = row_bytes(mover.source_type, int(origin.shape[0]))
        n_rows = int(origin.shape[1]) if len(origin.shape) > 1 else 1
        # dequantised rows are larger than the file's
        group = max(1, _GROUP_BYTES // max(mover.n_bytes, 4 * int(origin.shape[0])))
        for matrix in range(self.n_matrices):
            start = int(origin.data_offset) + matrix * n_rows * narrow
            for first in range(0, len(self.rows), group):
                rows = self.rows[first : first + group]
                out = np.zeros((len(rows), mover.n_bytes), np.uint8)
                live = np.flatnonzero(rows >= 0)
                if len(live):
                    needed, places = np.unique(rows[live], return_inverse=True)
                    file.seek(start + int(needed[0]) * narrow)
                    read = file.read(int(needed[-1] - needed[0] + 1) * narrow)
                    found = np.frombuffer(read, np.uint8).reshape(-1, narrow)[needed - needed[0]]
                    out[live] = mover.move(found)[places]
                yield out


def is_ffn(name: str) -> bool:
    """Whether --type applies to this tensor."""
    return ".ffn_" in name and "norm" not in name and "gate_inp" not in name


class Layout:
    """The maps of all dimensions, and the dimensions of each tensor."""

    def __init__(self, keys: dict[str, Any], narrow: Shape, wide: Shape, type_: str | None) -> None:
        self._keys, self._narrow, self._wide, self._type = keys, narrow, wide, type_
        self._arch = keys["general.architecture"]
        if narrow.head_dim != wide.head_dim and keys.get(f"{self._arch}.rope.scaling.type", "none") != "none":
            raise InputError("Heads with scaled rotary positions cannot grow.", "Leave out --head-dim.")
        times = repetitions(narrow.embd, wide.embd, narrow.head_dim, wide.head_dim)
        self._mean_square = times * narrow.embd / wide.embd
        self._rotary = Rotary(narrow.head_dim, wide.head_dim, float(keys.get(f"{self._arch}.rope.freq_base", 10000.0)))
        heads = GroupedHeads(narrow.heads, narrow.heads_kv, wide.heads, wide.heads_kv)
        written, read = repeated(narrow.embd, wide.embd, times), corner(narrow.embd, wide.embd)
        rotated, plain = self._rotary.places(), corner(narrow.head_dim, wide.head_dim)
        queries = product(heads.queries(), rotated, narrow.head_dim)
        keys_, values = (product(heads.kv(), inner, narrow.head_dim) for inner in (rotated, plain))
        attended = product(heads.queries(), plain, narrow.head_dim)
        ff, vocab, experts = corner(narrow.ff, wide.ff), np.arange(narrow.vocab), np.arange(narrow.experts)
        single, norm, key_norm = np.zeros(1, np.int64), self._mean_square**0.5, (narrow.head_dim / wide.head_dim) ** 0.5
        # role -> rows, columns, factor; the query norm's factor is 1 because it cancels attention's 1/sqrt(head size)
        self._roles: dict[str, tuple[Map, Map, float]] = {
            "token_embd": (vocab, written, 1.0),
            "output_norm": (single, read, norm),
            "output": (vocab, read, 1.0),
            "attn_norm": (single, read, norm),
            "ffn_norm": (single, read, norm),
            "attn_q": (queries, read, 1.0),
            "attn_k": (keys_, read, 1.0),
            "attn_v": (values, read, 1.0),
            "attn_q_norm": (single, rotated, 1.0),
            "attn_k_norm": (single, rotated, key_norm),
            "attn_output": (written, attended, 1.0),
            "ffn_gate_inp": (experts, read, 1.0),
        }
        for kind in ("", "_exps"):
            self._roles |= {f"ffn_gate{kind}": (ff, read, 1.0), f"ffn_up{kind}": (ff, read, 1.0)}
            self._roles[f"ffn_down{kind}"] = (written, ff, 1.0)

    def tensors(self, by_name: dict[str, Any]) -> Iterator[WideTensor]:
        """Yields all tensors of the wide file in the source's order, layer after layer."""
        layers: dict[int, list[tuple[str, Any]]] = {}
        for name, tensor in by_name.items():
            match = _LAYER.match(name)
            if match:
                layers.setdefault(int(match[1]), []).append((match[2], tensor))
            else:
                yield self._tensor(name, name, tensor)
        n, wide = self._narrow.layers, self._wide.layers
        for layer in range(wide):
            original = layer * n // wide
            adds = (layer + 1) * n // wide > original  # the last copy is the original
            for role, tensor in layers.get(original, []):
                yield self._tensor(f"blk.{layer}.{role}", role, tensor, adds=adds)

    def _tensor(self, name: str, role: str, source: Any, *, adds: bool = True) -> WideTensor:
        stem, _, kind = role.rpartition(".")
        if stem not in self._roles or kind != "weight":
            raise InputError(f"Cannot widen the tensor {source.name}.", "Use another model.")
        rows, columns, factor = self._roles[stem]
        shape = [int(size) for size in reversed(source.shape)]
        if shape[-1] != columns.max() + 1 or (len(shape) > 1 and shape[-2] != rows.max() + 1):
            raise ModelFileError(f"{source.name} has the shape {shape}, which contradicts the metadata.")
        if not adds and stem in ("attn_output", "ffn_down", "ffn_down_exps"):
            rows = np.full_like(rows, -1)
        sizes = (len(columns),) if len(shape) == 1 else (*shape[:-2], len(rows), len(columns))
        type_ = self._type_of(name, source.tensor_type, columns)
        return WideTensor(name, source, sizes, rows, RowMover(source.tensor_type, type_, columns, factor))

    def _type_of(self, name: str, source: GgmlType, columns: Map) -> GgmlType:
        """Returns the requested or the source's type, or llama.cpp's fallback if its blocks do not fit the row."""
        requested = TYPES[self._type][0] if self._type is not None and is_ffn(name) else source
        if requested == source:
            fits = RowMover(source, source, columns).copies or gguf.GGML_QUANT_SIZES[source][0] == 1
            return source if fits else GgmlType.Q8_0 if len(columns) % BLOCK == 0 else GgmlType.F16
        if len(columns) % gguf.GGML_QUANT_SIZES[requested][0] == 0:
            return requested
        return GgmlType.Q5_0 if requested == GgmlType.Q4_K and len(columns) % BLOCK == 0 else GgmlType.F16

    def metadata(self) -> dict[str, Any]:
        """Returns the keys whose values differ from the source's or that it may lack."""
        keys, arch, narrow, wide = self._keys, self._arch, self._narrow, self._wide
        sizes = " x ".join(str(size) for size in (wide.layers, wide.embd, wide.ff))
        changed: dict[str, Any] = {
            "general.name": f"{keys.get('general.name', 'model')}, widened to {sizes}",
            "general.description": f"{keys.get('general.description', '')} Widened by moeedge: the same function in "
            "larger matrices, most of them zeros.".strip(),
            f"{arch}.embedding_length": wide.embd,
            f"{arch}.block_count": wide.layers,
            f"{arch}.attention.head_count": wide.heads,
            f"{arch}.attention.head_count_kv": wide.heads_kv,
            f"{arch}.attention.key_length": wide.head_dim,
            f"{arch}.attention.value_length": wide.head_dim,
            f"{arch}.rope.freq_base": self._rotary.wide_base,
            f"{arch}.attention.layer_norm_rms_epsilon": keys[f"{arch}.attention.layer_norm_rms_epsilon"]
            * self._mean_square,
        }
        if narrow.experts:
            changed[f"{arch}.expert_feed_forward_length"] = wide.ff
        dense = int(keys.get(f"{arch}.feed_forward_length", narrow.ff))
        changed[f"{arch}.feed_forward_length"] = math.ceil(dense * wide.ff / narrow.ff)
        if f"{arch}.rope.dimension_count" in keys:
            changed[f"{arch}.rope.dimension_count"] = wide.head_dim
        if self._type is not None:
            changed["general.file_type"] = int(TYPES[self._type][1])
        return changed


@dataclass(frozen=True, kw_only=True)
class WidePlan(FilePlan):
    """A wide file before it is written."""

    room_hint = "Free some space, choose a path elsewhere, or write no zeros with --sparse."

    source: Path
    tensors: tuple[WideTensor, ...]
    source_shape: Shape
    shape: Shape
    notes: tuple[str, ...]

    def room_bytes(self, sparse: bool) -> int:
        data = sum(tensor.live_bytes for tensor in self.tensors) if sparse else self.data_bytes
        return self.source.stat().st_size + _HEADER_ROOM + data

    def data(self) -> Generator[Iterator[Bytes]]:
        with self.source.open("rb") as file:
            yield from (tensor.groups(file) for tensor in self.tensors)

    @property
    def source_expert_bytes(self) -> int:
        """Bytes of the source's experts."""
        sources = {each.source.name: int(each.source.n_bytes) for each in self.tensors if "_exps." in each.name}
        return sum(sources.values())

    @property
    def types(self) -> tuple[str, ...]:
        """Types of the feed-forward matrices."""
        return tuple(dict.fromkeys(tensor.mover.type.name for tensor in self.tensors if is_ffn(tensor.name)))

    @property
    def source_types(self) -> tuple[str, ...]:
        """Types of the source's feed-forward matrices."""
        return tuple(dict.fromkeys(tensor.mover.source_type.name for tensor in self.tensors if is_ffn(tensor.name)))


def make_wide_plan(
    source: Path, sizes: Mapping[str, int], *, like: str | None = None, type_: str | None = None
) -> WidePlan:
    """Reads the header of `source` and lays out the wide file. Raises InputError for an impossible shape or type.

    sizes: fields of `Shape` that the user names; others are as in the shape `like`, else as in the source.
    """
    if len(gguf_file.parts(source)) > 1:
        raise ModelFileError(f"{source} is split.", "Merge its parts first with llama-gguf-split --merge.")
    gguf_file.read_summary(source)  # raises for an unusable file
    reader = gguf.GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    keys = {name: field.contents() for name, field in fields.items()}
    narrow = read_shape(keys, source.name)
    wide, notes = wider_shape(narrow, sizes, like)
    if wide == narrow and type_ is None:
        raise InputError("This is the shape of the source.", "Give a larger one with --like NAME, --embd N or --ff N.")
    layout = Layout(keys, narrow, wide, type_)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    tensors = tuple(layout.tensors(by_name))
    return WidePlan(
        source=source,
        architecture=keys["general.architecture"],
        fields=fields,
        changed=layout.metadata(),
        tensors=tensors,
        source_shape=narrow,
        shape=wide,
        notes=(*notes, *_type_notes(tensors, type_)),
    )


def _type_notes(tensors: tuple[WideTensor, ...], type_: str | None) -> Iterator[str]:
    """Yields notes on row lengths that do not allow the requested type. Raises InputError if no matrix allows it."""
    if type_ is None:
        return
    requested = TYPES[type_][0]
    others = {
        (t.mover.type.name, len(t.mover.columns)) for t in tensors if is_ffn(t.name) and t.mover.type != requested
    }
    for other, n in sorted(others):
        yield f"Rows of {n:,} weights do not divide into {requested.name}'s blocks and become {other}, as in llama.cpp."
    if others and not any(tensor.mover.type == requested for tensor in tensors if is_ffn(tensor.name)):
        raise InputError(
            f"No matrix can be {requested.name}: neither width is a multiple of {gguf.GGML_QUANT_SIZES[requested][0]}.",
            "Choose such a multiple for --embd or --ff, or another --type.",
        )
