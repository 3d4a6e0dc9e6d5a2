"""The results of `moeedge lab replay` and `moeedge lab simulate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeedge.lab.sim.curves import PAIR_BOUNDS
from moeedge.lab.sim.execution import CAUSES
from moeedge.lab.sim.simulate import STOCK_POLICY
from moeedge.policies.registry import BOUNDS, TABLE
from moeedge.ui.plots import Line, Plot, save_plots
from moeedge.ui.tables import Column, json_text, print_table, text_column, value_columns
from moeedge.units import visible

if TYPE_CHECKING:
    from moeedge.lab.sim.curves import AtMost, CurvePanel, CurvePoint
    from moeedge.lab.sim.replay import ReplayRow, ReplaySetting

_MIB = 2.0**-20  # from bytes
_MS = 1e3  # from seconds


# replay


def _replay_name(row: ReplayRow) -> str:
    return f"({row.policy})" if row.without_predictor else row.policy + (" *" if row.prediction_source else "")


_ABOVE = "above oracle, as"
_REPLAY_COLUMNS = (
    text_column("policy", _replay_name),
    Column("pair hits", lambda row: None if row.policy == "belady" else row.hit_rate_pairs, ".3f"),
    Column("expert hits", "hit_rate_experts", ".3f"),
    Column("uploads", "uploads_per_layer_step", ".2f"),
    Column("MiB/step", "bytes_per_step", ".1f", _MIB),
    Column("hot/cold", "hot_cold_accuracy", ".3f"),
    Column("of oracle", lambda row: None if row.policy == "belady" else row.share_of_oracle, ".3f"),
    text_column(_ABOVE, lambda row: "slots change between layers" if row.above_oracle else ""),
)
_BUDGET_COLUMNS = (
    Column("natural", "experts_natural", ".1f"),
    Column("kept", "experts_kept", ".1f"),
    Column("weight", "kept_probability", ".3f"),
)
_BUDGET_LEGEND = (
    "natural, kept: distinct experts per layer and step that the router chose, and under the budget. weight: share of "
    "the router's weight that is on kept experts"
)
_WEIGHT_SOURCES = {
    "weights": "the trace's weights of the experts that tokens use",
    "counts": "counts, since the trace has no weights",
}

_LEFT_EDGE = 0.05  # uploads, for policies that move less
_THICK = ("spac", "lfu")  # with the interval of the bootstrap
_DEFAULT = "spac"
_UNRANKED = {*BOUNDS, *(f"({name})" for name in TABLE)}
_CURVE_LEGEND = (
    "Pair hits with at most so many uploads per layer and step: the best of the points that use no more. "
    "-: every point uses more. In brackets: by the cache alone, since a trace lacks what the predictor reads; not "
    "ranked. Lead in thousandths, with the interval of 95 % of the resamples."
)


def replay_json(rows: Sequence[ReplayRow] | Sequence[CurvePanel]) -> str:
    """One array, a line per row or panel; the same ones give the same bytes."""
    return "[\n" + ",\n".join(json_text(row.as_dict(), indent=None).rstrip() for row in rows) + "\n]\n"


def print_replay(rows: Sequence[ReplayRow], console: Console) -> None:
    """A table per model of rejected tokens and cache ratio, the best policy first and the bounds last."""
    known = {"MiB/step": any(row.bytes_per_step for row in rows), _ABOVE: any(row.above_oracle for row in rows)}
    columns = [column for column in _REPLAY_COLUMNS if known.get(column.title, True)]
    if any(row.expert_budget is not None for row in rows):
        columns += [replace(column, value=_of_budget(str(column.value))) for column in _BUDGET_COLUMNS]
    for (_, ratio, budget), group in groupby(
        rows, key=lambda row: (row.rejected_token_model, row.cache_ratio, _budget_of(row))
    ):
        entries = sorted(group, key=_rank)
        title = (
            f"{visible(entries[0].model)}: {entries[0].texts} texts, {_steps(entries[0])}; slots for "
            f"{100 * ratio:g} % of the experts ({entries[0].slots}){budget}"
        )
        print_table(console, columns, entries, title=title, style=_replay_style)
        console.print()
    if rows:
        console.print(_replay_legend(rows), style="dim")


def _of_budget(name: str) -> Callable[[ReplayRow], Any]:
    return lambda row: row.as_dict()[name]


def _rank(row: ReplayRow) -> tuple[float, ...]:
    return (1,) if row.policy in BOUNDS else (0, row.without_predictor, -row.hit_rate_pairs)


def _replay_style(row: ReplayRow) -> str:
    return "dim" if row.policy in BOUNDS or row.without_predictor else ""


def _budget_of(row: ReplayRow) -> str:
    """The budget of a row for the title; empty where no budgets were asked for."""
    return "" if row.expert_budget is None else f"; {row.expert_budget['budget'] or 'no expert budget'}"


def _steps(row: ReplaySetting) -> str:
    """Number and size of the steps, the drafts' acceptance, and where that and the rejected tokens are from."""
    model = row.rejected_token_model
    how = "as recorded" if model == "recorded" else f"{model} rejected tokens" if row.gamma else "one token at a time"
    rate = "" if row.acceptance_rate is None else f", acceptance rate {row.acceptance_rate:.2f}"
    if rate and row.acceptance_source not in (None, "recorded"):
        source = "an assumed chance" if row.acceptance_source == "assumed" else "the trace's chance"
        rate += f" by {source} of {row.acceptance_chance:.2f}"
    return f"{row.steps:,} steps of {row.gamma + 1} tokens{rate}, {how}"


