"""First contact with a model file: a child process decodes with its header and without its weights, since a damaged one
may crash or hang.

What the child survives is kept as known, by sizes, times and the beginning of the first part. What llama.cpp refuses in
order is loaded all the same: the error then says more. So is a file that could not be tried, e.g. for lack of memory.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from moeedge import paths
from moeedge.errors import ModelFileError, MoeedgeError
from moeedge.hardware.provenance import HEADER_BYTES, file_sha256
from moeedge.llama import gguf_file, probe_child
from moeedge.run import Level, Notification
from moeedge.scheduler.calibration import Measurement, keep, measurement_file, read_measurement

_OFF = "MOEEDGE_NO_PROBE"
_WAIT_S = 120  # for a child that waits for a disk; its processor time is limited to less
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
_WITHOUT_GPU = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"), "")
_tried: set[str] = set()  # by this process
_took_s: dict[Path, float] = {}  # what no session has told yet


@dataclass(frozen=True, kw_only=True)
class Probed(Measurement):
    """A file with whose header a child process has decoded."""

    SCHEMA: ClassVar[int] = 2


def probe(path: Path) -> None:
    """Lets a child process try the header of an unknown file. Raises ModelFileError where it crashes or does not end.

    Bundled files are known, and so is what this process or an earlier one has tried.
    """
    if os.environ.get(_OFF) or paths.is_bundled(path) or not path.is_file():
        return
    try:
        files = [(file.stat().st_size, file.stat().st_mtime_ns) for file in gguf_file.parts(path)]
        identity = hashlib.sha256(f"{files} {file_sha256(path, HEADER_BYTES)}".encode()).hexdigest()
    except (OSError, MoeedgeError):  # the loader says what is wrong
        return
    find_file = partial(measurement_file, "header", {"schema": Probed.SCHEMA, "file": identity})
    if identity in _tried or read_measurement(Probed, find_file) is not None:
        return
    start_s = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-I", probe_child.__file__, str(path.absolute()), *map(str, filter(None, sys.path))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_WAIT_S,
            env=os.environ | _WITHOUT_GPU,
            start_new_session=True,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        _tried.add(identity)
        return
    if done.returncode == -signal.SIGXCPU:
        raise _unusable(path, "llama.cpp does not come to an end with it")
    if -done.returncode in _CRASHES:
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        told = next((line.strip() for line in reversed(lines) if "assert" in line.lower()), "")
        told = re.sub(r"^.*/(?=[\w.-]+:\d+: )", "", told)  # the folder where that was compiled
        name = signal.Signals(-done.returncode).name
        raise _unusable(path, f"llama.cpp crashes with it, {name}{told and f': {told[:200]}'}")
    _tried.add(identity)
    if done.returncode == 0:
        seconds = time.perf_counter() - start_s
        keep(Probed(seconds=seconds), find_file)
        _took_s[path] = seconds


def take_notes(files: Sequence[Path]) -> list[Notification]:
    """A sentence for each of a session's files that was tried since the last call; what others left is forgotten."""
    tried = [(path.name, _took_s[path]) for path in files if path in _took_s]
    _took_s.clear()
    return [
        Notification(f"{name} is new here: another process tried its header first ({seconds:.1f} s).", Level.NOTICE)
        for name, seconds in tried
    ]


def _unusable(path: Path, reason: str) -> ModelFileError:
    hint = f"It may be damaged: download or copy it again. {_OFF}=1 loads it without this check."
    return ModelFileError(f"{path} cannot be used: {reason}.", hint)
