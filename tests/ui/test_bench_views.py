"""Rows of a benchmark as tables, records and pictures."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from moeedge.bench.quality import Difference, OutputCheck, Scores
from moeedge.bench.records import BenchRow
from moeedge.bench.samples import CacheFigures, spread
from moeedge.cli.bench_run import exit_code
from moeedge.errors import InputError
from moeedge.ui.bench_plots import cache_plots, draw
from moeedge.ui.bench_views import difference_lines, quiet_lines, render, withheld_lines
from moeedge.ui.plots import default_plots
from tests.support.answers import setup_of
from tests.support.markdown import table_rows

SETUP = setup_of(
    version="0.1.0", commit="f" * 40, dirty=True, llama_cpp_version="0.3.36", cpu="A CPU", time="2026-01-01",
    model="m.gguf", draft="d.gguf", gamma=4, threads=2, n_ctx=256, repetitions=2, model_description="qwen3moe",
    model_bytes=1 << 30, model_n_params=2 * 10**9, backend="CPU",
)  # fmt: skip
ROW = BenchRow(
    mode="moeedge", test="qa", policy="none", cache_ratio=None,
    pp=spread([100.0, 200.0]), tg=spread([10.0]), tg_drained_ts=9.5, drain_s=0.1, ttft_s=0.25, acceptance_rate=0.5,
    tokens_per_step=2.5, experts_per_verification=31.25, cache=CacheFigures(), output=OutputCheck(equal=8, compared=8),
    scores=Scores(), ratio=1.234, ratio_pp=None, ratio_drained=1.2, ratio_cpu=None, setup=SETUP, samples=(),
)  # fmt: skip


def listed(mode: str = "moeedge", **setup: Any) -> BenchRow:
    return replace(ROW, mode=mode, setup=replace(SETUP, **setup))


def swept(policy: str, ratio: float, hits: float, **setup: Any) -> BenchRow:
    figures = CacheFigures(hit_rate_pairs=hits, hit_rate_experts=hits / 2, uploads_per_layer_step=12.34)
    row = listed(device="emulated (CPU)", **setup)
    return replace(row, policy=policy, cache_ratio=ratio, cache=figures, ratio=1 + hits)


def test_every_form_has_the_figures() -> None:
    (cells,) = table_rows(render([ROW], "md"))
    assert (cells["pp t/s"], cells["tg t/s"], cells["TTFT ms"]) == ("150.00 ± 70.71", "10.00", "250.0")
    assert (cells["output"], cells["tg ratio"], cells.get("pp ratio"), cells.get("policy")) == (
        "8/8", "1.234", None, None,
    )  # fmt: skip
    text = render([ROW], "text")
    assert "|" not in text and max(map(len, text.splitlines())) <= 100
    (row,) = map(json.loads, render([ROW], "jsonl").splitlines())
    assert [row] == json.loads(render([ROW], "json")) and row["output_check"] == "8/8"
    (row,) = csv.DictReader(io.StringIO(render([replace(ROW, acceptance_rate=None)], "csv")))
    assert (row["output_check"], float(row["tg_ts"]) > 0, row["acceptance_rate"]) == ("8/8", True, "")
    with sqlite3.connect(":memory:") as base:
        base.executescript(render([replace(ROW, acceptance_rate=None)], "sql"))
        found = base.execute('SELECT mode, output_check, tg_ts > 0, acceptance_rate, "limit" FROM moeedge_bench')
        assert found.fetchall() == [("moeedge", "8/8", 1, None, None)]
    assert (render([], "md"), json.loads(render([], "json"))) == ("", [])


def test_a_difference_that_is_no_near_tie_fails(capsys: pytest.CaptureFixture[str]) -> None:
    tie = Difference("7", 1, 0, 4, 11, 12, 0.01, True)
    wrong = Difference("8", 0, 0, 2, 11, None, 3.5, False)
    tied = replace(ROW, output=OutputCheck(equal=7, compared=8, near_ties=(tie,)))
    assert exit_code([tied]) == 0
    assert difference_lines([tied]) == [
        "near-tie: moeedge, qa prompt 7, turn 2, token 5: token 12 instead of token 11, 0.0100 logits apart"
    ]
    failed = replace(ROW, output=OutputCheck(equal=6, compared=8, near_ties=(tie,), different=(wrong,)))
    assert exit_code([failed]) == 1
    assert "1 position(s)" in capsys.readouterr().err
    assert difference_lines([failed])[1].startswith("DIFFERENT: moeedge, qa prompt 8, turn 1, token 3: the end instead")


@pytest.mark.parametrize(("form", "reason"), [("md", "load"), ("text", "scatter")])
def test_a_ratio_of_disturbed_samples_is_withheld(form: str, reason: Literal["load", "scatter"]) -> None:
    quiet = replace(ROW, ratio=44.07)
    assert "44.07" in render([quiet], form) and not withheld_lines([quiet])
    row = replace(quiet, disturbed=reason)
    text = render([row, row], form)
    assert "44.07" not in text and " ? " in text and text.count("?: no ratio") == 1
    (record,) = json.loads(render([row], "json"))
    assert (record["disturbed"], record["ratio"]) == (reason, 44.07)


def test_a_busy_machine_and_scatter_are_told() -> None:
    assert quiet_lines([replace(ROW, tg=spread([10.0, 10.5]))]) == []
    assert len(quiet_lines([replace(ROW, tg=spread([10.0, 11.5]))])) == 1
    assert len(quiet_lines([listed(other_load=0.5)])) == 1


def _lines(rows: list[BenchRow]) -> list[list[tuple[str, list[float]]]]:
    """Names and x of the lines of each default plot."""
    plots = default_plots(rows, lambda row: row.label)
    return [[(line.label, list(line.x)) for line in plot.lines] for plot in plots]


def test_default_plots_are_over_what_differs() -> None:
    modes = (("stock-ar", 0), ("moeedge", 4))
    by_threads = [listed(mode, threads=n, gamma=gamma) for mode, gamma in modes for n in (2, 1)]
    assert _lines(by_threads) == [[("stock-ar", [1, 2]), ("moeedge", [1, 2])]] * 3  # speeds and their ratio
    titles = [plot.y_label.split()[0] for plot in default_plots(by_threads, lambda row: row.mode)]
    assert titles == ["Prefill", "Decoding", "Decoding"]
    by_prompt = [listed(n_prompt=n, flash_attn=attn) for attn in ("on", "off") for n in (512, 128)]
    lines = [("moeedge, flash_attn on", [128, 512]), ("moeedge, flash_attn off", [128, 512])]
    assert _lines(by_prompt) == [lines] * 3
    assert _lines([listed(mode, gamma=gamma) for mode, gamma in modes]) == _lines([listed(n_prompt=128)]) == []


@pytest.mark.parametrize("disturbed", [None, "load"])
def test_lists_are_drawn_next_to_a_cache(disturbed: Literal["load"] | None, tmp_path: Path) -> None:
    rows = [replace(swept("spac", 0.17, 0.5, n_prompt=n), disturbed=disturbed) for n in (128, 512)]
    assert draw(rows, tmp_path / "lists.svg")
    text = (tmp_path / "lists.svg").read_text()
    assert "Prompt" in text and ("median of pairs" in text) == (disturbed is None)  # withheld, as in the table


def test_the_picture_has_a_line_per_policy(tmp_path: Path) -> None:
    rows = [swept(policy, ratio, ratio * best) for policy, best in (("spac", 1), ("lru", 0.5)) for ratio in (0.5, 0.17)]
    hits, _ = cache_plots([ROW, *rows])
    assert [(line.label, line.x, line.values) for line in hits.lines] == [
        ("spac", (0.17, 0.5), (0.17, 0.5)),
        ("lru", (0.17, 0.5), (0.085, 0.25)),
    ]
    picture = tmp_path / "sweep.png"
    assert draw(rows, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not draw([ROW], tmp_path / "none.png")
    with pytest.raises(InputError, match="picture"):
        draw(rows, tmp_path / "absent" / "sweep.png")
