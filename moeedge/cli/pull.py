"""`moeedge pull`: download a model and its draft into the hub's cache on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import emit
from moeedge.cli.completion import completer, models
from moeedge.cli.declare import Output
from moeedge.cli.model_files import download
from moeedge.errors import InputError
from moeedge.hub.catalog import load_catalog
from moeedge.hub.pull import refresh, want_pair

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        autocompletion=completer(models),
        help="A name of the catalog (moeedge list --all), NAME:QUANT, hf:owner/repo:QUANT or hf:owner/repo:file.gguf.",
    ),
]
Quant = Annotated[
    str | None, typer.Option("--quant", metavar="TYPE", help="Another quantization of the model, for instance Q8_0.")
]
Draft = Annotated[
    str | None,
    typer.Option("--draft", metavar="NAME", help="Another draft model. Default: the first of the catalog's drafts."),
]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="Download only the model itself.")]


def pull(
    name: Name,
    quant: Quant = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    dry_run: options.DryRun = False,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Download a model of the catalog or of the Hugging Face hub, and its draft.

    A draft is a small model whose guesses make the large one faster. An interrupted download continues where it
    stopped. Files go into ~/.cache/huggingface/hub ($HF_HUB_CACHE), which other programs share, and are checked by
    their SHA-256. HF_TOKEN opens gated repositories, HF_ENDPOINT names another server.
    """
    from moeedge.ui.model_views import files_json, print_files
    from moeedge.ui.progress import PullProgress

    if draft is not None and no_draft:
        raise InputError("--draft and --no-draft cannot be used together.", "Give one of them.")
    wanted = want_pair(load_catalog(), name, quant=quant, draft=draft, no_draft=no_draft)
    missing = download(wanted, PullProgress(), dry_run=dry_run)
    emit(output, files_json, print_files, wanted if dry_run else refresh(wanted), missing)
