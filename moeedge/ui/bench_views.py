"""The results of `moeedge bench`, `moeedge lab ablate` and `moeedge calibrate`."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeedge.bench.figures import ALL, MEAN
from moeedge.bench.samples import RATIO_SCATTER
from moeedge.bench.scores import different_scores
from moeedge.hardware.machine_load import BUSY
from moeedge.policies.base import LookaheadStatus
from moeedge.ui.figures import is_ram, lookahead
from moeedge.ui.tables import (
    NONE,
    TABLE_WIDTH,
    WITHHELD,
    Column,
    csv_text,
    json_lines,
    json_text,
    markdown,
    narrow_markdown,
    print_table,
    ratio_column,
    sql_text,
    text_column,
    value_columns,
)
from moeedge.units import format_bytes, format_count

if TYPE_CHECKING:
    from moeedge.bench.budget_choice import BudgetChoice
    from moeedge.bench.figures import BudgetPoint, ParallelFigures, StockRatio
    from moeedge.bench.records import BenchRow
    from moeedge.bench.samples import Spread
    from moeedge.engine.types import EngineInfo
    from moeedge.policies.cost_model import CostModel
    from moeedge.scheduler.calibration import Calibration

_SCATTER = 0.1  # between repetitions, from which on a figure is not to be trusted
_MIB = 2.0**-20  # from bytes
_MB = 1e-6
_GB = 1e-9
_MS = 1e3  # from seconds
_US = 1e6


def render(rows: Sequence[BenchRow], form: str) -> str:
    """The rows of a benchmark as `form` (-o), ending in a newline. CSV and SQL leave out the raw samples."""
    records = [row.as_dict() for row in rows]
    if form == "json":
        return json_text(records)
    if form == "jsonl":
        return json_lines(records)
    if form in ("csv", "sql"):
        plain = [{key: value for key, value in record.items() if key != "samples"} for record in records]
        return csv_text(plain) if form == "csv" else sql_text("moeedge_bench", plain)
    if any(row.parallel is not None for row in rows):
        lines = ["", *setup_lines(rows), *curve_lines(rows), *withheld_lines(rows)]
        return parallel_markdown(rows) + "\n".join(lines) + "\n"
    return _tables(rows, is_text=form == "text") + quality_markdown(rows) + best_stock_markdown(rows)


_CONTEXT = ("threads", "n_batch", "n_ubatch")  # lists of -t, -b, -ub


def _bench_columns(rows: Sequence[BenchRow]) -> list[Column]:
    """As llama-bench's; those that make sense for none of the rows are left out."""
    varied = [name for name in _CONTEXT if len({row.setup.get(name) for row in rows}) > 1]
    is_synthetic = all(row.setup.get("n_prompt") or row.setup.get("n_gen") for row in rows)
    columns = [
        text_column("test", "test"),
        text_column("mode", "mode"),
        *(Column(name, partial(_setting, name)) for name in varied),
        Column("speculation", lambda row: (row.figures and row.figures.mode.speculation) or None, left=True),
        Column("policy", lambda row: None if row.policy == "none" else row.policy, left=True),
        Column("cache", "cache_ratio", "g"),
        Column("layers", lambda row: row.setup.get("whole_layers")),
        Column("GPU MiB", lambda row: row.setup.get("device_bytes"), ".0f", _MIB),
        Column("pp t/s", "pp", _spread),
        Column("tg t/s", "tg", _spread),
        Column("t/s", lambda row: (row.total or row.tg or row.pp) if is_synthetic else row.total, _spread),
        ratio_column("ratio", lambda row: next(filter(None, (row.ratio_total, row.ratio, row.ratio_pp)), None)),
        ratio_column("tg ratio", "ratio"),
        ratio_column("pp ratio", "ratio_pp"),
        Column("output", _output, none=NONE),
        Column("score", lambda row: row.scores if row.scores.n_answers else None, str),
        Column("partial", lambda row: f"{len(row.samples)} of {row.n_planned}" if row.is_partial else None),
        Column("TTFT ms", "ttft_s", ".1f", _MS),
        Column("accepted", "acceptance_rate", ".2f"),
        Column("tokens/step", "tokens_per_step", ".2f"),
        Column("experts/step", "experts_per_verification", ".1f"),
        Column("pair hits", lambda row: row.cache.hit_rate_pairs, ".3f"),
        Column("expert hits", lambda row: row.cache.hit_rate_experts, ".3f"),
        Column("uploads", lambda row: row.cache.uploads_per_layer_step, ".2f"),
        Column("MiB moved", lambda row: row.cache.bytes_moved, ".1f", _MIB),
        Column("MB/token", "read_bytes_per_token", ".1f", _MB),
        Column("disk MB/s", lambda row: row.cache.link_bytes_per_s, ".0f", _MB),
        Column("disk wait %", lambda row: row.cache.wait_share, ".0f", 100),
        Column("of limit", "limit_share", ".2f"),
        ratio_column("pp / ncmoe", "ratio_pp_ncmoe"),
        ratio_column("tg / ncmoe", "ratio_ncmoe"),
    ]
    if is_synthetic:  # each row has one speed, as llama-bench's
        replaced = {"pp t/s", "tg t/s", "pp ratio", "tg ratio", "tokens/step"}
        columns = [column for column in columns if column.title not in replaced]
    left_out = set() if is_synthetic else {"ratio"}
    if not any(row.cache_ratio is not None for row in rows):
        left_out |= {"policy", "cache", "pair hits", "expert hits", "uploads", "MiB moved"}
    from_disk = any(is_ram(row.setup.get("device", "")) for row in rows)
    left_out |= {"MiB moved"} if from_disk else {"MB/token", "disk MB/s", "disk wait %"}
    if not any(row.setup.get("whole_layers") for row in rows):
        left_out |= {"layers", "GPU MiB", "pp / ncmoe", "tg / ncmoe"}
    return [column for column in columns if column.title not in left_out]


