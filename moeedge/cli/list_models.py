"""`moeedge list`: the models on this machine, and those that the catalog offers."""

from __future__ import annotations

from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import cli_errors


def list_models(
    everything: Annotated[
        bool, typer.Option("-a", "--all", help="Also what the catalog offers and is not on this machine.")
    ] = False,
    output: Annotated[
        options.Output, typer.Option("-o", "--output", help="Print a table, or a JSON list with sizes in bytes.")
    ] = options.Output.TEXT,
) -> None:
    """List the models that -m and -md know by name: the bundled pair, what was pulled, and with --all the catalog.

    Own entries go into ~/.config/moeedge/catalog.toml, or the file that MOEEDGE_CATALOG names (docs/models.md).
    """
    from moeedge.hub.cache import hub_cache
    from moeedge.hub.catalog import load_catalog
    from moeedge.hub.local import list_models as listed
    from moeedge.ui.console import stdout_console
    from moeedge.ui.model_views import models_json, print_models

    with cli_errors():
        models = listed(load_catalog(), everything=everything)
        if output is options.Output.JSON:
            typer.echo(models_json(models), nl=False)
        else:
            print_models(models, hub_cache(), stdout_console(), everything=everything)
