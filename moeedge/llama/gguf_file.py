"""The header of a GGUF file: whether the file is complete, and which slice of it holds expert e of layer l.

ggml parses the header. llama.cpp reports a truncated file only as "failed to load model"; here the size that the header
implies is compared with the size on disk. Uploads to a device read experts from the file, as llama.cpp may repack them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from moeedge.errors import ModelFileError
from moeedge.hub.catalog import all_parts, is_first_part
from moeedge.llama import library
from moeedge.llama.settings import LoraAdapter
from moeedge.native.cache import ExpertTensor
from moeedge.native.library import load
from moeedge.native.mapping import FileVersion

MAGIC = b"GGUF"
_ROUTER = re.compile(r"^blk\.(\d+)\.ffn_gate_inp\.weight$")
_HEAD = re.compile(r"^blk\.(\d+)\.nextn\.eh_proj\.weight$")
LAYER = re.compile(r"^blk\.(\d+)\.")
_REPLACE_HINT = "Download or copy it again."
# not shared experts (_shexp) and the norm before the experts (ffn_norm_exps), which no router chooses
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(?:gate|up|gate_up|down)_exps\.(?P<part>weight|bias|scale|input_scale)$")
_UINT32, _INT32, _STRING, _ARRAY = 4, 5, 8, 9  # enum gguf_type
_EXPERT_DIMENSION = {"weight": 2, "bias": 1, "scale": 0, "input_scale": 0}


@dataclass(frozen=True)
class GgufSummary:
    size_bytes: int  # of all parts
    expert_layers: tuple[int, ...]  # layers that have a router, ascending
    head_layers: tuple[int, ...]  # blocks that predict further tokens (MTP), which follow the layers; ascending


@dataclass(frozen=True)
class GgufTensor:
    name: str
    type: int  # enum ggml_type
    shape: tuple[int, int, int, int]  # ggml's ne: the innermost dimension first, 1 where there is none
    offset: int  # bytes from the start of the file
    size_bytes: int
    file: Path = field(compare=False)

    def is_on_host(self, n_layers: int | None) -> bool:
        """Whether it is in host memory, where the first `n_layers` layers and the token embeddings are; None: all."""
        layer = LAYER.match(self.name)
        return n_layers is None or (int(layer[1]) < n_layers if layer else self.name.startswith("token_embd."))


def read_summary(path: Path) -> GgufSummary:
    """Reads the headers of all parts of the model at `path`. Raises ModelFileError for a missing or truncated part."""
    size_bytes = 0
    for part in parts(path):
        promised = promised_bytes(read_tensors(part))
        actual_bytes = part.stat().st_size
        if actual_bytes < promised:
            raise ModelFileError(
                f"{part} is truncated: it has {actual_bytes:,} of the {promised:,} bytes that its header lists.",
                _REPLACE_HINT,
            )
        size_bytes += actual_bytes
    names = [tensor.name for tensor in read_all_tensors(path)]
    layers = [{int(match[1]) for name in names if (match := of.match(name))} for of in (_ROUTER, _HEAD)]
    return GgufSummary(size_bytes, *(tuple(sorted(each)) for each in layers))


def promised_bytes(tensors: list[GgufTensor]) -> int:
    return max((tensor.offset + tensor.size_bytes for tensor in tensors), default=0)


def parts(path: Path) -> list[Path]:
    """Returns all files of a split model (name-00001-of-00003.gguf), or the one file. Raises ModelFileError."""
    names = all_parts(path.name)
    if not is_first_part(path.name) and path.exists():
        number = int(path.stem.split("-")[-3])
        raise ModelFileError(f"{path} is part {number} of {len(names)}.", "Give the first part.")
    return [path.parent / name for name in names]


def check_readable(path: Path) -> None:
    """Raises ModelFileError for a path that is no GGUF file."""
    if not path.exists():
        raise ModelFileError(f"There is no model file {path}.", "Check the path.")
    if path.is_dir():
        raise ModelFileError(f"{path} is a folder.", "Give the .gguf file in it.")
    if not path.is_file():  # reading a pipe may never end
        raise ModelFileError(f"{path} is no regular file.", "Give a model in llama.cpp's GGUF format.")
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ModelFileError(f"Cannot read {path}: {error.strerror}.", "Check its permissions.") from error
    if not magic:
        raise ModelFileError(f"{path} is empty.", _REPLACE_HINT)
    if magic != MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file.", "Give a model in llama.cpp's GGUF format.")


@contextmanager
def _open_header(path: Path) -> Iterator[tuple[Any, Any]]:
    """ggml's functions, and the gguf_context * of one file. Raises ModelFileError for an unreadable header."""
    check_readable(path)
    library.start()
    ggml = library.ggml_functions()
    library.clear_errors()
    native = load()
    header = native.moeedge_open_gguf(str(path).encode())
    if not header:
        reason = library.first_error(
            native.moeedge_last_error().decode("utf-8", "replace") or "its header is malformed"
        )
        is_other = re.search("version|endian|supported", reason)  # and not damaged
        hint = "Get the model in GGUF's current format." if is_other else f"It may be truncated. {_REPLACE_HINT}"
        raise ModelFileError(f"Cannot read {path}: {reason.rstrip('?')}.", hint)
    try:
        yield ggml, header
    finally:
        ggml.gguf_free(header)


