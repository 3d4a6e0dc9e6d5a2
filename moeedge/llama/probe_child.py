"""The process that meets a model file first: it may crash or hang in place of the one that asks.

Started as `python -I <this file> FILE FOLDER...`, with the folders of Python's modules. On Linux it maps the file, puts
zeros in the place of the weights, which need not be read then, and decodes a token, of small files two before it.
Exit code 0: that works, or fails in order; 2: llama.cpp refuses the file. Memory and processor time are limited.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Any

CPU_S = 20  # the largest vocabularies take two
MEMORY_BYTES = 8 << 30
REFUSED = 2
_N_CTX = 64
_SMALL_BYTES = 1 << 30  # less is decoded in no time
_MAPS = "/proc/self/maps"  # Linux only
_READ = 1  # PROT_READ
_ZEROS = 0x02 | 0x10 | 0x20 | 0x4000  # MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE
_HUGE_PAGES = 14  # MADV_HUGEPAGE
_BYTES_PER_CPU_S = 1 << 29  # of a dense model, in the slowest types


def main(path: str) -> int:
    """The exit code."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, CPU_S)
    _limit(resource.RLIMIT_DATA, MEMORY_BYTES)

    import llama_cpp.llama_cpp as lib

    from moeedge.native.library import errors_for_aborts
    from moeedge.native.mapping import map_lazily

    can_decode = os.path.exists(_MAPS)
    lib.llama_backend_init()
    parameters = lib.llama_model_default_params()
    parameters.n_gpu_layers, parameters.use_extra_bufts = 0, False
    parameters.no_alloc = not can_decode
    parameters.load_mode = lib.LLAMA_LOAD_MODE_MMAP if can_decode else lib.LLAMA_LOAD_MODE_NONE
    devices = (ctypes.c_void_p * 1)()  # no GPU
    parameters.devices = ctypes.cast(devices, ctypes.c_void_p)
    before = _shared_files() if can_decode else set()
    with errors_for_aborts():
        with map_lazily():
            model = lib.llama_model_load_from_file(os.fsencode(path), parameters)
        if not model:
            return REFUSED
        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = _N_CTX
        settings.n_threads = settings.n_threads_batch = 1
        context = lib.llama_init_from_model(model, settings)
    if not context:
        return REFUSED
    if can_decode:
        _decode(lib, model, context, before)
    return 0


def _limit(kind: int, value: int) -> None:
    """Sets a limit of this process, as far as one that holds already allows it."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _decode(lib: Any, model: Any, context: Any, before: set[str]) -> None:
    """Decodes with zeros in the place of the files that llama.cpp has mapped since `before`."""
    if lib.llama_model_has_encoder(model):  # drafts, too, that decode a target's hidden states
        return
    from moeedge.native.mapping import libc

    for addresses in _shared_files() - before:
        start, end = (int(address, 16) for address in addresses.split("-"))
        if libc().mmap(start, end - start, _READ, _ZEROS, -1, 0) != start:
            return
        libc().madvise(start, end - start, _HUGE_PAGES)
    n_bytes = lib.llama_model_size(model)
    _limit(resource.RLIMIT_CPU, CPU_S + n_bytes // _BYTES_PER_CPU_S)
    tokens = (lib.llama_token * 2)(0, min(1, lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)) - 1))
    for n in (2, 1) if n_bytes < _SMALL_BYTES else (1,):
        if lib.llama_decode(context, lib.llama_batch_get_one(tokens, n)):
            return


def _shared_files() -> set[str]:
    """Addresses of the files that are mapped to be read and shared, as llama.cpp maps models."""
    with open(_MAPS, "rb") as lines:
        parts = [line.decode("ascii", "replace").split(maxsplit=2) for line in lines]
    return {addresses for addresses, access, _ in parts if access == "r--s"}


if __name__ == "__main__":
    sys.path[:] = sys.argv[2:]
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # what is loaded need not be freed
