"""C++ kernels for training on the CPU, compiled on first use where a compiler is found."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from torch import Tensor

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-std=c++17")


@functools.cache
def library() -> ctypes.CDLL | None:
    """All kernels in one library, built once per source text; None (with a warning) where there is no compiler."""
    sources = sorted(FOLDER.glob("*.cpp"))
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(FOLDER.iterdir()) if p.suffix in (".cpp", ".h")))
    path = Path(tempfile.gettempdir()) / f"moeedge-kernels-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            warnings.warn("no C++ compiler: training will use the slower PyTorch path", stacklevel=2)
            return None
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
            for source, out in zip(sources, objects, strict=True):
                subprocess.run([compiler, *FLAGS, "-c", str(source), "-o", out], check=True)
            # Compiled for OpenMP but not linked to it: PyTorch's own runtime serves, so there is one team of threads.
            built = Path(folder) / "kernels.so"
            subprocess.run([compiler, "-shared", *objects, "-o", str(built)], check=True)
            built.replace(path)
    return ctypes.CDLL(str(path))


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    """Addresses of contiguous tensors, as arguments of a kernel."""
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def sizes(*numbers: int) -> list[ctypes.c_long]:
    """Sizes as arguments of a kernel."""
    return [ctypes.c_long(n) for n in numbers]
