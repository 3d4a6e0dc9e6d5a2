"""Calibration on a tiny model: what it measures, where it is kept, and what follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge import paths
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import BackendError
from moeedge.llama.context import Context
from moeedge.native.abi import DevicePath
from moeedge.native.cache import ExpertCache
from moeedge.run import Level, Notification, Run, is_warning
from moeedge.scheduler.calibration import (
    Calibration,
    kept_fields,
    measurement_json,
    parse_measurement,
    write_measurement,
)
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.microbench import _timed, fewest_readers
from tests.scheduler.test_manager import Pair, has_note
from tests.support.costs import cost_model
from tests.support.counting import DEVICE, CountingDevice
from tests.support.machine import files_of_at_most
from tests.support.sessions import answered

pytestmark = pytest.mark.usefixtures("cache_folder")


def config(pair: Pair, *, n_ctx: int = 512, gamma: int = 4, **placement: Any) -> EngineConfig:
    how: dict[str, Any] = {"n_ctx": n_ctx, "gamma": gamma, "n_threads": 1, "device": "emulated:threads=1"}
    return EngineConfig(model=pair[0], draft=pair[1], placement=PlacementConfig(cache_ratio=0.5, **placement), **how)


def files() -> list[Path]:
    return sorted((paths.cache_dir() / "calibration").glob("*.json"))


def made(**changes: Any) -> Calibration:
    values: dict[str, Any] = {
        "units": None,
        "step_s": {1: 0.010, 5: 0.020},
        "plain_step_s": {1: 0.012, 5: 0.018},
        "prefill_ts": {"cpu": 100.0, "resident": 101.0},
        "n_tokens": 5,
        "seconds": 1.5,
    }
    return Calibration(**values | changes)


def check_figures(calibration: Calibration) -> None:
    units = calibration.units
    assert units.transfer_expert_s > 0 and units.draft_token_s > 0 and units.block_overhead_s > 0
    assert units.cpu_expert_s[0] == 0 and np.all(np.diff(units.cpu_expert_s) >= 0)
    assert np.all(np.diff(units.r_c) >= 0) and np.all(np.diff(units.r_g) <= 0)
    assert (units.r_c[0], units.r_g[0]) == (0, 1)
    assert set(calibration.step_s) == set(calibration.plain_step_s) == {1, 2, 4, 5, 9, 16}
    assert set(calibration.prefill_ts) == {"cpu", "resident"}
    assert set(calibration.device_path_s) == {DevicePath.PAIRS}, "the emulated device computes in one way"


def test_the_cpu_is_timed_where_all_experts_are_on_the_device(pair: Pair) -> None:
    placement = replace(config(pair).placement, cache_ratio=1.0)
    with Session.open(replace(config(pair), placement=placement)) as session:
        assert session.calibration.units is not None
        check_figures(session.calibration)


def test_measured_once_and_kept(pair: Pair) -> None:
    with Session.open(config(pair, calibrate=False)) as session:
        assert session.calibration is None and session.placement_stats() is not None
        assert has_note(session, "Expert times were not measured", "as asked") and files() == []
    with Session.open(config(pair, n_ctx=64)) as session:
        assert session.calibration is None and session.placement_stats() is not None
        assert has_note(session, "Expert times were not measured", "a context of 64 tokens is too short")
    with Session.open(config(pair)) as session:
        first = session.calibration
        assert not first.kept_from and len(files()) == 1
        decisions = [first.cache_decision(is_on=True, emulated=True, kept=""), *first.path_decisions()]
        assert {decision.sentence() for decision in decisions} <= set(session.info.notes)
        # measuring leaves no trace
        stats = session.placement_stats()
        assert (stats.slots_used, stats.uploads, stats.pairs, stats.blocks, stats.steps) == (0, 0, 0, 0, 0)
        assert session.target.sequences[0].tokens == session.draft_context.sequences[0].tokens == []
        check_figures(first)
    for calibrate in (True, False):
        with Session.open(config(pair, calibrate=calibrate)) as session:
            assert session.calibration == replace(first, units=session.calibration.units)
            assert session.calibration.kept_from == date.today().isoformat()
    (file,) = files()
    file.write_text("{}")  # damaged: measured again
    for changes, n_files in (({}, 1), ({"measure_anew": True}, 1), ({"gamma": 2}, 2)):
        with Session.open(config(pair, **changes)) as session:
            assert not session.calibration.kept_from and len(files()) == n_files


def test_json_keeps_everything() -> None:
    units = cost_model(1e-5, 2e-5, 1e-4, draft_token_s=1e-3, block_overhead_s=1e-5, layer_rest_s=2e-4)
    read = parse_measurement(Calibration, measurement_json(made(units=units)))
    assert replace(read, units=None) == made()
    assert kept_fields(read.units) == kept_fields(units)
    other_version = json.dumps(kept_fields(made()) | {"schema": 0})
    for text in ("", "[]", "{}", "1", "no JSON", json.dumps({"schema": 1, "units": 3}), other_version):
        with pytest.raises(ValueError):
            parse_measurement(Calibration, text)


def test_the_path_of_prompts_must_clearly_win() -> None:
    assert made().prefill_path == "cpu"
    assert made(prefill_ts={"cpu": 100.0, "resident": 90.0, "stream": 110.0}).prefill_path == "stream"
    assert made(prefill_ts={}).prefill_path == "cpu"


def test_whether_it_pays_is_judged_by_a_verification() -> None:
    assert made().speed == pytest.approx(0.9) and not made().pays
    assert made(n_tokens=1).pays
    assert made(step_s={}, plain_step_s={}).speed == 1
    for is_on, emulated, gain, why in (
        *((True, True, 0.9, "emulation"), (True, False, 0.9, "given by the user"), (False, False, 1 / 0.9, "--vram")),
    ):
        decision = made().cache_decision(is_on=is_on, emulated=emulated, kept="given by the user")
        assert (decision.chosen, decision.gain) == ("on" if is_on else "off", pytest.approx(gain))
        assert why in decision.why


def test_paths_are_compared_with_the_fastest_other_one() -> None:
    times_s = {DevicePath.PAIRS: 0.02, DevicePath.COLUMNS: 0.015, DevicePath.AHEAD: 0.01}
    device, prefill = made(device_path_s=times_s).path_decisions()
    assert (device.chosen.split()[0], device.over, device.gain) == ("ahead", "columns", pytest.approx(1.5))
    assert (prefill.chosen.split()[0], prefill.over, prefill.gain) == ("cpu", "resident", pytest.approx(1 / 1.01))
    assert device.basis == prefill.basis == "measured in 1.5 s" and "must be 3% faster" in prefill.why
    for given, gain in ((DevicePath.PAIRS, 0.5), (None, None)):
        device, _ = made(device_path_s=times_s if given is not None else {}).path_decisions(device=given)
        assert (device.chosen.split()[0], device.gain) == ("pairs", gain)
        assert device.basis == ("not compared" if given is None else "given by the user")


def test_streaming_is_compared_over_a_full_graph_and_need_not_be_kept(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "file" / "cache"))  # a folder that cannot be made
    sizes: list[int] = []
    decode = Context.decode

    def remember(self: Context, tokens: Any, **options: Any) -> Any:
        sizes.append(len(tokens))
        return decode(self, tokens, **options)

    monkeypatch.setattr(Context, "decode", remember)
    received: list[Notification] = []
    settings = replace(config(pair, prefill="stream"), n_ubatch=300)
    with Session.open(settings, run=Run(received.append)) as session:
        assert sorted(session.calibration.prefill_ts) == ["cpu", "resident", "stream"]
        assert not session.calibration.kept
        (note,) = [note for note in session.info.notes if "cannot be saved" in note]
        assert is_warning(note)  # so that it is shown at the start of a chat
    assert [notification.level for notification in received] == [Level.INFO]
    measured = [i for i, n in enumerate(sizes) if n == 300]
    assert len(measured) >= 3
    assert all(sizes[i - 1] == 1 for i in measured)  # so that llama.cpp plans anew, for another path


def test_a_full_disk_leaves_no_file(cache_folder: Path) -> None:
    with files_of_at_most(20), pytest.raises(OSError):
        write_measurement(cache_folder / "calibration" / "a.json", made())
    assert list((cache_folder / "calibration").iterdir()) == []


def test_blocks_that_a_gpu_had_finished_unseen_say_nothing_of_it() -> None:
    records = np.zeros(40, dtype=[("wait_ns", np.int64), ("device_ns", np.int64)])
    records["device_ns"] = 1_000_000  # as long as the CPU took
    assert len(_timed(records)) == 40  # there is nothing better
    records["device_ns"][::3] = records["wait_ns"][::3] = 200_000
    assert (_timed(records)["device_ns"] == 200_000).all()


def test_more_readers_only_where_they_are_clearly_faster() -> None:
    seconds = [(10.0,), (10.0, 9.5, 9.2), (10.0, 6.0, 5.8), (10.0, 9.5, 7.0), (10.0, 0.0, 0.0)]
    assert [fewest_readers(dict(enumerate(each, 1))) for each in seconds] == [1, 1, 2, 3, 1]


def test_a_gpus_ways_of_computing_are_compared(pair: Pair, counting: CountingDevice) -> None:
    settings = replace(config(pair), device=DEVICE)
    with Session.open(settings) as session:
        found = session.calibration
        assert set(found.device_path_s) == set(DevicePath)
        assert found.device_path_s[found.device_path] == min(found.device_path_s.values()) == found.step_s[5]
    with Session.open(settings) as session:
        assert session.calibration.kept_from
        assert session.calibration.device_path_s == found.device_path_s
    placement = replace(settings.placement, device_path=DevicePath.COLUMNS)
    with Session.open(replace(settings, placement=placement)) as session:
        assert set(session.calibration.device_path_s) == {DevicePath.COLUMNS}


def answer(session: Session) -> list[int]:
    return answered(session, range(40), 12, ignore_eos=False).tokens


def check_postponed(session: Session, expected: list[int]) -> Calibration | None:
    """Nothing is measured before the first answer nor where that is cancelled, then once; figures and answers stay."""
    assert session.calibration is None and files() == []
    assert answer(session) == expected
    before = session.placement_stats()
    session.measure_postponed(Run(cancelled=lambda: True))
    assert session.calibration is None and files() == [], "cancelled: left for later"
    session.measure_postponed(Run())
    first = session.calibration
    assert not first.kept_from and len(files()) == 1
    if session.placement is not None:
        counted = session.placement_stats() - before
        assert (counted.uploads, counted.pairs, counted.blocks, counted.steps) == (0, 0, 0, 0)
    assert session.target.sequences[0].tokens == []
    assert answer(session) == expected
    session.measure_postponed(Run(cancelled=lambda: pytest.fail("measured again")))
    return first


def test_what_is_postponed_is_measured_after_an_answer(pair: Pair) -> None:
    with Session.open(config(pair, calibrate=False)) as session:
        expected = answer(session)
    with Session.open(config(pair, calibrate_later=True)) as session:
        first = check_postponed(session, expected)
    with Session.open(config(pair, calibrate_later=True)) as session:
        assert session.calibration == replace(first, units=session.calibration.units)
        assert session.calibration.kept_from


def postponed(pair: Pair) -> EngineConfig:
    """A GPU with a cache for half of the experts, as the chat opens it."""
    return replace(config(pair, calibrate_later=True), device=DEVICE, n_gpu_layers=0)


@pytest.mark.parametrize("pays", [True, False])
def test_a_gpu_is_measured_after_the_first_answer(
    pair: Pair, counting: CountingDevice, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """The first answer does not wait for it; a cache that does not pay goes off after it, and answers stay."""
    with Session.open(replace(config(pair), device="none")) as session:
        expected = answer(session)
    monkeypatch.setattr(Calibration, "speed", property(lambda self: 1.5 if pays else 0.5))
    # a size that is not the user's choice: the tiny model would fit the device as a whole
    monkeypatch.setattr(PlacementConfig, "has_size", property(lambda self: False))
    said: list[Notification] = []
    with Session.open(postponed(pair), run=Run(said.append)) as session:
        assert session.placement is not None and not said, "nothing is measured at the start"
        assert has_note(session, "measured after the first answer")
        session.measure_postponed(Run(cancelled=lambda: True))
        assert answer(session) == expected
        check_postponed(session, expected)
        assert (session.placement is not None) == pays == (session.info.device != "none")
        assert any(is_warning(note) for note in said) != pays
    with Session.open(postponed(pair)) as session:  # what is known is used at once
        assert session.calibration.kept_from
        assert (session.placement is not None) == pays
        assert answer(session) == expected


def test_a_gpu_that_is_lost_is_not_measured(pair: Pair, counting: CountingDevice) -> None:
    with Session.open(postponed(pair)) as session:
        expected = answer(session)
        session.placement.fall_back(context_usable=True)
        session.measure_postponed(Run())
        assert session.calibration is None and files() == []
        assert answer(session) == expected


def test_a_device_that_is_lost_while_it_is_measured_ends_nothing(
    pair: Pair, counting: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker that dies; an error of a device that is not lost is the caller's."""

    def fail(run: Run) -> tuple[Calibration, bool]:
        raise BackendError("The device is lost.")

    said: list[Notification] = []
    with Session.open(postponed(pair), run=Run(said.append)) as session:
        expected = answer(session)
        session.placement.postponed = fail
        with pytest.raises(BackendError):
            session.measure_postponed(Run())
        monkeypatch.setattr(ExpertCache, "trouble", lambda cache: (True, 0))
        session.measure_postponed(Run())
        assert session.placement.first.lost and session.calibration is None
        assert sum(map(is_warning, said)) == 1
        session.measure_postponed(Run())
        assert answer(session) == expected
