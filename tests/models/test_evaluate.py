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


def changed(name: str, **figures: object) -> Result:
    """GOOD with one domain's figures changed."""
    domain = replace(GOOD.domains[name], **figures)  # type: ignore[arg-type]
    return replace(GOOD, domains=GOOD.domains | {name: domain})


def test_a_good_pair_misses_none_and_is_read_back(tmp_path: Path) -> None:
    assert [bar.name for bar in bars(GOOD) if not bar.kept] == []
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(asdict(GOOD)))
    assert read(path) == GOOD


@pytest.mark.parametrize(
    ("result", "missed"),
    [
        (changed("sums", right=0.79), ["answers right, mean"]),
        (replace(GOOD, domains={name: replace(one, right=0.5) for name, one in GOOD.domains.items()}),
         ["answers right, mean", "answers right, worst domain (sums)"]),
        (changed("talk", right=0.59), ["answers right, mean", "answers right, worst domain (talk)"]),
        (changed("sums", accepted=470), ["acceptance rate"]),
        (replace(GOOD, overlap=0.24), ["expert overlap"]),
        (replace(GOOD, overlap=0.56), ["expert overlap"]),
        (replace(GOOD, unique_of_4=0.91), ["unique experts"]),
        (changed("talk", covers={"sums": 0.4, "talk": 0.4}), ["a domain's hottest"]),
        (replace(GOOD, file_bytes=MAX_FILE_BYTES + 1), ["size of the two files"]),
        (replace(GOOD, who="I am a real model."), ["tells the truth"]),
    ],
)  # fmt: skip
def test_what_falls_short_is_missed_and_nothing_else(
    result: Result, missed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [bar.name for bar in bars(result) if not bar.kept]
    assert len(found) == len(missed) and all(name.startswith(begin) for name, begin in zip(found, missed, strict=True))
    assert table(result).count("**no**") == len(missed)

    def measured(*_: object) -> Result:
        return result

    monkeypatch.setattr(evaluate, "measure", measured)
    monkeypatch.setattr(sys, "argv", ["evaluate"])
    with pytest.raises(SystemExit) as ended:
        evaluate.main()
    assert ended.value.code == 1
    assert f"missed: {'; '.join(found)}" in capsys.readouterr().err
