"""Fetch ggml's headers from the source distribution of exactly the llama-cpp-python that moeedge is compiled against.

A ggml backend needs two headers that the installed wheel does not carry. They are taken from the source distribution,
fetched by pip by name and version and checked by hash; this repository contains none of it. MOEEDGE_LLAMA_SDIST names a
copy on disk to use instead (checked by the same hash).

Usage: python fetch_headers.py VERSION SHA256 FOLDER     (writes FOLDER/*.h and FOLDER/ggml-version.txt)
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PROJECT = "llama-cpp-python"
GGML = "vendor/llama.cpp/ggml"
PRIVATE_HEADERS = ("ggml-impl.h", "ggml-backend-impl.h")


def download(version: str, folder: Path) -> Path:
    """The path of the source distribution, downloaded by pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PROJECT, "--dest", str(folder)]
    environment = {**os.environ, "CMAKE_ARGS": ""}  # pip reads the metadata only: it does not compile
    result = subprocess.run([*command, f"{PROJECT}=={version}"], env=environment, capture_output=True, text=True)
    archives = sorted(folder.glob("*.tar.gz"))
    if result.returncode != 0 or not archives:
        sys.exit(f"pip could not fetch {PROJECT}=={version} for its headers:\n{result.stdout}{result.stderr}")
    return archives[0]


def ggml_version(cmake_lists: str) -> str:
    """The version of ggml as its CMakeLists.txt sets it, for instance 0.25.3."""
    numbers = [re.search(rf"GGML_VERSION_{part} (\d+)", cmake_lists) for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(numbers):
        sys.exit("ggml's CMakeLists.txt does not state its version where it was expected.")
    return ".".join(number.group(1) for number in numbers if number)


def extract(sdist: Path, folder: Path) -> None:
    """Write the public and the two private headers flat into `folder`, and the version of ggml next to them."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(sdist) as archive:
        for member in archive:
            parent, _, name = member.name.partition("/")[2].rpartition("/")
            public = parent == f"{GGML}/include" and name.endswith(".h")
            private = parent == f"{GGML}/src" and name in PRIVATE_HEADERS
            versions = parent == GGML and name == "CMakeLists.txt"
            source = archive.extractfile(member) if public or private or versions else None
            if source is not None and versions:
                (folder / "ggml-version.txt").write_text(ggml_version(source.read().decode()))
            elif source is not None:
                (folder / name).write_bytes(source.read())


def main() -> None:
    version, expected, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    stamp = folder / "sha256.txt"
    if stamp.is_file() and stamp.read_text() == expected:
        return
    with tempfile.TemporaryDirectory() as scratch:
        copy = os.environ.get("MOEEDGE_LLAMA_SDIST")
        sdist = Path(copy) if copy else download(version, Path(scratch))
        actual = hashlib.sha256(sdist.read_bytes()).hexdigest()
        if actual != expected:
            sys.exit(f"{sdist.name} has sha256 {actual}, expected {expected}: not used.")
        extract(sdist, folder)
    stamp.write_text(expected)


if __name__ == "__main__":
    main()
