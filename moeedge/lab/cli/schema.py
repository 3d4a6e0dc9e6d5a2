"""`moeedge lab schema`: the JSON Schemas of what the other commands write."""

from __future__ import annotations

from typing import Annotated

import typer

from moeedge.errors import InputError
from moeedge.schemas import schema_names, schema_text

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Which one. Without a name: list them.", show_default=False),
]


def schema(name: Name = None) -> None:
    """Print the JSON Schema of a command's JSON output, or of a trace file: every key, with its meaning and unit."""
    if name is None:
        typer.echo("\n".join(schema_names()))
    elif name in schema_names():
        typer.echo(schema_text(name), nl=False)
    else:
        raise InputError(f"There is no schema of '{name}'.", f"Choose from: {', '.join(schema_names())}.")
