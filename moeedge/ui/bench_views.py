"""The results of `moeedge bench`."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import Console

from moeedge.bench.figures import ALL, MEAN, StockRatio
from moeedge.bench.quality import different_scores
from moeedge.bench.records import BenchRow, Setup
from moeedge.bench.samples import RATIO_SCATTER, Spread
from moeedge.hardware.host import BUSY
from moeedge.policies.base import LookaheadStatus
from moeedge.records import as_dict
from moeedge.ui.plots import Point, lines_of
from moeedge.ui.tables import (
    NONE,
    TABLE_WIDTH,
    WITHHELD,
    Column,
    csv_text,
    figure_columns,
    json_text,
    markdown,
    narrow_markdown,
    print_table,
    ratio_column,
    sql_text,
    text_column,
)
from moeedge.units import format_bytes, format_count, visible

_SCATTER = 0.1  # between repetitions, from which on a figure is not to be trusted
_MIB = 2.0**-20  # from bytes
_GB = 1e-9


def render(rows: Sequence[BenchRow], form: str) -> str:
    """The rows of a benchmark as `form` (-o), ending in a newline. CSV and SQL leave out the raw samples."""
    records = [as_dict(row) for row in rows]
    if form == "json":
        return json_text(records)
    if form == "jsonl":
        return "".join(json_text(record, indent=None) for record in records)
    if form in ("csv", "sql"):
        plain = [{key: value for key, value in record.items() if key != "samples"} for record in records]
        return csv_text(plain) if form == "csv" else sql_text("moeedge_bench", plain)
    if any(row.parallel is not None for row in rows):
        lines = ["", *setup_lines(rows), *curve_lines(rows), *withheld_lines(rows)]
        return narrow_markdown(_PARALLEL_COLUMNS, rows, n_keys=4) + "\n".join(lines) + "\n"
    return _tables(rows, is_text=form == "text") + quality_markdown(rows) + best_stock_markdown(rows)


# lists of -t, -b, -ub, -ngl, -fa, -ctk and -ctv; of -ncmoe the column "layers"
_CONTEXT = ("threads", "n_batch", "n_ubatch", "n_gpu_layers", "flash_attn", "type_k", "type_v")


def _bench_columns(rows: Sequence[BenchRow]) -> list[Column]:
    """As llama-bench's, without those that make sense for none of the rows; empty ones may be among them."""
    # stock-ncmoe has -1 layers, whatever -ngl says
    varied = [name for name in _CONTEXT if len({getattr(row.setup, name) for row in rows} - {-1}) > 1]
    is_synthetic = all(row.setup.n_prompt or row.setup.n_gen for row in rows)
    columns = [
        text_column("test", "test"),
        text_column("mode", "mode"),
        *(Column(name, f"setup.{name}") for name in varied),
        Column("speculation", lambda row: (row.figures and row.figures.mode.speculation) or None, left=True),
        Column("policy", lambda row: None if row.policy == "none" else row.policy, left=True),
        Column("cache", "cache_ratio", "g"),
        Column("layers", "setup.whole_layers"),
        Column("GPU MiB", "setup.device_bytes", ".0f", _MIB),
        Column("pp t/s", "pp", _spread),
        Column("tg t/s", "tg", _spread),
        Column("t/s", lambda row: (row.total or row.tg or row.pp) if is_synthetic else row.total, _spread),
        ratio_column("ratio", lambda row: next(filter(None, (row.ratio_total, row.ratio, row.ratio_pp)), None)),
        ratio_column("tg ratio", "ratio"),
        ratio_column("pp ratio", "ratio_pp"),
        Column("output", _output),
        Column("score", lambda row: row.scores if row.scores.n_answers else None, str),
        Column("partial", lambda row: f"{len(row.samples)} of {row.n_planned}" if row.is_partial else None),
        *figure_columns(BenchRow, "ttft_s", "acceptance_rate", "tokens_per_step", "experts_per_verification"),
        *figure_columns(BenchRow, "cache.hit_rate_pairs", "cache.hit_rate_experts", "cache.uploads_per_layer_step"),
        *figure_columns(BenchRow, "cache.bytes_moved", "read_bytes_per_token", "cache.link_bytes_per_s"),
        *figure_columns(BenchRow, "cache.wait_share", "limit_share"),
        ratio_column("pp / ncmoe", "ratio_pp_ncmoe"),
        ratio_column("tg / ncmoe", "ratio_ncmoe"),
    ]
    # of synthetic tests each row has one speed, as llama-bench's
    left_out = {"pp t/s", "tg t/s", "pp ratio", "tg ratio", "tokens/step"} if is_synthetic else {"ratio"}
    from_disk = any(not row.setup.is_device for row in rows)
    left_out |= {"MiB moved"} if from_disk else {"MB/token", "disk MB/s", "disk wait %"}
    if not any(row.setup.whole_layers for row in rows):
        left_out |= {"layers", "GPU MiB", "pp / ncmoe", "tg / ncmoe"}
    return [column for column in columns if column.title not in left_out]


