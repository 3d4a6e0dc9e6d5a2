"""`moeedge list`: the models on this machine, and those that the catalog offers."""

from __future__ import annotations

from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import memory_size
from moeedge.cli.declare import Output
from moeedge.errors import InputError
from moeedge.hub.cache import hub_cache
from moeedge.hub.catalog import load_catalog
from moeedge.hub.local import list_models as find_models

Everything = Annotated[
    bool, typer.Option("-a", "--all", help="Include models of the catalog that are not on this machine.")
]
Fits = Annotated[
    str | None,
    typer.Option(
        "--fits",
        metavar="SIZE|auto|none",
        help="Only models that run with a GPU of this much free memory, such as 12GB, and with this machine's RAM, the "
        "best first. auto: this machine's GPU; none: without one.",
    ),
]
Ram = Annotated[
    str | None,
    typer.Option("--ram", metavar="SIZE", help="With --fits: free RAM, such as 32GB. Default: what is free here."),
]


def list_models(
    everything: Everything = False, fits: Fits = None, ram: Ram = None, output: options.TextOrJson = Output.TEXT
) -> None:
    """List the models on this machine; with --all what the catalog offers, with --fits what runs here.

    moeedge list --all --fits 12GB shows what a GPU of 12 GB can run. -m of every command takes the names. Your own
    entries go into ~/.config/moeedge/catalog.toml, or the file that MOEEDGE_CATALOG names (docs/models.md).
    """
    from moeedge.ui.console import stdout_console
    from moeedge.ui.model_views import fits_json, models_json, print_fits, print_models

    if ram is not None and fits is None:
        raise InputError("--ram needs --fits.", "Write for instance --fits none --ram 32GB.")
    catalog = load_catalog()
    models = find_models(catalog, everything=everything)
    if fits is not None:
        from moeedge.planning.estimate import fitting, free_memory

        ram_bytes = None if ram is None else memory_size(ram, "--ram")
        vram_bytes = None if fits in ("auto", "none") else memory_size(fits, "--fits")
        memory = free_memory("none" if fits == "none" else "auto", vram_bytes=vram_bytes, ram_bytes=ram_bytes)
        found = fitting(models, catalog, memory)
        if output is Output.JSON:
            typer.echo(fits_json(found), nl=False)
        else:
            print_fits(found, stdout_console(), everything=everything)
    elif output is Output.JSON:
        typer.echo(models_json(models), nl=False)
    else:
        print_models(models, hub_cache(), stdout_console(), everything=everything, starter=catalog.starter())
