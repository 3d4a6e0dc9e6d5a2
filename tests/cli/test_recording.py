"""The recorded first minutes: the recorder works, and the recording in docs shows today's commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from docs import record_start
from docs.record_start import Command

DOCS = Path(record_start.__file__).parent


def shown(cast: Path) -> str:
    header, *events = [json.loads(line) for line in cast.read_text(encoding="utf-8").splitlines()]
    assert header["version"] == 2 and header["width"] == record_start.COLUMNS
    times_s = [event[0] for event in events]
    assert times_s == sorted(times_s)
    return "".join(event[2] for event in events)


@pytest.mark.slow
def test_what_is_typed_and_answered_is_recorded(tmp_path: Path) -> None:
    commands = (Command("moeedge --version"), Command("moeedge chat -n 4 -st", (("Hello", ""),)))
    events = record_start.record(commands)
    record_start.write_cast(events, tmp_path / "a.cast")
    record_start.write_svg(events, tmp_path / "a.svg")
    text = shown(tmp_path / "a.cast")
    assert "$ moeedge --version" in text and ">>> " in text and "Traceback" not in text
    strip = ElementTree.parse(tmp_path / "a.svg").getroot()
    rows = ["".join(row.itertext()) for row in strip.iter("{http://www.w3.org/2000/svg}text")]
    assert any(row.startswith("$ moeedge chat") for row in rows)


def test_the_recording_shows_every_command() -> None:
    text = shown(DOCS / "start.cast")
    assert "Traceback" not in text and "error:" not in text
    for command in record_start.COMMANDS:
        assert command.line in text
        assert all(message in text for message, _ in command.messages)
