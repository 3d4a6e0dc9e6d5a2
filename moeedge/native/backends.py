"""The devices of this process's llama.cpp, further ggml backends, a context's memory, and a dry-run GPU for planning.

llama.cpp's release archives and distributions ship backends as one file each, with `ggml_backend_init` (built with
GGML_BACKEND_DL) or with `ggml_backend_NAME_reg` alone. A backend shares ggml's structures with this process, so the
file is read before it is loaded, and its version is checked before it is registered.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import struct
import sys
import threading
from ctypes import c_bool, c_char, c_char_p, c_int, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moeedge.errors import BackendError, BackendFileError, VersionMismatchError
from moeedge.native.abi import OffloadScope, c_field, c_struct, from_c
from moeedge.native.library import ggml_functions, installed_api_version, llama_cpp, load

_MACOS = platform.system() == "Darwin"
_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_MACH_O = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # 64-bit; for several machines
_PACKED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"BZh": "bzip2"}
_HEADER_BYTES = 64  # of an ELF file
_SHARED_OBJECT = 3  # e_type: ET_DYN
_DYNAMIC, _DYNAMIC_SYMBOLS = 6, 11  # sh_type: SHT_DYNAMIC, SHT_DYNSYM
_NEEDED = 1  # d_tag: DT_NEEDED
_C_NAME = re.compile(rb"\0_([A-Za-z]\w*)(?=\0)")  # in Mach-O, where C names begin with _


@dataclass(frozen=True)
class SharedLibrary:
    """One shared library."""

    defined: frozenset[str]  # names of functions and data that it offers (Mach-O: that it mentions)
    needed: tuple[str, ...]  # sonames of the libraries that it is loaded with (Mach-O: unknown, none)


def read_shared_library(path: Path) -> SharedLibrary:
    """Reads the file. Raises OSError, and ValueError for one that cannot be loaded here: the rest of "it is ..."."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
        for magic, name in _PACKED.items():
            if start.startswith(magic):
                raise ValueError(f"packed by {name}")
        if len(start) < _HEADER_BYTES:
            raise ValueError("not a shared library")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if start.startswith(_MACH_O):
                if not _MACOS:
                    raise ValueError("a library of macOS")
                return SharedLibrary(frozenset(name.decode() for name in _C_NAME.findall(content)), ())
            if not start.startswith(_ELF64_LITTLE_ENDIAN) or _MACOS:
                raise ValueError("not a shared library of this system")
            try:
                return _read_elf(content)
            except (struct.error, IndexError, OverflowError, UnicodeDecodeError):
                raise ValueError("damaged or incomplete") from None


def _read_elf(content: mmap.mmap) -> SharedLibrary:
    kind, machine = struct.unpack_from("<HH", content, 16)
    if kind != _SHARED_OBJECT:
        raise ValueError("not a shared library")
    if machine != _own_machine():
        raise ValueError("a library for another kind of processor")
    (table,) = struct.unpack_from("<Q", content, 40)
    entry_bytes, n_sections = struct.unpack_from("<HH", content, 58)
    # the table is at the end: reading it fails where a download stopped
    # struct Elf64_Shdr: type, offset, bytes, and for symbols and dynamic entries the section with their strings
    places = (table + index * entry_bytes for index in range(n_sections))
    sections = [struct.unpack_from("<4xI16xQQI", content, place) for place in places]
    defined, needed = set(), []
    for section_kind, offset, n_bytes, link in sections:
        entries = content[offset : offset + n_bytes]
        if section_kind == _DYNAMIC_SYMBOLS:
            for name, in_section in struct.iter_unpack("<I2xH16x", entries):
                if in_section:  # 0: expected from another library
                    defined.add(_text(content, sections[link][1] + name))
        elif section_kind == _DYNAMIC:
            for tag, value in struct.iter_unpack("<QQ", entries):
                if tag == _NEEDED:
                    needed.append(_text(content, sections[link][1] + value))
    return SharedLibrary(frozenset(defined), tuple(needed))


def _text(content: mmap.mmap, start: int) -> str:
    end = content.find(b"\0", start)
    if end < 0:
        raise IndexError(start)
    return content[start:end].decode()


