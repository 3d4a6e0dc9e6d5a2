"""Chats on disk: what is left of them when a process ends in any way, and in the files' worst state."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine import autosave
from moeedge.engine.autosave import Autosave, Origin, UnfinishedChat, remove, take_over, unfinished_chats
from moeedge.engine.conversation import Conversation, Message
from moeedge.errors import InputError
from moeedge.run import Notification, Run, is_warning
from moeedge.ui.chat.settings import Settings, restored, saved_settings
from tests.support.machine import files_of_at_most

ORIGIN = Origin("model.gguf", 123, raw=False)
SETTINGS: dict[str, Any] = {"sampling": {"temperature": 0.5}, "n_predict": -1}


def chat(folder: Path) -> Autosave:
    return Autosave(lambda: folder, ORIGIN)


def found(folder: Path) -> list[UnfinishedChat]:
    return unfinished_chats(lambda: folder)


def talk(*texts: str, system: str = "") -> Conversation:
    """A conversation of these messages, the first of which is the user's."""
    return Conversation(system, [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)])


def abandoned(folder: Path, *texts: str) -> Path:
    """The file of a chat whose process ended."""
    saved = chat(folder)
    saved.update(talk(*texts), SETTINGS)
    before = set(folder.glob("*.jsonl"))
    saved.close(keep=True)
    return max(before)


def in_child(work: Callable[[], None]) -> int:
    """The exit status of `work` in a forked process."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("end", [os.abort, lambda: os.kill(os.getpid(), signal.SIGKILL)], ids=["abort", "kill -9"])
def test_every_finished_step_survives_the_process(end: Callable[[], None], tmp_path: Path) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # pytest's traceback
        saved = chat(tmp_path / "chats")
        saved.update(talk("hé?", system="be kind"), SETTINGS)
        saved.add_step("Grüße", [1, 2])
        saved.add_step(" \U0001f600", [3])
        end()

    assert os.WIFSIGNALED(in_child(work))
    (left,) = found(tmp_path / "chats")
    assert (left.origin, left.settings) == (ORIGIN, SETTINGS)
    assert left.conversation == talk("hé?", system="be kind")
    assert (left.text, left.tokens) == ("Grüße \U0001f600", [1, 2, 3])
    assert abs(left.ended_s - time.time()) < 60
    assert stat.S_IMODE(left.path.stat().st_mode) == 0o600, "it belongs to its user alone"
    assert stat.S_IMODE(left.path.parent.stat().st_mode) == 0o700


def test_nothing_is_left_of_a_chat_that_ended_well_or_never_began(tmp_path: Path) -> None:
    saved = chat(tmp_path / "new")
    saved.update(Conversation("system"), SETTINGS)
    assert not (tmp_path / "new").exists()
    saved.update(talk("one"), SETTINGS)
    saved.close()
    saved.close()
    assert list((tmp_path / "new").iterdir()) == []


def test_changes_of_the_conversation_are_repeated(tmp_path: Path) -> None:
    saved = chat(tmp_path)
    for state in (
        talk("one"),
        talk("one", "two"),
        talk("one", "two", system="new"),
        talk("one"),  # /regen
        talk("one", "other", "three"),
        talk("loaded", "from", "a file", "and so on"),
        talk(),
        talk("again"),
    ):
        saved.update(state, SETTINGS)
        saved.add_step("cut", [7])
        saved._messages = saved._messages if len(state.messages) != 3 else None  # Ctrl-C in the middle of an update
        (path,) = tmp_path.glob("*.jsonl")
        left = autosave._read(path)
        assert left.conversation == state
        assert left.text.endswith("cut")
    saved.close()


def test_chats_at_once_do_not_see_each_other(tmp_path: Path) -> None:
    first, second = chat(tmp_path), chat(tmp_path)
    first.update(talk("one"), SETTINGS)
    second.update(talk("two"), SETTINGS)
    assert found(tmp_path) == []
    second.close(keep=True)
    (left,) = found(tmp_path)
    assert left.conversation == talk("two")
    first.close(keep=True)
    assert [entry.conversation for entry in found(tmp_path)] == [talk("two"), talk("one")]


def test_a_forked_child_neither_removes_nor_unlocks_the_file(tmp_path: Path) -> None:
    saved = chat(tmp_path)
    saved.update(talk("one"), SETTINGS)
    assert in_child(lambda: None) == 0
    assert found(tmp_path) == []
    saved.add_step("two", [1])
    assert saved.is_saving
    saved.close()


def test_a_chat_is_taken_over_once(tmp_path: Path) -> None:
    abandoned(tmp_path, "one", "two")
    (left,) = found(tmp_path)
    take_over(left, lambda: False)  # not saved elsewhere: it stays
    assert found(tmp_path) == [left]
    take_over(left, lambda: True)
    assert found(tmp_path) == []
    with pytest.raises(InputError):
        take_over(left, lambda: True)
    remove(left)


def test_damaged_files(tmp_path: Path) -> None:
    whole = abandoned(tmp_path, "one", "two", "three")
    data = whole.read_bytes()
    for n_bytes in range(len(data)):  # however much of it reached the disk
        whole.write_bytes(data[:n_bytes])
        left = autosave._read(whole) if b"\n" in data[:n_bytes] else None
        if left is not None:
            said = [message.content for message in left.conversation.messages]
            assert said == ["one", "two", "three"][: len(said)]
    lines = data.splitlines(keepends=True)
    for damage in (b"\0\0\0", b"{}", b'{"tokens": "x", "text": 1}', b'{"role": "user"}', b"\xff\xfe", b"[1]"):
        whole.write_bytes(b"".join([*lines[:-1], damage + b"\n", lines[-1]]))
        (left,) = found(tmp_path)
        assert left.conversation == talk("one", "two")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: bytes(len(data)),
        lambda data: b"not json\n",
        lambda data: data[:20],
        lambda data: b"\xff" + data,
        lambda data: data.replace(b"123", b"1e999"),
        lambda data: data.replace(b"123", b"[" * 100_000 + b"]" * 100_000),
        lambda data: data.replace(b"123", b"9" * 10_000),
        lambda data: data.replace(b"123", b"null"),
        lambda data: data.replace(b'"budgets": []', b'"budgets": [1]'),
        lambda data: data.replace(b'"one"', b'"\\ud800"'),
        lambda data: data.replace(b'"one"', b"1e999"),
        lambda data: data + b" " * autosave.MAX_FILE_BYTES,
    ],
)
def test_a_damaged_file_is_set_aside_and_said_once(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    bad, good = abandoned(tmp_path, "one", "two"), abandoned(tmp_path, "whole")
    data = damage(bad.read_bytes())
    bad.write_bytes(data)
    lines: list[Notification] = []
    for _ in range(2):
        (left,) = unfinished_chats(lambda: tmp_path, Run(lines.append))
        assert left.path == good
    aside = tmp_path / f"{bad.name}.damaged"
    assert [str(aside) in line and is_warning(line) for line in lines] == [True]
    assert aside.read_bytes() == data
    assert not bad.exists()


def test_foreign_files_stay(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"schema": "x"}')
    (tmp_path / "b.jsonl").write_text(json.dumps({"schema": autosave.SCHEMA, "version": 99}) + "\n")
    (tmp_path / "folder.jsonl").mkdir()
    assert found(tmp_path) == []
    assert len(list(tmp_path.glob("*.jsonl"))) == 3


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    paths = [abandoned(tmp_path, str(i)) for i in range(autosave.MAX_KEPT + 3)]
    kept = found(tmp_path)
    assert [left.path for left in kept] == sorted(paths, reverse=True)[: autosave.MAX_KEPT]
    assert len(list(tmp_path.iterdir())) == autosave.MAX_KEPT


def test_a_full_disk_ends_saving_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = chat(tmp_path)
    saved.update(talk("one"), SETTINGS)
    with files_of_at_most(next(tmp_path.iterdir()).stat().st_size + 20):
        saved.add_step("a long text that does not fit", [1])
    assert "File too large" in saved.warning
    assert not saved.is_saving
    saved.add_step("more", [2])
    saved.close(keep=True)
    (left,) = found(tmp_path)
    assert (left.conversation, left.text) == (talk("one"), "")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saved = chat(tmp_path / "file" / "chats")
    saved.update(talk("one"), SETTINGS)
    assert "Not a directory" in saved.warning
    saved.add_step("two", [1])
    saved.close()
    assert found(tmp_path / "file" / "chats") == []


def test_a_step_costs_less_than_a_tenth_of_a_millisecond(tmp_path: Path) -> None:
    saved, times_s = chat(tmp_path), []
    saved.update(talk("a question"), SETTINGS)
    for _ in range(1000):
        start_s = time.perf_counter()
        saved.add_step(" some piece of text", [1234, 5678, 910])
        times_s.append(time.perf_counter() - start_s)
    assert float(np.median(times_s)) < 1e-4


def test_two_processes_start_at_once(tmp_path: Path) -> None:
    """Each of many starts looks at the folder while others make their files: none may be taken for abandoned."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert sum(pool.map(_start_and_look, [tmp_path] * 40)) == 0