def _setting(name: str, row: BenchRow) -> Any:
    return row.setup[name]


def _spread(spread: Spread) -> str:
    return f"{spread.mean:.2f}" + ("" if spread.stddev is None else f" ± {spread.stddev:.2f}")


def _output(row: BenchRow) -> str | None:
    if row.output is None:
        return None
    return f"{row.output} (lossy)" if row.is_lossy else row.output.summary


# what tells a row from the others; every table of the rows begins with these columns
_KEYS = ("test", "mode", *_CONTEXT, "speculation", "policy", "cache")

_MODEL_COLUMNS = (
    text_column("model", "model_description"),
    Column("size", lambda setup: format_bytes(setup["model_bytes"])),
    Column("params", lambda setup: format_count(setup["model_n_params"])),
    text_column("backend", "backend"),
    Column("threads", "threads"),
)


def model_table(rows: Sequence[BenchRow]) -> str:
    """The model as llama-bench shows it; a line for each number of threads."""
    setups = {row.setup["threads"]: row.setup for row in rows}
    return markdown(_MODEL_COLUMNS, list(setups.values()))


def _tables(rows: Sequence[BenchRow], *, is_text: bool) -> str:
    """Tables of at most 100 columns, as llama-bench prints them; below them, once, what all rows have in common.

    is_text: without Markdown's lines.
    """
    if not rows:
        return ""
    columns = _bench_columns(rows)
    n_keys = sum(column.title in _KEYS for column in columns)
    if not is_text:
        table = narrow_markdown(columns, rows, n_keys=n_keys)
        return "\n".join([model_table(rows), table, *_lines_below(rows)]) + "\n"
    file = io.StringIO()
    out = Console(file=file, width=TABLE_WIDTH, force_terminal=True, color_system=None, highlight=False)
    print_table(out, _MODEL_COLUMNS, list({row.setup["threads"]: row.setup for row in rows}.values()))
    columns = [column for column in columns if any(column.text(row) != column.none for row in rows)]
    out.print()
    print_table(out, columns, rows, n_keys=sum(column.title in _KEYS for column in columns))
    text = "\n".join(line.rstrip() for line in file.getvalue().splitlines())
    return "\n".join([text, "", *_lines_below(rows)]) + "\n"


