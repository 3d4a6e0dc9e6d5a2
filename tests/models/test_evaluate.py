"""The bars of the pair: what misses one is told, and `python -m models.evaluate` fails."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from models import evaluate
from models.evaluate import MAX_FILE_BYTES, bars, read, table
from models.measure import DomainResult, Result

WHO = "I am a toy model trained on synthetic text; use -m FILE for a real one."
GOOD = Result(
    gamma=8,
    file_bytes=25_000_000,
    who=WHO,
    overlap=0.4,
    unique_of_4=0.7,
    domains={
        "sums": DomainResult(100, 0.9, 1.0, 800, 720, 100, 820, {"sums": 0.5, "talk": 0.2}),
        "talk": DomainResult(100, 0.8, 1.0, 800, 640, 100, 740, {"sums": 0.1, "talk": 0.4}),
    },
)


def test_a_good_pair_misses_none_and_is_read_back(tmp_path: Path) -> None:
    assert [bar.name for bar in bars(GOOD) if not bar.kept] == []
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(asdict(GOOD)))
    assert read(path) == GOOD


def test_every_figure_that_falls_short_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poor = replace(GOOD.domains["talk"], right=0.59, accepted=390, covers={"sums": 0.4, "talk": 0.4})
    domains = GOOD.domains | {"talk": poor}
    bad = replace(
        GOOD, domains=domains, overlap=0.24, unique_of_4=0.91, file_bytes=MAX_FILE_BYTES + 1, who="I am a real model."
    )
    assert not any(bar.kept for bar in bars(bad)) and table(bad).count("**no**") == len(bars(bad)) == 8
    too_alike = replace(GOOD, overlap=0.56)
    assert [bar.name for bar in bars(too_alike) if not bar.kept] == ["expert overlap of adjacent tokens"]
    monkeypatch.setattr(evaluate, "measure", lambda *_: bad)
    monkeypatch.setattr(sys, "argv", ["evaluate"])
    with pytest.raises(SystemExit) as ended:
        evaluate.main()
    assert ended.value.code == 1
    assert f"missed: {'; '.join(bar.name for bar in bars(bad))}" in capsys.readouterr().err
