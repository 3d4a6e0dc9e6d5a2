"""Attaching: registers our backend, and those that the user names, with the llama.cpp of this process."""

from __future__ import annotations

from functools import cache

from moeedge.errors import VersionMismatchError
from moeedge.native.abi import OffloadScope
from moeedge.native.backends import load_requested
from moeedge.native.library import llama_cpp, load


def attach() -> None:
    """Register our backend and the files of $GGML_BACKEND_PATH; what is registered already stays as it is.

    Call it before the first context is made. Contexts start with `OffloadScope.NONE`, so that llama.cpp makes its
    automatic choices (flash attention, fused operations) as in stock; the engine raises the scope afterwards.
    """
    _register()
    load_requested()


@cache
def _register() -> None:
    library = load()
    llama_cpp().llama_backend_init()
    library.moeedge_disable_broken_amx()
    if library.moeedge_register() != 0:
        raise VersionMismatchError(
            f"moeedge was compiled for ggml {library.moeedge_ggml_version().decode()}, and this process has another.",
            "Install moeedge again with the llama-cpp-python that it names.",
        )
    library.moeedge_set_default_offload_scope(int(OffloadScope.NONE))