def _lines_below(rows: Sequence[BenchRow]) -> list[str]:
    lines = [*setup_lines(rows), *lookahead_lines(rows), *score_lines(rows)]
    if any(row.cache_ratio is not None for row in rows):
        lines.append(
            "pair hits, expert hits: share of (token, expert) pairs, and of distinct experts per layer and step, that "
            "were on the device. uploads: experts per layer and step."
        )
    lines += withheld_lines(rows)
    if any(row.is_partial for row in rows):
        lines.append("partial: the run was interrupted; so many of a mode's samples were measured.")
    return [part for line in lines for part in textwrap.wrap(line, TABLE_WIDTH)]


def withheld_lines(rows: Sequence[BenchRow]) -> list[str]:
    """One line where ratios are withheld, with the reasons."""
    reasons = {
        "load": "other programs took cores",
        "scatter": f"ratios of repetitions differ by more than {RATIO_SCATTER:.0%}",
    }
    found = [reason for key, reason in reasons.items() if any(row.disturbed == key for row in rows)]
    if not found:
        return []
    return [
        f"{WITHHELD}: no ratio, because the samples of the row or of stock-ar were disturbed: {' and '.join(found)}. "
        "Measure again on a quiet machine."
    ]


def quiet_lines(rows: Sequence[BenchRow]) -> list[str]:
    """Why the figures may not be trusted: repetitions that scatter, and a machine that other programs kept busy."""
    lines = []
    scattered = [row for row in rows if row.scatter is not None and row.scatter > _SCATTER]
    if scattered:
        most = max(scattered, key=lambda row: row.scatter or 0.0)
        lines.append(
            f"Speeds scatter: repetitions differ by more than {_SCATTER:.0%} in {len(scattered)} of {len(rows)} rows, "
            f"most in {most.test}, {most.label}: {most.scatter:.0%}. More repetitions (-r) help, or a quieter machine."
        )
    loads = [row.setup.get(name) for row in rows for name in ("other_load_before", "other_load")]
    busiest = max((load for load in loads if load is not None), default=0.0)
    if busiest > BUSY:
        lines.append(
            f"The machine was busy: other programs used {busiest:.1f} of {os.cpu_count()} processors "
            f"(quiet: up to {BUSY}). Speeds are too low, and ratios may be wrong."
        )
    return lines


def setup_lines(rows: Sequence[BenchRow]) -> list[str]:
    """What all rows have in common."""
    setup = rows[0].setup
    commit = f", commit {setup['commit'][:10]}{' (changed)' if setup['dirty'] else ''}" if setup["commit"] else ""
    drafted = next((row.setup for row in rows if row.setup["gamma"]), None)
    lengths = dict.fromkeys("auto" if row.setup.get("auto_gamma") else row.setup["gamma"] for row in rows)
    gammas = ", ".join(str(gamma) for gamma in lengths if gamma)
    draft = f"draft {drafted['draft']} (gamma {gammas})" if drafted else "no draft"
    cached = next((row.setup for row in rows if row.cache_ratio is not None), None)
    if cached is not None:
        draft += f"; device {cached['device']}"
    threads = ", ".join(str(n) for n in dict.fromkeys(row.setup["threads"] for row in rows))
    done = min((len({sample.repetition for sample in row.samples}) for row in rows if row.is_partial), default=None)
    repetitions = str(setup["repetitions"]) if done is None else f"{done} of {setup['repetitions']}"
    return [
        f"{setup['model']}, {draft}; {setup['cpu']}, threads: {threads}, context: {setup['n_ctx']}, "
        f"repetitions: {repetitions}",
        f"moeedge {setup['version']}{commit}, llama-cpp-python {setup['llama_cpp_version']}",
        *limit_lines(setup),
    ]


def limit_lines(setup: dict[str, Any]) -> list[str]:
    """What decoding without drafts is limited by, where the memory's read speed was measured."""
    if not setup.get("limit_ts"):
        return []
    return [
        f"weights per token: {format_bytes(setup['bytes_per_token'])}, read speed of the memory: "
        f"{setup['read_bytes_per_s'] * _GB:.1f} GB/s, limit without drafts: {setup['limit_ts']:.1f} t/s"
    ]


