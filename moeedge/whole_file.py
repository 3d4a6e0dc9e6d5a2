"""Files that are written whole or not at all: Ctrl-C, a full disk or a crash leave what was there before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which takes its place when the block ends well. Raises OSError.

    What is no file, such as /dev/stdout, is written to directly.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        os.replace(beside, path)
    finally:  # what is still there was not finished
        with suppress(OSError):
            beside.unlink(missing_ok=True)
