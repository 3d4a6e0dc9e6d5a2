"""A look into a GGUF file before llama.cpp loads it: is it one, is it whole, which layers have experts.

The header is parsed by ggml itself. llama.cpp would report a truncated file only as "failed to load model"; here the
size that the header promises is compared with the size on disk.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeedge.engine import library
from moeedge.errors import ModelFileError

_MAGIC = b"GGUF"
_ROUTER = re.compile(r"^blk\.(\d+)\.ffn_gate_inp\.weight$")
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")
_AGAIN = "Download or copy it again."


@dataclass(frozen=True)
class GgufSummary:
    """What the header of a model says."""

    size_bytes: int  # of all parts
    expert_layers: tuple[int, ...]  # layers that have a router, ascending


class _InitParams(ctypes.Structure):
    """struct gguf_init_params of gguf.h."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def summarize(path: Path) -> GgufSummary:
    """Checks every part of the model at `path`; raises ModelFileError with a sentence that a person can act on."""
    routers: set[int] = set()
    size_bytes = 0
    for part in _parts(path):
        _check_readable(part)
        names, promised_bytes = _read_header(part)
        actual_bytes = part.stat().st_size
        if actual_bytes < promised_bytes:
            raise ModelFileError(
                f"{part} is truncated: it has {actual_bytes:,} bytes of the {promised_bytes:,} that its header names.",
                _AGAIN,
            )
        size_bytes += actual_bytes
        routers.update(int(match[1]) for match in map(_ROUTER.match, names) if match)
    return GgufSummary(size_bytes=size_bytes, expert_layers=tuple(sorted(routers)))


def _parts(path: Path) -> list[Path]:
    """All files of a split model (name-00001-of-00003.gguf), or the one file."""
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return [path]
    parts = int(match["parts"])
    if int(match["part"]) != 1 and path.exists():
        raise ModelFileError(f"{path} is part {int(match['part'])} of {parts}.", "Give the first part.")
    return [path.with_name(f"{match['stem']}-{i:05d}-of-{parts:05d}.gguf") for i in range(1, parts + 1)]


def _check_readable(path: Path) -> None:
    if not path.exists():
        raise ModelFileError(f"There is no model file {path}.", "Check the path.")
    if path.is_dir():
        raise ModelFileError(f"{path} is a folder.", "Give the .gguf file inside it.")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}.", "Check its permissions.") from error
    if not magic:
        raise ModelFileError(f"{path} is empty.", _AGAIN)
    if magic != _MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file.", "Give a model in llama.cpp's GGUF format.")


def _read_header(path: Path) -> tuple[list[str], int]:
    """The tensor names, and the bytes that a whole file has."""
    library.start()
    c_gguf = ctypes.c_void_p
    read: Callable[..., Any] = library.ggml_function("gguf_init_from_file", c_gguf, ctypes.c_char_p, _InitParams)
    free = library.ggml_function("gguf_free", None, c_gguf)
    n_tensors = library.ggml_function("gguf_get_n_tensors", ctypes.c_int64, c_gguf)
    data_offset = library.ggml_function("gguf_get_data_offset", ctypes.c_size_t, c_gguf)
    name = library.ggml_function("gguf_get_tensor_name", ctypes.c_char_p, c_gguf, ctypes.c_int64)
    offset = library.ggml_function("gguf_get_tensor_offset", ctypes.c_size_t, c_gguf, ctypes.c_int64)
    size = library.ggml_function("gguf_get_tensor_size", ctypes.c_size_t, c_gguf, ctypes.c_int64)

    library.forget_complaints()
    header = read(str(path).encode(), _InitParams(no_alloc=True, ctx=None))
    if not header:
        reason = library.first_complaint() or "its header makes no sense"
        raise ModelFileError(f"{path} cannot be read: {reason}.", f"It may be truncated. {_AGAIN}")
    try:
        count = n_tensors(header)
        names = [name(header, i).decode("utf-8", "replace") for i in range(count)]
        end = max((offset(header, i) + size(header, i) for i in range(count)), default=0)
        return names, data_offset(header) + end
    finally:
        free(header)
