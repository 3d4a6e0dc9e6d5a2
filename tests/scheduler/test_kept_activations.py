"""Activations that are kept between runs: round trip, damaged files, what is loaded first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moeedge.policies.base import CacheShape, Observation
from moeedge.scheduler.kept_activations import KeptActivations

SHAPE = (3, 4)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 300)
    return path


def observed(counts: np.ndarray, n_tokens: int = 1) -> Observation:
    return Observation(counts=counts.astype(np.uint32), n_tokens=n_tokens, n_accepted=0)


def kept_file(tmp_path: Path) -> Path:
    return next((tmp_path / "cache").rglob("*activations*.json"))


def test_the_next_run_begins_with_what_was_used(model: Path) -> None:
    first = KeptActivations.open(model, *SHAPE)
    assert first.n_tokens == 0
    assert first.most_used(CacheShape.uniform(*SHAPE, 4)).shape == (0, 2)
    counts = np.zeros(SHAPE)
    counts[2, 1], counts[0, 3], counts[1, 0] = 9, 5, 1
    first.add(observed(counts, 10))
    first.save()
    second = KeptActivations.open(model, *SHAPE)
    assert second.most_used(CacheShape.uniform(*SHAPE, 2)).tolist() == [[2, 1], [0, 3]]
    assert second.most_used(CacheShape.uniform(*SHAPE, 12)).tolist() == [[2, 1], [0, 3], [1, 0]]
    second.add(observed(np.roll(counts, 1), 10))
    assert 10 < second.n_tokens < 20, "earlier runs weigh less"


def test_what_earlier_runs_have_left(model: Path, tmp_path: Path) -> None:
    first = KeptActivations.open(model, *SHAPE)
    assert first.earlier_runs is None
    first.save()
    assert not list((tmp_path / "cache").rglob("*.json")), "nothing was used"
    first.add(observed(np.ones(SHAPE), 10))
    first.save()
    earlier = KeptActivations.open(model, *SHAPE).earlier_runs
    assert earlier is not None
    assert (earlier.n_tokens, earlier.n_first, Path(earlier.file)) == (10, 0, kept_file(tmp_path))
    assert earlier.kept_at_s == kept_file(tmp_path).stat().st_mtime


def test_a_run_that_uses_nothing_leaves_the_counts(model: Path, tmp_path: Path) -> None:
    first = KeptActivations.open(model, *SHAPE)
    first.add(observed(np.ones(SHAPE), 10))
    first.save()
    before = kept_file(tmp_path).read_text()
    KeptActivations.open(model, *SHAPE).save()
    assert kept_file(tmp_path).read_text() == before


def test_each_group_fills_its_own_slots(model: Path) -> None:
    kept = KeptActivations.open(model, *SHAPE)
    kept.add(observed(np.arange(12).reshape(SHAPE)))
    shape = CacheShape(3, 4, np.array([0, 1, 0], dtype=np.int32), np.array([2, 1], dtype=np.int32))
    assert kept.most_used(shape).tolist() == [[2, 3], [2, 2], [1, 3]]


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        json.dumps({"schema": 0, "n_tokens": 1, "counts": np.ones(SHAPE).tolist()}),
        json.dumps({"schema": 1, "n_tokens": 1, "counts": [[1]]}),
        json.dumps({"schema": 1, "n_tokens": 1, "counts": (-np.ones(SHAPE)).tolist()}),
        json.dumps({"schema": 1, "n_tokens": "x", "counts": np.ones(SHAPE).tolist()}),
    ],
)
def test_a_damaged_file_is_no_history(model: Path, tmp_path: Path, damage: str) -> None:
    kept = KeptActivations.open(model, *SHAPE)
    kept.add(observed(np.ones(SHAPE)))
    kept.save()
    kept_file(tmp_path).write_text(damage, encoding="utf-8")
    assert KeptActivations.open(model, *SHAPE).n_tokens == 0


def test_another_model_has_its_own(model: Path) -> None:
    kept = KeptActivations.open(model, *SHAPE)
    kept.add(observed(np.ones(SHAPE)))
    kept.save()
    model.write_bytes(b"x" + model.read_bytes()[1:])
    assert KeptActivations.open(model, *SHAPE).n_tokens == 0


def test_a_disk_that_is_full(model: Path, tmp_path: Path) -> None:
    kept = KeptActivations.open(model, *SHAPE)
    kept.add(observed(np.ones(SHAPE)))
    (tmp_path / "cache" / "calibration").write_text("a file where a folder has to be", encoding="utf-8")
    with pytest.raises(OSError, match="calibration"):
        kept.save()