def _spread(spread: Spread) -> str:
    return f"{spread.mean:.2f}" + ("" if spread.stddev is None else f" ± {spread.stddev:.2f}")


def _output(row: BenchRow) -> str | None:
    if row.output is None:
        return None
    return f"{row.output.text} (lossy)" if row.is_lossy else row.output.summary


# what tells a row from the others; every table of the rows begins with these columns
_KEYS = ("test", "mode", *_CONTEXT, "speculation", "policy", "cache")

_MODEL_COLUMNS = (
    text_column("model", "model_description"),
    Column("size", "model_bytes", format_bytes),
    Column("params", "model_n_params", format_count),
    text_column("backend", "backend"),
    Column("threads", "threads"),
)


def _tables(rows: Sequence[BenchRow], *, is_text: bool) -> str:
    """Tables of at most 100 columns (is_text: without Markdown's lines); below them what all rows have in common."""
    if not rows:
        return ""
    columns = [column for column in _bench_columns(rows) if any(column.text(row) != column.none for row in rows)]
    n_keys = sum(column.title in _KEYS for column in columns)
    setups = list({row.setup.threads: row.setup for row in rows}.values())  # a line for each number of threads
    if not is_text:
        tables = markdown(_MODEL_COLUMNS, setups), narrow_markdown(columns, rows, n_keys=n_keys)
        return "\n".join([*tables, *_lines_below(rows)]) + "\n"
    file = io.StringIO()
    out = Console(file=file, width=TABLE_WIDTH, force_terminal=True, color_system=None, highlight=False)
    print_table(out, _MODEL_COLUMNS, setups)
    out.print()
    print_table(out, columns, rows, n_keys=n_keys)
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
    scatter = f"ratios of repetitions differ by more than {RATIO_SCATTER:.0%}"
    causes, texts = {row.disturbed for row in rows}, {"load": "other programs took cores", "scatter": scatter}
    reasons = [text for cause, text in texts.items() if cause in causes]
    return reasons and [
        f"{WITHHELD}: no ratio, because the samples of the row or of stock-ar were disturbed: {' and '.join(reasons)}. "
        "Measure again on a quiet machine."
    ]


def quiet_lines(rows: Sequence[BenchRow]) -> list[str]:
    """Why the figures may not be trusted: repetitions that scatter, and a machine that other programs kept busy."""
    lines, scattered = [], [row for row in rows if (row.scatter or 0.0) > _SCATTER]
    if scattered:
        most = max(scattered, key=lambda row: row.scatter or 0.0)
        lines.append(
            f"Speeds scatter: repetitions differ by more than {_SCATTER:.0%} in {len(scattered)} of {len(rows)} rows, "
            f"most in {most.test}, {most.label}: {most.scatter:.0%}. More repetitions (-r) help, or a quieter machine."
        )
    loads = [getattr(row.setup, name) for row in rows for name in ("other_load_before", "other_load")]
    busiest = max((load for load in loads if load is not None), default=0.0)
    if busiest > BUSY:
        lines.append(
            f"The machine was busy: other programs used {busiest:.1f} of {os.cpu_count()} processors "
            f"(quiet: up to {BUSY}). Speeds are too low, and ratios may be wrong."
        )
    return lines


