"""Keeps a chat on disk while it goes on, so that an abort, kill -9 or a closed terminal loses one step at most.

One file per chat, of JSON lines that are only appended: a header, then each change of the conversation and each step of
the answer in progress. A line survives the process, not a power failure. The process locks its file while it lives; a
file without a lock is the rest of a chat that ended unexpectedly.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moeedge.engine.conversation import Conversation, Message, read_message
from moeedge.errors import InputError
from moeedge.run import Level, Run
from moeedge.schemas import read_json

SCHEMA = "moeedge.autosave"
VERSION = 1
MAX_KEPT = 20  # unfinished chats; older ones are removed
MAX_FILE_BYTES = 2**26  # of a file that is read: some million tokens

Settings = dict[str, Any]  # JSON values
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Origin:
    """The conditions of a chat; an answer can only be continued where all of them are equal."""

    model: str  # file name
    model_bytes: int
    raw: bool  # without a chat template


@dataclass
class UnfinishedChat:
    """A chat whose process ended unexpectedly. `text` and `tokens`: of the answer to its last, open question."""

    path: Path
    origin: Origin
    ended_s: float = 0.0  # time of the last line, seconds since the epoch
    conversation: Conversation = field(default_factory=Conversation)
    settings: Settings = field(default_factory=dict)
    text: str = ""
    tokens: list[int] = field(default_factory=list)


class Autosave:
    """Writes one chat. The file is made with the first message, and removed by `close` unless it should stay.

    folder: None where the chat is not to be saved.
    """

    def __init__(self, folder: Callable[[], Path] | None, origin: Origin) -> None:
        self.warning = ""  # a sentence once the file cannot be written; the chat goes on unsaved
        self._folder = folder
        self._origin = origin
        self._path: Path | None = None
        self._file = -1  # descriptor
        self._header: dict[str, Any] = {}  # system prompt, expert budgets and settings
        self._messages: list[Message] | None = []  # None while they are being written

    @property
    def is_saving(self) -> bool:
        return self._file >= 0 and not self.warning

    def update(self, conversation: Conversation, settings: Settings) -> None:
        """Writes what has changed of the conversation and its settings."""
        if self._file < 0 and not conversation.messages:
            return
        header = {"system": conversation.system, "budgets": list(conversation.budgets), "settings": settings}
        records: list[dict[str, Any]] = [header] if self._file < 0 or header != self._header else []
        messages = list(conversation.messages)
        written = self._messages
        if written is None or messages[: len(written)] != written:
            written = []
            records.append({"clear": True})
        records += [vars(message) for message in messages[len(written) :]]
        self._messages = None  # Ctrl-C may come in between
        self._write(records)
        self._header, self._messages = header, messages

    def add_step(self, text: str, tokens: Sequence[int]) -> None:
        if self._file >= 0:
            self._write([{"text": text, "tokens": list(tokens)}])

    def begin_anew(self, origin: Origin) -> None:
        """From now on the chat is held with another model: the next `update` writes all of it into a new file."""
        self.close()
        self._origin, self._path = origin, None
        self._header, self._messages = {}, []

    def close(self, *, keep: bool = False) -> None:
        """Removes the file at a normal end; keep: the next chat offers it. Closing twice is harmless."""
        if self._file < 0:
            return
        with suppress(OSError):
            if not keep and self._path is not None:
                self._path.unlink()
        os.close(self._file)  # and unlocks
        self._file = -1

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self._folder is None or self.warning or not records:
            return
        try:
            if self._file < 0:
                self._create(self._folder())
            data = "".join(json.dumps(record) + "\n" for record in records).encode()
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.warning = f"The chat is not saved from here on: {error.strerror or error}."

    def _create(self, folder: Path) -> None:
        """The locked file, which gets its name once it has a header: no other process sees it without either."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{time.time_ns():020d}-{os.getpid()}.jsonl"
        hidden = folder / f".{name}"
        file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            header = {"schema": SCHEMA, "version": VERSION, **vars(self._origin)}
            os.write(file, (json.dumps(header) + "\n").encode())
            hidden.rename(folder / name)
        except OSError:
            hidden.unlink(missing_ok=True)
            os.close(file)
            raise
        self._file, self._path = file, folder / name


