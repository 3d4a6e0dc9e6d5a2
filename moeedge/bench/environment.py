"""What a number depends on besides the options: versions, commit, processor."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import moeedge

_GIT_TIMEOUT_S = 10


@dataclass(frozen=True)
class Environment:
    """Recorded in every row."""

    version: str  # of moeedge
    commit: str | None  # of the checkout that the package runs from; None for an installed wheel
    dirty: bool | None  # whether tracked files differ from that commit
    llama_cpp_version: str  # of the llama-cpp-python package
    cpu: str
    os: str
    python: str
    time: str  # UTC, ISO 8601


def read_environment() -> Environment:
    """Looks at this process's machine and installation."""
    commit, dirty = _git_state(Path(moeedge.__file__).resolve().parent)
    return Environment(
        version=moeedge.__version__,
        commit=commit,
        dirty=dirty,
        llama_cpp_version=_llama_cpp_version(),
        cpu=cpu_name(),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def cpu_name() -> str:
    """The processor's name as it reports itself, else the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "hardware") and value.strip():
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _llama_cpp_version() -> str:
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "unknown"


def _git_state(package: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout whose root holds `package`; (None, None) elsewhere.

    A package that lies inside some other project's checkout (a virtual environment, say) has no commit of ours.
    """
    root = package.parent
    if not (root / ".git").exists():
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit or None, None if status is None else bool(status)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
