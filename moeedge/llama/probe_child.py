"""The process that meets a model file first: it may crash or hang in place of the one that asks.

Started as `python -I <this file> FILE FOLDER...`, with the folders of Python's modules. It loads the file without its
weights and makes a context. Exit code 0: that works; 2: llama.cpp refuses it. Memory and processor time are limited.
"""

from __future__ import annotations

import os
import resource
import sys

CPU_S = 30  # the largest vocabularies take two
MEMORY_BYTES = 8 << 30
REFUSED = 2
_N_CTX = 64


def main(path: str) -> int:
    """The exit code."""
    wanted = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_DATA, MEMORY_BYTES))
    for kind, limit in wanted:
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))

    from ctypes import c_void_p, cast

    import llama_cpp.llama_cpp as lib

    from moeedge.native.library import errors_for_aborts

    lib.llama_backend_init()
    parameters = lib.llama_model_default_params()
    parameters.n_gpu_layers, parameters.no_alloc, parameters.load_mode = 0, True, lib.LLAMA_LOAD_MODE_NONE
    devices = (c_void_p * 1)()  # no GPU
    parameters.devices = cast(devices, c_void_p)
    with errors_for_aborts():
        model = lib.llama_model_load_from_file(os.fsencode(path), parameters)
        if not model:
            return REFUSED
        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = _N_CTX
        return 0 if lib.llama_init_from_model(model, settings) else REFUSED


if __name__ == "__main__":
    sys.path[:] = sys.argv[2:]
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # what is loaded need not be freed
