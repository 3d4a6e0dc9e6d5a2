"""Files of a real model's size with random weights: its shapes, vocabulary size and the types of a quantization.

Every byte is written and no region is empty, so that memory, disk and kernels are used as with the real file. Routers
choose different experts for different tokens; answers mean nothing.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType

from moeedge.errors import InputError, ModelFileError
from moeedge.lab.widen.architectures import MODELS, SCALED, Dims, Metadata, metadata, spread
from moeedge.lab.widen.architectures import tensors as tensors_of
from moeedge.lab.widen.maps import padded_bytes
from moeedge.lab.widen.quant_mix import QUANTS, MixedModel, mixed_type
from moeedge.lab.widen.random_weights import TYPES, RandomTensor, RandomWeights
from moeedge.lab.widen.shape import MAX_LAYERS
from moeedge.lab.widen.vocabulary import N_VOCAB, SPECIALS, add_vocabulary
from moeedge.lab.widen.writer import OnBytes, add_metadata, check_room, finish_header, stream
from moeedge.llama import gguf_file

_HEADER_BYTES_PER_TOKEN = 40  # of a vocabulary, at most


@dataclass(frozen=True)
class RandomModel:
    """A file before it is written."""

    name: str
    architecture: str
    tensors: tuple[RandomTensor, ...]
    changed: dict[str, Any]  # metadata besides the tokenizer's
    n_vocab: int
    fields: dict[str, Any] = field(default_factory=dict)  # of --header: gguf.ReaderField by key, tokenizer included

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors with the padding between them, without the header."""
        return padded_bytes(tensor.n_bytes for tensor in self.tensors)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the routed experts' matrices."""
        return sum(tensor.n_bytes for tensor in self.tensors if "_exps.weight" in tensor.name)

    @property
    def types(self) -> dict[str, int]:
        """Bytes of tensors by type, the most first."""
        counts = Counter[str]()
        for tensor in self.tensors:
            counts[tensor.type.name] += tensor.n_bytes
        return dict(counts.most_common())

    @property
    def layers(self) -> int:
        """Blocks."""
        return int(self.changed.get(key := f"{self.architecture}.block_count", 0) or self.fields[key].contents())


def model_like(name: str, quant: str, *, layers: int | None = None, vocab: int | None = None) -> RandomModel:
    """Plans a file with the sizes of a model of MODELS, in a quantization of QUANTS. Raises InputError."""
    if name not in MODELS:
        raise InputError(f"Unknown model '{name}'.", f"Choose from: {', '.join(MODELS)}.")
    if quant.lower() not in QUANTS:
        raise InputError(f"Unknown quantization '{quant}'.", f"Choose from: {', '.join(QUANTS)}.")
    if layers is not None and layers > MAX_LAYERS:
        raise InputError(f"llama.cpp cannot load {layers:,} layers.", f"Give at most {MAX_LAYERS}.")
    arch, dims, keys = MODELS[name]
    return model_of(name, arch, replace(dims, layers=layers or dims.layers, vocab=vocab or dims.vocab), keys, quant)


