"""A model that does not fit the memory: modes are measured one after the other, each with the memory to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench import arms as in_turn
from moeedge.bench.config import BenchPlan
from moeedge.engine.session import Session
from moeedge.scheduler.config import PlacementConfig
from tests.bench.recording import make_plan, run, write_conversations
from tests.support.commands import refused


@pytest.fixture(autouse=True)
def one_session_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Session] = []
    open_alone = in_turn.ArmsInTurn.open_alone

    @contextmanager
    def checked(self: in_turn.ArmsInTurn, mode: in_turn.BenchMode) -> Iterator[in_turn.BenchArm]:
        assert not opened
        with open_alone(self, mode) as arm:
            opened.append(arm.session)
            yield arm
        opened.clear()

    monkeypatch.setattr(in_turn.ArmsInTurn, "open_alone", checked)


def _in_ram(plan: BenchPlan) -> BenchPlan:
    placement = PlacementConfig(calibrate=False, policy="lfu")
    return replace(plan, base=replace(plan.base, device="none", ram=200_000, placement=placement))


def test_one_mode_after_the_other(
    tmp_path: Path, tiny_moe: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "cache"))
    plan = make_plan(
        tiny_moe,
        tiny_draft,
        modes="moeedge,stock-ar,stock-ncmoe,moeedge-ar",
        dataset=write_conversations(tmp_path),
        n_prompt=8,
        n_gen=17,
    )
    rows, recorder = run(_in_ram(plan))
    assert recorder.notes[0] == in_turn.NOTE and any("stock-ncmoe" in note for note in recorder.notes)
    assert [row.mode for row in rows[:3]] == ["stock-ar", "moeedge", "moeedge-ar"]
    assert len(recorder.samples) == recorder.total
    assert {sample.repetition for sample in recorder.samples} == {0, 1}
    for row in rows:
        ours = row.mode != "stock-ar"
        assert (row.setup.device == "RAM") == ours
        assert (row.cache.wait_share is not None) == (ours and row.tg is not None)
        assert row.ratio is not None or row.ratio_pp is not None
        assert len(row.samples) == {"pp8": 2, "tg17": 4}.get(row.test, 6)
        if row.output is not None:
            assert row.output.passed and row.output.compared == 2
    assert not list((tmp_path / "cache").rglob("*-activations-*")), "runs do not warm each other"


def test_several_texts_are_refused(tiny_moe: Path) -> None:
    refused("bench", "-m", str(tiny_moe), "-dev", "none", "--ram", "1MiB", "--parallel", "2")
