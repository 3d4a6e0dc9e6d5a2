"""`moeedge list`: the models on this machine, and those that the catalog offers."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import emit, gpu_memory, memory_size
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
        help="Only models that run, with the drafts that chat takes, on a GPU of this size and in this machine's RAM, "
        "the best first. 12GB: what a card sold with 12 GB has; 12GiB: exactly so much free memory. auto: this "
        "machine's GPU; none: without one.",
    ),
]
Ram = Annotated[
    str | None,
    typer.Option("--ram", metavar="SIZE", help="With --fits: free RAM, such as 32GB. Default: what is free here."),
]


def list_models(
    everything: Everything = False, fits: Fits = None, ram: Ram = None, output: options.TextOrJson = Output.TEXT
) -> None:
    """List the models on this machine; with --all those of the catalog, with --fits those that can run here.

    moeedge list --all --fits 12GB shows what a GPU of 12 GB can run. -m of every command takes the names. Your own
    entries go into ~/.config/moeedge/catalog.toml, or the file that MOEEDGE_CATALOG names (docs/models.md).
    """
    from moeedge.ui.model_views import fits_json, print_fits, print_models
    from moeedge.ui.tables import records_json

    if ram is not None and fits is None:
        raise InputError("--ram needs --fits.", "Write for instance --fits none --ram 32GB.")
    catalog = load_catalog()
    models = find_models(catalog, everything=everything)
    if fits is not None:
        from moeedge.planning.estimate import fitting, free_memory

        ram_bytes = None if ram is None else memory_size(ram, "--ram")
        vram_bytes = None if fits in ("auto", "none") else gpu_memory(fits, "--fits")
        memory = free_memory("none" if fits == "none" else "auto", vram_bytes=vram_bytes, ram_bytes=ram_bytes)
        found = fitting(models, catalog, memory)
        emit(output, fits_json, partial(print_fits, everything=everything), found)
    else:
        show = partial(print_models, everything=everything, starter=catalog.starter())
        emit(output, lambda rows, _folder: records_json(rows), show, models, hub_cache())
