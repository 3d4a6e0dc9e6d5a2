"""Files of a real model's size with random weights: its shapes, vocabulary size and the types of a quantization.

Every byte is written and no region is empty, so that memory, disk and kernels are used as with the real file. Routers
choose different experts for different tokens; answers mean nothing.

Weights of all types are random codes under scales that give the wanted standard deviation, whose factor is measured by
dequantizing a sample. Signs of scales are random, and minimums follow scales, so that weights have a mean of 0: a
common offset would grow from layer to layer. Most tensors are cut from pools of blocks, each time from another place,
to be as fast as a disk.

The vocabulary is byte-level BPE, 304 tokens: ids 0..255 are the bytes, then 45 two-letter merges, then the three
specials of ChatML; every text can be tokenized and every token has bytes, many of which are no complete UTF-8, as in
real byte-level vocabularies. Fillers up to the model's size ("w304", ...) are words that no text is tokenized to.
Models with as many tokens have the same ones, so that any can draft for another.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GgmlType

from moeedge.errors import InputError, ModelFileError
from moeedge.lab.widen.architectures import MODELS, SCALED, Dims, Metadata, metadata, spread
from moeedge.lab.widen.architectures import tensors as tensors_of
from moeedge.lab.widen.layout import MAX_LAYERS
from moeedge.lab.widen.maps import Bytes
from moeedge.lab.widen.quant_mix import QUANTS, mixed_type
from moeedge.lab.widen.writer import FilePlan
from moeedge.llama import gguf_file

_PAIRS = (  # Ġ is the byte-level spelling of a space
    "Ġt he in er an re on at en nd ti es or te of ed is it al ar st to nt"
    " ng se ha as ou io le ve co me de hi ri ro ic ne ea ra ce li ch ll"
)
MERGES = _PAIRS.split()
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
N_VOCAB = 256 + len(MERGES) + len(SPECIALS)
ENDOFTEXT, IM_START, IM_END = range(N_VOCAB - len(SPECIALS), N_VOCAB)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_symbols() -> list[str]:
    """The 256 printable characters that byte-level BPE writes for the bytes 0..255 (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int = N_VOCAB, *, mask: int = -1) -> None:
    """Writes the `tokenizer.*` keys; fillers follow the first N_VOCAB tokens. mask: a token's id, -1: none is one."""
    fillers = [f"w{token}" for token in range(N_VOCAB, n_vocab)]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*byte_symbols(), *MERGES, *SPECIALS, *fillers])
    kinds = [normal] * (N_VOCAB - len(SPECIALS)) + [control] * len(SPECIALS) + [normal] * len(fillers)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{merge[0]} {merge[1]}" for merge in MERGES])
    writer.add_bos_token_id(ENDOFTEXT)
    writer.add_eos_token_id(IM_END)
    writer.add_pad_token_id(ENDOFTEXT)
    if mask >= 0:
        writer.add_mask_token_id(mask)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


_POOL_BYTES = 4 * 2**20  # stays in caches, which makes writing it twice as fast as one of 16 MiB
_QUIET = 0.01  # of the spread of other rows: logits near 0, which no greedy answer chooses

# byte offsets of a block's float16 fields, and each field as a multiple of the scale: the offset that makes the mean 0
_FIELDS: dict[GgmlType, dict[int, float]] = {
    **{GgmlType[name]: {0: 1.0} for name in ("Q4_0", "Q5_0", "Q8_0", "IQ1_S", "IQ4_NL", "IQ4_XS")},
    **{GgmlType[name]: {0: 1.0} for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
    GgmlType.Q4_1: {0: 1.0, 2: -7.5},
    GgmlType.Q5_1: {0: 1.0, 2: -15.5},
    GgmlType.Q2_K: {80: 1.0, 82: 1.5},
    GgmlType.Q3_K: {108: 1.0},
    GgmlType.Q4_K: {0: 1.0, 2: 7.5},
    GgmlType.Q5_K: {0: 1.0, 2: 15.5},
    GgmlType.Q6_K: {208: 1.0},
}
_FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
TYPES = frozenset({*_FIELDS, *_FLOATS, GgmlType.MXFP4})


@dataclass(frozen=True)
class RandomTensor:
    """One tensor of a file with random weights."""

    name: str
    shape: tuple[int, ...]  # the slowest dimension first
    type: GgmlType
    std: float
    mean: float = 0.0  # of types without blocks
    quiet: tuple[int, ...] = ()  # rows with nearly no spread: end tokens in the output matrix

    @property
    def n_bytes(self) -> int:
        """Bytes without padding."""
        block, n_bytes = GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape)) // int(block) * int(n_bytes)