def _start_and_look(folder: Path) -> int:
    saved = chat(folder)
    saved.update(talk("one"), SETTINGS)
    n_found = len(found(folder))
    still_there = saved._path is not None and saved._path.exists()
    saved.close()
    return n_found + (not still_there)


def test_no_damage_ends_in_another_error(tmp_path: Path) -> None:
    """Random bytes, cuts and values of other types, anywhere in a file: what is found can be used."""
    rng = random.Random(7)
    values = [b"1e999", b"-1", b"NaN", b"null", b"{}", b"[[]]", b'"\\udead"', b"true", b"9" * 5000, b"[" * 5000, b"0.5"]
    saved = chat(tmp_path)
    saved.update(talk("one", "two", "three"), saved_settings(Settings()))
    saved.add_step("answer", [1, 2])
    saved.update(talk("four"), SETTINGS)
    saved.close(keep=True)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(damaged))
            match rng.randrange(4):
                case 0:
                    damaged[start] = rng.randrange(256)
                case 1:
                    del damaged[start : start + rng.choice((1, 10, 1000))]
                case 2:
                    damaged[start:start] = damaged[: rng.randrange(100)]
                case _:
                    spans = [match.span() for match in re.finditer(rb'"[^"]*"|\d+|\[[^]]*\]', damaged)] or [(0, 0)]
                    start, end = rng.choice(spans)
                    damaged[start:end] = rng.choice(values)
        path.write_bytes(damaged)
        for left in found(tmp_path):
            text = left.conversation.to_json() + left.text + left.origin.model
            text.encode()
            assert all(type(token) in (int, bool) for token in left.tokens)
            restored(left.settings, Settings())