def setup_lines(rows: Sequence[BenchRow]) -> list[str]:
    """Model, drafts, machine and versions of all rows."""
    setup = rows[0].setup
    commit = f", commit {setup.commit[:10]}{' (changed)' if setup.dirty else ''}" if setup.commit else ""
    drafted = next((row.setup for row in rows if row.setup.gamma), None)
    lengths = dict.fromkeys(row.setup.draft_length for row in rows)
    gammas = ", ".join(str(gamma) for gamma in lengths if gamma)
    draft = f"draft {drafted.draft} (gamma {gammas})" if drafted else "no draft"
    cached = next((row.setup for row in rows if row.cache_ratio is not None), None)
    if cached is not None:
        draft += f"; device {cached.device}"
    threads = ", ".join(str(n) for n in dict.fromkeys(row.setup.threads for row in rows))
    done = min((len({sample.repetition for sample in row.samples}) for row in rows if row.is_partial), default=None)
    repetitions = str(setup.repetitions) if done is None else f"{done} of {setup.repetitions}"
    return [
        f"{visible(setup.model)}, {visible(draft)}; {setup.cpu}, threads: {threads}, context: {setup.n_ctx}, "
        f"repetitions: {repetitions}",
        f"moeedge {setup.version}{commit}, llama-cpp-python {setup.llama_cpp_version}",
        *forced_lines(rows),
        *limit_lines(setup),
    ]


def forced_lines(rows: Sequence[BenchRow]) -> list[str]:
    """What is not the model's own: experts of a recorded trace, and scripted drafts."""
    lines = []
    if (setup := rows[0].setup).routing is not None:
        fit = f"scaled: {setup.routing_scaling}" if setup.routing_scaling else "on its own shape"
        costs = {row.mode.split("-")[0]: row.setup.routing_cost for row in rows if row.setup.routing_cost is not None}
        cost = ", ".join(f"{cost:.1%} of {engine}'s decoding" for engine, cost in costs.items())
        lines.append(f"experts: of {setup.routing} ({fit}); the hook costs {cost or 'a time that was not measured'}")
    scripted = next((row.setup for row in rows if row.setup.acceptance is not None), None)
    if scripted is not None:
        lines.append(f"drafts are accepted by a script, confidences {scripted.confidences}; texts are random")
    return lines


def limit_lines(setup: Setup) -> list[str]:
    """The limit of decoding without drafts, where the memory's read speed was measured."""
    if not (setup.limit_ts and setup.bytes_per_token and setup.read_bytes_per_s):
        return []
    return [
        f"weights per token: {format_bytes(setup.bytes_per_token)}, read speed of the memory: "
        f"{setup.read_bytes_per_s * _GB:.1f} GB/s, limit without drafts: {setup.limit_ts:.1f} t/s"
    ]


def lookahead_lines(rows: Sequence[BenchRow]) -> list[str]:
    """One line for each row whose policy judges its predictions from the draft."""
    lines = []
    for row in rows:
        used, gain, reason = row.setup.lookahead_used, row.setup.lookahead_gain, row.setup.lookahead_reason
        if used is not None:
            lines.append(f"{row.label}: {LookaheadStatus(used, gain, reason or '').decision.sentence()}")
    return lines


