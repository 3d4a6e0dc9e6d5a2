"""`moeedge rm`: free the space that a downloaded model takes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moeedge.cli.common import cli_errors
from moeedge.errors import InputError


def rm(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="As moeedge list shows it: a name, NAME:QUANT or hf:owner/repo:file.gguf."),
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a downloaded model, or what an unfinished download left, from the hub's cache.

    Only the model itself: drafts are models of their own. Other programs that use the same cache lose the file, too.
    """
    from moeedge.hub.catalog import load_catalog
    from moeedge.hub.local import plan_removal, remove
    from moeedge.units import format_bytes

    with cli_errors():
        removal = plan_removal(load_catalog(), name)
        for path in removal.links or removal.blobs:
            typer.echo(str(path), err=True)
        size = format_bytes(removal.size_bytes)
        if not yes:
            if not sys.stdin.isatty():
                raise InputError(f"Nobody can be asked whether {removal.name} ({size}) should go.", "Give --yes.")
            typer.echo(f"Remove {removal.name}, {size}? [y/N] ", nl=False, err=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                typer.echo("Nothing was removed.", err=True)
                return
        remove(removal)
        typer.echo(f"Removed {removal.name}: {size} are free.", err=True)
