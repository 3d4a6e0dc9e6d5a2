"""Small parts between policy and store, on made-up tables: eviction order in RAM, prompts' frames, predictions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from moeedge.native.abi import Phase
from moeedge.native.sensor import Frame
from moeedge.scheduler.native_io import RoutingReader
from moeedge.scheduler.prediction import PredictionAccuracy
from moeedge.scheduler.ram_tier import RamStore


def test_experts_that_the_device_holds_go_first_from_ram() -> None:
    seen: list[Any] = []
    score = np.array([[0.5, 2.0, 1.0]])
    store = RamStore(SimpleNamespace(set_utilities=seen.append, residency=None), lambda: SimpleNamespace(score=score))  # type: ignore
    store.push(None)  # type: ignore[arg-type]
    store.on_device = np.array([[False, True, False]])
    store.push(None)  # type: ignore[arg-type]
    assert seen[0].tolist() == score.tolist()
    assert seen[1].argmin() == 1 and seen[1][0, [0, 2]].tolist() == [0.5, 1.0]


def test_predictions_are_counted_from_nothing() -> None:
    accuracy = PredictionAccuracy()
    assert accuracy.share is None
    accuracy.add(np.array([[[0, 1], [2, 3]]], dtype=np.int32), np.array([[[1, 5], [6, 7]]], dtype=np.int32))
    assert (accuracy.n_predicted, accuracy.n_correct, accuracy.share) == (4, 1, 0.25)


def test_frames_of_an_interrupted_prompt_belong_to_no_other() -> None:
    def frame(serial: int, expert: int, n: int) -> Frame:
        ids = np.full((1, n, 1), expert, dtype=np.int32)
        weights = np.ones_like(ids, dtype=np.float32)
        return Frame(serial, int(Phase.PREFILL), n, np.array([n], dtype=np.int32), ids, weights)

    frames = [frame(1, 3, 2), frame(2, 3, 8), frame(3, 0, 3), frame(4, 1, 2)]  # 3 and 4 are the prompt's last graphs
    sensor: Any = SimpleNamespace(frames_after=lambda serial: [each for each in frames if each.serial > serial])
    reader = RoutingReader.__new__(RoutingReader)
    reader._sensor, reader._scores, reader._last_serial = sensor, None, 0
    pieces = reader.prefill(np.array([[3, 2, 2, 0]], dtype=np.uint32), [5, 6, 7, 8, 9, 10, 11])
    assert [piece.n_tokens for piece in pieces] == [2, 3, 2]
    assert [piece.counts.tolist() for piece in pieces] == [[[0, 0, 2, 0]], [[3, 0, 0, 0]], [[0, 2, 0, 0]]]
