"""A model's own low-bit quantization, made with llama.cpp's quantizer and kept in the cache folder.

As a draft of the model itself it has the same layers, the same hidden size and nearly the same hidden states, which
SP-MoE's predictor lives on (the paper's pair DeepSeek-Lite and DeepSeek-Lite-AWQ is of that kind).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

import llama_cpp.llama_cpp as lib

from moeedge import paths
from moeedge.engine import gguf_file, library
from moeedge.errors import EngineError, InputError
from moeedge.whole_file import whole

# by name: enum llama_ftype of llama.h; widths that a type's blocks do not divide get the nearest one that they do
TYPES = {"q2_k": 10, "q3_k": 12, "q4_0": 2, "q4_k": 15, "iq4_nl": 25, "q5_0": 8, "q8_0": 7}


def quantized(model: Path, type_name: str = "q4_0") -> Path:
    """The file, made unless it is there. Raises ModelFileError for a bad model, InputError for an unknown type."""
    gguf_file.summarize(model)
    if type_name not in TYPES:
        raise InputError(f'There is no type "{type_name}" for a draft.', f"Known: {', '.join(TYPES)}.")
    status = model.stat()
    identity = f"{model.resolve()}|{status.st_size}|{status.st_mtime_ns}|{type_name}"
    name = f"{model.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}-{type_name}.gguf"
    try:
        file = paths.cache_dir() / "drafts" / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole(file) as beside:
                _quantize(model, beside, TYPES[type_name])
    except OSError as error:
        raise InputError(
            f"The draft cannot be kept in the cache folder: {error.strerror}.",
            "Set MOEEDGE_CACHE to a folder that can be written, or name a draft with -md FILE.",
        ) from None
    return file


def _quantize(model: Path, out: Path, file_type: int) -> None:
    library.start()
    library.forget_complaints()
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = file_type
    parameters.nthread = library.physical_cores()
    parameters.allow_requantize = True  # a model that is quantized already loses little more
    if lib.llama_model_quantize(os.fsencode(model), os.fsencode(out), ctypes.byref(parameters)) != 0:
        reason = library.first_complaint() or "it gave no reason"
        raise EngineError(f"llama.cpp cannot quantize {model}: {reason}.")