@cache
def _own_machine() -> int:
    """e_machine of this interpreter."""
    with open(sys.executable, "rb") as file:
        machine: int = struct.unpack_from("<H", file.read(20), 18)[0]
    return machine


PATH_VARIABLE = "GGML_BACKEND_PATH"  # as llama.cpp, which takes one file; here several, separated by os.pathsep
LLAMA_CPP_RELEASE = "b11312"  # build of llama.cpp at the commit that the pinned llama-cpp-python has
_SAME_BUILD = f"Use the file of llama.cpp's release {LLAMA_CPP_RELEASE} (docs/devices.md)."
RPC_REGISTRY = "RPC"
_INIT = "ggml_backend_init"
_REGISTRATION = re.compile(r"ggml_backend_[a-z0-9]+_reg")
_OURS = "moeedge_register"  # only moeedge's own library has it
_GGML = re.compile(r"lib(ggml[a-z-]*)\.so\.(\d+)")  # soname; the number changes with ggml's binary interface
_VERSIONED = re.compile(r"\.so\.(\d+\.\d+\.\d+)$")
_ANY_OF_BASE = "ggml_backend_buffer_init"  # a function of libggml-base that every backend calls
_OTHER_SYSTEM = "Use a build for an older system, or compile llama.cpp with the backend (docs/devices.md)."
_NEEDS = (  # what the system says where it does not load a file, what the file needs, and a hint
    (re.compile(r"([^:\s]+): cannot open shared object file"), "{}, which is not on this machine", ""),
    (re.compile(r"undefined symbol: (\w+)"), "the function {}, which llama.cpp here does not have", _SAME_BUILD),
    (re.compile(r"version [`'](\w+)' not found"), "{}, and this system's is older", _OTHER_SYSTEM),
)
_INSTALL = {  # what brings the libraries that backends need
    "libvulkan.so": "Install the Vulkan loader (Debian and Ubuntu: libvulkan1).",
    "libcudart.so": "Install NVIDIA's CUDA runtime of that version, or put the library next to the file.",
    "libcublas.so": "Install NVIDIA's CUDA runtime of that version, or put the library next to the file.",
    "libcuda.so": "Install NVIDIA's driver.",
}

_lock = threading.Lock()
_loaded: dict[Path, LoadedBackend] = {}
registered: dict[int, LoadedBackend] = {}  # by ggml_backend_reg_t; those of files


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


def load_backend(path: Path | str) -> LoadedBackend:
    """Load a ggml backend, once, and register its devices with llama.cpp, before the model is loaded that uses them.

    Raises BackendFileError where the file is missing or is no backend of this ggml, needs a library that is missing,
    is registered already, or finds no device.
    """
    file = Path(path).expanduser().absolute()
    with _lock:
        if file not in _loaded:
            _loaded[file] = _load(file)
        return _loaded[file]


def attach() -> None:
    """Registers our backend and the files of $GGML_BACKEND_PATH, once, before the first context is made.

    Contexts start with `OffloadScope.NONE`: llama.cpp makes its automatic choices (flash attention) as in stock.
    """
    _register_ours()
    for path in requested_files():
        load_backend(path)


@cache
def _register_ours() -> None:
    library = load()
    llama_cpp().llama_backend_init()
    library.moeedge_disable_broken_amx()
    if library.moeedge_register() != 0:
        raise VersionMismatchError(
            f"moeedge was compiled for ggml {library.moeedge_ggml_version().decode()}, and this process has another.",
            "Install moeedge again with the llama-cpp-python that it names.",
        )
    library.moeedge_set_default_offload_scope(int(OffloadScope.NONE))


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
    api_version, expected = c_int.from_address(registry).value, installed_api_version()  # its first member
    if api_version != expected:
        raise BackendFileError(
            f"{file} was built for ggml's backend API {api_version}, and llama.cpp here has {expected}.", _SAME_BUILD
        )
    functions = ggml_functions()
    name = functions.ggml_backend_reg_name(registry).decode()
    same_name = functions.ggml_backend_reg_by_name(name.encode())
    if same_name not in (None, registry):
        origin = f"from {registered[same_name].file}" if same_name in registered else "as part of llama.cpp"
        raise BackendFileError(f"{file} is not needed: the backend {name} is here already, {origin}.", "Leave it out.")
    n_devices = functions.ggml_backend_reg_dev_count(registry)
    if not n_devices and name != RPC_REGISTRY:  # RPC has no devices until a worker is added
        raise _no_device(file, name)
    functions.ggml_backend_register(registry)
    registered[registry] = LoadedBackend(file, name, n_devices, states_ggml)
    return registered[registry]


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
    names = sorted(filter(_REGISTRATION.fullmatch, content.defined))
    if len(names) != 1:
        backends = f"{len(names)} ggml backends" if names else "no ggml backend"
        raise BackendFileError(f"{file} holds {backends}.", "Give a file with one backend, such as libggml-vulkan.so.")
    return names[0]


