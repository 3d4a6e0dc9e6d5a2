"""Calibration on a tiny model: what it measures, where it is kept, and what follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge import paths
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama.context import Context
from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.policies.cost_model import CostModel
from moeedge.run import Level, Notification, Run, is_warning
from moeedge.scheduler.calibration import Calibration
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.measurement import kept_fields, measurement_json, parse_measurement, write_measurement
from moeedge.scheduler.microbench import _timed, fewest_readers
from tests.conftest import TinyFactory
from tests.support.counting import DEVICE, CountingDevice


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(tiny: TinyFactory, *, n_ctx: int = 512, gamma: int = 4, **placement: Any) -> EngineConfig:
    return EngineConfig(
        model=tiny("qwen3moe"),
        draft=tiny("qwen3"),
        gamma=gamma,
        n_ctx=n_ctx,
        n_threads=1,
        device="emulated:threads=1",
        placement=PlacementConfig(cache_ratio=0.5, **placement),
    )


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


def test_measured_once_and_kept(tiny: TinyFactory) -> None:
    with Session.open(config(tiny)) as session:
        first = session.calibration
        assert first is not None and not first.from_file
        assert any(note.startswith("Measured in ") and "emulation" in note for note in session.info.notes)
        # measuring leaves no trace
        stats = session.placement_stats()
        assert stats is not None
        assert (stats.slots_used, stats.uploads, stats.pairs, stats.blocks, stats.steps) == (0, 0, 0, 0, 0)
        assert session.target.sequences[0].tokens == []
        assert session.draft_context is not None and session.draft_context.sequences[0].tokens == []
    assert len(files()) == 1
    with Session.open(config(tiny)) as session:
        assert session.calibration == replace(first, from_file=True, units=session.calibration.units)
        assert any(note.startswith("Measured before") for note in session.info.notes)


def test_what_is_measured(tiny: TinyFactory) -> None:
    with Session.open(config(tiny)) as session:
        calibration = session.calibration
    assert calibration is not None
    units = calibration.units
    assert units is not None
    assert units.transfer_expert_s > 0 and units.draft_token_s > 0 and units.block_overhead_s > 0
    assert units.cpu_expert_s[0] == 0 and np.all(np.diff(units.cpu_expert_s) >= 0)
    assert np.all(np.diff(units.r_c) >= 0) and np.all(np.diff(units.r_g) <= 0)
    assert (units.r_c[0], units.r_g[0]) == (0, 1)
    assert set(calibration.step_s) == set(calibration.plain_step_s) == {1, 2, 4, 5, 9, 16}
    assert set(calibration.prefill_ts) == {"cpu", "resident"}


def test_another_cache_is_measured_anew(tiny: TinyFactory) -> None:
    for gamma in (4, 2):
        with Session.open(config(tiny, gamma=gamma)):
            pass
    assert len(files()) == 2


def test_measure_anew_replaces_what_is_kept(tiny: TinyFactory) -> None:
    for anew in (False, True):
        with Session.open(config(tiny, measure_anew=anew)) as session:
            assert session.calibration is not None and not session.calibration.from_file
    assert len(files()) == 1


def test_without_calibration_nothing_is_measured(tiny: TinyFactory) -> None:
    with Session.open(config(tiny, calibrate=False)) as session:
        assert session.calibration is None and session.placement_stats() is not None
    assert files() == []
    with Session.open(config(tiny)):
        pass
    with Session.open(config(tiny, calibrate=False)) as session:
        assert session.calibration is not None  # measured before


def test_a_small_context_leaves_no_room(tiny: TinyFactory) -> None:
    with Session.open(config(tiny, n_ctx=64)) as session:
        assert session.calibration is None and session.placement_stats() is not None


def test_a_damaged_file_is_measured_again(tiny: TinyFactory) -> None:
    with Session.open(config(tiny)):
        pass
    (file,) = files()
    for text in ("", "[]", "{}", json.dumps({"schema": 1, "units": 3})):
        file.write_text(text)
        with Session.open(config(tiny)) as session:
            assert session.calibration is not None and not session.calibration.from_file


def test_json_keeps_everything() -> None:
    units = CostModel(
        cpu_expert_s=np.array([0, 1e-5, 2e-5]),
        device_expert_s=np.array([0, 2e-5, 3e-5]),
        transfer_expert_s=1e-4,
        draft_token_s=1e-3,
        block_overhead_s=1e-5,
        r_c=np.array([0, 0.5, 1]),
        r_g=np.array([1, 0.5, 0]),
        layer_rest_s=2e-4,
    )
    read = parse_measurement(Calibration, measurement_json(made(units=units)))
    assert replace(read, units=None) == made(from_file=True)
    assert read.units is not None and kept_fields(read.units) == kept_fields(units)


def test_the_path_of_prompts_must_clearly_win() -> None:
    assert made().prefill_path == "cpu"
    assert made(prefill_ts={"cpu": 100.0, "resident": 90.0, "stream": 110.0}).prefill_path == "stream"
    assert made(prefill_ts={}).prefill_path == "cpu"


def test_whether_it_pays_is_judged_by_a_verification() -> None:
    assert made().speed == pytest.approx(0.9) and not made().pays
    assert made(n_tokens=1).pays
    assert made(step_s={}, plain_step_s={}).speed == 1


def test_the_line_says_that_it_is_emulation() -> None:
    said = made().sentence(emulated=True, prefill=PrefillPath.CPU)
    assert "emulation on the CPU's own cores: 0.90 times the speed of plain decoding" in said
    assert "for prompts the CPU computes" in said
    assert "emulation" not in made().sentence(emulated=False, prefill=PrefillPath.STREAM)


def test_streaming_is_compared_over_a_full_graph(tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = Context.decode

    def remember(self: Context, tokens: Any, **options: Any) -> Any:
        sizes.append(len(tokens))
        return decode(self, tokens, **options)

    monkeypatch.setattr(Context, "decode", remember)
    settings = replace(config(tiny, prefill="stream"), n_ubatch=300)
    with Session.open(settings) as session:
        assert session.calibration is not None
        assert sorted(session.calibration.prefill_ts) == ["cpu", "resident", "stream"]
    measured = [i for i, n in enumerate(sizes) if n == 300]
    assert len(measured) >= 3
    assert all(sizes[i - 1] == 1 for i in measured)  # so that llama.cpp plans anew, for another path


def test_a_cache_folder_that_cannot_be_made(tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "file" / "cache"))
    received: list[Notification] = []
    with Session.open(config(tiny), run=Run(received.append)) as session:
        assert session.calibration is not None and not session.calibration.kept
        (note,) = [note for note in session.info.notes if "the result cannot be saved" in note]
        assert is_warning(note)  # so that it is shown at the start of a chat
    assert [notification.level for notification in received] == [Level.INFO]


def test_a_full_disk_leaves_no_file(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError):
        write_measurement(cache_folder / "calibration" / "a.json", made())
    assert list((cache_folder / "calibration").iterdir()) == []


def test_blocks_that_a_gpu_had_finished_unseen_say_nothing_of_it() -> None:
    records = np.zeros(40, dtype=[("wait_ns", np.int64), ("device_ns", np.int64)])
    records["device_ns"] = 1_000_000  # as long as the CPU took
    assert len(_timed(records)) == 40  # there is nothing better
    records["device_ns"][::3] = records["wait_ns"][::3] = 200_000
    assert (_timed(records)["device_ns"] == 200_000).all()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 10.0}, 1),
        ({1: 10.0, 2: 9.5, 3: 9.2}, 1),
        ({1: 10.0, 2: 6.0, 3: 5.8}, 2),
        ({1: 10.0, 2: 9.5, 3: 7.0}, 3),
        ({1: 10.0, 2: 0.0, 3: 0.0}, 1),
    ],
)
def test_more_readers_only_where_they_are_clearly_faster(seconds: dict[int, float], expected: int) -> None:
    assert fewest_readers(seconds) == expected


def test_a_gpus_ways_of_computing_are_compared(tiny: TinyFactory, counting: CountingDevice) -> None:
    settings = replace(config(tiny), device=DEVICE)
    with Session.open(settings) as session:
        found = session.calibration
        assert found is not None and set(found.device_path_s) == set(DevicePath)
        assert found.device_path_s[found.device_path] == min(found.device_path_s.values()) == found.step_s[5]
    with Session.open(settings) as session:
        assert session.calibration is not None and session.calibration.from_file
        assert session.calibration.device_path_s == found.device_path_s
    placement = replace(settings.placement, device_path=DevicePath.COLUMNS)
    with Session.open(replace(settings, placement=placement)) as session:
        assert session.calibration is not None and set(session.calibration.device_path_s) == {DevicePath.COLUMNS}
    with Session.open(config(tiny)) as session:  # the emulated device computes in one way
        assert session.calibration is not None and set(session.calibration.device_path_s) == {DevicePath.PAIRS}


def answer(session: Session) -> list[int]:
    generation = session.generate(list(range(40)), n_predict=12, sampling=SamplingConfig(temperature=0.0))
    for _ in generation:
        pass
    return generation.tokens


def test_what_is_postponed_is_measured_after_an_answer(tiny: TinyFactory) -> None:
    with Session.open(config(tiny, calibrate=False)) as session:
        expected = answer(session)
    with Session.open(config(tiny, calibrate_later=True)) as session:
        assert session.calibration is None and files() == []
        assert answer(session) == expected
        before = session.placement_stats()
        session.measure_postponed(Run(cancelled=lambda: True))
        assert session.calibration is None and files() == [], "cancelled: left for later"
        session.measure_postponed(Run())
        first = session.calibration
        assert first is not None and not first.from_file and len(files()) == 1
        after = session.placement_stats()
        assert before is not None and after is not None
        counted = after - before
        assert (counted.uploads, counted.pairs, counted.blocks, counted.steps) == (0, 0, 0, 0)
        assert session.target.sequences[0].tokens == []
        assert answer(session) == expected
        session.measure_postponed(Run(cancelled=lambda: pytest.fail("measured again")))
    with Session.open(config(tiny, calibrate_later=True)) as session:
        assert session.calibration == replace(first, from_file=True, units=session.calibration.units)


def postponed(tiny: TinyFactory, **placement: Any) -> EngineConfig:
    """A GPU with a cache for half of the experts, as the chat opens it."""
    return replace(config(tiny, calibrate_later=True, **placement), device=DEVICE, n_gpu_layers=0)


@pytest.mark.parametrize("pays", [True, False])
def test_a_gpu_is_measured_after_the_first_answer(
    tiny: TinyFactory, counting: CountingDevice, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """The first answer does not wait for it; a cache that does not pay goes off after it, and answers stay."""
    with Session.open(replace(config(tiny), device="none")) as session:
        expected = answer(session)
    monkeypatch.setattr(Calibration, "speed", property(lambda self: 1.5 if pays else 0.5))
    # a size that is not the user's choice: the tiny model would fit the device as a whole
    monkeypatch.setattr(PlacementConfig, "has_size", property(lambda self: False))
    said: list[Notification] = []
    with Session.open(postponed(tiny), run=Run(said.append)) as session:
        assert session.calibration is None and files() == [] and session.placement is not None
        assert not said, "nothing is measured at the start"
        assert any("measured after the first answer" in note for note in session.info.notes)
        assert answer(session) == expected
        session.measure_postponed(Run(cancelled=lambda: True))
        assert session.calibration is None and files() == [] and answer(session) == expected
        session.measure_postponed(Run())
        assert session.calibration is not None and len(files()) == 1
        assert (session.placement is not None) == pays == (session.info.device != "none")
        assert any(is_warning(note) for note in said) != pays
        assert answer(session) == expected
        session.measure_postponed(Run(cancelled=lambda: pytest.fail("measured again")))
    with Session.open(postponed(tiny)) as session:  # what is known is used at once
        assert session.calibration is not None and session.calibration.from_file
        assert (session.placement is not None) == pays
        assert answer(session) == expected


def test_a_gpu_that_is_lost_is_not_measured(tiny: TinyFactory, counting: CountingDevice) -> None:
    with Session.open(postponed(tiny)) as session:
        expected = answer(session)
        assert session.placement is not None
        session.placement.lose_device(context_usable=True)
        session.measure_postponed(Run())
        assert session.calibration is None and files() == []
        assert answer(session) == expected
