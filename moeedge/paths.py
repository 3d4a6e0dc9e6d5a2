"""Where things lie: the bundled pair, the user's cache and history, the data folder.

Files that are written whole or not at all: Ctrl-C, a full disk or a crash leave what was there before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moeedge.errors import ModelFileError

_PACKAGE = Path(__file__).resolve().parent
# in an installed wheel the pair lies inside the package; in a checkout (editable install) beside it
_BUNDLE_FOLDERS = (_PACKAGE / "bundled", _PACKAGE.parent / "models" / "bundled")


def _bundled(name: str) -> Path:
    for folder in _BUNDLE_FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise ModelFileError(
        f"The bundled model {name} is not part of this installation.",
        "Install again with its files (git checkout, then pip install .) or name a model with -m FILE.gguf.",
    )


def bundled_target() -> Path:
    """The bundled qwen3moe target. Raises ModelFileError where the installation lacks it."""
    return _bundled("target.gguf")


def bundled_draft() -> Path:
    """The bundled dense draft of `bundled_target`. Raises ModelFileError where the installation lacks it."""
    return _bundled("draft.gguf")


def is_bundled(path: Path) -> bool:
    """Whether `path` is one of the bundled files."""
    return path.resolve().parent in _BUNDLE_FOLDERS


def catalog_file() -> Path:
    """The catalog of models that comes with the package. Raises ModelFileError where the installation lacks it."""
    for folder in (_PACKAGE / "bundled", _PACKAGE.parent / "models"):
        if (folder / "catalog.toml").is_file():
            return folder / "catalog.toml"
    raise ModelFileError(
        "The catalog of models is not part of this installation.",
        "Install again with its files (git checkout, then pip install .) or name a model with -m FILE.gguf.",
    )


def own_catalog_file() -> Path | None:
    """The user's own catalog: what $MOEEDGE_CATALOG names, else moeedge/catalog.toml in the folder of settings; None
    where there is none."""
    named = os.environ.get("MOEEDGE_CATALOG")
    if named:
        return Path(named).expanduser()
    path = config_dir() / "catalog.toml"
    return path if path.is_file() else None


def config_dir() -> Path:
    """The user's folder of settings: $XDG_CONFIG_HOME/moeedge, else ~/.config/moeedge; it may not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "moeedge"


def cache_dir() -> Path:
    """The user's cache folder: $MOEEDGE_CACHE, else $XDG_CACHE_HOME/moeedge, else ~/.cache/moeedge; made on use."""
    named = os.environ.get("MOEEDGE_CACHE")
    root = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moeedge"
    root.mkdir(parents=True, exist_ok=True)
    return root


def data_dir() -> Path | None:
    """The folder of prompt sets and traces that $MOEEDGE_DATA names, or None."""
    named = os.environ.get("MOEEDGE_DATA")
    return Path(named) if named else None


def history_file() -> Path:
    """Where `moeedge chat` keeps its input lines across runs."""
    return cache_dir() / "chat_history"


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
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
