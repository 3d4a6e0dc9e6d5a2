"""CMake options that name the cuBLAS of NVIDIA's Python package, one per line: for toolkits that came without it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or []) if package else []:
        headers = sorted(Path(folder).rglob("cublas_v2.h"))
        libraries = {name: sorted(Path(folder).rglob(f"lib{name}.so.*")) for name in ("cublas", "cublasLt")}
        if headers and all(libraries.values()):
            print(f"-DCMAKE_CUDA_FLAGS=-isystem={headers[0].parent}")
            for name, found in libraries.items():
                print(f"-DCUDA_{name}_LIBRARY={found[0]}")
            return
    sys.exit("error: neither the CUDA toolkit nor the package nvidia-cublas has cublas_v2.h")


if __name__ == "__main__":
    main()
