"""Which moeedge processes of this user run, with the models that they hold: from the process list alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from moeedge.hardware import nvidia


@dataclass(frozen=True)
class RunningProcess:
    """One process. Bytes are those of this moment."""

    pid: int
    command: str  # of moeedge: "chat"
    models: tuple[str, ...]  # GGUF files that it has mapped or opened
    memory_bytes: int  # resident, mapped parts of the files included
    gpu_bytes: int | None  # on NVIDIA GPUs; None: none, or the driver does not say
    started_s: float  # since the epoch


def list_running() -> list[RunningProcess]:
    """The user's processes, the oldest first, without the one that asks."""
    running, on_gpus = [], nvidia.process_bytes()
    for process in psutil.process_iter():
        try:
            words = process.cmdline() if process.pid != os.getpid() else []
            command = command_of(words)
            if command is None or process.uids().real != os.getuid():
                continue
            files = {region.path for region in process.memory_maps()} | {file.path for file in process.open_files()}
            models = tuple(sorted(path for path in files if path.endswith(".gguf")))
            memory_bytes, gpu_bytes = process.memory_info().rss, on_gpus.get(process.pid)
            row = RunningProcess(process.pid, command, models, memory_bytes, gpu_bytes, process.create_time())
            running.append(row)
        except psutil.Error:  # it ended meanwhile, or is another user's
            continue
    return sorted(running, key=lambda row: row.started_s)


def command_of(words: Sequence[str]) -> str | None:
    """The command of moeedge that a command line runs, None for other programs; empty where it names none."""
    for i, word in enumerate(words[:4]):
        is_program = os.path.basename(word) == "moeedge" and (i == 0 or (i == 1 and "python" in words[0]))
        if is_program or (word == "moeedge" and words[i - 1] == "-m"):
            return words[i + 1] if i + 1 < len(words) else ""
    return None
