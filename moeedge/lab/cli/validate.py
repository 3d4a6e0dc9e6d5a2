"""`moeedge lab validate`: formulas and simulator compared with the papers, and the simulator with the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from moeedge.cli.common import emit, names, numbers
from moeedge.cli.engine_options import EngineOptions
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError
from moeedge.hardware.provenance import read_provenance
from moeedge.lab.cli.trace_options import RejectedTokenModel
from moeedge.records import as_dict
from moeedge.run import Run
from moeedge.ui.tables import Column, markdown, print_table, text_column

if TYPE_CHECKING:
    from rich.console import Console

    from moeedge.lab.analysis.published import Reproduced
    from moeedge.lab.experiments.validation import Comparison
    from moeedge.lab.sim.papers import Compared, Fit, Papers, PublishedCount
    from moeedge.trace.steps import RejectedTokenModel as Model

validate = typer.Typer(
    name="validate",
    help="Compare formulas and simulator with published figures, and the simulator with this machine.",
    no_args_is_help=True,
    add_completion=False,
)


class PaperPart(str, Enum):
    TABLE2 = "table2"
    TABLE3 = "table3"
    TABLE4 = "table4"
    FIGURE5 = "figure5"
    CUTOFF = "cutoff"
    ELSEWHERE = "elsewhere"
    ALL = "all"


declare(
    """
    []
    --part NAME  Table or figure: table2, table3, table4, figure5, cutoff, elsewhere or all, which takes some minutes.
    [Trace]
    --rejected-token-model optimistic|pessimistic|both  How rejected tokens route: like the tokens that follow
        (optimistic), or like unrelated tokens of the text (pessimistic); both, one table after the other.
        also: --tail
    """,
    "papers",
    part={"metavar": None},
)
declare("--output text|json|md  Format of the table.", "formulas")
declare(
    """
    --policy LIST  ... Several, separated by commas, are compared.
    --cache-ratio LIST  ... Several, separated by commas, are compared.
    --n-predict N  Tokens per answer.
    --repetitions N  Measurements, of which the median counts.
    """,
    "measured",
    read={names: "policy", numbers: "cache_ratio"},
    n_predict={"min": 8},
    repetitions={"min": 1},
)


@validate.command("papers")
@flatten
def papers(
    part: PaperPart = PaperPart.ALL,
    rejected_token_model: RejectedTokenModel = RejectedTokenModel.BOTH,
    seed: int = 0,
    output: Output = Output.TEXT,
) -> None:
    """Compare the simulator with published figures: those that its constants were chosen by, and others.

    Three figures say what the calibration is worth: Table 2 without overheads of programs, Table 2 with the chosen
    ones, and "elsewhere", figures of other publications from which no constant was chosen. Two constants are fitted
    on two rows of Table 2. Where the sources of a constant differ a prediction is a range.
    """
    from moeedge.lab.sim.papers import Cases, Papers, figures
    from moeedge.ui.console import notifier, stderr_console, stdout_console

    console = stdout_console()
    as_tables = output is Output.TEXT
    parts = [name for name in PaperPart if name is not PaperPart.ALL] if part is PaperPart.ALL else [part]
    others = [name for name in parts if name in (PaperPart.CUTOFF, PaperPart.ELSEWHERE)]
    of_table2 = [name for name in parts if name not in others]
    models = rejected_token_model.models
    rows: list[Compared] = []
    fits: list[dict[str, Any]] = []

    def compare(name: PaperPart, runs: Papers, fit: Fit | None = None) -> None:
        found = runs.part(name.value, fit)
        rows.extend(found)
        if as_tables:
            print_part(found, console)

    with Cases(Run(notifier(stderr_console()))) as cases:
        for model in models if of_table2 else ():
            runs = Papers(cases, rejected_token_model=model, seed=seed)
            fit = runs.fit()
            fits.append({"rejected_token_model": model, **asdict(fit)})
            if as_tables:
                print_fit(fit, model, console)
            for name in of_table2:
                compare(name, runs, fit)
        for name in others:  # hardly a draft is rejected there, or nothing is drafted
            compare(name, Papers(cases, rejected_token_model=models[0], seed=seed))
    summary = figures(rows)
    if as_tables:
        print_figures(summary, console)
    else:
        objects = {"fits": fits, "figures": [asdict(figure) for figure in summary]}
        typer.echo(json.dumps(objects | {"rows": [row.row() for row in rows]}, indent=1))


@validate.command("formulas")
@flatten
def formulas(output: Output = Output.TEXT) -> None:
    """Compute figures that three papers print, from the inputs that they print next to them.

    Expert reuse of MoE-SpAc, Table 1 of MoESD, active experts and Amdahl's law of the production study.
    """
    from moeedge.lab.analysis.published import reproduced

    rows = reproduced()
    if output is Output.MD:
        typer.echo(markdown(_FORMULA_COLUMNS, rows), nl=False)
    else:
        objects = [asdict(row) | {"agrees": row.agrees} for row in rows]
        emit(output, lambda _: json.dumps(objects, indent=1), print_formulas, rows)


@validate.command("measured")
@partial(flatten, ctx_size=1024, threads=1, device="emulated:link=2GB/s,threads=1")
def measured(
    *,
    engine: EngineOptions,
    policy: Sequence[str] = ("spac", "spac-paper", "lru"),
    cache_ratio: Sequence[float] = (0.17, 0.5),
    draft_max: Sequence[int] = (0, 4),
    n_predict: int = 96,
    repetitions: int = 3,
    output: Output = Output.TEXT,
) -> None:
    """Measure time per token on this machine's emulated device, and compare it with the simulator's.

    The simulator gets the trace of the same run and measured times of single operations (expert, transfer); nothing
    is fitted to the times that it predicts. Every combination of the lists is a row.
    """
    engine.limit_openmp_spin(emulate_bundled=True)
    from moeedge.lab.experiments.validation import Combination, compare_with_engine
    from moeedge.llama.gguf_file import read_summary
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.scheduler.opening import check_policy
    from moeedge.ui.console import notifier, stderr_console

    asked = [Combination(*values) for values in product(policy, cache_ratio, draft_max)]
    for name in policy:
        check_policy(PlacementConfig(policy=name))
    config = engine.config(emulate_bundled=True)
    if not read_summary(config.model).expert_layers:
        raise InputError(
            f"{config.model.name} has no experts: there is nothing to place.",
            "Give a Mixture-of-Experts model with -m.",
        )
    err = stderr_console()
    rows = compare_with_engine(config, asked, n_predict=n_predict, repeat=repetitions, run=Run(notifier(err)))
    source = as_dict(read_provenance(config.model))
    objects, errors = [asdict(row) | source for row in rows], [abs(row.error) for row in rows]
    emit(output, lambda *_: json.dumps(objects, indent=1), print_measured, rows, (median(errors), max(errors)))


# what is shown

_MS = 1e3  # from seconds

_PART_TITLES = {
    "table2": "MoE-SpAc, Table 2, calibrated: Qwen3-30B-A3B, tokens/s",
    "table3": "MoE-SpAc, Table 3: DeepSeek-V2-Lite, tokens/s",
    "table4": "MoE-SpAc, Table 4: without one of its parts, tokens/s",
    "figure5": "MoE-SpAc, Figure 5 (left): tokens/s by cache ratio",
    "cutoff": "SP-MoE, Figure 14: ms per token by cutoff layer",
    "elsewhere": "The same programs in other publications, ms per token; drafts of SP-MoE alone",
}
_IN_MS = ("cutoff", "elsewhere")  # as their sources print times
_CALIBRATION = {
    "without overheads": "(a) Table 2, without overheads of programs",
    "calibrated": "(b) Table 2, calibrated",
    "fed no constant": "(c) other publications, rows that fed no constant",
}
_FIGURE_COLUMNS = (
    text_column("", lambda row: _CALIBRATION[row.figure]),
    text_column("rejected tokens", lambda row: row.rejected_token_model or "none"),
    text_column("within 25 %", lambda row: f"{row.within_25_percent} of {row.rows}"),
    text_column("in order", lambda row: "" if row.pairs is None else f"{row.pairs_in_order} of {row.pairs}"),
    Column("whatever the constants", "pairs_in_order_anyway", none=""),
)
_MEASURED_COLUMNS = (
    text_column("policy", "policy"),
    Column("ratio", "cache_ratio", "g"),
    Column("gamma", "gamma"),
    Column("measured", "measured_tpot_s", ".2f", _MS),
    Column("simulated", "tpot_s", ".2f", _MS),
    Column("error", "error", "+.1%"),
    Column("pair hits measured", "hit_rate_pairs_measured", ".3f", none=""),
    Column("simulated", "hit_rate_pairs", ".3f"),
    Column("steps", "steps"),
    Column("rejected tokens", "rejected_token_model", str, none="none"),
)


def print_fit(fit: Fit, model: Model, console: Console) -> None:
    """The constants fitted on two rows of Table 2."""
    console.print(
        f"\nRejected tokens: {model}. Fitted on two rows of Table 2: experts on the CPU at "
        f"{fit.cpu_bytes_per_s / 1e9:.1f} GB/s, acceptance {fit.acceptance:.3f}",
        soft_wrap=True,
    )


def print_part(rows: Sequence[Compared], console: Console) -> None:
    """One table or figure of a paper, or the same programs in other publications: a line per row, with its range.

    Of tables also how many pairs of rows come in the published order, and how many are close.
    """
    table = rows[0].table
    console.print()
    title = f"{_PART_TITLES[table]} (rejected tokens: {rows[0].rejected_token_model})"
    columns = _part_columns(in_ms=table in _IN_MS)
    if len({row.result.config.cache_ratio for row in rows}) == 1:
        del columns[1]
    known = [column for column in columns if any(column.read(row) not in (None, "") for row in rows)]
    print_table(console, known, rows, title=title)
    if table.startswith("table"):
        from moeedge.lab.sim.papers import same_order

        right, total = same_order([row.predicted_ts for row in rows], rows)
        free = [row for row in rows if not row.fitted]
        console.print(
            f"{right} of {total} pairs in the published order, {sum(row.close for row in free)} of {len(free)} "
            "predictions within 25 %",
            soft_wrap=True,
        )


def _part_columns(*, in_ms: bool) -> list[Column]:
    """Columns of a part of the papers; in_ms: times per token instead of tokens per second."""
    form = ".1f" if in_ms else ".2f"

    def shown(speed_ts: float | None) -> float | None:
        return speed_ts and (_MS / speed_ts if in_ms else speed_ts)

    def over(ratio: float | None) -> float | None:
        return ratio and (1 / ratio if in_ms else ratio)

    def spread(row: Compared) -> str:
        ends = (row.range.high_ts, row.range.low_ts) if in_ms else (row.range.low_ts, row.range.high_ts)
        return " to ".join(format(shown(end), form) for end in ends)

    def remark(row: Compared) -> str:
        is_far = row.published_ts is not None and not row.close
        return "fitted" if row.fitted else "not within 25 %" if is_far else ""

    return [
        text_column("", "name"),
        Column("ratio of experts", "result.config.cache_ratio", ".0%"),
        Column("published", lambda row: shown(row.published_ts), form),
        Column("no overheads", lambda row: shown(row.without_overheads_ts), form),
        Column("ratio", lambda row: over(row.without_overheads_ratio), ".2f"),
        Column("predicted", lambda row: shown(row.predicted_ts), form),
        text_column("range", spread),
        Column("ratio", lambda row: over(row.ratio), ".2f"),
        text_column("", remark),
    ]


def print_figures(figures: Sequence[PublishedCount], console: Console) -> None:
    if figures:
        console.print()
        print_table(console, _FIGURE_COLUMNS, figures, title="What the calibration is worth")


def print_measured(rows: Sequence[Comparison], median_and_worst: tuple[float, float], console: Console) -> None:
    """ms per token, measured and simulated; `median_and_worst` are the absolute errors of all rows."""
    print_table(console, _MEASURED_COLUMNS, rows)
    of_both = "ms per token; absolute error: median {:.1%}, worst {:.1%}"
    console.print(of_both.format(*median_and_worst), soft_wrap=True)


def _cell(value: float | bool, digits: int) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.{digits}f}"


_FORMULA_COLUMNS = (
    text_column("source", "source"),
    text_column("figure", "figure"),
    Column("published", lambda row: _cell(row.published, row.digits)),
    Column("computed", lambda row: _cell(row.computed, row.digits + 1)),
    text_column("", lambda row: "" if row.agrees else "differs"),
)


def print_formulas(rows: Sequence[Reproduced], console: Console) -> None:
    """The rows, and how many agree as far as they are printed."""
    print_table(console, _FORMULA_COLUMNS, rows)
    console.print(f"\n{sum(row.agrees for row in rows)} of {len(rows)} agree as far as they are printed.")
