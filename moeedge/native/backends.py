"""Other ggml backends: prebuilt libraries of the same ggml, loaded next to those that llama.cpp was compiled with.

llama.cpp's release archives and distributions ship them as one file each, with `ggml_backend_init` (built with
GGML_BACKEND_DL) or with `ggml_backend_NAME_reg` alone. A backend shares ggml's structures with this process, so the
file is read before it is loaded, and its version is checked before it is registered.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

from moeedge.errors import BackendFileError
from moeedge.native.library import ggml, ggml_function, installed_api_version
from moeedge.native.shared_library import SharedLibrary, read_shared_library

PATH_VARIABLE = "GGML_BACKEND_PATH"  # as llama.cpp, which takes one file; here several, separated by os.pathsep
LLAMA_CPP_RELEASE = "b11312"  # build of llama.cpp at the commit that the pinned llama-cpp-python has
RPC_REGISTRY = "RPC"
_INIT = "ggml_backend_init"
_REGISTRATION = re.compile(r"ggml_backend_[a-z0-9]+_reg")
_OURS = "moeedge_register"  # only moeedge's own library has it
_GGML = re.compile(r"lib(ggml[a-z-]*)\.so\.(\d+)")  # soname; the number changes with ggml's binary interface
_VERSIONED = re.compile(r"\.so\.(\d+\.\d+\.\d+)$")
_ANY_OF_BASE = "ggml_backend_buffer_init"  # a function of libggml-base that every backend calls
_MISSING = re.compile(r"(?P<name>[^:\s]+): cannot open shared object file")
_UNDEFINED = re.compile(r"undefined symbol: (?P<name>\w+)")
_OLD_SYSTEM = re.compile(r"version [`'](?P<name>\w+)' not found")
_INSTALL = {  # what brings the libraries that backends need
    "libvulkan.so": "Install the Vulkan loader (Debian and Ubuntu: libvulkan1).",
    "libcudart.so": "Install NVIDIA's CUDA runtime of that version, or put the library next to the file.",
    "libcublas.so": "Install NVIDIA's CUDA runtime of that version, or put the library next to the file.",
    "libcuda.so": "Install NVIDIA's driver.",
}

_lock = threading.Lock()
_loaded: dict[Path, LoadedBackend] = {}
_registered: dict[int, LoadedBackend] = {}  # by ggml_backend_reg_t


@dataclass(frozen=True)
class LoadedBackend:
    """A ggml backend that was loaded from a file."""

    file: Path
    name: str  # as ggml calls it: Vulkan, CUDA, ...
    n_devices: int
    states_ggml: bool  # whether the file's name or a neighbour tells ggml's version, which is then the right one


def requested_files() -> list[Path]:
    """The files that $GGML_BACKEND_PATH names, without moeedge's own library, which stock programs load that way."""
    value = os.environ.get(PATH_VARIABLE, "")
    names = [value] if Path(value).is_file() else value.split(os.pathsep)
    return [path for path in map(Path, filter(None, names)) if not _is_ours(path)]


def load_requested() -> None:
    """Load the files that $GGML_BACKEND_PATH names and that are not loaded yet. Errors as in `load_backend`."""
    for path in requested_files():
        load_backend(path)


def load_backend(path: Path | str) -> LoadedBackend:
    """Load a ggml backend and register its devices with the llama.cpp of this process; a file is loaded once.

    Call it before the model is loaded that shall use its devices.
    Raises BackendFileError where the file is missing or is no backend of this ggml, needs a library that is missing,
    is registered already, or finds no device.
    """
    file = Path(path).expanduser().absolute()
    with _lock:
        if file not in _loaded:
            _loaded[file] = _load(file)
        return _loaded[file]


def loaded_as(registry: int) -> LoadedBackend | None:
    """The file's backend with this ggml_backend_reg_t; None for those that llama.cpp was compiled with."""
    return _registered.get(registry)


def _is_ours(path: Path) -> bool:
    try:
        return _OURS in read_shared_library(path).defined
    except (OSError, ValueError):
        return False  # load_backend gives the reason


def _load(file: Path) -> LoadedBackend:
    content = _read(file)
    entry = _entry(file, content)
    states_ggml = _check_ggml(file, content)
    library = _open(file)
    _check_one_ggml(file, library)
    score = getattr(library, "ggml_backend_score", None)
    if score is not None and score() == 0:
        raise BackendFileError(f"{file} does not support this machine's processor.", "Use another build of it.")
    function = getattr(library, entry)
    function.restype = c_void_p
    registry = function()
    if not registry:
        raise _no_device(file)
    api_version, expected = c_int.from_address(registry).value, installed_api_version(ggml())  # its first member
    if api_version != expected:
        raise BackendFileError(
            f"{file} was built for ggml's backend API {api_version}, and llama.cpp here has {expected}.", _same_build()
        )
    name = ggml_function("ggml_backend_reg_name", c_char_p, c_void_p)(registry).decode()
    same_name = ggml_function("ggml_backend_reg_by_name", c_void_p, c_char_p)(name.encode())
    if same_name not in (None, registry):
        origin = f"from {_registered[same_name].file}" if same_name in _registered else "as part of llama.cpp"
        raise BackendFileError(f"{file} is not needed: the backend {name} is here already, {origin}.", "Leave it out.")
    n_devices = ggml_function("ggml_backend_reg_dev_count", c_size_t, c_void_p)(registry)
    if not n_devices and name != RPC_REGISTRY:  # RPC has no devices until a worker is added
        raise _no_device(file, name)
    ggml_function("ggml_backend_register", None, c_void_p)(registry)
    _registered[registry] = LoadedBackend(file, name, n_devices, states_ggml)
    return _registered[registry]