def unfinished_chats(folder: Callable[[], Path], run: Run | None = None) -> list[UnfinishedChat]:
    """The chats in `folder()` that ended unexpectedly, the newest first; those that still run are left alone.

    Removes files without messages and all but the newest MAX_KEPT. A damaged file gets another name, of which `run`
    is told. Other programs' files stay, and hidden ones, which a process has just made and not locked yet.
    """
    chats: list[UnfinishedChat] = []
    with suppress(OSError):
        for path in sorted(folder().glob("[!.]*.jsonl"), reverse=True):
            with suppress(OSError), _locked(path):
                try:
                    chat = _read(path)
                except (ValueError, KeyError, TypeError):
                    aside = path.rename(path.with_name(f"{path.name}.damaged"))
                    (run or Run()).say(f"A saved chat is damaged; its file is now {aside}.", Level.WARNING)
                    continue
                if chat is not None and chat.conversation.messages and len(chats) < MAX_KEPT:
                    chats.append(chat)
                elif chat is not None:
                    path.unlink()
    return chats


def take_over(chat: UnfinishedChat, save: Callable[[], bool]) -> None:
    """Removes the file of `chat` if `save` has written it elsewhere. Raises InputError if another process has it."""
    try:
        with _locked(chat.path):
            if save():
                chat.path.unlink()
    except OSError:
        raise InputError("This chat was resumed or removed by another program.") from None


def remove(chat: UnfinishedChat) -> None:
    """Removes the file of `chat`, unless another process has resumed it."""
    with suppress(InputError):
        take_over(chat, lambda: True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file. Raises OSError where its process lives, or where it is gone."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only what may be written
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS):
            raise
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists():  # removed by the process that held the lock
            raise FileNotFoundError(path)
        yield
    finally:
        os.close(file)


def _read(path: Path) -> UnfinishedChat | None:
    """Reads a file up to its first damaged line; None for another program's, or another version's.

    Raises ValueError if no message is before the damaged line, KeyError or TypeError for a header of other fields.
    """
    status = path.stat()
    if status.st_size > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES:,} bytes")
    header, *lines = path.read_bytes().split(b"\n")
    record = read_json(header.decode())
    if not isinstance(record, dict):
        raise ValueError("no header")
    if (record.get("schema"), record.get("version")) != (SCHEMA, VERSION):
        return None
    origin = Origin(_typed(record["model"], str), _typed(record["model_bytes"], int), _typed(record["raw"], bool))
    chat = UnfinishedChat(path, origin, status.st_mtime)
    for number, line in enumerate(lines, 1):
        try:
            if line:
                _apply(chat, read_json(line.decode()))
        except (ValueError, KeyError, TypeError, InputError):
            if number < len(lines) and not chat.conversation.messages:
                raise ValueError(f"line {number + 1}") from None
            break  # usually the last line: the step during which the process ended
    return chat


def _apply(chat: UnfinishedChat, record: Any) -> None:
    """Repeats one change. Raises one of several errors for a record that no `Autosave` writes, and changes nothing."""
    conversation = chat.conversation
    if "settings" in record:
        system, settings = _typed(record["system"], str), _typed(record["settings"], dict)
        budgets = [_typed(label, str) for label in _typed(record.get("budgets", []), list)]
        conversation.system, conversation.budgets, chat.settings = system, budgets, settings
    elif "tokens" in record:
        text, tokens = _typed(record["text"], str), [_typed(token, int) for token in _typed(record["tokens"], list)]
        chat.text += text
        chat.tokens += tokens
    elif "clear" in record:
        conversation.messages.clear()
        chat.text, chat.tokens = "", []
    else:
        conversation.messages.append(read_message(record, len(conversation.messages)))
        chat.text, chat.tokens = "", []


def _typed(value: Any, kind: type[_Value]) -> _Value:
    """The value. Raises TypeError where it is of another type."""
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} is no {kind.__name__}")
    return value
