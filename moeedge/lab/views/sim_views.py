"""The results of `moeedge lab replay` and `moeedge lab simulate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeedge.lab.sim.curves import PAIR_BOUNDS
from moeedge.policies.registry import BOUNDS, TABLE
from moeedge.ui.console import visible
from moeedge.ui.plots import COLOURS, MARKERS, new_figure, save_figure
from moeedge.ui.tables import Column, json_text, print_table, text_column, value_columns

if TYPE_CHECKING:
    from moeedge.lab.sim.curves import AtMost, CurvePanel, CurvePoint
    from moeedge.lab.sim.replay import ReplayRow, Setting

_MIB = 2.0**-20  # from bytes
_MS = 1e3  # from seconds


# replay

_ABOVE = "above oracle, as"
_REPLAY_COLUMNS = (
    text_column("policy", lambda row: _replay_name(row)),
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
    for (model, ratio, budget), group in groupby(
        rows, key=lambda row: (row.rejected_token_model, row.cache_ratio, _budget_of(row))
    ):
        entries = list(group)
        ranked = sorted(
            (row for row in entries if row.policy not in BOUNDS),
            key=lambda row: (row.without_predictor, -row.hit_rate_pairs),
        )
        ranked += [row for row in entries if row.policy in BOUNDS]
        title = _replay_title(ranked[0], model, ratio) + budget
        print_table(console, columns, ranked, title=title, style=_row_style)
        console.print()
    if rows:
        console.print(_replay_legend(rows), style="dim")


def _of_budget(name: str) -> Callable[[ReplayRow], Any]:
    return lambda row: row.as_dict()[name]


def _budget_of(row: ReplayRow) -> str:
    """The budget of a row for the title; empty where no budgets were asked for."""
    if row.expert_budget is None:
        return ""
    return f"; {row.expert_budget['budget'] or 'no expert budget'}"


def _row_style(row: ReplayRow) -> str:
    return "dim" if row.policy in BOUNDS or row.without_predictor else ""


def _replay_name(row: ReplayRow) -> str:
    if row.without_predictor:
        return f"({row.policy})"
    return row.policy + ("" if row.prediction_source is None else " *")


def _replay_title(row: ReplayRow, model: str, ratio: float) -> str:
    acceptance = _acceptance(row)
    how = "as recorded" if model == "recorded" else f"{model} rejected tokens" if row.gamma else "one token at a time"
    return (
        f"{visible(row.model)}: {row.texts} texts, {row.steps:,} steps of {row.gamma + 1} tokens{acceptance}, {how}; "
        f"slots for {100 * ratio:g} % of the experts ({row.slots})"
    )


def _acceptance(row: Setting) -> str:
    """The drafts' acceptance, and where it is from unless it was recorded; empty without drafts."""
    if row.acceptance_rate is None:
        return ""
    rate = f", acceptance rate {row.acceptance_rate:.2f}"
    if row.acceptance_source in (None, "recorded"):
        return rate
    source = "an assumed chance" if row.acceptance_source == "assumed" else "the trace's chance"
    return f"{rate} by {source} of {row.acceptance_chance:.2f}"


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
        by_policy: dict[str, dict[float | None, AtMost]] = {}
        for entry in panel.at_most:
            by_policy.setdefault(entry.policy, {})[entry.uploads] = entry
        limits = list(dict.fromkeys(entry.uploads for entry in panel.at_most))
        ranked = [name for name in by_policy if name not in BOUNDS and name not in panel.apart]
        ranked.sort(key=lambda name: -by_policy[name][None].hit_rate_pairs.value)
        order = [*ranked, *(name for name in panel.apart if name in by_policy), *PAIR_BOUNDS]
        titles = ["any" if limit is None else f"{limit:g}" for limit in limits]
        columns = [text_column("uploads at most", 0), *value_columns(titles, ".3f")]
        lines = [
            (
                f"({name})" if name in panel.apart else name,
                *(
                    by_policy[name][limit].hit_rate_pairs.value if limit in by_policy[name] else None
                    for limit in limits
                ),
            )
            for name in order
        ]
        console.print(_curve_title(panel), style="bold", soft_wrap=not console.is_terminal)
        print_table(console, columns, lines, style=lambda line: "dim" if line[0] in _UNRANKED else "")
        leads = [
            (name, *(_lead(by_policy[name].get(limit)) for limit in limits))
            for name in ranked
            if name == _DEFAULT and by_policy[name][None].beyond_reference is not None
        ]
        if leads:
            console.print()
            columns = [
                text_column("lead over lfu", 0),
                *(Column(title, index, str) for index, title in enumerate(titles, 1)),
            ]
            print_table(console, columns, leads)
        console.print()
    if panels:
        console.print(_CURVE_LEGEND, style="dim")