def _check_ggml(file: Path, content: SharedLibrary) -> bool:
    """Whether name, neighbours and libraries of the file tell its ggml version. Raises BackendFileError for another."""
    ours = ggml_functions().ggml_version().decode()
    for soname in content.needed:
        named = _GGML.fullmatch(soname)
        if named and named[2] != ours.split(".")[0]:
            raise BackendFileError(f"{file} was built for {soname}, and llama.cpp here has ggml {ours}.", _SAME_BUILD)
    resolved = file.resolve()
    named_versions = (_VERSIONED.search(path.name) for path in (resolved, *resolved.parent.glob("libggml-base.so.*")))
    versions = {match[1] for match in named_versions if match}
    if versions and ours not in versions:
        raise BackendFileError(
            f"{file} was built for ggml {', '.join(sorted(versions))}, and llama.cpp here has {ours}.", _SAME_BUILD
        )
    return bool(versions)


def _open(file: Path) -> ctypes.CDLL:
    """The loaded library: its libggml-base.so.0 is the one that llama_cpp has loaded, by its soname."""
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        text = str(error)
    for pattern, need, hint in _NEEDS:
        if match := pattern.search(text):
            installs = (each for name, each in _INSTALL.items() if match[1].startswith(name))
            hint = hint or next(installs, "Install that library.")
            raise BackendFileError(f"{file} needs {need.format(match[1])}.", hint)
    raise BackendFileError(f"{file} cannot be loaded: {text.removeprefix(f'{file}: ')}.", _SAME_BUILD)


def _check_one_ggml(file: Path, library: ctypes.CDLL) -> None:
    """A backend must call the ggml of this process. Raises BackendFileError where it brought a second one."""
    theirs = getattr(library, _ANY_OF_BASE, None)  # looked up in the libraries that it needs, too
    ours = getattr(ggml_functions(), _ANY_OF_BASE)
    if theirs is not None and ctypes.cast(theirs, c_void_p).value != ctypes.cast(ours, c_void_p).value:
        raise BackendFileError(f"{file} brings a ggml of its own instead of using llama.cpp's.", _SAME_BUILD)


def _no_device(file: Path, name: str = "") -> BackendFileError:
    if name == "Vulkan" or "vulkan" in file.name:
        return BackendFileError(
            f"{file} finds no Vulkan device on this machine.",
            "Install the GPU's Vulkan driver; a device of type CPU (Mesa's lavapipe) is used only if "
            "GGML_VK_VISIBLE_DEVICES names it, for instance GGML_VK_VISIBLE_DEVICES=0.",
        )
    return BackendFileError(f"{file} finds no device on this machine.", "Install the driver of the device.")


_KINDS = {0: "CPU", 1: "GPU", 2: "IGPU", 3: "ACCEL"}  # enum ggml_backend_dev_type
_OUR_DEVICE = "MOEEDGE"
_BUFFER_FROM_HOST_POINTER = 2  # index in struct ggml_backend_dev_caps


