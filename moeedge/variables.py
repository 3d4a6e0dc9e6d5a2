"""The environment variables that moeedge and the libraries below it read: one table for documents and `moeedge doctor`.

An option given on the command line wins over a variable. Those that llama.cpp's own programs read for their options
(LLAMA_ARG_*) are in the table of these options.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Reader = Literal["moeedge", "its build", "its tests", "models", "llama.cpp", "drivers", "the terminal"]
OPTION_PREFIX = "LLAMA_ARG_"
_OWN_PREFIX = "MOEEDGE_"
_SHOWN_PREFIXES = (_OWN_PREFIX, OPTION_PREFIX, "GGML_", "HF_", "HUGGINGFACE_", "GOMP_", "OMP_")
_SIMILAR = 0.7  # difflib's ratio from which a name is suggested


@dataclass(frozen=True)
class Variable:
    """One environment variable."""

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


@dataclass(frozen=True)
class SetVariable:
    """A variable that is set and acts, or that looks as if it should."""

    name: str
    value: str  # as set; a secret is not shown
    variable: Variable | None  # None: unknown to moeedge
    suggestion: str = ""  # a known name similar to an unknown one of moeedge


def set_variables(environment: Mapping[str, str]) -> list[SetVariable]:
    """The variables that are set, by name, also unknown ones of known prefixes; not those that every shell sets."""
    variables = []
    for name, value in sorted(environment.items()):
        variable = BY_NAME.get(name)
        usual = variable is not None and (variable.reader == "the terminal" or name.startswith(("XDG_", "TMP", "LD_")))
        if not value or (usual and name != "NO_COLOR") or (variable is None and not name.startswith(_SHOWN_PREFIXES)):
            continue
        shown = "(set)" if "TOKEN" in name else value
        is_unknown = variable is None and name.startswith(_OWN_PREFIX)
        similar = difflib.get_close_matches(name, BY_NAME, 1, _SIMILAR) if is_unknown else []
        variables.append(SetVariable(name, shown, variable, next(iter(similar), "")))
    return variables