def lookahead_lines(rows: Sequence[BenchRow]) -> list[str]:
    """One line for each row whose policy judges its predictions from the draft."""
    lines = []
    for row in rows:
        used = row.setup.get("lookahead_used")
        if used is not None:
            status = LookaheadStatus(used, row.setup["lookahead_gain"], row.setup["lookahead_reason"])
            lines.append(f"{row.label}: lookahead {lookahead(status)}")
    return lines


def difference_lines(rows: Sequence[BenchRow]) -> list[str]:
    """One line for each token at which a mode's answer differs from stock-ar's."""
    lines = []
    for row in rows:
        if row.output is None:
            continue
        for kind, differences in (("near-tie", row.output.near_ties), ("DIFFERENT", row.output.different)):
            lines += [
                f"{kind}: {row.label}, {row.test} prompt {d.prompt}, turn {d.turn + 1}, token {d.position + 1}: "
                f"{_shown_token(d.token)} instead of {_shown_token(d.reference_token)}, {d.gap:.4f} logits apart"
                for d in differences
            ]
    return lines


def score_lines(rows: Sequence[BenchRow]) -> list[str]:
    """The parts of the first scored row's score, and the modes whose score differs from it."""
    scored = [(row.label, row.scores) for row in rows if row.scores.n_answers]
    if not scored:
        return []
    scores, n_predict = scored[0][1], rows[0].setup["n_predict"]
    lines = [
        f"score: {scores.scorer or 'none'}; {scores.n_cut} of {scores.n_answers} answers cut at {n_predict} tokens"
    ]
    lines += [f"not scored: {n} of {scores.n_answers}, {reason}" for reason, n in scores.unscored]
    if len(scores.by_category) > 1:
        each = (f"{part.category} {part.score:.3f} ({part.n_scored})" for part in scores.by_category)
        lines.append(f"score by category: {', '.join(each)}")
    exact = [(row.label, row.scores) for row in rows if row.scores.n_answers and not row.is_lossy]
    return [*lines, *different_scores(exact)]