@dataclass(frozen=True)
class Device:
    """One device of the installed llama.cpp."""

    name: str  # as -dev takes it
    kind: str  # CPU, GPU, IGPU (shares the host's memory), ACCEL, or RPC (of a worker in another process)
    description: str
    free_bytes: int
    total_bytes: int  # 0: it reports no memory
    registry: str = ""  # the ggml backend that offers it: CPU, CUDA, Metal, BLAS, ...
    pci_id: str = ""  # domain:bus:device.function in lower case, where the backend knows it
    shares_host_memory: bool = False  # of a GPU or IGPU: what it holds is in the host's memory
    loaded: LoadedBackend | None = None  # None: llama.cpp was compiled with its backend


class _Properties(ctypes.Structure):
    """struct ggml_backend_dev_props of ggml-backend.h."""

    _fields_ = [
        *((name, c_char_p) for name in ("name", "description")),
        *((name, c_size_t) for name in ("memory_free", "memory_total")),
        *(("type", c_int), ("device_id", c_char_p), ("caps", c_bool * 5)),
    ]


def devices() -> list[Device]:
    """llama.cpp's devices without ours; workers without memory: to ask one that has ended ends this process."""
    listed = []
    ggml = ggml_functions()
    for device in map(ggml.ggml_backend_dev_get, range(ggml.ggml_backend_dev_count())):
        name = ggml.ggml_backend_dev_name(device).decode()
        if name == _OUR_DEVICE:
            continue
        registry_address = ggml.ggml_backend_dev_backend_reg(device)
        registry = ggml.ggml_backend_reg_name(registry_address).decode()
        if registry == RPC_REGISTRY:
            listed.append(Device(name, "RPC", ggml.ggml_backend_dev_description(device).decode(), 0, 0, registry))
            continue
        properties = _Properties()
        ggml.ggml_backend_dev_get_props(device, ctypes.byref(properties))
        kind = _KINDS.get(properties.type, "other")
        # Metal calls every device a GPU. Its devices, and no GPU with memory of its own, take host memory as buffers.
        is_shared = kind == "IGPU" or (kind == "GPU" and bool(properties.caps[_BUFFER_FROM_HOST_POINTER]))
        memory = properties.memory_free, properties.memory_total, registry
        pci_id = (properties.device_id or b"").decode()
        text = properties.description.decode()
        listed.append(Device(name, kind, text, *memory, pci_id, is_shared, registered.get(registry_address)))
    return listed


_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"  # of llama-ext.h; it has no C interface
_MAX_USES = 64
PLAIN_BUFFERS = ("CPU", "CPU_Mapped")  # llama.cpp's names of memory with weights as in the file, not repacked
DRY_RUN_GPU = "dry-run"  # device name by which the planner asks for it


@dataclass(frozen=True)
class MemoryUse:
    """struct moeedge_memory_use: bytes that a context and its model have in buffers of one type."""

    buffer_type: str = c_field(c_char * 64)  # llama.cpp's name: CPU, CPU_REPACK, CUDA0, ...
    device: str = c_field(c_char * 64)  # the GPU's name; empty: the CPU's
    on_gpu: bool = c_field(c_int32)  # False: in host memory
    weights_bytes: int = c_field()
    memory_bytes: int = c_field()  # KV cache and recurrent states
    compute_bytes: int = c_field()


def dry_run_gpu() -> int:
    """Address of a ggml device without memory and computation, for models that are loaded without weights."""
    return int(load().moeedge_dry_run_gpu())


def memory_uses(llama: Any, context: Any, *, simulated: bool) -> list[MemoryUse]:
    """Memory of `context` (llama_context *) and its model, exact to the byte.

    llama: the loaded libllama. simulated: the model was loaded without weights, and no memory is allocated.
    Raises BackendError where this llama.cpp does not report its memory.
    """
    breakdown = getattr(llama, _BREAKDOWN, None)
    if breakdown is None:
        raise BackendError("The installed llama.cpp does not report its memory.", "Install moeedge again.")
    uses = (c_struct(MemoryUse) * _MAX_USES)()
    count = load().moeedge_memory_uses(ctypes.cast(breakdown, ctypes.c_void_p), context, simulated, uses, _MAX_USES)
    if count < 0:
        raise BackendError(f"llama.cpp's memory report cannot be read (code {count}).")
    return [from_c(MemoryUse, use) for use in uses[:count]]
