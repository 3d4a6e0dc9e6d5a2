"""llama.cpp in this process: started once, with its log sent to the Python logger "moeedge.llama".

`start` puts the log callback in place and registers our backend; it must run before the first model is loaded.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections import deque
from typing import Any

import llama_cpp.llama_cpp as lib
import psutil

from moeedge import native
from moeedge.native.devices import DRY_RUN_GPU, dry_run_gpu

logger = logging.getLogger("moeedge.llama")
logger.addHandler(logging.NullHandler())
logger.propagate = False  # silent unless the CLI adds a handler (--verbose)

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # enum ggml_log_level of ggml.h
_CONTINUED = 5  # the text belongs to the line before
_FUNCTION_NAME = re.compile(r"^[a-z0-9]+_\w+: +")  # says nothing to a user

_lock = threading.Lock()
_started = False
_error_lines: deque[str] = deque(maxlen=8)
_partial = ""
_partial_level = logging.DEBUG


def _on_log(level: int, text: bytes, _user_data: object) -> None:
    """Collects llama.cpp's fragments to lines; called from any thread that llama.cpp logs from."""
    global _partial, _partial_level
    if level != _CONTINUED:
        _partial_level = _LEVELS.get(level, logging.DEBUG)
    _partial += text.decode("utf-8", "replace")
    while "\n" in _partial:
        line, _partial = _partial.split("\n", 1)
        if not line.strip():
            continue
        if _partial_level >= logging.WARNING:
            _error_lines.append(_FUNCTION_NAME.sub("", line.strip()))
        logger.log(_partial_level, "%s", line)


# llama.cpp keeps the bare pointer: a collected callback would crash the process
_log_callback = lib.llama_log_callback(_on_log)


def start() -> None:
    """Registers our backend and the log callback; must run before a model is loaded, further calls do nothing."""
    global _started
    with _lock:
        if _started:
            return
        lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
        native.attach()
        lib.llama_backend_init()
        _started = True


def forget_errors() -> None:
    """Empties the list that `first_complaint` looks at."""
    _error_lines.clear()


def first_error() -> str:
    """llama.cpp's first warning or error since `forget_complaints`: later ones only repeat that loading failed."""
    return _error_lines[0] if _error_lines else ""


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of libggml or libggml-base, which llama_cpp loads but does not wrap.

    Looked up through libllama and what it depends on: wheels carry libggml.so and libggml.so.0 as two files, so that
    llama_cpp._ggml loads a second copy with a device registry of its own.
    """
    function = getattr(lib._lib, name)
    function.restype = result
    function.argtypes = list(arguments)
    return function


def device_list(name: str) -> ctypes.Array[ctypes.c_void_p]:
    """What llama_model_params.devices takes for the value of -dev: pointers, NULL-terminated.

    A GPU's name is that GPU; "none" and the CPU's name are no device, for the CPU computes what no device of the list
    does; "imagined" a GPU that is not there, for models without weights; anything else ("auto", an emulated device, a
    remote worker) is every GPU of this machine. A remote worker is never in the list: llama.cpp would put whole layers
    there.
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
    pointers = [_device(one) for one in chosen]
    return (ctypes.c_void_p * (len(pointers) + 1))(*pointers, None)


def local_gpus() -> list[str]:
    """The GPUs of this machine that llama.cpp uses by itself: all discrete ones, without one the integrated ones."""
    kinds = {device.name: device.kind for device in native.devices()}
    discrete = [name for name, kind in kinds.items() if kind == "GPU"]
    return discrete or [name for name, kind in kinds.items() if kind == "IGPU"]


def has_gpu() -> bool:
    """Whether llama.cpp uses a GPU of this machine unless it is told otherwise."""
    return bool(local_gpus())


def _device(name: str) -> Any:
    """ggml_backend_dev_t of that name."""
    return ggml_function("ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p)(name.encode())


def physical_cores() -> int:
    """Physical cores that this process may run on: the thread count that llama.cpp's users get by default."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or usable, usable))