def _replay_legend(rows: Sequence[ReplayRow]) -> str:
    lines = [
        "pair hits, expert hits: share of (token, expert) pairs, of distinct experts, resident when their step begins. "
        "uploads: per layer and step, loads on demand included. hot/cold: share of experts predicted correctly as "
        "used or unused before the step. oracle: knows each next step; no policy that plans between steps finds more "
        "pairs. belady: MIN; no cache that holds only used experts, such as lru and lfu, finds more experts."
    ]
    stated = {(row.prediction_source, row.predictor_accuracy) for row in rows if row.prediction_source is not None}
    if stated:
        names = ", ".join(f"{source} {accuracy:g}" for source, accuracy in sorted(stated, key=str))
        lines.append(
            f"* needs what layers read, which a trace lacks: a predictor of stated accuracy replaces it ({names})."
        )
    if any(row.expert_budget is not None for row in rows):
        source = rows[0].as_dict()["budget_weights"]
        lines.append(f"{_BUDGET_LEGEND}; ranked by {_WEIGHT_SOURCES[source]}.")
    return "\n".join(lines + shortcomings(rows))


# replay --curve


def print_curves(panels: Sequence[CurvePanel], console: Console) -> None:
    """Per panel a line per policy: its hit rate of pairs with at most so many uploads; and its lead over lfu."""
    for panel in panels:
        found = {(entry.policy, entry.uploads): entry for entry in panel.at_most}
        limits = list(dict.fromkeys(entry.uploads for entry in panel.at_most))
        names = dict.fromkeys(entry.policy for entry in panel.at_most)
        ranked = [name for name in names if name not in BOUNDS and name not in panel.apart]
        ranked.sort(key=lambda name: -found[name, None].hit_rate_pairs.value)
        titles = ["any" if limit is None else f"{limit:g}" for limit in limits]
        lines = [
            (
                f"({name})" if name in panel.apart else name,
                *(found[name, limit].hit_rate_pairs.value if (name, limit) in found else None for limit in limits),
            )
            for name in (*ranked, *(name for name in panel.apart if name in names), *PAIR_BOUNDS)
        ]
        memory = ", memory emptied per text" if panel.fresh_memory else ""
        console.print(
            f"{visible(panel.trace)} ({visible(panel.model)}), texts {panel.texts}: "
            f"{_steps(panel)}, slots for {100 * panel.cache_ratio:g} % of the experts "
            f"({panel.slots}){memory}; resampled by {panel.unit}",
            style="bold",
            soft_wrap=not console.is_terminal,
        )
        columns = [text_column("uploads at most", 0), *value_columns(titles, ".3f")]
        print_table(console, columns, lines, style=lambda line: "dim" if line[0] in _UNRANKED else "")
        leads = [_lead(found.get((_DEFAULT, limit))) for limit in limits]
        if _DEFAULT in ranked and leads[limits.index(None)] is not None:
            console.print()
            columns = [Column(title, index, str) for index, title in enumerate(titles, 1)]
            print_table(console, [text_column("lead over lfu", 0), *columns], [(_DEFAULT, *leads)])
        console.print()
    if panels:
        console.print(_CURVE_LEGEND, style="dim")