def _curve_title(panel: CurvePanel) -> str:
    model = panel.rejected_token_model
    how = "as recorded" if model == "recorded" else f"{model} rejected tokens" if panel.gamma else "token by token"
    memory = ", memory emptied per text" if panel.fresh_memory else ""
    slots = f"slots for {100 * panel.cache_ratio:g} % of the experts ({panel.slots})"
    return (
        f"{visible(panel.trace)} ({visible(panel.model)}), texts {panel.texts}: {panel.steps:,} steps of "
        f"{panel.gamma + 1} tokens{_acceptance(panel)}, {how}, {slots}{memory}; resampled by {panel.unit}"
    )


def _lead(entry: AtMost | None) -> str | None:
    if entry is None or entry.beyond_reference is None:
        return None
    lead = entry.beyond_reference
    return f"{1e3 * lead.value:+.0f} [{1e3 * lead.low:+.0f} {1e3 * lead.high:+.0f}]"


def shortcomings(rows: Sequence[ReplayRow]) -> list[str]:
    """A sentence for each input that policies lack in this replay."""
    lines = []
    unpredicted = dict.fromkeys(row.policy for row in rows if row.without_predictor)
    if unpredicted:
        lines.append(
            f"{', '.join(unpredicted)}: by the cache alone, without a predictor, since a trace holds no inputs of "
            "layers, so not ranked; --predictor-accuracy replaces it by one of stated accuracy."
        )
    unread = dict.fromkeys(row.policy for row in rows if not row.token_ids and TABLE[row.policy].reads_tokens)
    if unread:
        lines.append(f"{', '.join(unread)}: without token tables, since this trace holds no vocabulary ids.")
    stateless = dict.fromkeys(row.policy for row in rows if row.token_ids and not row.draft_hidden_states)
    contextless = [name for name in stateless if "draft-states" in TABLE[name].required_inputs]
    if contextless:
        lines.append(
            f"{', '.join(contextless)}: prediction by token ids alone, since this trace lacks the draft's hidden "
            "states, with which the engine predicts more; profile --policy spac --trace-out records them."
        )
    unprofiled = dict.fromkeys(row.policy for row in rows if not row.profile and TABLE[row.policy].takes_profile)
    if unprofiled:
        lines.append(f"{', '.join(unprofiled)}: profiled on the first steps, since no text was held out for a profile.")
    return lines


