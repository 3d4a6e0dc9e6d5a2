"""llama.cpp in this process: started once, its log sent to the Python logger "moeedge.llama"; its devices.

llama_cpp wraps libllama only; llama_cpp._ggml would load a second libggml with a device registry of its own. Functions
of libggml, and private ones of llama.cpp, are looked up through the handle `lib._lib`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections import deque

import llama_cpp.llama_cpp as lib

from moeedge import native
from moeedge.hardware.host import physical_cores as physical_cores
from moeedge.native.backends import DRY_RUN_GPU, dry_run_gpu
from moeedge.native.library import ggml_function as ggml_function
from moeedge.native.library import ggml_functions as ggml_functions

logger = logging.getLogger("moeedge.llama")
logger.addHandler(logging.NullHandler())
logger.propagate = False  # silent unless --verbose adds a handler

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # enum ggml_log_level of ggml.h
_CONTINUED = 5  # the text continues the previous line
_FUNCTION_NAME = re.compile(r"^[a-z0-9]+_\w+: +")  # stripped from errors

_lock = threading.Lock()
_error_lines: deque[tuple[int, str]] = deque(maxlen=32)  # level and text
_partial = ""
_partial_level = logging.DEBUG


def _on_log(level: int, text: bytes, _user_data: object) -> None:
    """Joins fragments of llama.cpp's log to lines; called from any thread."""
    global _partial, _partial_level
    if level != _CONTINUED:
        _partial_level = _LEVELS.get(level, logging.DEBUG)
    _partial += text.decode("utf-8", "replace")
    while "\n" in _partial:
        line, _partial = _partial.split("\n", 1)
        if not line.strip():
            continue
        if _partial_level >= logging.WARNING:
            _error_lines.append((_partial_level, _FUNCTION_NAME.sub("", line.strip())))
        logger.log(_partial_level, "%s", line)


# kept for the life of the process: llama.cpp holds a bare pointer to it
_log_callback = lib.llama_log_callback(_on_log)


def start() -> None:
    """Registers the log callback, our backend and those that the user names; must run before a model is loaded."""
    with _lock:
        # without it ggml's CUDA backend pins no pages of files; os.environ has what the user has set
        os.putenv("GGML_CUDA_REGISTER_HOST", "1")
        lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
        native.attach()


def clear_errors() -> None:
    _error_lines.clear()


def first_error(default: str = "it gave no reason") -> str:
    """llama.cpp's first error since `clear_errors` that says more than that it failed, else its first warning."""
    telling = [text for level, text in _error_lines if level >= logging.ERROR and text != "failed to load model"]
    line = next(iter([*telling, *(text for _, text in _error_lines)]), default)
    # an assertion names its source file, in the folder where that was compiled
    return re.sub(r"/\S*/(?=[\w.-]+:\d+: )", "", line).rstrip(".")


def device_list(name: str) -> ctypes.Array[ctypes.c_void_p]:
    """Returns llama_model_params.devices for a value of -dev: a NULL-terminated array of ggml_backend_dev_t.

    A GPU's name gives that GPU; "none" and the CPU's name none, as the CPU computes what no listed device does;
    DRY_RUN_GPU one that allocates nothing; anything else ("auto", an emulated device, a remote worker) every GPU of
    this machine. A remote worker is never listed: llama.cpp would put entire layers there.
    """
    if name == DRY_RUN_GPU:
        return (ctypes.c_void_p * 2)(dry_run_gpu(), None)
    kinds = {device.name: device.kind for device in native.devices()}
    if name == "none" or kinds.get(name) == "CPU":
        chosen = []
    elif kinds.get(name) in ("GPU", "IGPU"):
        chosen = [name]
    else:
        chosen = local_gpus()
    pointers = [ggml_functions().ggml_backend_dev_by_name(gpu.encode()) for gpu in chosen]
    return (ctypes.c_void_p * (len(pointers) + 1))(*pointers, None)


def local_gpus() -> list[str]:
    """Returns the GPUs that llama.cpp uses by default: all discrete ones, or without any the integrated ones."""
    kinds = {device.name: device.kind for device in native.devices()}
    discrete = [name for name, kind in kinds.items() if kind == "GPU"]
    return discrete or [name for name, kind in kinds.items() if kind == "IGPU"]


def buffer_types() -> dict[str, int]:
    """The types of memory in which weights can be kept, as -ot names them: ggml_backend_buffer_type_t by name."""
    ggml = ggml_functions()
    devices = map(ggml.ggml_backend_dev_get, range(ggml.ggml_backend_dev_count()))
    types = [int(ggml.ggml_backend_dev_buffer_type(device)) for device in devices]
    return {ggml.ggml_backend_buft_name(each).decode(): each for each in types if each}
