"""Activations that are kept between runs: round trip, damaged files, what is loaded first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moeedge.policies.base import CacheShape, Observation
from moeedge.scheduler.ram_tier import KeptActivations

SHAPE = (3, 4)
ONES = np.ones(SHAPE)


@pytest.fixture
def model(tmp_path: Path, cache_folder: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 300)
    return path


def observed(counts: np.ndarray, n_tokens: int = 1) -> Observation:
    return Observation(counts=counts.astype(np.uint32), n_tokens=n_tokens, n_accepted=0)


def kept(model: Path, counts: np.ndarray, n_tokens: int = 1) -> KeptActivations:
    """Of a run that used these experts."""
    run = KeptActivations.open(model, *SHAPE)
    run.add(observed(counts, n_tokens))
    run.save()
    return run


def kept_file(cache_folder: Path) -> Path:
    return next(cache_folder.rglob("*activations*.json"))


def test_the_next_run_begins_with_what_was_used(model: Path) -> None:
    first = KeptActivations.open(model, *SHAPE)
    assert first.n_tokens == 0
    assert first.most_used(CacheShape.uniform(*SHAPE, 4)).shape == (0, 2)
    counts = np.zeros(SHAPE)
    counts[2, 1], counts[0, 3], counts[1, 0] = 9, 5, 1
    kept(model, counts, 10)
    second = KeptActivations.open(model, *SHAPE)
    assert second.most_used(CacheShape.uniform(*SHAPE, 2)).tolist() == [[2, 1], [0, 3]]
    assert second.most_used(CacheShape.uniform(*SHAPE, 12)).tolist() == [[2, 1], [0, 3], [1, 0]]
    second.add(observed(np.roll(counts, 1), 10))
    assert 10 < second.n_tokens < 20, "earlier runs weigh less"


def test_what_earlier_runs_have_left(model: Path, cache_folder: Path) -> None:
    first = KeptActivations.open(model, *SHAPE)
    assert first.earlier_runs is None
    first.save()
    assert not list(cache_folder.rglob("*.json")), "nothing was used"
    kept(model, ONES, 10)
    earlier = KeptActivations.open(model, *SHAPE).earlier_runs
    file = kept_file(cache_folder)
    assert (earlier.n_tokens, earlier.n_first, Path(earlier.file)) == (10, 0, file)
    assert earlier.kept_at_s == file.stat().st_mtime
    before = file.read_text()
    KeptActivations.open(model, *SHAPE).save()
    assert file.read_text() == before, "a run that uses nothing leaves the counts"
    model.write_bytes(b"x" + model.read_bytes()[1:])
    assert KeptActivations.open(model, *SHAPE).n_tokens == 0, "another model has its own"


def test_each_group_fills_its_own_slots(model: Path) -> None:
    shape = CacheShape(3, 4, np.array([0, 1, 0], dtype=np.int32), np.array([2, 1], dtype=np.int32))
    assert kept(model, np.arange(12).reshape(SHAPE)).most_used(shape).tolist() == [[2, 3], [2, 2], [1, 3]]


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]"),
        json.dumps({"schema": 0, "n_tokens": 1, "counts": ONES.tolist()}),
        json.dumps({"schema": 1, "n_tokens": 1, "counts": [[1]]}),
        json.dumps({"schema": 1, "n_tokens": 1, "counts": (-ONES).tolist()}),
        json.dumps({"schema": 1, "n_tokens": "x", "counts": ONES.tolist()}),
    ],
)
def test_a_damaged_file_is_no_history(model: Path, cache_folder: Path, damage: str) -> None:
    kept(model, ONES)
    kept_file(cache_folder).write_text(damage, encoding="utf-8")
    assert KeptActivations.open(model, *SHAPE).n_tokens == 0


def test_a_disk_that_is_full(model: Path, cache_folder: Path) -> None:
    run = KeptActivations.open(model, *SHAPE)
    run.add(observed(ONES))
    (cache_folder / "calibration").write_text("a file where a folder has to be", encoding="utf-8")
    with pytest.raises(OSError, match="calibration"):
        run.save()