def read_experts_used(path: Path) -> tuple[str, list[int]]:
    """The metadata key of experts per token, and its number, one per layer, or none (dense). Raises ModelFileError."""
    with _open_header(path) as (ggml, header):
        architecture = ggml.gguf_find_key(header, b"general.architecture")
        if architecture < 0 or ggml.gguf_get_kv_type(header, architecture) != _STRING:
            raise ModelFileError(f"{path} does not name its architecture.", _REPLACE_HINT)
        name = f"{ggml.gguf_get_val_str(header, architecture).decode('utf-8', 'replace')}.expert_used_count"
        key = ggml.gguf_find_key(header, name.encode())
        if key < 0:
            return name, []
        kind = ggml.gguf_get_kv_type(header, key)
        if kind == _UINT32:
            return name, [int(ggml.gguf_get_val_u32(header, key))]
        if kind == _ARRAY and ggml.gguf_get_arr_type(header, key) in (_UINT32, _INT32):
            return name, ggml.gguf_get_arr_data(header, key)[: ggml.gguf_get_arr_n(header, key)]
        raise ModelFileError(f"{path} has {name} as a value of another type than numbers.", _REPLACE_HINT)


def read_tensors(path: Path) -> list[GgufTensor]:
    """All tensors of one file in its order, parsed again when it has changed. Raises ModelFileError."""
    check_readable(path)
    return list(_parse_tensors(path, FileVersion.of(path)))


@lru_cache(maxsize=64)  # a start asks several times, and a large vocabulary takes long
def _parse_tensors(path: Path, _version: FileVersion) -> tuple[GgufTensor, ...]:
    with _open_header(path) as (ggml, header):
        start = ggml.gguf_get_data_offset(header)
        return tuple(
            GgufTensor(
                name=ggml.gguf_get_tensor_name(header, i).decode("utf-8", "replace"),
                type=ggml.gguf_get_tensor_type(header, i),
                shape=tuple(ggml.gguf_get_tensor_ne(header, i)[:4]),
                offset=start + ggml.gguf_get_tensor_offset(header, i),
                size_bytes=ggml.gguf_get_tensor_size(header, i),
                file=path,
            )
            for i in range(ggml.gguf_get_n_tensors(header))
        )


def read_all_tensors(path: Path) -> list[GgufTensor]:
    """Returns the tensors of all parts of the model at `path`. Raises ModelFileError."""
    return [tensor for part in parts(path) for tensor in read_tensors(part)]


def expert_tensors(path: Path, *, n_layers: int | None = None) -> tuple[list[ExpertTensor], list[Path]]:
    """Returns the expert tensors of the model at `path` in layer order, and the files that `ExpertTensor.file` indexes.

    n_layers: skip the layers after that many (multi-token prediction, which does not run here). Raises ModelFileError.
    """
    files, experts = parts(path), []
    for tensor in read_all_tensors(path):
        match = _EXPERTS.match(tensor.name)
        if match is None or (n_layers is not None and int(match[1]) >= n_layers):
            continue
        dimension = _EXPERT_DIMENSION[match["part"]]
        n_experts = max(tensor.shape[dimension], 1)  # a malformed header may say 0
        experts.append(
            ExpertTensor(
                layer=int(match[1]),
                type=tensor.type,
                ne0=tensor.shape[0] if dimension > 0 else 1,
                ne1=tensor.shape[1] if dimension > 1 else 1,
                n_experts=n_experts,
                file=files.index(tensor.file),
                offset=tensor.offset,
                stride=tensor.size_bytes // n_experts,
                name=tensor.name,
            )
        )
    return sorted(experts, key=lambda tensor: (tensor.layer, tensor.name)), files


