"""A draft made by quantizing the target.

A low-bit copy of the target has the same layers, the same hidden size and nearly the same hidden states, which is what
SP-MoE's predictor relies on (the paper's pair DeepSeek-Lite and DeepSeek-Lite-AWQ is of that kind).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

import llama_cpp.llama_cpp as lib

from moeedge import paths
from moeedge.errors import EngineError, InputError
from moeedge.llama import gguf_file, library
from moeedge.paths import replace_file

# name -> enum llama_ftype of llama.h; rows that a type's blocks do not divide get llama.cpp's fallback type
TYPES = {"q2_k": 10, "q3_k": 12, "q4_0": 2, "q4_k": 15, "iq4_nl": 25, "q5_0": 8, "q8_0": 7}


def quantized(model: Path, type_name: str = "q4_0") -> Path:
    """Returns the path of `model` quantized to `type_name`, kept in the cache folder and made on first use.

    Raises ModelFileError for an unusable model, InputError for an unknown type or a cache that cannot be written,
    EngineError when llama.cpp fails.
    """
    gguf_file.read_summary(model)
    if type_name not in TYPES:
        raise InputError(f"Unknown type '{type_name}' for a draft.", f"Choose from: {', '.join(TYPES)}.")
    status = model.stat()
    identity = f"{model.resolve()}|{status.st_size}|{status.st_mtime_ns}|{type_name}"
    name = f"{model.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}-{type_name}.gguf"
    try:
        file = paths.cache_dir() / "drafts" / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(file) as temporary:
                _quantize(model, temporary, TYPES[type_name])
    except OSError as error:
        raise InputError(
            f"Cannot write the draft to the folder of what moeedge keeps: {error.strerror}.",
            "Set MOEEDGE_CACHE to a folder that you may write, or give a draft with -md FILE.",
        ) from None
    return file


def _quantize(model: Path, out: Path, file_type: int) -> None:
    library.start()
    library.clear_errors()
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = file_type
    parameters.nthread = library.physical_cores()
    parameters.allow_requantize = True  # requantizing a quantized model loses little more
    if lib.llama_model_quantize(os.fsencode(model), os.fsencode(out), ctypes.byref(parameters)) != 0:
        raise EngineError(f"llama.cpp cannot quantize {model}: {library.first_error()}.")
