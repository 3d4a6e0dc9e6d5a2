"""The program in this process, run in a folder of its own."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typer.testing import CliRunner

from tests.outputs.values import compact, plain
from tests.support.commands import all_commands

_KEPT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LANG",
    "GOMP_SPINCOUNT",
    "OMP_NUM_THREADS",
    "MOEEDGE_NO_PROBE",
)
_OPTIONS_AND_NUMBERS = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*|\d+(?:\.\d+)?")


class Captured(Exception):
    """A command has reached what does its work."""


def commands() -> dict[str, Any]:
    """Every command by its name, "lab trace info" for one of a group."""
    return all_commands(load)


@cache
def load(name: str) -> Any:
    """A command, loaded once."""
    return import_module("moeedge.cli.app").load_command.__wrapped__(name)


@contextmanager
def patched(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of objects replaced for a while."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder as current and home folder, with no variable of the environment that a command reads."""
    app = import_module("moeedge.cli.app")
    if not hasattr(app.load_command, "__wrapped__"):
        original = app.load_command
        app.load_command = lambda name: load(name)
        app.load_command.__wrapped__ = original
    here, environment = Path.cwd(), dict(os.environ)
    with TemporaryDirectory() as name:
        try:
            os.chdir(name)
            os.environ.clear()
            os.environ |= {key: environment[key] for key in _KEPT if key in environment}
            os.environ |= {"HOME": name, "HF_HUB_OFFLINE": "1", "TERM": "dumb", "COLUMNS": "100", "LINES": "40"}
            yield Path(name)
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ |= environment


def run(arguments: list[str], *, piped: str = "", env: dict[str, str] | None = None) -> Any:
    """The result of `moeedge ARGUMENTS`; what it leaves in the process (logs, environment) is undone."""
    app = import_module("moeedge.cli.app")
    loggers = [logging.getLogger(name) for name in ("moeedge", "moeedge.llama")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    console = import_module("moeedge.ui.console")
    try:
        with app.environment_kept():
            return CliRunner().invoke(app.app, arguments, input=piped, env=env)
    finally:
        console.set_modes(quiet=False, plain=False)
        for logger, (level, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers


def outcome(result: Any) -> dict[str, Any]:
    """Exit code of a command that ended, and the options and numbers that its message names."""
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        return {"raised": type(error).__name__}
    message = next((line for line in result.stderr.splitlines() if line.startswith("error: ")), "")
    return {"exit": result.exit_code, "names": _OPTIONS_AND_NUMBERS.findall(plain(message))}


class Recorder:
    """Stands at places where commands begin their work: keeps the arguments and the caller's records, and stops."""

    def __init__(self, places: tuple[str, ...]) -> None:
        self.seen: dict[str, Any] = {}
        self._patches = []
        for place in places:
            name, _, attribute = place.partition(":")
            owner = import_module(name)
            self._patches.append((owner, attribute, self._at(attribute, getattr(owner, attribute))))

    def __enter__(self) -> Recorder:
        self._context = patched(*self._patches)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def _at(self, name: str, original: Any) -> Any:
        signature = inspect.signature(original)

        def stop(*arguments: Any, **named: Any) -> None:
            self.seen = {"work": name}
            for key, value in signature.bind(*arguments, **named).arguments.items():
                self._see(key, value)
            frame: Any = sys._getframe(1)
            frames = [frame, frame.f_back] if frame.f_code.co_name == "run_chat" else [frame]
            for value in [value for each in frames for value in each.f_locals.values()]:
                if dataclasses.is_dataclass(value):
                    self._see("", value)
            raise Captured

        return stop

    def _see(self, key: str, value: Any) -> None:
        """Records are kept by their type, the first of each; those of options and of the machine are not."""
        kind = type(value).__name__
        if dataclasses.is_dataclass(value):
            if kind.endswith("Options") or kind in ("LoadReading", "Provenance", "ResolvedDevice"):
                return
            key = kind
        found = compact(plain(value))
        if not (isinstance(found, str) and found.startswith("a ")):
            self.seen.setdefault(key, found)