def _lead(entry: AtMost | None) -> str | None:
    if entry is None or entry.beyond_reference is None:
        return None
    lead = entry.beyond_reference
    return f"{1e3 * lead.value:+.0f} [{1e3 * lead.low:+.0f} {1e3 * lead.high:+.0f}]"


def shortcomings(rows: Sequence[ReplayRow]) -> list[str]:
    """A sentence for each input that policies lack in this replay."""

    def named(lacks: Callable[[ReplayRow], bool]) -> str:
        return ", ".join(dict.fromkeys(row.policy for row in rows if lacks(row)))

    def reads(row: ReplayRow) -> frozenset[str]:
        return TABLE[row.policy].make.required_inputs

    unread = named(lambda row: not row.token_ids and TABLE[row.policy].reads_tokens)
    stateless = named(lambda row: row.token_ids and not row.draft_hidden_states and "draft-states" in reads(row))
    unprofiled = named(lambda row: not row.profile and TABLE[row.policy].takes_profile)
    found = [
        f"{named(lambda row: row.without_predictor)}: by the cache alone, without a predictor, since a trace holds no "
        "inputs of layers, so not ranked; --predictor-accuracy replaces it by one of stated accuracy.",
        f"{unread}: without token tables, since this trace holds no vocabulary ids.",
        f"{stateless}: prediction by token ids alone, since this trace lacks the draft's hidden states, with which "
        "the engine predicts more; profile --policy spac --trace-out records them.",
        f"{unprofiled}: profiled on the first steps, since no text was held out for a profile.",
    ]
    return [sentence for sentence in found if not sentence.startswith(":")]


def draw_curves(panels: Sequence[CurvePanel], path: Path) -> None:
    """`replay --curve --plot`: hits over uploads, a plot per trace and model of rejected tokens, a line per policy.

    A line is what a policy reaches with at most so many uploads; a policy of one point, whose loads on demand cannot be
    limited, is a marker; those without their predictor are hollow. Raises InputError where the file cannot be written.
    """
    save_plots([_curve_plot(panel) for panel in panels], path, n_columns=2 if len(panels) < 5 else 4)


def _curve_plot(panel: CurvePanel) -> Plot:
    model = "" if panel.rejected_token_model == "recorded" else f", {panel.rejected_token_model}"
    memory = ", memory emptied" if panel.fresh_memory else ""
    about = f"{panel.n_texts} texts, {panel.steps:,} steps, {100 * panel.cache_ratio:g} % of the experts"
    x_label, y_label = "uploads per layer and step, at most", "pair hits: share of all pairs"
    points: dict[str, list[CurvePoint]] = {}
    for point in panel.points:
        points.setdefault(point.policy, []).append(point)
    lines = [_curve_line(panel, name, own) for name, own in points.items()]
    title = f"{panel.trace}{model}{memory}\n{about}"
    return Plot(title, x_label, y_label, lines=lines, log_base=10, bottom=None)


