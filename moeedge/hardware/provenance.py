"""Where figures come from: versions of the programs, the machine, the files, the time."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import moeedge
from moeedge.hardware.host import cpu_name
from moeedge.records import figure

_GIT_TIMEOUT_S = 10
HEADER_BYTES = 1 << 16  # of a model's file, that its hash covers: metadata and the first tensors' names


@dataclass(frozen=True)
class Provenance:
    """Versions, machine, files and time of a run, for its records."""

    version: str = figure("Version of moeedge")
    commit: str | None = figure("Commit of the checkout that contains the package; null for an installed package")
    dirty: bool | None = figure("Whether tracked files differ from that commit")
    llama_cpp_version: str = figure("Version of llama-cpp-python; behind it LLAMA_CPP_LIB_PATH where it is set")
    cpu: str = figure("Name of the processor; behind it MOEEDGE_INSTRUCTIONS where it is set")
    os: str = figure("Operating system and release")
    python: str = figure("Version of Python")
    time: str | None = figure("Begin of the run, UTC, ISO 8601; null in output that is the same in every run")
    model_header_sha256: str | None = figure(
        "SHA-256 of the first 64 KiB of the model's file, its metadata; null: no file was read", default=None
    )
    trace_sha256: str | None = figure("SHA-256 of the trace's file", default=None, optional=True)


def read_provenance(model: Path | None = None, *, trace: Path | None = None, timed: bool = True) -> Provenance:
    """Reads the versions and the machine of this process, and the files that its figures are of."""
    commit, dirty = _git_state(Path(moeedge.__file__).resolve().parent)
    return Provenance(
        version=moeedge.__version__,
        commit=commit,
        dirty=dirty,
        llama_cpp_version=version("llama-cpp-python") + _told("LLAMA_CPP_LIB_PATH", " with LLAMA_CPP_LIB_PATH"),
        cpu=cpu_name() + _told("MOEEDGE_INSTRUCTIONS", ", MOEEDGE_INSTRUCTIONS={}"),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        time=datetime.now(timezone.utc).isoformat(timespec="seconds") if timed else None,
        model_header_sha256=None if model is None else file_sha256(model, HEADER_BYTES),
        trace_sha256=None if trace is None else file_sha256(trace),
    )


def _told(variable: str, words: str) -> str:
    """The words with the value of an environment variable that changes what computes; empty where it is not set."""
    value = os.environ.get(variable)
    return words.format(value) if value else ""


def file_sha256(file: Path, n_bytes: int = -1) -> str | None:
    """The hash of the file's first `n_bytes`, by default of all, hexadecimal; None where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.sha256(opened.read(n_bytes)).hexdigest()
    except OSError:  # whoever needs the content says so
        return None


def _git_state(package: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout with `package` in its root; (None, None) elsewhere."""
    root = package.parent
    if not (root / ".git").exists():  # the checkout around a virtual environment is another project's
        return None, None
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, None
    lines = done.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    return commit, any(not line.startswith("#") for line in lines)
