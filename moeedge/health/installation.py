"""Checks of the installation: the native library, llama.cpp and its backends, the bundled files, the catalog."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import moeedge
from moeedge import native, paths
from moeedge.errors import ModelFileError
from moeedge.hardware.gpus import unused_gpus
from moeedge.health.report import Finding
from moeedge.hub.catalog import load_catalog
from moeedge.native.abi import ABI_VERSION
from moeedge.native.backends import LLAMA_CPP_RELEASE
from moeedge.units import format_bytes


def library() -> Iterator[Finding]:
    """Program, native library and llama.cpp; raises BackendError where these do not fit each other."""
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("moeedge", "ok", f"{moeedge.__version__}, {python}")
    native.load()  # raises
    from importlib.metadata import version

    llama = f"llama.cpp {LLAMA_CPP_RELEASE} (llama-cpp-python {version('llama-cpp-python')})"
    yield Finding("library", "ok", f"{native.library_path().name}, interface {ABI_VERSION}, fits {llama}")


def gpu() -> Iterator[Finding]:
    """The GPUs that llama.cpp can use, and those that it cannot. Needs the native library.

    Raises BackendFileError for a file of $GGML_BACKEND_PATH that cannot be loaded.
    """
    from moeedge.llama import library

    library.start()
    devices = native.devices()
    usable = [device for device in devices if device.kind in ("GPU", "IGPU")]
    for device in usable:
        shared = " of the host's memory" if device.shares_host_memory else ""
        size = f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free{shared}"
        yield Finding("GPU", "ok", f"{device.name}, {device.description}: {size}")
    unused = unused_gpus(devices)
    for found in unused:
        yield Finding("GPU", "info" if found.in_processor else "warning", f"{found.name}: not used", found.advice)
    if not usable and not unused:
        yield Finding("GPU", "ok", "none found: experts are computed on the CPU")


def bundled_files() -> Iterator[Finding]:
    """The bundled pair and the catalog; raises CatalogError for a malformed one."""
    try:
        size = sum(file.stat().st_size for file in (paths.bundled_target(), paths.bundled_draft()))
        yield Finding("toy pair", "ok", f"bundled, {format_bytes(size)}")
    except ModelFileError as error:
        yield Finding("toy pair", "warning", error.message, error.hint)
    catalog = load_catalog()
    own = paths.own_catalog_file()
    mine = sum(entry.own for entry in catalog.entries.values())
    text = f"{len(catalog.entries)} models" + (f", {mine} of them your own ({paths.short(own)})" if own else "")
    yield Finding("catalog", "ok", text)
