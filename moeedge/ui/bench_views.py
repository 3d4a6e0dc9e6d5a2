"""The results of `moeedge bench`, `moeedge lab ablate` and `moeedge calibrate`."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeedge.bench.samples import RATIO_SCATTER
from moeedge.bench.scores import different_scores
from moeedge.hardware.machine_load import BUSY
from moeedge.policies.base import LookaheadStatus
from moeedge.ui.figures import is_ram, lookahead
from moeedge.ui.parallel_views import curve_lines, parallel_markdown
from moeedge.ui.quality_views import best_stock_markdown, quality_markdown
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
    from moeedge.bench.records import BenchRow
    from moeedge.bench.samples import Spread
    from moeedge.engine.types import EngineInfo
    from moeedge.policies.cost_model import CostModel
    from moeedge.scheduler.calibration import Calibration

FORMATS = ("md", "text", "csv", "json", "jsonl", "sql")
_SCATTER = 0.1  # between repetitions, from which on a figure is not to be trusted
_MIB = 2.0**-20  # from bytes
_MB = 1e-6
_GB = 1e-9
_MS = 1e3  # from seconds
_US = 1e6


def render(rows: Sequence[BenchRow], form: str) -> str:
    """The rows of a benchmark in one of FORMATS, ending in a newline. CSV and SQL leave out the raw samples."""
    records = [row.as_dict() for row in rows]
    if form == "json":
        return json_text(records)
    if form == "jsonl":
        return json_lines(records)
    if form == "csv":
        return csv_text(_without_samples(records))
    if form == "sql":
        return sql_text("moeedge_bench", _without_samples(records))
    if any(row.parallel is not None for row in rows):
        lines = ["", *setup_lines(rows), *curve_lines(rows), *withheld_lines(rows)]
        return parallel_markdown(rows) + "\n".join(lines) + "\n"
    first = _text(rows) if form == "text" else _markdown(rows)
    return first + quality_markdown(rows) + best_stock_markdown(rows)


def _bench_columns(
    *,
    has_cache: bool,
    has_scores: bool,
    has_layers: bool,
    has_budgets: bool,
    from_disk: bool,
    varied: set[str],
    is_synthetic: bool,
) -> list[Column]:
    """As llama-bench's.

    has_cache: some mode had an expert cache. has_scores: answers were scored. has_layers: some stock mode had whole
    layers on a GPU. has_budgets: expert budgets or draft lengths are compared. from_disk: experts were loaded into RAM.
    varied: keys of _CONTEXT in which rows differ. is_synthetic: no row has answers.
    """
    columns = [
        text_column("test", "test"),
        text_column("mode", "mode"),
        *(Column(title, _setting(name)) for title, name in _CONTEXT.items() if name in varied),
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
    left_out = set() if has_cache else {"policy", "cache", "pair hits", "expert hits", "uploads", "MiB moved"}
    left_out |= {"MiB moved"} if from_disk else {"MB/token", "disk MB/s", "disk wait %"}
    left_out |= set() if has_budgets else {"speculation"}
    left_out |= set() if has_scores else {"score"}
    left_out |= set() if is_synthetic else {"ratio"}
    left_out |= set() if has_layers else {"layers", "GPU MiB", "pp / ncmoe", "tg / ncmoe"}
    return [column for column in columns if column.title not in left_out]


def _spread(spread: Spread) -> str:
    return f"{spread.mean:.2f}" + ("" if spread.stddev is None else f" ± {spread.stddev:.2f}")


def _output(row: BenchRow) -> str | None:
    if row.output is None:
        return None
    return f"{row.output} (lossy)" if row.is_lossy else row.output.summary


_CONTEXT = {"threads": "threads", "n_batch": "n_batch", "n_ubatch": "n_ubatch"}  # lists of -t, -b, -ub: title and key


def _setting(name: str) -> Callable[[BenchRow], Any]:
    return lambda row: row.setup[name]


def _columns_of(rows: Sequence[BenchRow]) -> list[Column]:
    return _bench_columns(
        has_cache=any(row.cache_ratio is not None for row in rows),
        has_scores=any(row.scores.n_answers for row in rows),
        has_layers=any(row.setup.get("whole_layers") for row in rows),
        has_budgets=any(row.figures is not None and row.figures.mode.speculation for row in rows),
        from_disk=any(is_ram(row.setup.get("device", "")) for row in rows),
        varied={name for name in _CONTEXT.values() if len({row.setup.get(name) for row in rows}) > 1},
        is_synthetic=all(row.setup.get("n_prompt") or row.setup.get("n_gen") for row in rows),
    )


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


def _markdown(rows: Sequence[BenchRow]) -> str:
    """Tables of at most 100 columns, as llama-bench prints them; below them, once, what all rows have in common."""
    if not rows:
        return ""
    columns = _columns_of(rows)
    n_keys = sum(column.title in _KEYS for column in columns)
    table = narrow_markdown(columns, rows, n_keys=n_keys)
    return "\n".join([model_table(rows), table, *_lines_below(rows)]) + "\n"


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


def _text(rows: Sequence[BenchRow]) -> str:
    """The same without Markdown's lines; further tables stay as they are."""
    if not rows:
        return ""
    out = Console(file=io.StringIO(), width=TABLE_WIDTH, force_terminal=True, color_system=None, highlight=False)
    print_table(out, _MODEL_COLUMNS, list({row.setup["threads"]: row.setup for row in rows}.values()))
    columns = [column for column in _columns_of(rows) if any(column.text(row) != column.none for row in rows)]
    out.print()
    print_table(out, columns, rows, n_keys=sum(column.title in _KEYS for column in columns))
    assert isinstance(out.file, io.StringIO)
    text = "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())
    return "\n".join([text, "", *_lines_below(rows)]) + "\n"


def _without_samples(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "samples"} for record in records]


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
