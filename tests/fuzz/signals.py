"""Commands that get a signal at a random moment: right exit code, no traceback, nothing half-written, no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

_TARGET = "-m {tiny qwen3moe} -dev none"
COMMANDS = (  # OUT: a file that it may write, without its suffix
    f"chat {_TARGET} -md none -p a -n 4000 -c 8192 --ignore-eos --raw -q",
    f"chat {_TARGET} -md {{tiny qwen3}} -p a -n 4000 -c 8192 --ignore-eos --raw -q -o json",
    f"bench {_TARGET} -md none -p 64 -n 64 -r 50 -o json",
    f"profile {_TARGET} -md none --dataset toy -n 400 --trace-out OUT.npz",
    f"plan {_TARGET} -md none -o json",
    "lab trace import {positions.csv} OUT.npz --n-experts 8",
    "lab replay {trace.npz} --cache-ratio 0.5",
    "lab make-model OUT.gguf --like granite-3.1-1b-a400m --quant q8_0 --layers 2",
    "show {tiny qwen3moe}",
    "doctor",
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LATEST_S = 4.0  # most commands compute by then, and some have ended
_PATIENCE_S = 30.0


def run_case(rng: Random, arguments: list[str], home: Path) -> tuple[str, str]:
    """The outcome of the command in a process group of its own, which gets one or two signals; and what is wrong."""
    chosen = [rng.choice(SIGNALS)] * rng.choice((1, 1, 2))
    moments_s = sorted(rng.random() ** 2 * _LATEST_S for _ in chosen)
    out = home / "written"
    out.mkdir(exist_ok=True)
    environment = os.environ | {"HOME": str(home), "MOEEDGE_CACHE": str(home / "cache"), "TMPDIR": str(out)}
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", "moeedge", *arguments]
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            command,
            stdin=null,
            stdout=null,
            stderr=errors,
            env=environment,
            start_new_session=True,
            preexec_fn=_stop_ignoring,  # what a shell lets its background jobs ignore
        )
        start_s = time.monotonic()
        for signum, moment_s in zip(chosen, moments_s, strict=True):
            time.sleep(max(0.0, start_s + moment_s - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signum)
        try:
            code = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "hang", f"{signal.Signals(chosen[0]).name} after {moments_s[0]:.2f} s"
        errors.seek(0)
        text = errors.read().decode("utf-8", "replace")
    about = f"{signal.Signals(chosen[0]).name} after {', '.join(f'{moment:.3f}' for moment in moments_s)} s"
    left = [path.name for path in out.rglob("*") if path.is_file() and path.name not in ("out.npz", "out.gguf")]
    for path in sorted(out.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    has_traceback = "Traceback (most recent call last)" in text
    # Python itself has one, and exit code 1 at times, where Ctrl-C comes before our code
    is_pythons = has_traceback and "moeedge" not in text and text.endswith("KeyboardInterrupt\n")
    if has_traceback and not is_pythons:
        return "traceback", f"{about}: {text.strip().splitlines()[-1]}"
    # before Python runs our code, and after it, a signal ends the process by itself
    if code not in (0, 128 + chosen[0], -chosen[0]) and not is_pythons:
        return f"exit code {code}", f"{about}: {(text.strip().splitlines() or [''])[-1]}"
    if left:
        return "files left", f"{about}: {', '.join(left)}"
    if _lives(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
        return "process left", about
    return "ended" if code else "finished", ""


def _stop_ignoring() -> None:
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)


def _lives(group: int) -> bool:
    """Whether a process of the group goes on for longer than a moment."""
    for _ in range(20):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True
