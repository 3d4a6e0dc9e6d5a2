"""`moeedge show`: what one model is."""

from __future__ import annotations

from typing import Annotated

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import emit
from moeedge.cli.completion import completer, models
from moeedge.cli.declare import Output, derive
from moeedge.errors import DownloadError

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        autocompletion=completer(models),
        help="GGUF file, name of the catalog (moeedge list --all), or hf:OWNER/REPO:QUANT. Default: the bundled model.",
        show_default=False,
    ),
]
Offline = Annotated[
    bool,
    derive(
        options.Offline, help="Ask no server: the files here and the catalog say what is known.", rich_help_panel=None
    ),
]
Template = Annotated[bool, typer.Option("--template", help="Print the chat template alone.")]


def show(
    name: Name = "bundled",
    template: Template = False,
    offline: Offline = False,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Show what a model is: architecture, size, context, experts, licence, chat template.

    The header of the file is enough; of a model that is not on this machine it is read from the hub, and without
    network the catalog says what it knows. moeedge plan shows how much memory a model takes here.
    """
    from moeedge.hub.catalog import load_catalog
    from moeedge.planning.model_card import read_card
    from moeedge.ui.console import notifier, stderr_console
    from moeedge.ui.model_views import card_json, entry_json, print_card, print_entry

    try:
        card = read_card(str(paths.bundled_target()) if name.lower() == "bundled" else name, notifier(stderr_console()))
    except DownloadError as error:
        choice = None if template else load_catalog().find(name)
        if choice is None:
            raise
        emit(output, entry_json, print_entry, choice, error.message)
        return
    if template:
        typer.echo(card.template)
    else:
        emit(output, card_json, print_card, card)
