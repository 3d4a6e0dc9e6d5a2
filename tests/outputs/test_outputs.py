"""The program behaves as recorded, but for what changes.py lists."""

from __future__ import annotations

import pytest

from tests.outputs import compare
from tests.outputs.compare import PARTS, RECORDED, Comparison, compute, load


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] if part.endswith("-slow") else []) for part in PARTS]
)
def test_behaviour_is_that_of_the_record(part: str) -> None:
    old = load(RECORDED, part)
    assert not list(Comparison().differences(part, old, compute(part, old)))[:20]


def test_differences_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "rounds_as_recorded", lambda: True)

    def n_found(part: str, new: dict[str, object]) -> int:
        old = {"a": {"decode_s": 1.0, "n": 1, "rows": [{"x": 1}]}}
        return len(list(Comparison().differences(part, old, {"a": {**old["a"], **new}})))

    assert n_found("commands", {}) == n_found("commands", {"decode_s": 2.0}) == 0
    assert n_found("commands", {"decode_s": "2"}) == n_found("screens", {"decode_s": 2.0}) == 1
    assert n_found("commands", {"n": 2}) == n_found("commands", {"more": 1}) == 1
    assert n_found("commands", {"rows": []}) == 2
    monkeypatch.setattr(compare, "rounds_as_recorded", lambda: False)
    assert n_found("commands", {"n": 2}) == 0 and n_found("commands", {"n": "2"}) == n_found("screens", {"n": 2}) == 1
    old, new = {"a": {"0 x": 1, "1 y": 2}, "b": {"0 x": 1}}, {"a": {"0 x": 1, "1 z": 3}, "c": {"0 x": 1}}
    assert not list(Comparison().differences("functions", old, new))
    assert len(list(Comparison().differences("functions", old, {"a": {"0 x": 2}}))) == 1