def _curve_line(panel: CurvePanel, name: str, points: Sequence[CurvePoint]) -> Line:
    is_apart, colour = name in panel.apart, "black" if name in BOUNDS else None
    marker = "*" if name == "oracle" else "+" if name in BOUNDS else "o"
    if len(points) == 1:
        point = points[0]
        x = [max(point.uploads_per_layer_step, _LEFT_EDGE)]
        return Line(name, [point.hit_rate_pairs.value], marker, colour, x=x, hollow=is_apart)
    reached = [each for each in panel.at_most if each.policy == name and each.uploads is not None]
    x, hits = [each.uploads or 0.0 for each in reached], [each.hit_rate_pairs for each in reached]
    errors = [(each.value - each.low, each.high - each.value) for each in hits] if name in _THICK else ()
    style, width = marker + (":" if is_apart else "-"), 2.2 if name in _THICK else 1.0
    return Line(name, [each.value for each in hits], style, colour, x=x, errors=errors, width=width, hollow=is_apart)


# simulate

Row = dict[str, Any]

_VARIED = {
    "policy": "policy",
    "ablations": "without",
    "cache_ratio": "ratio",
    "gamma": "gamma",
    "utility_cap": "K",
    "link_factor": "link",
    "rejected_token_model": "rejected tokens",
    "budget": "expert budget",
}
_PARTS = dict(zip(CAUSES.values(), ("draft", "dense", "experts", "CPU", "load", "link", "host"), strict=True))
_SIMULATE_COLUMNS = (
    Column("t/s", "tg_ts", ".2f"),
    text_column("range", lambda row: f"{row['tg_low_ts']:.2f} to {row['tg_high_ts']:.2f}"),
    Column("over stock", "over_stock", ".2f"),
    Column("ms/token", "tpot_s", ".1f", _MS),
    *(Column(title, key, lambda value: f"{value * _MS:.1f}" if value else "") for key, title in _PARTS.items()),
    # None where entire layers are on the GPU instead of a cache
    Column("pair hits", lambda row: None if row["whole_layers"] else row["hit_rate_pairs"], ".3f"),
    Column("expert hits", lambda row: None if row["whole_layers"] else row["hit_rate_experts"], ".3f"),
    Column("uploads", lambda row: None if row["whole_layers"] else row["uploads_per_layer_step"], ".2f"),
)


def print_simulation(rows: Sequence[Row], console: Console) -> None:
    """Speed, parts of the time per token in ms, hits and transfers; the title names what all rows have in common."""
    has_budgets = "budget" in rows[0]
    known = {key: name for key, name in _VARIED.items() if key in rows[0]}
    varied = [key for key in known if key == "policy" or len({row[key] for row in rows}) > 1]
    same = [f"{name} {_short(rows[0][key])}" for key, name in known.items() if key not in varied]
    quant, expert = rows[0]["quant"], f"{rows[0]['expert_bytes'] * _MIB:.3g} MiB per expert"
    about = [str(rows[0]["model"]), quant, expert, *(str(rows[0][key]) for key in ("hardware", "trace"))]
    assumed = dict.fromkeys(row["acceptance_chance"] for row in rows if row["acceptance_source"] == "assumed")
    same += [f"assumed chance of acceptance {chance:g}" for chance in assumed]
    title = ", ".join([*about, *(text for text in same if text not in ("without ", "link 1"))])
    columns = [Column(_VARIED[key], key, _short, left=True) for key in varied]
    columns += [*_SIMULATE_COLUMNS, *(_BUDGET_COLUMNS if has_budgets else ())]
    print_table(console, columns, rows, title=title, n_keys=len(varied))
    note = "draft to host: ms per token, of which CPU, load and link are waiting; uploads: per layer and step."
    if any(row["whole_layers"] for row in rows):
        note += (
            f" {STOCK_POLICY}: stock llama.cpp without drafts, with as many of the experts on the GPU, in entire "
            "layers (--n-cpu-moe)."
        )
    if has_budgets:
        note += f" {_BUDGET_LEGEND}; ranked by {_WEIGHT_SOURCES[rows[0]['budget_weights']]}."
    console.print(note, soft_wrap=not console.is_terminal)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
