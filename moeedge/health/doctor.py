"""`moeedge doctor`: checks of installation, machine, folders and variables; one that fails hides no other.

One table has the environment variables that moeedge and the libraries below it read, for documents, too. An option on
the command line wins over a variable. Those that llama.cpp's own programs read for their options (LLAMA_ARG_*) are in
the table of these options.
"""

from __future__ import annotations

import difflib
import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil

import moeedge
from moeedge import native, paths
from moeedge.errors import ModelFileError, MoeedgeError
from moeedge.hardware.gpus import unused_gpus
from moeedge.hardware.host import (
    LARGE_PAGES,
    available_memory,
    busy_note,
    core_limit,
    cpu_name,
    has_large_pages,
    instruction_sets,
    others_now,
    physical_cores,
    total_memory,
    usable_cores,
)
from moeedge.hardware.provenance import Provenance, read_provenance
from moeedge.hub.catalog import load_catalog
from moeedge.hub.local import cached_models, hub_cache, unfinished_downloads
from moeedge.native import compute
from moeedge.native.abi import ABI_VERSION
from moeedge.native.backends import LLAMA_CPP_RELEASE
from moeedge.records import derived, figure
from moeedge.units import format_bytes, format_rate

Reader = Literal["moeedge", "its build", "its tests", "models", "llama.cpp", "drivers", "the terminal"]
OPTION_PREFIX = "LLAMA_ARG_"
_OWN_PREFIX = "MOEEDGE_"
_SHOWN_PREFIXES = (_OWN_PREFIX, OPTION_PREFIX, "GGML_", "HF_", "HUGGINGFACE_", "GOMP_", "OMP_")
_SIMILAR = 0.7  # difflib's ratio from which a name is suggested


@dataclass(frozen=True)
class Variable:
    name: str
    effect: str
    default: str = ""
    reader: Reader = "moeedge"


