"""Where figures come from: versions of the programs, the machine, the time."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import moeedge
from moeedge.hardware.processor import cpu_name
from moeedge.records import figure

_GIT_TIMEOUT_S = 10


@dataclass(frozen=True)
class Provenance:
    """Versions, machine and time of a run, for its records."""

    version: str = figure("Version of moeedge")
    commit: str | None = figure("Commit of the checkout that contains the package; null for an installed package")
    dirty: bool | None = figure("Whether tracked files differ from that commit")
    llama_cpp_version: str = figure("Version of llama-cpp-python")
    cpu: str = figure("Name of the processor")
    os: str = figure("Operating system and release")
    python: str = figure("Version of Python")
    time: str = figure("Begin of the run, UTC, ISO 8601")


def read_provenance() -> Provenance:
    """Reads the versions and the machine of this process."""
    commit, dirty = _git_state(Path(moeedge.__file__).resolve().parent)
    return Provenance(
        version=moeedge.__version__,
        commit=commit,
        dirty=dirty,
        llama_cpp_version=version("llama-cpp-python"),
        cpu=cpu_name(),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


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
