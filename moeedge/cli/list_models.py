"""`moeedge list`: the models on this machine, and those that the catalog offers."""

from __future__ import annotations

from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.declare import Output
from moeedge.hub.cache import hub_cache
from moeedge.hub.catalog import load_catalog
from moeedge.hub.local import list_models as find_models

Everything = Annotated[
    bool, typer.Option("-a", "--all", help="Include models of the catalog that are not on this machine.")
]


def list_models(everything: Everything = False, output: options.TextOrJson = Output.TEXT) -> None:
    """List the models that -m and -md know by name.

    These are the bundled pair, what was pulled, and with --all the catalog. Your own entries go into
    ~/.config/moeedge/catalog.toml, or the file that MOEEDGE_CATALOG names (docs/models.md).
    """
    from moeedge.ui.console import stdout_console
    from moeedge.ui.model_views import models_json, print_models

    models = find_models(load_catalog(), everything=everything)
    if output is Output.JSON:
        typer.echo(models_json(models), nl=False)
    else:
        print_models(models, hub_cache(), stdout_console(), everything=everything)