VARIABLES = (
    Variable(
        "MOEEDGE_CACHE",
        "Folder of what moeedge keeps: measurements, saved chats, input history, prompt sets.",
        "$XDG_CACHE_HOME/moeedge, else ~/.cache/moeedge",
    ),
    Variable("MOEEDGE_CATALOG", "File with your own entries of the catalog.", "~/.config/moeedge/catalog.toml"),
    Variable("MOEEDGE_DATA", "Folder with published prompt sets and routing traces.", "none"),
    Variable("MOEEDGE_NO_PROBE", "1: no other process tries a model file that is new here first.", "not set"),
    Variable(
        "MOEEDGE_INSTRUCTIONS",
        "Newest instructions that moeedge's kernels may use: avx512vnni, avxvnni, avx2; none: no kernels.",
        "the CPU's",
    ),
    Variable("MOEEDGE_LIBRARY", "Another build of the native library, for its developers.", "the installed one"),
    Variable("XDG_CACHE_HOME", "Folder of all programs' caches; also of the hub's.", "~/.cache"),
    Variable("XDG_CONFIG_HOME", "Folder of all programs' settings.", "~/.config"),
    Variable("TMPDIR", "Folder of temporary files: headers that plan reads, programs that bench --score runs.", "/tmp"),
    Variable("HF_HUB_CACHE", "Folder of downloaded models.", "$HF_HOME/hub, else ~/.cache/huggingface/hub", "models"),
    Variable("HUGGINGFACE_HUB_CACHE", "The older name of HF_HUB_CACHE.", "", "models"),
    Variable("HF_HOME", "Folder of the hub's files: hub below it holds the models.", "~/.cache/huggingface", "models"),
    Variable("HF_TOKEN", "Opens gated and private repositories.", "what hf auth login stored", "models"),
    Variable("HF_ENDPOINT", "Another server, for instance a mirror.", "https://huggingface.co", "models"),
    Variable("HF_HUB_OFFLINE", "1: never contact the hub; models on this machine work.", "0", "models"),
    Variable("HF_HUB_ETAG_TIMEOUT", "Seconds to wait for the hub's answer about a file.", "10", "models"),
    Variable("HF_HUB_DOWNLOAD_TIMEOUT", "Seconds to wait for a silent server in a download.", "10", "models"),
    Variable("HTTPS_PROXY", "Proxy for downloads, as http://HOST:PORT.", "none", "models"),
    Variable(
        "GGML_BACKEND_PATH",
        "Prebuilt ggml backends to load, separated by a colon (docs/devices.md). --backend adds to them.",
        "none",
        "llama.cpp",
    ),
    Variable("GGML_CPU_DISABLE_FUSION", "Any value: no fused operations on the CPU, also in ours.", "", "llama.cpp"),
    Variable(
        "GOMP_SPINCOUNT",
        "How long an idle thread keeps its core. Low where other threads compute at the same time; moeedge sets it "
        "for the emulated device, workers and models larger than RAM.",
        "OpenMP's own",
        "llama.cpp",
    ),
    Variable("OMP_WAIT_POLICY", "active or passive: the same choice for all of OpenMP.", "OpenMP's own", "llama.cpp"),
    Variable("LD_LIBRARY_PATH", "Folders in which a GPU backend's libraries are found.", "the system's", "drivers"),
    Variable("CUDA_VISIBLE_DEVICES", "NVIDIA GPUs that a program sees, as 0,1; empty: none.", "all", "drivers"),
    Variable("HIP_VISIBLE_DEVICES", "The same for AMD's.", "all", "drivers"),
    Variable("GGML_VK_VISIBLE_DEVICES", "The same for Vulkan, also a software driver (0).", "all GPUs", "drivers"),
    Variable("NO_COLOR", "Any value: plain text without colours and panel.", "", "the terminal"),
    Variable("TERM", "dumb: plain text.", "the terminal's", "the terminal"),
    Variable("COLUMNS", "Width of the output.", "the terminal's, 80 in a file", "the terminal"),
    Variable("CMAKE_ARGS", "Options of llama.cpp's build (docs/devices.md).", "none", "its build"),
    Variable("MOEEDGE_WERROR", "ON: warnings of the C++ compiler are errors.", "OFF", "its build"),
    Variable("MOEEDGE_LLAMA_SDIST", "llama-cpp-python's source file, for a build offline.", "downloaded", "its build"),
    Variable("MOEEDGE_TEST_DEVICE", "The device of the exactness tests, as CUDA0.", "the emulated one", "its tests"),
    Variable("MOEEDGE_LLAMA_BENCH", "llama.cpp's program, for the tests of lab rivals.", "none", "its tests"),
    Variable("MOEEDGE_IK_LLAMA_BENCH", "The same of ik_llama.cpp.", "none", "its tests"),
    Variable("MOEEDGE_VULKAN_BACKEND", "The library for the tests on Vulkan.", "next to $MOEEDGE_DATA", "its tests"),
)
BY_NAME = {variable.name: variable for variable in VARIABLES}


_LITTLE_DISK_BYTES = 2 * 2**30  # of free disk
_SLOW_BYTES_PER_S = 200e6  # a hard disk or a network's: experts that are read from it take most of the time
_LITTLE_BYTES = 2**30  # of free memory
_LONG_SPIN = 10**6  # turns of an idle thread that keeps its core: milliseconds
_READ_BYTES = 2**27  # to read once, for the memory's speed
Status = Literal["ok", "info", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    topic: str = figure("What was checked")
    status: Status = figure("info: could be better; warning: something is slower or missing; broken: commands fail")
    text: str = figure("The finding, in a line")
    hint: str = figure("What to do, in the imperative", default="")


@dataclass(frozen=True)
class Report:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...] = figure("All findings")
    provenance: Provenance = figure("Versions, machine and time", default_factory=read_provenance)

    @derived("Whether commands fail")
    def is_broken(self) -> bool:
        return any(finding.status == "broken" for finding in self.findings)


def _warn_if(topic: str, text: str, *hints: str | Literal[False], status: Status = "warning") -> Finding:
    """A warning, or a finding of that status, with the first hint that applies; all is well without one."""
    hint = next((hint for hint in hints if hint), "")
    return Finding(topic, status if hint else "ok", text, hint)


