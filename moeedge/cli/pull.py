"""`moeedge pull`: download a model and its draft into the hub's cache on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import cli_errors
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.hub.pull import MissingFile, WantedModel


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A name of the catalog (moeedge list --all), NAME:QUANT, hf:owner/repo:QUANT or "
            "hf:owner/repo:file.gguf.",
        ),
    ],
    quant: Annotated[
        str | None,
        typer.Option(
            "--quant", metavar="TYPE", help="Another file of the same model, for instance Q8_0.", show_default=False
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="NAME",
            help="Another draft, named likewise. Default: the first that the catalog has for the model.",
            show_default=False,
        ),
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Only the model itself.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be downloaded, and stop.")] = False,
    output: Annotated[
        options.Output, typer.Option("-o", "--output", help="Print the files' paths, or one JSON object.")
    ] = options.Output.TEXT,
) -> None:
    """Download a model and the draft that goes with it; what an earlier try brought is not asked for again.

    Files go into the hub's cache ($HF_HUB_CACHE, else ~/.cache/huggingface/hub), which other programs share, and are
    checked by their SHA-256. HF_TOKEN opens gated repositories, HF_ENDPOINT names another server.
    """
    from moeedge.hub.catalog import load_catalog
    from moeedge.hub.pull import check_room, fetch_all, missing_files, refresh, want_pair
    from moeedge.ui.model_views import notify_downloads
    from moeedge.ui.progress import PullProgress

    with cli_errors():
        if draft is not None and no_draft:
            raise InputError("--draft and --no-draft exclude each other.", "Give one of them.")
        wanted = want_pair(load_catalog(), name, quant=quant, draft=draft, no_draft=no_draft)
        missing = missing_files(wanted)
        progress = PullProgress()
        notify_downloads(wanted, missing, progress.note)
        if dry_run:
            _show(wanted, missing, output)
            return
        check_room(missing)
        try:
            with progress:
                fetch_all(missing, progress)
        except KeyboardInterrupt:
            progress.note("Stopped; the same command goes on from there.")
            raise
        _show(refresh(wanted), [], output)


def _show(wanted: Sequence[WantedModel], missing: Sequence[MissingFile], output: options.Output) -> None:
    from moeedge.ui.console import stdout_console
    from moeedge.ui.model_views import files_json, print_files

    if output is options.Output.JSON:
        typer.echo(files_json(wanted, missing), nl=False)
    else:
        print_files(wanted, missing, stdout_console())
