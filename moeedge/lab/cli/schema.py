"""`moeedge lab schema`: the JSON Schemas of what the other commands write, made from the records."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from moeedge.errors import InputError
from moeedge.schemas import json_schema

Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Which one. Without a name: list them.", show_default=False)
]


# --help loads neither NumPy nor llama.cpp: the records are imported where they are asked for


def _bench() -> dict[str, Any]:
    from moeedge.bench.records import BenchRow

    about = "Rows of a benchmark. -o json prints this array, -o jsonl each element on a line of its own. "
    return json_schema(list[BenchRow], "moeedge bench -o json", about + "Null: does not apply, or is not known.")


def _chat() -> dict[str, Any]:
    from moeedge.ui.chat.single import AnswerRecord

    about = "One answer. Keys that do not apply, or whose value is not known, are left out."
    return json_schema(AnswerRecord, "moeedge chat -o json", about, nulls=False)


def _replay() -> dict[str, Any]:
    from moeedge.lab.sim.replay import ReplayRow

    about = (
        "Rows of a replay. With --expert-budget also lossy, budget, expert_budget, budget_ranking and budget_policy "
        "(null for off), experts_natural, experts_kept and experts_max (distinct experts per layer and step that the "
        "router chose, that the budget left, and the most of a layer and step), kept_probability (share of the weight "
        "of the router's choices that is on kept experts) and budget_weights (weights or, where the trace has none, "
        "counts)."
    )
    return json_schema(list[ReplayRow], "moeedge lab replay -o json", about)


def _trace() -> dict[str, Any]:
    from moeedge.trace.format import FORMAT, SCHEMA, TraceMeta, array_schemas

    about = (
        'Contents of a routing trace, a NumPy .npz archive: "meta" is the JSON text in the array of that name, each '
        "other property describes an array. T: tokens, in the order of computation; L: layers; k: experts of a token; "
        "d: values of a hidden state. Readers ignore unknown keys and arrays."
    )
    schema = json_schema(TraceMeta, "moeedge lab trace (.npz)", about)
    meta = {key: schema.pop(key) for key in ("type", "properties", "required")}
    for name, value, meaning in (
        ("format", FORMAT, "Name of the format."),
        ("schema", SCHEMA, "Version of the format."),
    ):
        meta["properties"][name] = {"description": meaning, "const": value}
        meta["required"].append(name)
    arrays = array_schemas()
    required = ["meta", *(name for name in arrays if name not in ("weights", "states"))]
    members = {"meta": {"description": 'The JSON object in the array "meta".', **meta}, **arrays}
    return schema | {"type": "object", "properties": members, "required": required}


SCHEMAS = {"bench": _bench, "chat": _chat, "replay": _replay, "trace": _trace}


def schema_text(name: str) -> str:
    """Returns the JSON text of a schema. Raises KeyError for a name that is not in SCHEMAS."""
    return json.dumps(SCHEMAS[name](), indent=2) + "\n"


def schema(name: Name = None) -> None:
    """Print the JSON Schema of a command's JSON output, or of a trace file: every key, with its meaning and unit."""
    if name is None:
        typer.echo("\n".join(SCHEMAS))
    elif name in SCHEMAS:
        typer.echo(schema_text(name), nl=False)
    else:
        raise InputError(f"There is no schema of '{name}'.", f"Choose from: {', '.join(SCHEMAS)}.")