def models() -> Iterator[Finding]:
    """The folder of downloads, and the disk that holds it."""
    folder = hub_cache()
    there = paths.existing(folder)
    free = shutil.disk_usage(there).free
    files, read_only = [model.path for model in cached_models()], not os.access(there, os.W_OK)
    text = f"{paths.short(folder)}: {len(files)} here, {format_bytes(free)} free"
    if unfinished := len(list(unfinished_downloads())):
        text += f", {unfinished} unfinished"
    text += ", not writable" if read_only else ""
    little = free < _LITTLE_DISK_BYTES and "Free some space (moeedge rm NAME), or set HF_HUB_CACHE elsewhere."
    yield _warn_if("models", text, read_only and "Set HF_HUB_CACHE to a folder that you may write.", little)
    yield _disk(files)


def _disk(files: list[Path]) -> Finding:
    """The speed of the disk with the largest model, as it was measured, or by a glance."""
    try:
        from moeedge.scheduler import disk  # which needs llama.cpp

        files = sorted(files, key=lambda file: -file.stat().st_size) or [paths.bundled_target()]
        if (calibration := disk.read_kept(files[0])) is not None:
            speed, how = calibration.best.bytes_per_s, "measured"
        else:
            speed, direct = disk.quick_rate(files[0])
            how = "at a glance" if direct else "at a glance, the page cache may have helped"
    except (ModelFileError, ImportError, OSError) as error:
        return Finding("disk", "info", f"its speed is unknown: {error}")
    hint = "Store models that are larger than RAM on a faster disk (HF_HUB_CACHE)."
    text = f"random reads of {format_rate(speed)}, {how}"
    return _warn_if("disk", text, speed < _SLOW_BYTES_PER_S and hint, status="info")


def kept_files() -> Iterator[Finding]:
    """The folder of what moeedge keeps, and the measurements in it."""
    try:
        folder = paths.cache_dir()
    except OSError as error:
        hint = "Set MOEEDGE_CACHE to a folder that you may write; until then nothing is kept between runs."
        yield Finding("kept files", "warning", f"no cache folder: {error.strerror or error}", hint)
        return
    if not os.access(folder, os.W_OK):
        hint = "Make it writable, or set MOEEDGE_CACHE to another folder: every run measures anew."
        yield Finding("kept files", "warning", f"{paths.short(folder)} is not writable", hint)
        return
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    # none without the folder; of model files that were tried first there is nothing to tell
    n_files = sum(not file.name.startswith("header-") for file in paths.measurement_dir().glob("*.json"))
    measured = f"{n_files} measurements" if n_files else "nothing measured yet: the first chat measures"
    yield Finding("kept files", "ok", f"{paths.short(folder)}, {format_bytes(size)}: {measured}")


