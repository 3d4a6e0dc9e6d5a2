"""`moeedge list`, `show`, `pull` and `rm`: models on this machine, of the catalog and of the hub."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from moeedge import paths
from moeedge.cli.common import emit, gpu_memory, memory_size
from moeedge.cli.completion import completer, models
from moeedge.cli.model_files import download
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import DownloadError, InputError
from moeedge.hub.catalog import load_catalog
from moeedge.hub.local import hub_cache, plan_removal, remove
from moeedge.hub.local import list_models as find_models
from moeedge.hub.remote import refresh, want_pair
from moeedge.run import Run
from moeedge.ui.tables import records_json
from moeedge.units import format_bytes, visible


def _name(metavar: str, help: str, **settings: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, autocompletion=completer(models), **settings)


_SHOWN = "GGUF file, name of the catalog (moeedge list --all), or hf:OWNER/REPO:QUANT. Default: the bundled model."
_WANTED = "A name of the catalog (moeedge list --all), NAME:QUANT, hf:owner/repo:QUANT or hf:owner/repo:file.gguf."
_REMOVED = "As moeedge list shows it: a name, NAME:QUANT or hf:owner/repo:file.gguf."
Shown = Annotated[str, _name("NAME|FILE", _SHOWN, show_default=False)]
Wanted = Annotated[str, _name("NAME", _WANTED)]
Removed = Annotated[str, _name("NAME", _REMOVED)]

declare(
    """
    -a, --all  Include models of the catalog that are not on this machine.
        also: everything
    --fits SIZE|auto|none  Only models that run, with the drafts that chat takes, on a GPU of this size and in this
        machine's RAM, the best first. 12GB: what a card sold with 12 GB has; 12GiB: exactly so much free memory. auto:
        this machine's GPU; none: without one.
    --ram SIZE  With --fits: free RAM, such as 32GB. Default: what is free here.
    """,
    "list_models",
    ram={"rich_help_panel": None},
)
declare(
    """
    --template  Print the chat template alone.
    --offline  Ask no server: the files here and the catalog say what is known.
    """,
    "show",
    offline={"rich_help_panel": None},
)
declare(
    """
    --quant TYPE  Another quantization of the model, for instance Q8_0.
    --draft NAME  Another draft model. Default: the first of the catalog's drafts.
    --no-draft  Download only the model itself.
    """,
    "pull",
)
declare("-y, --yes  Do not ask.", "rm")


@flatten
def list_models(
    everything: bool = False, fits: str | None = None, ram: str | None = None, output: Output = Output.TEXT
) -> None:
    """List the models on this machine; with --all those of the catalog, with --fits those that can run here.

    moeedge list --all --fits 12GB shows what a GPU of 12 GB can run. -m of every command takes the names. Your own
    entries go into ~/.config/moeedge/catalog.toml, or the file that MOEEDGE_CATALOG names (docs/models.md).
    """
    from moeedge.ui.model_views import fits_json, print_fits, print_models

    if ram is not None and fits is None:
        raise InputError("--ram needs --fits.", "Write for instance --fits none --ram 32GB.")
    catalog = load_catalog()
    models = find_models(catalog, everything=everything)
    if fits is not None:
        from moeedge.planning.estimate import fitting, free_memory

        ram_bytes = None if ram is None else memory_size(ram, "--ram")
        vram_bytes = None if fits == "auto" else 0 if fits == "none" else gpu_memory(fits, "--fits")
        fits_here = fitting(models, catalog, free_memory(vram_bytes, ram_bytes))
        emit(output, fits_json, partial(print_fits, everything=everything), fits_here)
    else:
        show = partial(print_models, everything=everything, starter=catalog.starter())
        emit(output, lambda rows, _folder: records_json(rows), show, models, hub_cache())


@flatten
def show(name: Shown = "bundled", template: bool = False, offline: bool = False, output: Output = Output.TEXT) -> None:
    """Show what a model is: architecture, size, context, experts, licence, chat template.

    The header of the file is enough; of a model that is not on this machine it is read from the hub, and without
    network the catalog says what it knows. moeedge plan shows how much memory a model takes here.
    """
    from moeedge.planning.headers import read_card
    from moeedge.ui.console import notifier, stderr_console
    from moeedge.ui.model_views import card_json, entry_json, print_card, print_entry

    try:
        wanted = str(paths.bundled_target()) if name.lower() == "bundled" else name
        card = read_card(wanted, Run(notifier(stderr_console())))
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


@flatten
def pull(
    name: Wanted,
    quant: str | None = None,
    draft: str | None = None,
    no_draft: bool = False,
    dry_run: bool = False,
    output: Output = Output.TEXT,
) -> None:
    """Download a model of the catalog or of the Hugging Face hub, and its draft.

    A draft is a small model whose guesses make the large one faster. An interrupted download continues where it
    stopped. Files go into ~/.cache/huggingface/hub ($HF_HUB_CACHE), which other programs share, and are checked by
    their SHA-256. HF_TOKEN opens gated repositories, HF_ENDPOINT names another server.
    """
    from moeedge.ui.console import PullProgress
    from moeedge.ui.model_views import files_json, print_files

    if draft is not None and no_draft:
        raise InputError("--draft and --no-draft cannot be used together.", "Give one of them.")
    wanted = want_pair(load_catalog(), name, quant=quant, draft=draft, no_draft=no_draft)
    missing = download(wanted, PullProgress(), dry_run=dry_run)
    emit(output, files_json, print_files, wanted if dry_run else refresh(wanted), missing)


@flatten
def rm(name: Removed, yes: bool = False) -> None:
    """Delete a downloaded model, or what is left of an unfinished download.

    Its draft stays: that is a model of its own. Other programs that use the same folder (the hub's cache) lose the
    file, too. Asks first.
    """
    removal = plan_removal(load_catalog(), name)
    for path in removal.links or removal.blobs:
        typer.echo(visible(str(path)), err=True)
    name, size = visible(removal.name), format_bytes(removal.size_bytes)
    if not yes:
        if not sys.stdin.isatty():
            raise InputError(f"Removing {name} ({size}) needs a confirmation.", "Add --yes to the command.")
        typer.echo(f"Remove {name}, {size}? [y/N] ", nl=False, err=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            typer.echo("Nothing was removed.", err=True)
            return
    remove(removal)
    typer.echo(f"Removed {name}, which frees {size}.", err=True)