def expert_bytes(tensors: list[ExpertTensor]) -> int:
    return sum(tensor.stride * tensor.n_experts for tensor in tensors)


def mean_expert_bytes(tensors: list[ExpertTensor]) -> int:
    n_experts = max((tensor.n_experts for tensor in tensors), default=1)
    return expert_bytes(tensors) // max(1, len({tensor.layer for tensor in tensors}) * n_experts)


def bytes_per_token(tensors: list[GgufTensor], experts: list[ExpertTensor], used_per_layer: Sequence[int]) -> int:
    """The bytes of weights that a token reads, of `experts` those that it uses. tensors: all of the model."""
    has_output = any(tensor.name == "output.weight" for tensor in tensors)
    # a token reads one row of the embedding matrix, unless that is also the output matrix
    unread = sum(t.size_bytes for t in tensors if t.name == "token_embd.weight" and has_output)
    read = sum(tensor.stride * used_per_layer[tensor.layer] for tensor in experts)
    return sum(tensor.size_bytes for tensor in tensors) - expert_bytes(experts) - unread + read


def expert_bytes_by_layer(tensors: list[ExpertTensor], n_layers: int) -> list[int]:
    """Returns the bytes of one expert of each layer, [n_layers]; 0 for a layer without experts."""
    return [sum(tensor.stride for tensor in tensors if tensor.layer == layer) for layer in range(n_layers)]


def adapts_experts(adapters: Iterable[LoraAdapter]) -> bool:
    """Whether one of them changes routed experts: blk.3.ffn_up_exps.weight.lora_a. Raises ModelFileError."""
    files = [adapter.path for adapter in adapters if adapter.path.is_file()]  # `Model.load_adapters` reports others
    names = (tensor.name for file in files for tensor in read_tensors(file))
    return any(_EXPERTS.match(name.removesuffix(".lora_a")) for name in names)


def n_groups(tensors: list[ExpertTensor]) -> int:
    """Returns the number of groups of layers whose experts have equal tensors; a cache has staging slots per group."""
    layers = defaultdict[int, set[tuple[str, int, int, int]]](set)
    for tensor in tensors:
        layers[tensor.layer].add((tensor.role, tensor.type, tensor.ne0, tensor.ne1))
    return len({frozenset(roles) for roles in layers.values()})


def scratch_bytes(tensors: list[ExpertTensor], n_pairs: int) -> int:
    """An upper bound for the float32 columns of `n_pairs` (token, expert) pairs in the widest layer, in bytes."""
    values: Counter[int] = Counter()
    for tensor in tensors:  # an input and an output column of each matrix; one that two matrices share counts twice
        values[tensor.layer] += tensor.ne0 + tensor.ne1 if tensor.ne1 > 1 else 0
    return 4 * n_pairs * max(values.values(), default=0)


@dataclass(frozen=True)
class WholeLayers:
    """A choice of layers whose experts are on the GPU, as with llama.cpp's --n-cpu-moe: the last ones."""

    n_whole: int  # layers with experts
    n_cpu_moe: int  # the value of --n-cpu-moe: experts of so many first layers stay in host memory
    expert_bytes: int  # of the layers on the GPU


def whole_layers(tensors: list[ExpertTensor], n_layers: int, n_whole: int) -> WholeLayers:
    """The choice of the last `n_whole` layers with experts, or of all. n_layers: of the model, dense ones included."""
    layers = sorted({tensor.layer for tensor in tensors})
    n_whole = max(0, min(n_whole, len(layers)))
    first = layers[len(layers) - n_whole] if n_whole else n_layers
    return WholeLayers(n_whole, first, expert_bytes([tensor for tensor in tensors if tensor.layer >= first]))


def most_whole_layers(tensors: list[ExpertTensor], n_layers: int, n_bytes: int) -> WholeLayers:
    """Returns the choice of as many of the last layers as have experts of `n_bytes` at most, together."""
    n_most = len({tensor.layer for tensor in tensors})
    choices = [whole_layers(tensors, n_layers, n_whole) for n_whole in range(n_most, -1, -1)]
    return next((choice for choice in choices if choice.expert_bytes <= n_bytes), choices[-1])