def model_of(name: str, arch: str, dims: Dims, keys: Metadata, quant: str) -> RandomModel:
    """Plans a file of any sizes; keys: metadata that differs from the architecture's. Raises InputError."""
    quant = quant.lower()
    if dims.vocab < N_VOCAB:
        raise InputError(f"A vocabulary of {dims.vocab} is too small.", f"Give --vocab {N_VOCAB} or more.")
    mix = MixedModel(dims.layers, dims.experts, dims.heads // dims.heads_kv, dims.tied)
    quiet = tuple(range(N_VOCAB - len(SPECIALS), N_VOCAB))
    chosen = []
    for spec in tensors_of(arch, dims):
        is_output = spec.name == ("token_embd.weight" if dims.tied else "output.weight")
        type_ = mixed_type(quant, spec.name, spec.shape, mix)
        chosen.append(RandomTensor(spec.name, spec.shape, type_, spec.std, spec.mean, quiet if is_output else ()))
    changed: dict[str, Any] = {f"{arch}.{key}": value for key, value in (metadata(arch, dims) | keys).items()}
    changed |= {"general.name": f"{name} {quant}, random weights", "general.file_type": int(QUANTS[quant][1])}
    return RandomModel(name, arch, tuple(chosen), changed, dims.vocab)


class _HeaderReader(gguf.GGUFReader):  # type: ignore[misc]
    """Reads a header: metadata, and name, shape (the slowest dimension first) and type of each tensor."""

    listed: list[tuple[str, tuple[int, ...], GgmlType]]

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        """Takes the place of a method that maps the tensors' data, which may be missing."""
        self.listed = []
        for entry in fields:
            _, name, _, sizes, type_, _ = entry.parts
            shape = tuple(int(size) for size in reversed(sizes))
            self.listed.append((bytes(name).decode(), shape, GgmlType(int(type_[0]))))


def model_of_header(path: Path) -> RandomModel:
    """Plans a file with the tensors, types, metadata and tokenizer that a GGUF file's header lists.

    The file may end after its header. Raises InputError for types that cannot be drawn, and ModelFileError.
    """
    gguf_file.check_readable(path)
    try:
        reader = _HeaderReader(path)
        fields = {name: each for name, each in reader.fields.items() if not name.startswith("GGUF.")}
        arch = str(fields["general.architecture"].contents())
        _ = fields[f"{arch}.block_count"]
    except (ValueError, IndexError, KeyError):
        raise ModelFileError(f"The header of {path} is malformed or truncated.", "Copy more of the file.") from None
    if "split.count" in fields and int(fields["split.count"].contents()) > 1:
        raise ModelFileError(f"{path} is a part of a split model.", "Give the header of a file that is not split.")
    unknown = sorted({type_.name for _, _, type_ in reader.listed if type_ not in TYPES})
    if unknown:
        raise InputError(f"{path} has tensors of type {', '.join(unknown)}, for which no weights can be drawn.")
    shapes = {name: shape for name, shape, _ in reader.listed}
    n_vocab, embd = shapes.get("token_embd.weight", (0, 1))
    tied = "output.weight" not in shapes
    scales = SCALED if arch.startswith("granite") else {}
    dims = Dims(layers=0, embd=embd, heads=1, heads_kv=1, head_dim=1, ff=1, tied=tied, **scales)
    kinds = fields["tokenizer.ggml.token_type"].contents() if "tokenizer.ggml.token_type" in fields else []
    quiet = tuple(int(token) for token in np.flatnonzero(np.asarray(kinds) == int(gguf.TokenType.CONTROL)))
    chosen = []
    for tensor, shape, type_ in reader.listed:
        std, mean = spread(dims, tensor, shape)
        rows = quiet if tensor == ("token_embd.weight" if tied else "output.weight") else ()
        chosen.append(RandomTensor(tensor, shape, type_, std, mean, rows))
    name = str(fields["general.name"].contents()) if "general.name" in fields else path.stem
    return RandomModel(name, arch, tuple(chosen), {"general.name": f"{name}, random weights"}, n_vocab, fields)


def check_space(model: RandomModel, out: Path) -> None:
    """Raises DiskSpaceError if the file does not fit on the disk."""
    check_room(out, model.data_bytes + _HEADER_BYTES_PER_TOKEN * model.n_vocab + 2**20)


def write(model: RandomModel, out: Path, *, on_bytes: OnBytes = lambda n: None) -> None:
    """Writes the model to `out`, replacing it; calls on_bytes after each group of bytes. A failure leaves no file."""
    weights = RandomWeights(zlib.crc32(model.name.encode()))
    tensors = (weights.chunks(tensor) for tensor in model.tensors)
    stream(out, lambda part: _write_header(model, part), tensors, on_bytes=on_bytes)


def _write_header(model: RandomModel, part: Path) -> None:
    writer = gguf.GGUFWriter(part, model.architecture)
    add_metadata(writer, model.fields, model.changed)
    if not model.fields:
        add_vocabulary(writer, model.n_vocab)
    finish_header(writer, [(tensor.name, tensor.shape, tensor.n_bytes, tensor.type) for tensor in model.tensors])
