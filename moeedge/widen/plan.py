"""What a wide file will hold, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from moeedge.engine import gguf_file
from moeedge.errors import InputError, ModelFileError
from moeedge.widen.layout import TYPES, Layout, WeightType, WideTensor, is_ffn
from moeedge.widen.shape import Asked, Shape, read_shape, wider_shape


@dataclass(frozen=True)
class Plan:
    """A wide file before it is written."""

    source: Path
    fields: dict[str, Any]  # of the source: gguf.ReaderField by key
    changed: dict[str, Any]  # metadata that differs
    tensors: tuple[WideTensor, ...]
    source_shape: Shape
    shape: Shape
    notes: tuple[str, ...]

    @property
    def data_bytes(self) -> int:
        """Of all tensors; the header comes on top."""
        return sum(tensor.padded_bytes for tensor in self.tensors)

    @property
    def expert_bytes(self) -> int:
        """Of the feed-forward matrices of all experts."""
        return sum(tensor.n_bytes for tensor in self.tensors if "_exps." in tensor.name)

    @property
    def source_expert_bytes(self) -> int:
        """The same of the source."""
        sources = {tensor.source.name: int(tensor.source.n_bytes) for tensor in self.tensors if "_exps." in tensor.name}
        return sum(sources.values())

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the feed-forward matrices."""
        return tuple(dict.fromkeys(tensor.mover.type.name for tensor in self.tensors if is_ffn(tensor.name)))

    @property
    def source_types(self) -> tuple[str, ...]:
        """The same of the source."""
        return tuple(dict.fromkeys(tensor.mover.source_type.name for tensor in self.tensors if is_ffn(tensor.name)))


def make_plan(source: Path, asked: Asked, *, like: str | None = None, type_: WeightType | None = None) -> Plan:
    """Reads the header of `source` and lays the wide file out. Raises InputError where that is impossible."""
    if len(gguf_file.parts(source)) > 1:
        raise ModelFileError(f"{source} is split.", "Merge its parts first: llama-gguf-split --merge.")
    gguf_file.summarize(source)  # says what is wrong with the file
    reader = gguf.GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    keys = {name: field.contents() for name, field in fields.items()}
    narrow = read_shape(keys, source.name)
    wide, notes = wider_shape(narrow, asked, like)
    if wide == narrow and type_ is None:
        raise InputError("That is the shape of the source.", "Name a larger one: --like NAME, --embd N, --ff N.")
    layout = Layout(keys, narrow, wide, type_)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    tensors = tuple(layout.tensors(by_name))
    return Plan(
        source=source,
        fields=fields,
        changed=layout.metadata(),
        tensors=tensors,
        source_shape=narrow,
        shape=wide,
        notes=(*notes, *_type_notes(tensors, type_)),
    )


def _type_notes(tensors: tuple[WideTensor, ...], type_: WeightType | None) -> Iterator[str]:
    """Where a type was asked for that the row lengths do not allow."""
    if type_ is None:
        return
    wanted = TYPES[type_][0]
    others = {(t.mover.type.name, len(t.mover.columns)) for t in tensors if is_ffn(t.name) and t.mover.type != wanted}
    for other, n in sorted(others):
        yield f"Rows of {n:,} weights do not divide into {wanted.name}'s blocks: those are {other}, as llama.cpp does."
    if others and not any(tensor.mover.type == wanted for tensor in tensors if is_ffn(tensor.name)):
        raise InputError(
            f"No matrix can be {wanted.name}: neither width is a multiple of {gguf.GGML_QUANT_SIZES[wanted][0]}.",
            "Give --embd or --ff such a multiple, or another --type.",
        )