def difference_lines(rows: Sequence[BenchRow]) -> list[str]:
    """One line for each token at which a mode's answer differs from stock-ar's."""
    checked = [(row, row.output) for row in rows if row.output is not None]
    return [
        f"{kind}: {row.label}, {row.test} prompt {d.prompt}, turn {d.turn + 1}, token {d.position + 1}: "
        f"{_shown_token(d.token)} instead of {_shown_token(d.reference_token)}, {d.gap:.4f} logits apart"
        for row, output in checked
        for kind, differences in (("near-tie", output.near_ties), ("DIFFERENT", output.different))
        for d in differences
    ]


def score_lines(rows: Sequence[BenchRow]) -> list[str]:
    """The parts of the first scored row's score, and the modes whose score differs from it."""
    scored = [row for row in rows if row.scores.n_answers]
    if not scored:
        return []
    scores, n_predict = scored[0].scores, rows[0].setup.n_predict
    lines = [
        f"score: {scores.scorer or 'none'}; {scores.n_cut} of {scores.n_answers} answers cut at {n_predict} tokens"
    ]
    lines += [f"not scored: {n} of {scores.n_answers}, {reason}" for reason, n in scores.unscored]
    if len(scores.by_category) > 1:
        each = (f"{part.category} {part.score:.3f} ({part.n_scored})" for part in scores.by_category)
        lines.append(f"score by category: {', '.join(each)}")
    return lines + different_scores([(row.label, row.scores) for row in scored if not row.is_lossy])


