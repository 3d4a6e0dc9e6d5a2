"""Texts that are decoded together: rows per mode and number of texts, equal answers, and the batch-size curve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeedge.bench.config import MODES, BenchPlan, Sweep, parse_modes
from moeedge.bench.experiment import BenchArm, Together
from moeedge.bench.figures import parallel_figures, plain_mode
from moeedge.bench.journal import Journal, settings_of
from moeedge.bench.records import BenchRow
from moeedge.bench.samples import Sample
from moeedge.data.datasets import load_dataset
from moeedge.errors import EngineError, InputError
from moeedge.hardware.provenance import read_provenance
from moeedge.ui.bench_views import curve_lines
from tests.bench.recording import Recorder, make_plan, run
from tests.support import commands

TEXTS = ("the sea", "a stone and a bird", "def add(a, b):", "one two three", "go home", "what is it?")
SAMPLE = Sample(
    mode="", prompt="", turn=0, repetition=0, order=0, decode_tokens=1, decode_s=1, all_decode_s=1, steps=4, drafted=8
)


def write_texts(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def plan_of(folder: Path, target: Path, draft: Path, modes: str, counts: tuple[int, ...]) -> BenchPlan:
    dataset = load_dataset(str(write_texts(folder)))
    chosen = Sweep(gammas=(1, 3), counts=counts).modes(parse_modes(modes))
    return replace(make_plan(target, draft, dataset=dataset, ignore_eos=True), modes=chosen)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path, tiny_draft: Path
) -> tuple[list[BenchRow], Recorder]:
    """Stock and our backend, plain and with three draft lengths, 1 and 4 texts at a time, two repetitions."""
    modes = "stock-ar,moeedge,moeedge:auto,moeedge-ar"
    return run(plan_of(tmp_path_factory.mktemp("texts"), tiny_moe, tiny_draft, modes, (1, 4)))


def test_rows_are_of_every_mode_and_number_of_texts(finished: tuple[list[BenchRow], Recorder]) -> None:
    rows, recorder = finished
    assert [row.label for row in rows] == [
        f"{name} parallel {n}"
        for n in (1, 4)
        for name in ("stock-ar", "moeedge gamma 1", "moeedge gamma 3", "moeedge gamma auto", "moeedge-ar")
    ]
    assert recorder.total == len(recorder.samples) == 6 + 2 * 10  # alone, then per repetition and mode
    for row in rows:
        assert row.output is not None and row.output.passed and row.output.compared == 6, row.label
        assert row.parallel.sequence_ts == pytest.approx(_throughput_ts(row) / row.parallel.n_parallel)
        assert [sample.steps % row.parallel.n_parallel for sample in row.samples] == [0, 0]
        assert 0 < row.parallel.full_batch_share <= 1
    assert rows[0].parallel.full_batch_share == pytest.approx(1)


def _throughput_ts(row: BenchRow) -> float:
    return sum(s.decode_tokens for s in row.samples) / sum(s.decode_s for s in row.samples)


def test_texts_share_experts(finished: tuple[list[BenchRow], Recorder]) -> None:
    """A plain step of four texts uses at least the experts of one, and at most four times as many."""
    by_label = {row.label: row for row in finished[0]}
    one, four = (by_label[f"moeedge-ar parallel {n}"].experts_per_verification for n in (1, 4))
    assert one == 4 and four is not None and one < four < 16
    assert by_label["moeedge-ar parallel 4"].tokens_per_step == 1.0
    drafted = by_label["moeedge gamma 3 parallel 4"]
    assert drafted.tokens_per_step is not None and 1 <= drafted.tokens_per_step <= 4


def test_speed_ups_are_over_plain_decoding_of_as_many_texts(finished: tuple[list[BenchRow], Recorder]) -> None:
    rows = finished[0]
    by_label = {row.label: row for row in rows}
    own, plain = by_label["moeedge gamma 3 parallel 4"], by_label["moeedge-ar parallel 4"]
    assert (own.parallel.plain_mode, plain.parallel.plain_mode, plain.parallel.speed_up) == ("moeedge-ar", None, None)
    expected = []
    for ours, theirs in zip(own.samples, plain.samples, strict=True):
        assert ours.repetition == theirs.repetition and ours.tg_ts and theirs.tg_ts
        expected.append(ours.tg_ts / theirs.tg_ts)
    assert own.parallel.speed_up_samples == pytest.approx(expected)
    assert own.parallel.speed_up == pytest.approx(sum(expected) / 2)
    _, *curves = curve_lines([replace(row, disturbed=None) for row in rows])
    assert [line.partition(":")[0] for line in curves] == ["moeedge gamma 1", "moeedge gamma 3", "moeedge gamma auto"]
    assert all("for N = 1, 4;" in line for line in curves)
    assert not curve_lines([replace(row, disturbed="load") for row in rows])[1:]  # as in the table


def test_without_plain_decoding_of_the_engine_stock_is_the_base() -> None:
    modes = Sweep(counts=(2, 4)).modes(parse_modes("stock-ar,stock-sd,moeedge"))
    found = {mode.label: plain_mode(mode, modes) for mode in modes}
    assert {label: plain and plain.label for label, plain in found.items()} == {
        f"{name} parallel {n}": None if name == "stock-ar" else f"stock-ar parallel {n}"
        for name in ("stock-ar", "stock-sd", "moeedge")
        for n in (2, 4)
    }
    assert plain_mode(modes[-1], modes[1:3]) is None
    with pytest.raises(InputError):
        Sweep(counts=(2,)).modes([MODES["stock-ncmoe"]])


def test_plain_decoding_has_the_same_expert_cache() -> None:
    swept = Sweep(("lru", "utility"), (0.25, 0.5)).modes(parse_modes("stock-ar,stock-sd,moeedge,moeedge-ar"))
    modes = Sweep(counts=(2,)).modes(swept)
    found = {mode.label: plain_mode(mode, modes) for mode in modes if mode.drafts}
    assert len(found) == 5
    for label, plain in found.items():
        expected = "stock-ar parallel 2" if label.startswith("stock") else label.replace("moeedge", "moeedge-ar")
        assert plain is not None and plain.label == expected


def test_curves_of_several_expert_caches_are_apart(tmp_path: Path) -> None:
    rows = []
    for mode in Sweep(ratios=(0.25, 0.5), counts=(1, 2)).modes(parse_modes("moeedge,moeedge-ar")):
        sample = replace(SAMPLE, mode=mode.label, decode_tokens=10 if mode.drafts else 8)
        plain = (mode, [replace(sample, decode_tokens=8)]) if mode.drafts else None
        figures = parallel_figures(mode, [sample], plain, 4 if mode.drafts else 0)
        rows.append(SimpleNamespace(parallel=figures, disturbed=None))
    assert curve_lines(rows)[1:] == [  # type: ignore[arg-type]
        f"moeedge {ratio} gamma 4: 1.25, 1.25 for N = 1, 2; the most with N = 1." for ratio in (0.25, 0.5)
    ]


def test_fewer_prompts_than_texts_and_too_large_contexts_are_refused(
    tmp_path: Path, tiny_moe: Path, tiny_draft: Path
) -> None:
    plan = plan_of(tmp_path, tiny_moe, tiny_draft, "stock-ar", (8,))
    with pytest.raises(InputError, match="6 prompts"):
        run(plan)
    plan = plan_of(tmp_path, tiny_moe, tiny_draft, "stock-ar", (1, 4))
    plan = replace(plan, base=replace(plan.base, n_ctx=2**23))  # four times that is more than can be counted
    with pytest.raises(InputError, match="4 texts"):
        run(plan)


def test_an_interrupted_run_goes_on(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    plan = plan_of(tmp_path, tiny_moe, tiny_draft, "stock-ar,stock-sd", (2, 4))
    path, settings = tmp_path / "run.jsonl", [settings_of(plan, read_provenance(plan.base.model))]
    # a repetition of three modes, and one of a single mode, which is measured again
    rows, first = run(plan, Journal(path, settings), stop_after=6 + 4)
    assert [(row.label, len(row.samples)) for row in rows] == [
        ("stock-ar parallel 2", 1), ("stock-sd gamma 1 parallel 2", 1), ("stock-sd gamma 3 parallel 2", 1),
    ]  # fmt: skip
    journal = Journal.resume(str(path), settings)
    assert journal.n_done == 6 + 4
    rows, second = run(plan, journal)
    assert len(second.samples) == second.total == 6 + 2 * 6
    assert second.samples[:9] == first.samples[:9]
    for row in rows:
        assert len(row.samples) == 2
        assert row.output is not None and row.output.passed and row.output.compared == 6


@pytest.mark.usefixtures("cache_folder")
def test_command(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    picture = tmp_path / "curve.png"
    pair = ["-m", str(tiny_moe), "-md", str(tiny_draft), "-c", "512", "-t", "1", "-dev", "none"]
    work = ["--dataset", str(write_texts(tmp_path)), "-n", "12", "-r", "1", "--ignore-eos", "--draft-max", "1,3"]
    bench = ["bench", *pair, *work, "--modes", "stock-ar,stock-sd", "--parallel", "4,2"]
    rows = commands.run_json(*bench, "--plot", str(picture))
    assert "no interrupted bench" in commands.refused(*bench, "--resume")
    assert picture.stat().st_size > 10_000
    assert [(row["mode"], row["gamma"], row["n_parallel"]) for row in rows] == [
        (mode, gamma, n) for n in (2, 4) for mode, gamma in (("stock-ar", 0), ("stock-sd", 1), ("stock-sd", 3))
    ]
    assert [row["speed_up"] is None for row in rows] == [not row["gamma"] for row in rows]


def test_rows_come_out_where_a_later_number_of_texts_fails(
    tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Together._answer

    def failing(work: Together, tokens: list[list[int]], repetition: int, arm: BenchArm) -> Sample:
        if arm.mode.n_parallel == 3:
            raise EngineError("No memory.")
        return answer(work, tokens, repetition, arm)

    monkeypatch.setattr(Together, "_answer", failing)
    work = ["--dataset", str(write_texts(tmp_path)), "-n", "4", "-r", "1", "--ignore-eos", "--modes", "stock-ar"]
    options = ["-m", str(tiny_moe), "-c", "512", "-t", "1", "-dev", "none", "--no-warmup", "-o", "json"]
    result = commands.run("bench", *options, *work, "--parallel", "2,3")
    assert result.exit_code == 1
    assert [row["n_parallel"] for row in json.loads(result.stdout)] == [2]
