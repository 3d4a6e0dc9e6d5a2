"""Replay gives the figures of 0.6.0, and of its bounds those of 0.11.0."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.outputs.compare import COMMANDS, differences, load, run

RECORDED = Path(__file__).parent / "recorded"
EXACT = ["replay-gptoss", "replay-predicted", "replay-gemma", "trace-info"]
PROGRAM = [sys.executable, "-m", "moeedge"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_the_same_output(name: str) -> None:
    data = os.environ.get("MOEEDGE_DATA")
    if not data:
        pytest.skip("needs MOEEDGE_DATA")
    arguments = [text.format(data=data, scratch="") for text in COMMANDS[name]]
    assert not list(differences(load(RECORDED, name), json.loads(run(PROGRAM, [*arguments, "-o", "json"])), exact=True))


def test_differences_are_found() -> None:
    old = {"tail": "optimistic", "n": 1, "decode_s": 1.0, "rows": [{"a": 1}]}
    new = {"rejected_token_model": "optimistic", "n": 1, "decode_s": 2.0, "rows": [{"a": 1}]}
    assert not list(differences(old, new, exact=False))
    assert len(list(differences(old, new, exact=True))) == 1
    assert len(list(differences(old, new | {"n": 2}, exact=False))) == 1
    assert len(list(differences(old, new | {"rows": []}, exact=False))) == 1
    assert len(list(differences(old, new | {"more": 1}, exact=False))) == 1
