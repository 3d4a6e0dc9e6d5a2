"""`moeedge lab schema`: the JSON Schemas of what the other commands write, made from the records."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from types import GenericAlias
from typing import Annotated, Any

import typer

from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError
from moeedge.schemas import json_schema, key_rows
from moeedge.ui.tables import markdown, text_column

Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Which one. Without a name: list them.", show_default=False)
]


# by name: the record (in an array or alone), the command, what its output is. --help does not wait for the records
RECORDS = {
    "bench": (
        *("moeedge.bench.records:BenchRow", True, "bench -o json"),
        "Rows of a benchmark. -o json prints this array, -o jsonl each element on a line of its own. Null: does not "
        "apply, or is not known.",
    ),
    "chat": (
        *("moeedge.ui.chat.single:AnswerRecord", False, "chat -o json"),
        "One answer. Keys that do not apply, or whose value is not known, are left out.",
    ),
    "doctor": ("moeedge.health.doctor:Report", False, "doctor -o json", "What doctor finds."),
    "plan": ("moeedge.planning.session_plan:SessionPlan", False, "plan -o json", "What fits, before it is loaded."),
    "profile": (
        *("moeedge.analysis.profile:LayerProfile", False, "profile -o json"),
        "One layer. Keys of the run and, for a single layer, model_profile follow (docs/lab/traces.md).",
    ),
    "replay": (
        *("moeedge.lab.sim.replay:ReplayRow", True, "lab replay -o json"),
        "Rows of a replay. With --expert-budget also lossy, budget, expert_budget, budget_ranking, budget_policy (null "
        "for off), experts_natural, experts_kept, experts_max (distinct experts per layer and step: the router's, "
        "those kept, the most of a layer and step), kept_probability (share of the router's weight on kept experts), "
        "budget_weights (weights or, where the trace has none, counts).",
    ),
    "rivals": (
        *("moeedge.lab.experiments.rivals:RivalRow", True, "lab rivals -o json"),
        "Tests of moeedge next to other programs.",
    ),
    "simulate": (
        *("moeedge.lab.sim.simulate:SimulationRow", True, "lab simulate -o json"),
        "Rows of simulations; then the range of tg_ts, and over stock. --expert-budget adds the keys as in a replay.",
    ),
}


def _of_record(name: str) -> dict[str, Any]:
    place, is_array, command, about = RECORDS[name]
    module, _, kind = place.partition(":")
    record = getattr(import_module(module), kind)
    kind_of_output = GenericAlias(list, (record,)) if is_array else record
    return json_schema(kind_of_output, f"moeedge {command}", about, nulls=name != "chat")


def _of_trace() -> dict[str, Any]:
    from moeedge.trace.format import file_schema

    return file_schema()


SCHEMAS = {name: partial(_of_record, name) for name in RECORDS} | {"trace": _of_trace}


def schema_text(name: str) -> str:
    """Returns the JSON text of a schema. Raises KeyError for a name that is not in SCHEMAS."""
    return json.dumps(SCHEMAS[name](), indent=2) + "\n"


def key_table(name: str) -> str:
    """Returns the keys of a schema as a Markdown table: the documentation's. Raises KeyError as `schema_text`."""
    return markdown(
        [text_column(title, at) for at, title in enumerate(("key", "type", "meaning"))], list(key_rows(SCHEMAS[name]()))
    )


declare("--output json|md  The JSON Schema, or a Markdown table of the keys.", "schema")


@flatten
def schema(name: Name = None, *, output: Output = Output.JSON) -> None:
    """Print the JSON Schema of a command's JSON output, or of a trace file: every key, with its meaning and unit."""
    if name is None:
        typer.echo("\n".join(SCHEMAS))
    elif name in SCHEMAS:
        typer.echo(key_table(name) if output is Output.MD else schema_text(name), nl=False)
    else:
        raise InputError(f"There is no schema of '{name}'.", f"Choose from: {', '.join(SCHEMAS)}.")