def _shown_token(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"


_PARALLEL_COLUMNS = (
    text_column("test", "test"),
    Column("parallel", "parallel.n_parallel"),
    text_column("mode", "mode"),
    Column("gamma", lambda row: row.setup.draft_length or None),
    text_column("policy", lambda row: "" if row.policy == "none" else row.policy),
    Column("cache", "cache_ratio", "g"),
    Column("pp t/s", lambda row: row.pp and row.pp.mean, ".1f"),
    Column("t/s", lambda row: row.tg and row.tg.mean, ".2f"),
    Column("+-", lambda row: row.tg and row.tg.stddev, ".2f"),
    Column("t/s each", "parallel.sequence_ts", ".2f"),
    Column("partial", lambda row: f"{len(row.samples)} of {row.n_planned}" if row.is_partial else None),
    *figure_columns(BenchRow, "acceptance_rate", "tokens_per_step", "experts_per_verification", "cache.hit_rate_pairs"),
    Column("output", lambda row: row.output and row.output.summary),
    ratio_column("/ stock-ar", "ratio"),
    ratio_column("speed-up", "parallel.speed_up"),
)


def curve_lines(rows: Sequence[BenchRow]) -> list[str]:
    """How the columns are to be read, and each curve in one line."""
    lines = [
        "t/s: of all texts, in steps of as many texts as asked for. speed-up: over plain decoding of as many texts."
    ]
    trusted = [row.parallel for row in rows if row.parallel is not None and not row.disturbed]
    measured = {(own.curve, own.n_parallel): own.speed_up for own in trusted}
    for curve in lines_of(Point(*key, speed_up) for key, speed_up in measured.items()):
        speed_ups, sizes = [value or 0.0 for value in curve.values], ", ".join(map(str, curve.x))
        numbers = ", ".join(f"{value:.2f}" for value in speed_ups)
        peak = curve.x[speed_ups.index(max(speed_ups))]
        lines.append(f"{curve.label}: {numbers} for N = {sizes}; the most with N = {peak}.")
    return lines


def best_stock_markdown(rows: Sequence[BenchRow]) -> str:
    """A line per category of the prompts, or per test with scripted drafts; "" where stock had one mode only."""
    # a column for each row; those of one mode with scripted drafts share theirs, with a line for each rate
    columns_of: dict[tuple[str, int], dict[str, tuple[BenchRow, StockRatio]]] = {}
    for index, row in enumerate(rows):
        is_scripted = row.setup.acceptance is not None
        for part in row.best_stock:
            own = columns_of.setdefault((row.label, 0 if is_scripted else index), {})
            own[row.test if is_scripted else part.category] = row, part
    if not columns_of:
        return ""
    first, titles = next(iter(columns_of.values())), {ALL: "all together", MEAN: "mean of categories"}
    columns = [
        text_column("prompts", lambda name: titles.get(name, name)),
        text_column("fastest stock mode", lambda name: first[name][1].fastest or NONE),
        *(Column(label, partial(_with_interval, parts)) for (label, _), parts in columns_of.items()),
    ]
    title = "Decoding speed over the fastest stock mode of each category, in hindsight, with 95 % intervals:"
    names = [*(name for name in first if name != ALL), *([ALL] if ALL in first else [])]
    return "\n".join(["", title, "", narrow_markdown(columns, names, n_keys=2)])


def _with_interval(parts: Mapping[str, tuple[BenchRow, StockRatio]], name: str) -> str | None:
    if name not in parts:
        return None
    row, part = parts[name]
    if row.disturbed:
        return WITHHELD
    interval = "" if part.low is None or part.high is None else f" ({part.low:.3f} to {part.high:.3f})"
    return f"{part.ratio:.3f}{interval}"


def _with_error(value: float | None, error: float | None, form: str) -> str | None:
    if value is None or error is None:
        return None if value is None else format(value, form)
    return f"{value:{form}} ± {error:{form.lstrip('+')}}"


def _perplexity(row: BenchRow) -> str | None:
    measured = row.figures and row.figures.perplexity
    return _with_error(measured.value, measured.stderr, ".3f") if measured else None


_QUALITY_COLUMNS = (
    text_column("mode", "label"),
    Column("score", lambda row: _with_error(row.figures.total.score, row.figures.total.score_stderr, ".3f")),
    Column(
        "change", lambda row: _with_error(row.figures.total.score_change, row.figures.total.score_change_stderr, "+.3f")
    ),
    Column("quality", "figures.total.quality", ".3f"),
    Column("perplexity", _perplexity),
    Column("agreement", lambda row: row.output and row.output.agreement, ".3f"),
    ratio_column("/ stock-ar", "figures.total.ratio", ".2f"),
    ratio_column("/ no budget", "figures.total.ratio_unbudgeted", ".2f"),
    Column("tokens/step", "figures.total.tokens_per_step", ".2f"),
    Column("natural", "figures.total.experts_natural", ".1f"),
    Column("kept", "figures.total.experts_kept", ".1f"),
    Column("most", "figures.total.experts_max"),
    Column("probability", "figures.total.kept_probability", ".3f"),
)


def quality_markdown(rows: Sequence[BenchRow]) -> str:
    """The table of the rows whose expert budgets or draft lengths are compared, and one by category; "" for none."""
    compared = [(row, row.figures) for row in rows if row.figures is not None and row.setup.acceptance is None]
    if not compared:
        return ""
    rows = [row for row, _ in compared]
    lines = [
        "",
        "Experts per MoE layer and verification: natural (chosen by the router), kept, and the most in any",
        "layer; probability: share of the natural choice's that stays. change: score against the answers",
        "without a budget. agreement: share of stock-ar's tokens before the first difference.",
        "",
        narrow_markdown(_QUALITY_COLUMNS, rows, n_keys=1),
    ]
    columns = [text_column("score, / stock-ar", "label")]
    categories = dict.fromkeys(point.category for _, own in compared for point in own.by_category)
    columns += [Column(category, partial(_score_and_ratio, category)) for category in categories]
    by_category = "\n" + narrow_markdown(columns, rows, n_keys=1) if len(columns) > 1 else ""
    return "\n".join(lines) + by_category


def _score_and_ratio(category: str, row: BenchRow) -> str | None:
    point = next((each for each in row.figures.by_category if each.category == category), None) if row.figures else None
    if point is None:
        return None
    score, ratio = (NONE if value is None else format(value, ".2f") for value in (point.score, point.ratio))
    return f"{score}, {WITHHELD if row.disturbed else ratio}"
