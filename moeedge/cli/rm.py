"""`moeedge rm`: free the space that a downloaded model takes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moeedge.cli.completion import completer, models
from moeedge.errors import InputError
from moeedge.hub.catalog import load_catalog
from moeedge.hub.local import plan_removal, remove
from moeedge.units import format_bytes

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="As moeedge list shows it: a name, NAME:QUANT or hf:owner/repo:file.gguf.",
        autocompletion=completer(models),
    ),
]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]


def rm(name: Name, yes: Yes = False) -> None:
    """Delete a downloaded model, or what is left of an unfinished download.

    Its draft stays: that is a model of its own. Other programs that use the same folder (the hub's cache) lose the
    file, too. Asks first.
    """
    removal = plan_removal(load_catalog(), name)
    for path in removal.links or removal.blobs:
        typer.echo(str(path), err=True)
    size = format_bytes(removal.size_bytes)
    if not yes:
        if not sys.stdin.isatty():
            raise InputError(f"Removing {removal.name} ({size}) needs a confirmation.", "Add --yes to the command.")
        typer.echo(f"Remove {removal.name}, {size}? [y/N] ", nl=False, err=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            typer.echo("Nothing was removed.", err=True)
            return
    remove(removal)
    typer.echo(f"Removed {removal.name}, which frees {size}.", err=True)