def draw_curves(panels: Sequence[CurvePanel], path: Path) -> None:
    """`replay --curve --plot`: hits over uploads, a panel per trace and model of rejected tokens, a line per policy.

    A line is what a policy reaches with at most so many uploads; a policy of one point, whose loads on demand cannot be
    limited, is a marker; those without their predictor are hollow. Raises InputError where the file cannot be written.
    """
    n_columns = min(len(panels), 2 if len(panels) < 5 else 4)
    n_rows = -(-len(panels) // n_columns)
    figure = new_figure(5.2 * n_columns, 4.2 * n_rows + 0.9)
    all_axes = figure.subplots(n_rows, n_columns, squeeze=False).reshape(-1)
    names = list(dict.fromkeys(point.policy for panel in panels for point in panel.points))
    styles = {name: _curve_style(index, name) for index, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for axes, panel in zip(all_axes, panels, strict=False):
        handles |= _draw_curve_panel(axes, panel, styles)
    for axes in all_axes[len(panels) :]:
        axes.axis("off")
    for index, axes in enumerate(all_axes[: len(panels)]):
        if index % n_columns == 0:
            axes.set_ylabel("pair hits: share of (token, expert) pairs")
        if index + n_columns >= len(panels):
            axes.set_xlabel("uploads per layer and step, at most")
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(len(handles), 10),
        fontsize="small",
        frameon=False,
    )
    save_figure(figure, path)


def _curve_style(index: int, name: str) -> dict[str, Any]:
    style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index // len(COLOURS) % len(MARKERS)]}
    if name in BOUNDS:
        return {"color": "black", "marker": "*" if name == "oracle" else "+"}
    return style


def _draw_curve_panel(axes: Any, panel: CurvePanel, styles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Draws one panel; returns what the legend shows of each policy."""
    handles = {}
    points: dict[str, list[CurvePoint]] = {}
    for point in panel.points:
        points.setdefault(point.policy, []).append(point)
    for name, own in points.items():
        style = styles[name]
        face = "white" if name in panel.apart else style["color"]
        if len(own) == 1:
            x, y = max(own[0].uploads_per_layer_step, _LEFT_EDGE), own[0].hit_rate_pairs.value
            (handles[name],) = axes.plot(x, y, linestyle="", markersize=7, markerfacecolor=face, **style)
            continue
        reached = [each for each in panel.at_most if each.policy == name and each.uploads is not None]
        x_values = [each.uploads for each in reached]
        middle, low, high = (
            [getattr(each.hit_rate_pairs, part) for each in reached] for part in ("value", "low", "high")
        )
        dashes = ":" if name in panel.apart else "-"
        width = 2.2 if name in _THICK else 1.0
        (handles[name],) = axes.plot(
            x_values, middle, dashes, linewidth=width, markersize=4, markerfacecolor=face, **style
        )
        if name in _THICK:
            axes.fill_between(x_values, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    model = "" if panel.rejected_token_model == "recorded" else f", {panel.rejected_token_model}"
    memory = ", memory emptied" if panel.fresh_memory else ""
    axes.set_title(
        f"{panel.trace}{model}{memory}\n{panel.n_texts} texts, {panel.steps:,} steps, {100 * panel.cache_ratio:g} % of "
        "the experts",
        fontsize="small",
    )
    return handles


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
_PARTS = {
    "draft_s": "draft",
    "dense_s": "dense",
    "device_s": "experts",
    "stall_cpu_s": "CPU",
    "stall_load_s": "load",
    "stall_link_s": "link",
    "host_s": "host",
}
_SIMULATE_COLUMNS = (
    Column("t/s", "tg_ts", ".2f"),
    text_column("range", lambda row: f"{row['tg_low_ts']:.2f} to {row['tg_high_ts']:.2f}"),
    Column("over stock", "over_stock", ".2f"),
    Column("ms/token", "tpot_s", ".1f", _MS),
    *(Column(title, key, lambda value: f"{value * _MS:.1f}" if value else "") for key, title in _PARTS.items()),
    Column("pair hits", lambda row: _of_cache(row, "hit_rate_pairs"), ".3f"),
    Column("expert hits", lambda row: _of_cache(row, "hit_rate_experts"), ".3f"),
    Column("uploads", lambda row: _of_cache(row, "uploads_per_layer_step"), ".2f"),
)


def _of_cache(row: Row, key: str) -> Any:
    """A figure of the expert cache; None where entire layers are on the GPU instead."""
    return None if row["whole_layers"] else row[key]


def print_simulation(rows: Sequence[Row], console: Console) -> None:
    """Speed, parts of the time per token in ms, hits and transfers; the title names what all rows have in common."""
    from moeedge.lab.sim.simulate import STOCK_POLICY

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