def _shown_token(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"


_PARALLEL_COLUMNS = (
    text_column("test", "test"),
    Column("parallel", lambda row: row.parallel.n_parallel),
    text_column("mode", "mode"),
    Column("gamma", lambda row: row.setup["gamma"] or None),
    text_column("policy", lambda row: "" if row.policy == "none" else row.policy),
    Column("cache", "cache_ratio", "g"),
    Column("pp t/s", lambda row: row.pp and row.pp.mean, ".1f"),
    Column("t/s", lambda row: row.tg and row.tg.mean, ".2f"),
    Column("+-", lambda row: row.tg and row.tg.stddev, ".2f"),
    Column("t/s each", lambda row: row.parallel.sequence_ts, ".2f"),
    Column("partial", lambda row: f"{len(row.samples)} of {row.n_planned}" if row.is_partial else None),
    Column("accepted", "acceptance_rate", ".2f"),
    Column("tokens/step", "tokens_per_step", ".2f"),
    Column("experts/step", "experts_per_verification", ".1f"),
    Column("pair hits", lambda row: row.cache.hit_rate_pairs, ".3f"),
    Column("output", lambda row: row.output and row.output.summary),
    ratio_column("/ stock-ar", "ratio"),
    ratio_column("speed-up", lambda row: row.parallel.speed_up),
)


def parallel_markdown(rows: Sequence[BenchRow]) -> str:
    """A row per mode, draft length and number of texts."""
    return narrow_markdown(_PARALLEL_COLUMNS, rows, n_keys=4)


def batch_curves(rows: Sequence[BenchRow]) -> dict[str, dict[int, ParallelFigures]]:
    """The figures of modes with drafts by the name of their curve and the number of texts, in the order of the rows."""
    curves: dict[str, dict[int, ParallelFigures]] = {}
    for row in rows:
        if row.parallel is not None and row.parallel.speed_up is not None:
            curves.setdefault(row.parallel.curve, {})[row.parallel.n_parallel] = row.parallel
    return curves


def curve_lines(rows: Sequence[BenchRow]) -> list[str]:
    """How the columns are to be read, and each curve in one line."""
    lines = [
        "t/s: of all texts, in steps of as many texts as asked for. speed-up: over plain decoding of as many texts."
    ]
    for name, points in batch_curves(rows).items():
        speed_ups = {n: figures.speed_up or 0.0 for n, figures in points.items()}
        numbers = ", ".join(f"{value:.2f}" for value in speed_ups.values())
        sizes, peak = ", ".join(map(str, speed_ups)), max(speed_ups, key=lambda n: speed_ups[n])
        lines.append(f"{name}: {numbers} for N = {sizes}; the most with N = {peak}.")
    return lines


def best_stock_markdown(rows: Sequence[BenchRow]) -> str:
    """A line per mode with our backend, and one per category of the prompts; "" where stock had one mode only."""
    lanes = [row for row in rows if row.best_stock]
    if not lanes:
        return ""
    parts = [{part.category: part for part in row.best_stock} for row in lanes]
    is_disturbed = [row.disturbed is not None for row in lanes]
    table = [
        (
            {ALL: "all together", MEAN: "mean of categories"}.get(category, category),
            parts[0][category].fastest or NONE,
            *map(_with_interval, (own.get(category) for own in parts), is_disturbed),
        )
        for category in (*(name for name in parts[0] if name != ALL), ALL)
    ]
    columns = [text_column("prompts", 0), text_column("fastest stock mode", 1)]
    columns += [Column(row.label, index, str) for index, row in enumerate(lanes, start=2)]
    title = "Decoding speed over the fastest stock mode of each category, in hindsight, with 95 % intervals:"
    return "\n".join(["", title, "", narrow_markdown(columns, table, n_keys=2)])


def _with_interval(part: StockRatio | None, is_disturbed: bool) -> str:
    if part is None or is_disturbed:
        return NONE if part is None else WITHHELD
    interval = "" if part.low is None or part.high is None else f" ({part.low:.3f} to {part.high:.3f})"
    return f"{part.ratio:.3f}{interval}"


def _with_error(value: float | None, error: float | None, form: str) -> str:
    if value is None:
        return NONE
    return format(value, form) if error is None else f"{value:{form}} ± {error:{form.lstrip('+')}}"


def _perplexity(row: BenchRow) -> str:
    measured = None if row.figures is None else row.figures.perplexity
    return NONE if measured is None else _with_error(measured.value, measured.stderr, ".3f")


_QUALITY_COLUMNS = (
    text_column("mode", "label"),
    Column("score", lambda row: _with_error(row.figures.total.score, row.figures.total.score_stderr, ".3f"), str),
    Column(
        "change",
        lambda row: _with_error(row.figures.total.score_change, row.figures.total.score_change_stderr, "+.3f"),
        str,
    ),
    Column("quality", lambda row: row.figures.total.quality, ".3f"),
    Column("perplexity", _perplexity, str),
    Column("agreement", lambda row: None if row.output is None else row.output.agreement, ".3f"),
    ratio_column("/ stock-ar", lambda row: row.figures.total.ratio, ".2f"),
    ratio_column("/ no budget", lambda row: row.figures.total.ratio_unbudgeted, ".2f"),
    Column("tokens/step", lambda row: row.figures.total.tokens_per_step, ".2f"),
    Column("natural", lambda row: row.figures.total.experts_natural, ".1f"),
    Column("kept", lambda row: row.figures.total.experts_kept, ".1f"),
    Column("most", lambda row: row.figures.total.experts_max),
    Column("probability", lambda row: row.figures.total.kept_probability, ".3f"),
)


def quality_markdown(rows: Sequence[BenchRow]) -> str:
    """The table of the rows whose expert budgets or draft lengths are compared, and one by category; "" for none."""
    rows = [row for row in rows if row.figures is not None]
    if not rows:
        return ""
    lines = [
        "",
        "Experts per MoE layer and verification: natural (chosen by the router), kept, and the most in any",
        "layer; probability: share of the natural choice's that stays. change: score against the answers",
        "without a budget. agreement: share of stock-ar's tokens before the first difference.",
        "",
        narrow_markdown(_QUALITY_COLUMNS, rows, n_keys=1),
    ]
    return "\n".join(lines) + _by_category(rows)


def _by_category(rows: Sequence[BenchRow]) -> str:
    """Score and speed-up over stock-ar, a column per category of the dataset."""
    points = {row.label: {p.category: p for p in row.figures.by_category} for row in rows if row.figures is not None}
    disturbed = {row.label for row in rows if row.disturbed}
    categories = list(dict.fromkeys(category for own in points.values() for category in own))
    if not categories:
        return ""
    table = [
        (
            label,
            *(
                _score_and_ratio(own[category], label in disturbed) if category in own else NONE
                for category in categories
            ),
        )
        for label, own in points.items()
    ]
    columns = [text_column("score, / stock-ar", 0)]
    columns += [Column(category, index, str) for index, category in enumerate(categories, start=1)]
    return "\n" + narrow_markdown(columns, table, n_keys=1)


def _score_and_ratio(point: BudgetPoint, is_disturbed: bool) -> str:
    score, ratio = (NONE if value is None else format(value, ".2f") for value in (point.score, point.ratio))
    return f"{score}, {WITHHELD if is_disturbed else ratio}"


_TOKENS = (1, 2, 4, 8, 16)  # per expert, of the curves


def print_calibration(calibration: Calibration, info: EngineInfo, console: Console) -> None:
    """The measured times in microseconds and milliseconds, and the prompt's speed in tokens per second."""
    console.print(f"{info.model} on {info.device}, {info.n_threads} threads, {info.cache_slots:,} slots")
    if calibration.units is None:
        console.print("No layer was shared between CPU and device: there are no times of experts.")
    else:
        _print_cost_model(calibration.units, console)
    _print_steps(calibration, console)
    if calibration.prefill_ts:
        columns = [text_column("prompts", 0), *value_columns(list(calibration.prefill_ts), ".0f")]
        print_table(console, columns, [("t/s", *calibration.prefill_ts.values())])
        console.print(f"Chosen for prompts: {calibration.prefill_path}.")


def _print_cost_model(costs: CostModel, console: Console) -> None:
    curves = [("CPU", *map(costs.cpu_s, _TOKENS)), ("device", *map(costs.device_s, _TOKENS))]
    print_table(console, [text_column("us per expert, tokens", 0), *value_columns(_TOKENS, ".1f", scale=_US)], curves)
    titles = ("move an expert", "draft a token", "split a block", "rest of a layer")
    units = ("", costs.transfer_expert_s, costs.draft_token_s, costs.block_overhead_s, costs.layer_rest_s)
    print_table(console, [text_column("us", 0), *value_columns(titles, ".1f", scale=_US)], [units])
    print_table(
        console,
        [text_column("tau", 0), *value_columns(range(costs.cap + 1), ".2f")],
        [("r_c: pairs on the CPU", *costs.r_c), ("r_g: experts on the device", *costs.r_g)],
    )


def _print_steps(calibration: Calibration, console: Console) -> None:
    sizes = sorted(calibration.step_s)
    plain_ms = [calibration.plain_step_s[n] * _MS for n in sizes]
    cached_ms = [calibration.step_s[n] * _MS for n in sizes]
    speeds = (plain / cached for plain, cached in zip(plain_ms, cached_ms, strict=True))
    print_table(
        console,
        [text_column("ms per step, tokens", 0), *value_columns(sizes, ".2f")],
        [("without the cache", *plain_ms), ("with the cache", *cached_ms), ("speed", *speeds)],
    )


def print_budget_choice(choice: BudgetChoice, console: Console) -> None:
    """A line per budget that was tried, and the choice with its reason."""
    is_text = choice.score_kind == "likelihood"
    columns = [
        text_column("expert budget", lambda trial: "off" if trial.budget is None else str(trial.budget)),
        Column("log-likelihood" if is_text else "score", "score", ".3f"),
        Column("+-", "score_stddev", ".3f"),
        Column("tokens" if is_text else "tasks", "n_scored", ",d"),
        Column("t/s", "tg_ts", ".1f"),
        Column("speed", "ratio", ".3f"),
        Column("tokens/step", "tokens_per_step", ".2f"),
        Column("experts/layer", "experts", ".1f"),
    ]
    print_table(console, columns, choice.trials)
    console.print(choice.sentence(), soft_wrap=True)