def checked(topic: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check; an error that it raises on purpose is one: something is broken."""
    findings: list[Finding] = []
    try:
        findings.extend(check())  # keeps those before an error
    except MoeedgeError as error:
        findings.append(Finding(topic, "broken", error.message, error.hint))
    except OSError as error:
        findings.append(Finding(topic, "broken", f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")))
    return findings


def processor() -> Iterator[Finding]:
    """Name and instructions. An x86 processor without AVX2 is slow."""
    instructions = instruction_sets()
    text = f"{cpu_name()}; {', '.join(instructions) or 'no vector instructions that matter here'}"
    slow = not instructions and platform.machine() in ("x86_64", "amd64")
    yield _warn_if("processor", text, slow and "Expect slow answers: kernels in plain C++ compute.", status="info")


def kernels() -> Iterator[Finding]:
    """Which of our kernels compute experts; each was compared with ggml's. Needs the native library."""
    if compute.is_amx_disabled():
        yield Finding("AMX", "info", "off: llama.cpp's AMX kernels fail as they are compiled here; others compute")
    tested = compute.kernels()
    best: dict[str, compute.Kernel] = {}
    for kernel in tested:  # the newest instructions first
        if kernel.is_equal:
            best.setdefault(kernel.layout, kernel)
    if not best:
        yield Finding("kernels", "info", "llama.cpp's own compute experts: none of ours has its bits here")
        return
    instructions = ", ".join(dict.fromkeys(kernel.instructions for kernel in best.values()))
    differing = len({kernel.layout for kernel in tested}) - len(best)
    best.pop(compute.ATTENTION, None)
    attention = [kernel for kernel in tested if kernel.is_equal and kernel.layout == compute.ATTENTION]
    gains = [max(kernel.single_speed, kernel.several_speed) for kernel in best.values()]
    used = sum(gain > 1 for gain in gains)
    text = f"ours ({instructions}) for {used} of {len(best)} weight layouts"
    text += f", up to {max(gains):.1f} x llama.cpp's" if used else ""
    for what, speeds in (
        ("attention", [kernel.several_speed for kernel in attention]),
        ("prompts' attention", [kernel.many_speed for kernel in attention]),
    ):
        text += f"; {what} {max(speeds):.1f} x" if max(speeds, default=0) > 1 else ""
    yield Finding("kernels", "ok", text + (f"; {differing} not used: other bits" if differing else ""))


def threads() -> Iterator[Finding]:
    """How many threads compute, and what may keep them from it."""
    n_threads, n_usable, limit = physical_cores(), usable_cores(), core_limit()
    text = f"{n_threads} (-t N sets it); {n_usable} of {psutil.cpu_count() or n_usable} logical cores may be used"
    if limit is not None and limit < n_usable:
        text += f", a container's limit is {limit:g}"
    busy = busy_note(others_now(), n_threads)
    text += f". {busy}" if busy else ""
    spin = os.environ.get("GOMP_SPINCOUNT", "0")
    spins = not spin.isdigit() or int(spin) > _LONG_SPIN or os.environ.get("OMP_WAIT_POLICY", "").lower() == "active"
    hint = "Unset GOMP_SPINCOUNT and OMP_WAIT_POLICY: idle threads that keep their cores slow drafts and reads."
    yield _warn_if("threads", text, busy is not None and "End other programs before you measure.", spins and hint)


def memory() -> Iterator[Finding]:
    """Free memory, and how fast it is read. Needs the native library."""
    free, total = available_memory(), total_memory()
    text = f"{format_bytes(free)} of {format_bytes(total)} free"
    if total < psutil.virtual_memory().total:
        text += " (a container's limit)"
    if free > 4 * _READ_BYTES:
        speed = compute.read_speed(_READ_BYTES, physical_cores(), repetitions=1)
        text += f", read at about {format_rate(speed)}"
    swapped = psutil.swap_memory().used
    if swapped > _LITTLE_BYTES and free < total / 4:
        text += f", {format_bytes(swapped)} swapped out"
    little = free < _LITTLE_BYTES and "End other programs, or choose a smaller model (moeedge plan)."
    small_pages = not has_large_pages() and f"As root write madvise to {LARGE_PAGES}: decoding may gain some percent."
    text += ", pages of 2 MiB are off" if small_pages else ""
    yield _warn_if("memory", text, little, small_pages, status="warning" if little else "info")


def library() -> Iterator[Finding]:
    """Program, native library and llama.cpp; raises BackendError where these do not fit each other."""
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("moeedge", "ok", f"{moeedge.__version__}, {python}")
    native.load()  # raises
    llama = f"llama.cpp {LLAMA_CPP_RELEASE} (llama-cpp-python {version('llama-cpp-python')})"
    yield Finding("library", "ok", f"{native.library_path().name}, interface {ABI_VERSION}, fits {llama}")


def gpu() -> Iterator[Finding]:
    """The GPUs, also those that llama.cpp cannot use; raises BackendFileError for a file of $GGML_BACKEND_PATH."""
    from moeedge.llama import library

    library.start()
    devices = native.devices()
    usable, unused = [device for device in devices if device.kind in ("GPU", "IGPU")], unused_gpus(devices)
    for device in usable:
        shared = " of the host's memory" if device.shares_host_memory else ""
        size = f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free{shared}"
        yield Finding("GPU", "ok", f"{device.name}, {device.description}: {size}")
    for gpu in unused:
        yield Finding("GPU", "info" if gpu.in_processor else "warning", f"{gpu.name}: not used", gpu.advice)
    if not usable and not unused:
        yield Finding("GPU", "ok", "none found: experts are computed on the CPU")


def bundled_files() -> Iterator[Finding]:
    """The bundled pair and the catalog; raises CatalogError for a malformed one."""
    try:
        size = sum(file.stat().st_size for file in (paths.bundled_target(), paths.bundled_draft()))
        yield Finding("toy pair", "ok", f"bundled, {format_bytes(size)}")
    except ModelFileError as error:
        yield Finding("toy pair", "warning", error.message, error.hint)
    catalog, own = load_catalog(), paths.own_catalog_file()
    mine = sum(entry.own for entry in catalog.entries.values())
    text = f"{len(catalog.entries)} models" + (f", {mine} of them your own ({paths.short(own)})" if own else "")
    yield Finding("catalog", "ok", text)


_FOLDERS = ("MOEEDGE_DATA",)
_FILES = ("MOEEDGE_CATALOG", "MOEEDGE_LIBRARY")
_INSTRUCTIONS = ("none", "avx2", "avxvnni", "avx512vnni", "avx512bf16")
_REFERENCE = "python -m moeedge.cli.reference"  # has the table of all variables


def environment(values: Mapping[str, str] = os.environ, *, honoured: Collection[str] = ()) -> Iterator[Finding]:
    """One finding for all that is well, one for each variable that is not; honoured: LLAMA_ARG_* that act here.

    Those that every shell sets are left out, and unknown ones of other prefixes than ours and the libraries'.
    """
    well, wrong = list[str](), list[Finding]()
    for name, value in sorted(values.items()):
        variable = BY_NAME.get(name)
        usual = variable is not None and (variable.reader == "the terminal" or name.startswith(("XDG_", "TMP", "LD_")))
        if not value or (usual and name != "NO_COLOR") or (variable is None and not name.startswith(_SHOWN_PREFIXES)):
            continue
        shown = f"{name}={'(set)' if 'TOKEN' in name else value}"
        if (fault := _fault(name, value, honoured)) is None:
            well.append(shown)
        else:
            status, text, hint = fault
            wrong.append(Finding("variables", status, f"{shown}{text}", hint))
    yield Finding("variables", "ok", ", ".join(well) or "none set that acts here")
    yield from wrong


def _fault(name: str, value: str, honoured: Collection[str]) -> tuple[Status, str, str] | None:
    """Status, text and hint for a variable that cannot be right, or that changes what commands do."""
    if name in _FOLDERS and not Path(value).is_dir():
        return "warning", ": no such folder", f"Unset {name}, or name a folder."
    if name in _FILES and not Path(value).expanduser().is_file():
        return "broken", ": no such file", f"Unset {name}, or name a file."
    if name == "MOEEDGE_INSTRUCTIONS" and value not in _INSTRUCTIONS:
        return "warning", " has no effect", f"Known are {', '.join(_INSTRUCTIONS)}."
    if name not in BY_NAME and name.startswith(_OWN_PREFIX):
        similar = difflib.get_close_matches(name, BY_NAME, 1, _SIMILAR)
        hint = f"Did you mean {similar[0]}?" if similar else f"{_REFERENCE} lists those that do."
        return "warning", " has no effect", hint
    if name.startswith(OPTION_PREFIX) and name not in honoured:
        return "info", " has no effect here", f"{_REFERENCE} lists those that have."
    if name == "HF_HUB_OFFLINE" and value.upper() in ("1", "TRUE", "YES", "ON"):
        return "info", ": nothing is downloaded", "Unset it before moeedge pull."
    return ("info", ": the CPU computes slower", "Unset it.") if name == "GGML_CPU_DISABLE_FUSION" else None


def examine(honoured: Collection[str] = ()) -> Report:
    """Runs every check, in a second or two, without models, downloads and writing; honoured: as of `environment`."""
    findings = checked("library", library)
    works = not Report(tuple(findings)).is_broken
    checks: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
        ("GPU", gpu),
        ("toy pair", bundled_files),
        ("processor", processor),
        ("kernels", kernels),
        ("threads", threads),
        ("memory", memory),
        ("models", models),
        ("kept files", kept_files),
        ("variables", partial(environment, honoured=honoured)),
    )
    for topic, check in checks:
        if works or check not in (gpu, kernels, memory):  # these need the library
            findings += checked(topic, check)
    return Report(tuple(findings))
