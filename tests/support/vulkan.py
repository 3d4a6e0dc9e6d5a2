"""A real GPU backend on any machine: ggml's Vulkan backend on Mesa's software driver, lavapipe.

The library is $MOEEDGE_VULKAN_BACKEND, or the packed one in the folder `vulkan` next to $MOEEDGE_DATA. Nothing is
installed: without library or driver the callers skip.
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
from pathlib import Path

from moeedge import paths
from moeedge.native.backends import PATH_VARIABLE

DEVICE = "Vulkan0"
LIBRARY_VARIABLE = "MOEEDGE_VULKAN_BACKEND"
_PACKED = "libggml-vulkan.so.xz"
_SHIM = Path(__file__).parents[1] / "gpu" / "lavapipe_shim.c"  # which says why it is needed
_DRIVER_FOLDERS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")


def find_driver() -> Path | None:
    """The manifest of Mesa's software driver for this processor, or None."""
    found = [path for folder in _DRIVER_FOLDERS for path in sorted(Path(folder).glob("lvp_icd.*json"))]
    matching = [path for path in found if os.uname().machine in path.name]
    return next(iter(matching or found), None)


def find_library(folder: Path) -> Path | None:
    """The backend's library; a packed one is unpacked into `folder` once. None where there is none."""
    if named := os.environ.get(LIBRARY_VARIABLE):
        return Path(named)
    data = paths.data_dir()
    packed = data.parent / "vulkan" / _PACKED if data is not None else None
    if packed is None or not packed.exists():
        return None
    library = folder / packed.stem
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(".part")
        with lzma.open(packed) as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target)
        unfinished.rename(library)
    return library


def missing() -> str | None:
    """Why there is no lane here, as a reason to skip; None where everything is found."""
    if find_driver() is None:
        return "Mesa's software driver for Vulkan is missing (Debian and Ubuntu: mesa-vulkan-drivers)"
    data = paths.data_dir()
    if not os.environ.get(LIBRARY_VARIABLE) and not (data and (data.parent / "vulkan" / _PACKED).exists()):
        return f"{LIBRARY_VARIABLE} names no libggml-vulkan.so"
    if shutil.which("cc") is None:
        return "a C compiler is missing"
    return None


def compile_shim(folder: Path) -> Path:
    """The library to preload, compiled into `folder` once."""
    library = folder / "lavapipe_shim.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(_SHIM), "-ldl"], check=True)
    return library


def environment(library: Path, folder: Path) -> dict[str, str]:
    """This process's environment for a child that uses the backend; its calibrations and caches go to `folder`."""
    driver = str(find_driver())
    return os.environ | {
        PATH_VARIABLE: str(library),
        "GGML_VK_VISIBLE_DEVICES": "0",  # a device that is a CPU is used only if it is named
        "VK_DRIVER_FILES": driver,  # no other driver: a real card has tests/gpu/run_gpu_checks.sh
        "VK_ICD_FILENAMES": driver,  # the same for loaders before 1.3.207
        "LD_PRELOAD": str(compile_shim(folder)),
        "MOEEDGE_CACHE": str(folder / "cache"),
        "GOMP_SPINCOUNT": "1000",
    }