class RandomWeights:
    """Draws the weights of one file."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.SFC64(seed))
        self._pools: dict[tuple[GgmlType, float, float], Bytes] = {}

    def chunks(self, tensor: RandomTensor) -> Iterator[Bytes]:
        """Yields the tensor's bytes in groups: uint8, one-dimensional."""
        if tensor.name in ("token_embd.weight", "output.weight") or tensor.type == GgmlType.F32:
            yield from self._rows(tensor)  # equal rows would be equal tokens
            return
        pool, left = self._pool(tensor), tensor.n_bytes
        size = GGML_QUANT_SIZES[tensor.type][1]
        while left:
            start = int(self._rng.integers(len(pool) // size)) * size
            chunk = pool[start : start + left]
            yield chunk
            left -= len(chunk)

    def _rows(self, tensor: RandomTensor) -> Iterator[Bytes]:
        block, size = GGML_QUANT_SIZES[tensor.type]
        per_row = tensor.shape[-1] // block
        n_rows = int(np.prod(tensor.shape[:-1]))
        group = max(1, _POOL_BYTES // (per_row * size))
        for first in range(0, n_rows, group):
            n = min(group, n_rows - first)
            rows = draw(self._rng, tensor.type, n * per_row, tensor.std, tensor.mean).reshape(n, -1)
            for row in tensor.quiet:
                if first <= row < first + n:
                    rows[row - first] = draw(self._rng, tensor.type, per_row, tensor.std * _QUIET).reshape(-1)
            yield rows.reshape(-1)

    def _pool(self, tensor: RandomTensor) -> Bytes:
        """Returns blocks of the tensor's kind, more than it has or as many as a pool has."""
        key = (tensor.type, tensor.std, tensor.mean)
        n_bytes = min(_POOL_BYTES, 2 * tensor.n_bytes)
        if key not in self._pools or len(self._pools[key]) < n_bytes // 2:
            n_blocks = n_bytes // GGML_QUANT_SIZES[tensor.type][1]
            self._pools[key] = draw(self._rng, tensor.type, n_blocks, tensor.std, tensor.mean).reshape(-1)
        return self._pools[key]


def draw(rng: np.random.Generator, type_: GgmlType, n_blocks: int, std: float, mean: float = 0.0) -> Bytes:
    """Returns random blocks, of types without blocks values: uint8 [n_blocks, bytes of a block]."""
    if type_ not in _FLOATS:
        blocks = _codes(rng, type_, n_blocks)
        spread = rng.random(n_blocks, np.float32) + np.float32(0.5)  # scales differ from block to block
        spread *= std / _unit_std(type_) / np.sqrt(13 / 12)
        _set_scales(rng, blocks, type_, spread)
        return blocks
    if type_ == GgmlType.F32:
        values = rng.standard_normal(n_blocks, np.float32) * np.float32(std) + np.float32(mean)
        return _bytes(values)
    values = (rng.random(n_blocks, np.float32) - np.float32(0.5)) * np.float32(12**0.5 * std) + np.float32(mean)
    if type_ == GgmlType.F16:
        return _bytes(values.astype(np.float16))
    return _bytes((values.view(np.uint32) >> 16).astype(np.uint16))


def _bytes(values: np.ndarray[Any, Any]) -> Bytes:
    return values.view(np.uint8).reshape(len(values), -1)


def _codes(rng: np.random.Generator, type_: GgmlType, n_blocks: int) -> Bytes:
    """Returns blocks of random bytes whose minimums are those of the scales next to them."""
    size = GGML_QUANT_SIZES[type_][1]
    drawn = rng.integers(0, 2**64, -(-n_blocks * size // 8), np.uint64)
    blocks: Bytes = drawn.view(np.uint8)[: n_blocks * size].reshape(n_blocks, size)
    if type_ == GgmlType.Q2_K:  # 16 bytes of scale and minimum
        blocks[:, :16] = (blocks[:, :16] & 15) * np.uint8(17)
    if type_ in (GgmlType.Q4_K, GgmlType.Q5_K):  # 8 scales and 8 minimums of 6 bits
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * np.uint8(17)
    return blocks


def _set_scales(rng: np.random.Generator, blocks: Bytes, type_: GgmlType, scales: np.ndarray[Any, Any]) -> None:
    """Writes the blocks' scales, [blocks], above 0."""
    if type_ == GgmlType.MXFP4:  # a power of two: one of the nearest, so that the mean square is that of the scale
        exponents = np.floor(np.log2(scales))
        chance = (np.square(scales / np.exp2(exponents)) - 1) / 3
        blocks[:, 0] = 127 + exponents + (rng.random(len(scales), np.float32) < chance)
        return
    signed = scales * (2 * rng.integers(0, 2, len(scales), np.int8) - 1)
    for offset, factor in _FIELDS[type_].items():
        blocks[:, offset : offset + 2] = (signed * factor).astype("<f2").view(np.uint8).reshape(-1, 2)


@lru_cache
def _unit_std(type_: GgmlType) -> float:
    """Returns the root mean square of random blocks with a scale of 1."""
    rng = np.random.default_rng(0)
    blocks = _codes(rng, type_, 4096)
    _set_scales(rng, blocks, type_, np.ones(len(blocks), np.float32))
    return float(np.sqrt(np.mean(np.square(gguf.quants.dequantize(blocks, type_), dtype=np.float64))))


_HEADER_BYTES_PER_TOKEN = 40  # of a vocabulary, at most


@dataclass(frozen=True, kw_only=True)
class RandomModel(FilePlan):
    """A file before it is written. fields: of --header, tokenizer included; else the vocabulary is ours."""

    name: str
    tensors: tuple[RandomTensor, ...]
    n_vocab: int

    @property
    def types(self) -> dict[str, int]:
        """Bytes of tensors by type, the most first."""
        counts = Counter[str]()
        for tensor in self.tensors:
            counts[tensor.type.name] += tensor.n_bytes
        return dict(counts.most_common())

    @property
    def layers(self) -> int:
        return int(self.changed.get(key := f"{self.architecture}.block_count", 0) or self.fields[key].contents())

    def room_bytes(self, sparse: bool) -> int:
        return self.data_bytes + _HEADER_BYTES_PER_TOKEN * self.n_vocab + 2**20

    def data(self) -> Generator[Iterator[Bytes]]:
        weights = RandomWeights(zlib.crc32(self.name.encode()))
        return (weights.chunks(tensor) for tensor in self.tensors)

    def add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        if not self.fields:
            add_vocabulary(writer, self.n_vocab)


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
    quiet = tuple(range(N_VOCAB - len(SPECIALS), N_VOCAB))
    chosen = []
    for spec in tensors_of(arch, dims):
        is_output = spec.name == ("token_embd.weight" if dims.tied else "output.weight")
        type_ = mixed_type(quant, spec.name, spec.shape, dims)
        chosen.append(RandomTensor(spec.name, spec.shape, type_, spec.std, spec.mean, quiet if is_output else ()))
    changed: dict[str, Any] = {f"{arch}.{key}": value for key, value in (metadata(arch, dims) | keys).items()}
    changed |= {"general.name": f"{name} {quant}, random weights", "general.file_type": int(QUANTS[quant][1])}
    return RandomModel(name=name, architecture=arch, changed=changed, tensors=tuple(chosen), n_vocab=dims.vocab)


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
    changed = {"general.name": f"{name}, random weights"}
    return RandomModel(
        name=name, architecture=arch, fields=fields, changed=changed, tensors=tuple(chosen), n_vocab=n_vocab
    )
