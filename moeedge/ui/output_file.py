"""Files that a command writes beside its output: whether they can be, before the work, and pictures after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moeedge.errors import InputError

SUFFIXES = (".png", ".svg", ".pdf")
_DPI = 130


def check_output(path: Path) -> None:
    """Raises InputError where no file could be written, before the work whose result it is to hold."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise InputError(f"{path} cannot be written.", "Name a file in a folder that exists.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{path} may not be written.", "Name another file.")


def check_picture(path: Path, option: str = "--plot") -> None:
    """The same for a picture, whose name says its format."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{option} cannot write {path.name}.", f"Let the name end in {', '.join(SUFFIXES)}.")
    check_output(path)


def save_picture(figure: Any, path: Path) -> None:
    """A Matplotlib figure into a file."""
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        reason = error.strerror or "write error"
        raise InputError(f"Cannot write the picture {path}: {reason}.", "Name another file.") from None
