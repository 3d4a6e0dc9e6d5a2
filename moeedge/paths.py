"""Locations of files (the bundled pair, the catalog, cache, settings, data), and files replaced atomically."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moeedge.errors import InputError, ModelFileError

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # values of OSError.errno
_PACKAGE = Path(__file__).resolve().parent
_MODELS = _PACKAGE.parent / "models"  # in a checkout (editable install)
_IN_WHEEL = _PACKAGE / "bundled"
_BUNDLE_FOLDERS = (_IN_WHEEL, _MODELS / "bundled")


def _installed(name: str, folders: tuple[Path, ...]) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    hint = "Install again from a checkout (pip install .), or name a model with -m FILE.gguf."
    raise ModelFileError(f"This installation lacks {name}.", hint)


def user_path(text: str) -> Path:
    """Returns the path that a user typed, with ~ and ~NAME replaced. Raises InputError for one that cannot be."""
    if not text:
        raise InputError("The path is empty.", "Give the path of a file; the variable in it may be unset.")
    try:
        path = Path(text).expanduser()
        path.exists()
        return path
    except RuntimeError:
        raise InputError(f"There is no home folder for {text}.", "Write the path from / on.") from None
    except OSError as error:  # too long, or in a folder that cannot be read
        raise InputError(f"{text} cannot be read: {error.strerror}.") from None


def bundled_target() -> Path:
    """Returns the bundled qwen3moe target. Raises ModelFileError if the installation lacks it."""
    return _installed("target.gguf", _BUNDLE_FOLDERS)


def bundled_draft() -> Path:
    """Returns the dense draft of `bundled_target`. Raises ModelFileError if the installation lacks it."""
    return _installed("draft.gguf", _BUNDLE_FOLDERS)


def is_bundled(path: Path) -> bool:
    """Whether `path` is one of the bundled files."""
    return Path(os.path.realpath(path)).parent in _BUNDLE_FOLDERS  # resolve() fails for a link to itself


def catalog_file() -> Path:
    """Returns the package's catalog of models. Raises ModelFileError if the installation lacks it."""
    return _installed("catalog.toml", (_IN_WHEEL, _MODELS))


def own_catalog_file() -> Path | None:
    """Returns the user's catalog: $MOEEDGE_CATALOG, else ~/.config/moeedge/catalog.toml if it exists, else None."""
    named = os.environ.get("MOEEDGE_CATALOG")
    if named:
        return user_path(named)
    path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "moeedge" / "catalog.toml"
    return path if path.is_file() else None


def cache_dir() -> Path:
    """Returns the cache folder, made if needed: $MOEEDGE_CACHE, else $XDG_CACHE_HOME/moeedge, else ~/.cache/moeedge."""
    named = os.environ.get("MOEEDGE_CACHE")
    root = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moeedge"
    root.mkdir(parents=True, exist_ok=True)
    return root


def data_dir() -> Path | None:
    """Returns the folder of prompt sets and traces that $MOEEDGE_DATA names, or None."""
    named = os.environ.get("MOEEDGE_DATA")
    return Path(named) if named else None


def unfinished_chats_dir() -> Path:
    """Returns the folder in which running chats are saved; it may not exist."""
    return cache_dir() / "unfinished_chats"


def measurement_dir() -> Path:
    """The folder of measurements of this machine, which may not exist. Raises OSError without a cache folder."""
    return cache_dir() / "calibration"


def children(folder: Path) -> list[Path]:
    """Files and folders in a folder; none where it cannot be read."""
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def read_text(path: Path, hint: str = "", *, most_bytes: int | None = 1 << 26) -> str:
    """The text of a user's UTF-8 file of at most so many bytes. Raises InputError where it cannot be read."""
    try:
        with path.open("rb") as file:  # in part, so that a device or a model's file does not fill the memory
            data = file.read(-1 if most_bytes is None else most_bytes + 1)
        if most_bytes is not None and len(data) > most_bytes:
            raise InputError(f"{path} is too large: a text has at most {most_bytes >> 20} MiB.", hint)
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        what = f"byte {error.start:,} is {error.object[error.start]:#04x}"
        raise InputError(f"{path} is not UTF-8 text: {what}.", hint) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.", hint) from None


def text_of(path: Path) -> str:
    """The text of a file of the system, without blanks around it; empty where it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def unpacked(data: bytes, most_bytes: int = 1 << 28) -> bytes:
    """The data, uncompressed where they are gzip's. Raises ValueError where they are damaged, or larger than that."""
    if data[:2] != b"\x1f\x8b":
        return data
    import gzip  # few commands read such files
    import io
    import zlib

    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            data = file.read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from None
    if len(data) > most_bytes:
        raise ValueError(f"uncompressed it has more than {most_bytes >> 20} MiB")
    return data


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def short(path: Path) -> str:
    """Returns the path for the screen: with ~ for the home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path != home and path.is_relative_to(home) else str(path)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` when the block ends without an exception. Raises OSError.

    Ctrl-C, a full disk or a crash leave the old content. A path that is no regular file, such as /dev/stdout, is
    yielded itself.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))  # a link stays
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        if error.filename == str(temporary):
            error.filename = str(path)  # the user knows this name alone
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def write_file(path: Path, what: str) -> Iterator[Path]:
    """As `replace_file`; raises InputError where the path cannot be written. what: a noun for it."""
    try:
        with replace_file(path) as temporary:
            yield temporary
    except OSError as error:
        reason = error.strerror or "write error"
        raise InputError(f"Cannot write the {what} {path}: {reason}.", "Choose another path.") from None
