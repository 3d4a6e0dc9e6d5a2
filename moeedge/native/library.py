"""Loading the native library: find it, and check that llama.cpp and ggml here are those it was compiled against."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from moeedge.errors import BackendError, VersionMismatchError
from moeedge.native.abi import ABI_VERSION, GGML_SIGNATURES, SIGNATURES, declare

_NAMES = ("libmoeedge.so", "libmoeedge.dylib")


def library_path() -> Path:
    """Path of the compiled library, or of another build ($MOEEDGE_LIBRARY). Raises BackendError if there is none."""
    named = os.environ.get("MOEEDGE_LIBRARY")
    own = [Path(__file__).with_name(name) for name in _NAMES]
    candidates = [Path(named)] if named else [*own, *_installed()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise BackendError(
        f"moeedge's native library is not at {candidates[0]}.", "Run pip install . in moeedge's checkout to compile it."
    )


def _installed() -> list[Path]:
    """The files of the package's name: an editable install keeps them in site-packages, apart from the sources."""
    with suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("moeedge") or []
        return [Path(str(file.locate())) for file in files if file.name in _NAMES]
    return []


@cache
def llama_cpp() -> Any:
    """The imported llama_cpp package."""
    try:
        import llama_cpp as package
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(f"llama-cpp-python cannot be loaded: {error}.", "Install moeedge again.") from error
    return package


@cache
def ggml_functions() -> Any:
    """Those functions of the libggml that llama_cpp has loaded whose signatures abi.py has; objects are addresses."""
    # a handle of its own: a function's signature is that of its handle
    return declare(ctypes.CDLL(llama_cpp().llama_cpp._lib._name), GGML_SIGNATURES)


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the libllama or libggml that llama_cpp has loaded, with its result and argument types set."""
    function = getattr(llama_cpp().llama_cpp._lib, name)
    function.restype = result
    function.argtypes = list(arguments)
    return function


@cache
def load() -> ctypes.CDLL:
    """Load the native library. Raises BackendError, and VersionMismatchError where it is for another llama.cpp."""
    llama_cpp()  # whose ggml ours is linked against
    try:
        library = ctypes.CDLL(str(library_path()))
    except OSError as error:
        text = f"moeedge's native library cannot be loaded: {error}."
        raise BackendError(text, "Install llama-cpp-python and moeedge again.") from error
    try:
        declare(library, SIGNATURES, "moeedge_")
        built_for = int(library.moeedge_abi_version())
    except AttributeError:  # older than the number
        built_for = 1
    if built_for != ABI_VERSION:
        raise VersionMismatchError(
            f"moeedge's native library has interface version {built_for}, but moeedge needs {ABI_VERSION}.",
            "Install moeedge again with pip install . to compile it.",
        )
    compiled_for = library.moeedge_llama_cpp_version().decode()
    installed = importlib.metadata.version("llama-cpp-python")
    if compiled_for != installed:
        raise VersionMismatchError(
            f"moeedge was compiled for llama-cpp-python {compiled_for}, but {installed} is installed.",
            f"Run pip install llama-cpp-python=={compiled_for}, or install moeedge again.",
        )
    compiled_api, installed_api = library.moeedge_backend_api_version(), installed_api_version()
    if compiled_api != installed_api:
        raise VersionMismatchError(
            f"moeedge was compiled for ggml's backend API {compiled_api}, but llama.cpp here has {installed_api}.",
            "Install moeedge again with the llama-cpp-python that it names.",
        )
    return library


@contextmanager
def errors_for_aborts() -> Iterator[None]:
    """An assertion of llama.cpp fails the call within, in this thread, in place of ending the process."""
    library = load()
    before = library.moeedge_throw_on_abort(1)
    try:
        yield
    finally:
        library.moeedge_throw_on_abort(before)


def installed_api_version() -> int:
    """The backend API version that the first registered backend of llama.cpp's ggml states, in its first member."""
    return int(ggml_function("ggml_backend_reg_get", ctypes.POINTER(ctypes.c_int), ctypes.c_size_t)(0)[0])


def newest_instance() -> int:
    """Id of our backend's part of the llama.cpp context that the calling thread made last; 0 without one."""
    return int(load().moeedge_newest_instance())


def keep_activations_near(gpu: int | None) -> None:
    """Keep activations of new contexts in memory that `gpu` (ggml_backend_dev_t) copies fast; None: ordinary memory."""
    load().moeedge_set_default_host_buffer(gpu)