def _read(file: Path) -> SharedLibrary:
    try:
        return read_shared_library(file)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BackendFileError(
            f"The ggml backend {file} cannot be read: {reason}.", f"Check --backend and ${PATH_VARIABLE}."
        ) from None
    except ValueError as error:
        raise BackendFileError(
            f"{file} is {error}.", "Give --backend an unpacked file such as libggml-vulkan.so."
        ) from None


def _entry(file: Path, content: SharedLibrary) -> str:
    """The name of the function that gives the backend."""
    if _INIT in content.defined:
        return _INIT
    found = sorted(filter(_REGISTRATION.fullmatch, content.defined))
    if len(found) != 1:
        held = f"{len(found)} ggml backends" if found else "no ggml backend"
        raise BackendFileError(f"{file} holds {held}.", "Give a file with one backend, such as libggml-vulkan.so.")
    return found[0]


def _check_ggml(file: Path, content: SharedLibrary) -> bool:
    """Compares ggml's version with what the file's name and neighbours and the names of its libraries tell.

    Returns whether the entire version was found. Raises BackendFileError where it is another.
    """
    ours = ggml_function("ggml_version", c_char_p)().decode()
    for soname in content.needed:
        named = _GGML.fullmatch(soname)
        if named and named[2] != ours.split(".")[0]:
            raise BackendFileError(f"{file} was built for {soname}, and llama.cpp here has ggml {ours}.", _same_build())
    resolved = file.resolve()
    named_versions = (_VERSIONED.search(path.name) for path in (resolved, *resolved.parent.glob("libggml-base.so.*")))
    versions = {found[1] for found in named_versions if found}
    if versions and ours not in versions:
        raise BackendFileError(
            f"{file} was built for ggml {', '.join(sorted(versions))}, and llama.cpp here has {ours}.", _same_build()
        )
    return bool(versions)


def _open(file: Path) -> ctypes.CDLL:
    """The loaded library: its libggml-base.so.0 is the one that llama_cpp has loaded, by its soname."""
    ggml()
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        text = str(error)
    if missing := _MISSING.search(text):
        install = next((hint for name, hint in _INSTALL.items() if missing["name"].startswith(name)), "")
        raise BackendFileError(
            f"{file} needs {missing['name']}, which is not on this machine.", install or "Install that library."
        )
    if undefined := _UNDEFINED.search(text):
        raise BackendFileError(
            f"{file} needs the function {undefined['name']}, which llama.cpp here does not have.", _same_build()
        )
    if old := _OLD_SYSTEM.search(text):
        raise BackendFileError(
            f"{file} needs {old['name']}, and this system's is older.",
            "Use a build for an older system, or compile llama.cpp with the backend (docs/devices.md).",
        )
    raise BackendFileError(f"{file} cannot be loaded: {text.removeprefix(f'{file}: ')}.", _same_build())


def _check_one_ggml(file: Path, library: ctypes.CDLL) -> None:
    """A backend must call the ggml of this process. Raises BackendFileError where it brought a second one."""
    theirs = getattr(library, _ANY_OF_BASE, None)  # looked up in the libraries that it needs, too
    if theirs is None:
        return
    address, ours = (ctypes.cast(function, c_void_p).value for function in (theirs, getattr(ggml(), _ANY_OF_BASE)))
    if address != ours:
        raise BackendFileError(f"{file} brings a ggml of its own instead of using llama.cpp's.", _same_build())


def _no_device(file: Path, name: str = "") -> BackendFileError:
    if name == "Vulkan" or "vulkan" in file.name:
        return BackendFileError(
            f"{file} finds no Vulkan device on this machine.",
            "Install the GPU's Vulkan driver; a device of type CPU (Mesa's lavapipe) is used only if "
            "GGML_VK_VISIBLE_DEVICES names it, for instance GGML_VK_VISIBLE_DEVICES=0.",
        )
    return BackendFileError(f"{file} finds no device on this machine.", "Install the driver of the device.")


def _same_build() -> str:
    return f"Use the file of llama.cpp's release {LLAMA_CPP_RELEASE} (docs/devices.md)."
