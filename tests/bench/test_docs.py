"""Figures in documents are those of their records; docs/datasets.md names every file of a dataset and every scorer."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from dataclasses import fields
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from moeedge.bench.config import MODES
from moeedge.bench.figures import MEAN
from moeedge.bench.quality import NEAR_TIE_GAP
from moeedge.data.datasets import CATALOG, load_dataset
from moeedge.lab.analysis.draft_surface import surface_points
from moeedge.scoring.answers import SCORERS, Reference
from tests.benchmarks.decision_regret import DECISIONS
from tests.benchmarks.performance import (
    draft_cost,
    is_within,
    over_stock,
    over_stock_by_round,
    ratios,
    read,
    recosted,
    tables,
)
from tests.benchmarks.policies_table import table
from tests.fuzz.__main__ import KINDS, table_row
from tests.soak.greedy import summary

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_TEXT = (_DOCS / "bench.md").read_text(encoding="utf-8")
_README = (_DOCS.parent / "README.md").read_text(encoding="utf-8")
_PERFORMANCE = (_DOCS / "performance.md").read_text(encoding="utf-8")
_RECORDS = _DOCS / "benchmarks"
_BEYOND_RAM_ARMS = {"moeedge": "", "moeedge-auto": " with drafts"}
_DATASETS = (_DOCS / "datasets.md").read_text(encoding="utf-8")


def test_the_policies_have_the_table_of_their_record() -> None:
    """Figures of docs/policies.md that a command measured are those of the record that it names."""
    rows = read(_RECORDS / "policies-bundled.json.gz")
    text = (_DOCS / "policies.md").read_text(encoding="utf-8")
    assert table(rows) in text
    assert {row["repetitions"] for row in rows} == {1} and len({row["time"] for row in rows}) == 3
    for part in ("--policy spac,lfu,spac-program,spac-paper,lru,static", "--cache-ratio 0.17", "--draft-max 8 -r 1"):
        assert part in text
    assert {row["policy"] for row in rows} - {"none"} == set(
        ["spac", "lfu", "spac-program", "spac-paper", "lru", "static"]
    )
    assert all(row["gamma"] == 8 and row["cache_ratio"] == 0.17 for row in rows if row["mode"] == "moeedge")


def test_the_readme_has_the_rounds_of_its_record() -> None:
    speeds: dict[str, list[str]] = {}
    for run_ in read(_RECORDS / "beyond-ram.json")["runs"]:
        tokens, seconds = (sum(answer[key] for answer in run_["answers"]) for key in ("decode_tokens", "decode_s"))
        speeds.setdefault(run_["arm"], []).append(f"{tokens / seconds:.2f}")
        assert {answer["acceptance_rate"] for answer in run_["answers"]} <= {None, 1.0}
    cells = {arm: ", ".join(rounds) for arm, rounds in speeds.items()}
    assert f"| stock llama.cpp | {cells['stock']} | {cells['stock-sd']} | |" in _README
    assert f"| moeedge | {cells['moeedge']} | {cells['moeedge-sd']} | {cells['moeedge-auto']} |" in _README


def test_beyond_ram_has_the_rounds_under_recorded_routing() -> None:
    record = read(_RECORDS / "beyond-ram-gptoss-20b.json.gz")
    stock = [f"stock@t{n}" for n in (2, 4, 8)]
    rounds: dict[str, list[float]] = {arm: [] for arm in (*stock, *_BEYOND_RAM_ARMS)}
    accepted, found = [], []
    for run_ in record["runs"]:
        (answer,) = run_["answers"]
        rounds[run_["arm"]].append(answer["decode_tokens"] / answer["decode_s"])
        accepted += [answer["acceptance_rate"]] if run_["arm"] == "moeedge-auto" else []
    text = (_DOCS / "beyond-ram.md").read_text(encoding="utf-8")
    assert f"| {', '.join(f'{median(rounds[arm]):.2f}' for arm in stock)} with 2, 4, 8 threads |" in text
    for arm, word in _BEYOND_RAM_ARMS.items():
        pairs = over_stock_by_round(record)[f"{arm} tg"]
        first = f"{median(rounds[arm]):.2f}{word} ({median(pairs):.2f} times, {min(pairs):.2f} to {max(pairs):.2f}"
        assert first in text
        found.append((median(rounds[arm]), median(pairs), min(pairs), max(pairs)))
    rates = f"{min(accepted):.0%} to {max(accepted):.0%} accepted".replace("%", "").replace(" accepted", " % accepted")
    assert f", {rates})" in text and f"{rates}, {found[1][0]:.2f} ({found[1][1]:.2f})" in _README
    plain = "{:.2f} tokens/s, {:.2f} times stock with its best number of threads in the round ({:.2f} to {:.2f})"
    assert plain.format(*found[0]) in _README
    pairs = over_stock_by_round(read(_RECORDS / "beyond-ram-gptoss-20b-older.json.gz"))
    before = [median(pairs[f"{arm} tg"]) for arm in _BEYOND_RAM_ARMS]
    assert (
        "{:.2f} and {:.2f} times; ".format(*before) in text
        and "With 0.23.0: {:.2f}, {:.2f} (".format(*before) in _README
    )
    older = {row["arm"]: row["decode_ts"] for row in read(_RECORDS / "beyond-ram-gptoss-20b-round.json.gz")["summary"]}
    before = [older[arm] / max(older[name] for name in stock) for arm in _BEYOND_RAM_ARMS]
    assert "{:.2f} and {:.2f} times |".format(*before) in text and "{:.2f}, {:.2f}.".format(*before) in _README


def test_performance_has_the_ratios_of_expert_budgets() -> None:
    rows = [row for row in read(_RECORDS / "budget-gptoss-20b-zen4.json.gz") if row["mode"] == "moeedge"]
    (plain,) = (row["tg_ts_samples"] for row in rows if row["budget"] is None)
    pairs = [zip(row["tg_ts_samples"], plain, strict=True) for row in rows if row["budget"]]
    ratios = ", ".join(f"{median(own / other for own, other in each):.2f}" for each in pairs)
    assert f"{ratios} times as fast as none" in (_DOCS / "performance.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_log_has_the_regret_of_all_decisions() -> None:
    text = (_DOCS / "log.md").read_text(encoding="utf-8")
    for decision, streams in DECISIONS.items():
        found = [100 * lost for _, lost in streams()]
        assert f"{mean(found):.1f}, {max(found):.1f}" in text, decision


@pytest.mark.parametrize("name", ["greedy-soak", "greedy-soak-avx2", "greedy-soak-rpc"])
def test_the_log_has_the_sums_of_the_greedy_soaks(name: str) -> None:
    with gzip.open(_RECORDS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        _, *lines = map(json.loads, file)
    assert summary(lines).partition(";")[0] in (_DOCS / "log.md").read_text(encoding="utf-8")


def test_security_has_the_rows_of_the_damaged_inputs() -> None:
    text = (_DOCS.parent / "SECURITY.md").read_text(encoding="utf-8")
    kinds = (*KINDS, "cli", "fault")
    assert "\n".join(table_row(_RECORDS / f"fuzz-{kind}.jsonl.gz") for kind in kinds) in text


_SHAPES = [f"{model}{cpu}" for model in ("qwen3-30b", "gptoss-20b") for cpu in ("", "-zen4", "-zen5", "-avxvnni")]


@pytest.mark.parametrize("name", _SHAPES)
def test_performance_has_the_tables_of_other_programs(name: str) -> None:
    """Prompts of 2,048 tokens have a record of their own, and are in the same table."""
    first, *others = read(_RECORDS / f"rivals-{name}.json.gz")
    longer = _RECORDS / f"rivals-{name}-2048.json.gz"
    long = read(longer)[:1] if longer.is_file() else []
    *_, shown = tables([first, *long, *others])
    assert (shown in _PERFORMANCE) is name.endswith(("zen5", "avxvnni"))
    assert {row["repetitions"] for row in (first, *long, *others)} == {3}
    cells = " | ".join([_cell(first), *([_cell(row) for row in long] or ["-"]), *map(_cell, others)])
    (line,) = (line for line in _README.splitlines() if f"(docs/benchmarks/rivals-{name}.json.gz)" in line)
    assert line.endswith(f" | {cells} |")


def test_performance_has_long_prompts() -> None:
    rows = read(_RECORDS / "prompts-qwen3-30b-zen4.json.gz")[:2]
    *_, shown = tables(rows)
    assert shown in _PERFORMANCE
    assert "of 4,096 tokens {}, of 16,384 {} ([record]".format(*map(_cell, rows)) in _README


@pytest.mark.parametrize("path", sorted(_RECORDS.glob("*-again.json.gz")), ids=lambda path: path.name)
def test_performance_tells_what_the_same_command_gave_again(path: Path) -> None:
    first, again = (ratios(read(each)) for each in (path.with_name(path.name.replace("-again", "")), path))
    # a test without an interval is not compared; a long prompt's command decodes one token, cold
    tests = [test for test in first if test in again and test != "tg1"]
    assert len(tests) >= len(first) - 1
    within = sum(is_within(first[test], again[test]) for test in tests)
    told = f"| {', '.join(f'{again[test][0]:.2f}' for test in tests)} | {within} of {len(tests)} |"
    assert f"](benchmarks/{path.name})) {told}" in _PERFORMANCE
    if "-zen4" in path.name:
        *most, last = (f"{again[test][0]:.2f}" for test in tests)
        assert f"{', '.join(most)} and {last} of ik_llama.cpp" in _README


def test_performance_has_the_floors_of_other_types() -> None:
    prompts, decoding, on_intel = {}, {}, {}
    for path in sorted(_RECORDS.glob("floors-qwen3-30b-*.json.gz")):
        rows = read(path)
        *_, quant, cpu = path.name.removesuffix(".json.gz").split("-")
        cells = " | ".join(map(_cell, rows))
        label = {"zen5": "", "zen4": ", Zen 4, 0.27.0", "avxvnni": ""}[cpu]
        assert f"| [{quant.upper()}](benchmarks/{path.name}){label} | {cells} |" in _PERFORMANCE
        if cpu == "zen5":
            ratios = {row["test"]: row["ratio"] for row in rows}
            prompts |= {ratios[test]: quant.upper() for test in ("pp512", "pp2048")}
            decoding[ratios["tg64"]] = quant.upper()
        if cpu == "avxvnni":
            on_intel = {row["test"]: f"{row['ratio']:.2f}" for row in rows}
    least, most = (
        " to ".join(f"{edge(ratios):.2f} ({ratios[edge(ratios)]})" for edge in (min, max))
        for ratios in (prompts, decoding)
    )
    assert f"prompts over the fastest {least}, decoding {most};" in _README
    assert f"(docs/performance.md#with-avx-vnni) {on_intel['pp512']}, decoding {on_intel['tg64']}." in _README


def _cell(row: dict[str, Any]) -> str:
    return f"{row['speeds']['moeedge']:.1f} ({over_stock(row):.2f}; {row['ratio']:.2f})"


def test_performance_has_the_rows_under_recorded_routing() -> None:
    rows = read(_RECORDS / "routed-gptoss-20b.json.gz")
    assert {row["routing_scaling"] for row in rows} == {""} and {row["disturbed"] for row in rows} == {None}
    cells = []
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        kind, (ratio, low, high) = "tg" if ours["n_gen"] else "pp", ratios(rows)[ours["test"]]
        cells.append(f"{ours[f'{kind}_ts_median']:.1f} ({ratio:.2f})")
        speeds = " | ".join(f"{row[f'{kind}_ts_median']:.2f}" for row in (stock, ours))
        assert f"| {ours['test']} | {speeds} | {ratio:.2f} ({low:.2f} to {high:.2f}) |" in _PERFORMANCE
    assert f"| {cells[0]} | - | {' | '.join(cells[1:])} |" in _README
    costs = [f"{100 * row['routing_cost']:.1f} %" for row in rows[:2]]
    assert f"takes {costs[0]} of stock's time for a token and {costs[1]} of moeedge's" in _PERFORMANCE


def test_a_surface_needs_plain_decoding_and_auto() -> None:
    rows = read(_RECORDS / "surface-gptoss-20b-fifth.json.gz")
    assert surface_points(rows)
    for left in ([row for row in rows if row["mode"] != "stock-ar"], [row for row in rows if not row["auto_gamma"]]):
        assert surface_points(left) == []


def test_performance_has_the_surface_of_drafts() -> None:
    kinds = (("fifth", "tenth"), ("head", "ngram"))
    for shape, drafts in itertools.product(("gptoss-20b", "qwen3-30b"), kinds):
        records = [read(_RECORDS / f"surface-{shape}-{kind}.json.gz") for kind in drafts]
        for row in zip(*map(surface_points, records), strict=True):
            cells = [
                f"{each.ratio:.2f} ({each.low:.2f} to {each.high:.2f}) | {each.fixed_ratio:.2f} ({each.fixed_gamma})"
                for each in row
            ]
            assert f"| {row[0].acceptance:g} | {' | '.join(cells)} |" in _PERFORMANCE


def test_performance_has_the_figures_next_to_a_gpu() -> None:
    pinned, copied = (
        {(row["mode"], row["test"]): row for row in read(_RECORDS / f"h100-{name}.json.gz")}
        for name in ("pinned", "copied")
    )
    ours = "moeedge-ar"
    for test, kind in (("pp2048", "pp"), ("pp512", "pp"), ("pp9", "pp"), ("tg64", "tg")):
        arms = (pinned["stock-ncmoe", test], copied[ours, test], pinned[ours, test])
        speeds = [arm[f"{kind}_ts_median"] for arm in arms]
        (line,) = (line for line in _PERFORMANCE.splitlines() if " | ".join(f"{each:.3g}" for each in speeds) in line)
        assert f"{speeds[2] / speeds[0]:.2f}" in line
    lanes = read(_RECORDS / "h100-checks.json.gz")["lanes"]
    for suffix, names in (
        ("", ("cpu-moe", "n-cpu-moe", "moeedge", "static")),
        ("-sd", ("cpu-moe", "n-cpu-moe", "moeedge")),
    ):
        assert " | ".join(f"{lanes[name + suffix]['tg_ts']:.1f}" for name in names) + " |" in _PERFORMANCE


@pytest.mark.parametrize(
    ("name", "column"),
    [("toy-2.6gb-q4_0", 0), ("toy-2.6gb-q4_k", 1), ("toy-9.5gb-q4_0", 2), ("toy-9.5gb-q4_k", 3)],
)
def test_performance_has_gains_of_drafts_with_acceptance_and_cost(name: str, column: int) -> None:
    """Figures of docs/performance.md: a column of the table for each widened toy."""
    rows = read(_RECORDS / f"performance-{name}.json.gz")
    ours = next(row for row in rows if row["auto_gamma"])
    ratios = {part["category"]: part["ratio"] for part in ours["best_stock_by_category"]}
    mean = ratios.pop(MEAN)
    figures = {
        "drafts accepted: auto": f"{ours['acceptance_rate']:.2f}",
        "T_D / T_T(1)": f"{draft_cost(rows, ours):.3f}",
    }
    for cost in (0.2, 0.3):
        dropped = " to ".join(f"{recosted(rows, ours, cost, n_dropped):.2f}" for n_dropped in (1, 0))
        figures[f"recosted mean, T_D / T_T(1) = {cost}"] = dropped
    table = [[cell.strip(" *") for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*", _PERFORMANCE, re.M)]
    cells = {row[0]: row[column + 1] for row in table if len(row) == 5}
    least = min(ratios, key=lambda category: ratios[category])
    assert (cells["mean"], cells["least"]) == (f"{mean:.3f}", f"{ratios[least]:.3f} ({least})")
    assert {label: cells[label] for label in figures} == figures


def test_performance_tells_the_loss_of_the_bundled_pair() -> None:
    ours = next(row for row in read(_RECORDS / "performance-bundled.json.gz") if row["auto_gamma"])
    ratios = {part["category"]: part["ratio"] for part in ours["best_stock_by_category"]}
    assert (
        f"{ratios[MEAN]:.2f} times as fast as stock at its best, with `questions` {min(ratios.values()):.2f}"
        in _PERFORMANCE
    )


def test_modes_and_the_bound() -> None:
    assert all(f"| {name} |" in _TEXT for name in MODES)
    assert f"Closer than {NEAR_TIE_GAP} " in _TEXT


def test_datasets_and_scorers() -> None:
    for entry in CATALOG.values():
        hub = "; ".join(f"{source.repo}: {source.file}" for source in entry.hub)
        assert f"| {entry.name} | {', '.join(entry.files)} | {hub} |" in _DATASETS
        assert all(source.revision == "main" or source.revision in _DATASETS for source in entry.hub)
    assert all(f"\n| `{name}` |" in _DATASETS for name in SCORERS)
    rows = _DATASETS.split("| field | meaning |")[1].splitlines()
    documented = {key for row in rows if row.startswith("| `") for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == {field.name for field in fields(Reference)}


def test_the_examples_of_own_rows_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(line for line in _DATASETS.splitlines() if line.startswith("    {")), encoding="utf-8")
    scorers = [
        reference.scorer
        for prompt in load_dataset(str(path)).prompts
        for reference in prompt.references
        if reference is not None
    ]
    assert scorers == ["number", "list", "code", "contains"]
