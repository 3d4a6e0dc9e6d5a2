"""`moeedge widen`: a file of real size that says what a small model says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import cli_errors
from moeedge.cli.pair import resolve_pair

_SHAPE = "Shape"


def _size(name: str, text: str) -> object:
    return typer.Option(name, metavar="N", min=1, help=text, show_default=False, rich_help_panel=_SHAPE)


def widen(
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    model: options.Model = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="NAME",
            help="Every size of this model that can be had: qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v2-lite, "
            "olmoe-1b-7b; for a dense source qwen3-0.6b, qwen3-1.7b, qwen3-4b.",
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    embd: Annotated[int | None, _size("--embd", "Embedding width, a multiple of 32.")] = None,
    ff: Annotated[
        int | None,
        typer.Option(
            "--ff",
            "--expert-ff",
            metavar="N",
            min=1,
            help="Width of an expert, or of the feed-forward block of a dense model; a multiple of 32.",
            show_default=False,
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    heads: Annotated[int | None, _size("--heads", "Attention heads.")] = None,
    heads_kv: Annotated[int | None, _size("--heads-kv", "Heads of keys and values.")] = None,
    head_dim: Annotated[int | None, _size("--head-dim", "Size of a head, a multiple of the source's.")] = None,
    layers: Annotated[int | None, _size("--layers", "Layers; the added ones change nothing.")] = None,
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="q4_0|q4_k|q8_0",
            help="What feed-forward matrices, experts above all, are quantised to. Default: the source's types, whose "
            "bytes are copied. Other matrices always stay in the source's types.",
            show_default=False,
        ),
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Leave zeros out of the disk; for the page cache nothing changes.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.gguf where it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would come out, and write nothing.")] = False,
    output: Annotated[
        options.Output, typer.Option("-o", "--output", help="Print a table, or one JSON object with sizes in bytes.")
    ] = options.Output.TEXT,
) -> None:
    """Write a model of a larger shape that says the same: its matrices inside larger ones, zeros elsewhere.

    Routing, acceptance and answers stay those of the trained model, while memory and memory traffic become those of the
    real shape. Tokenizer and chat template stay, and so the draft fits. The source is the bundled target, or any
    qwen3moe or qwen3 model.
    """
    with cli_errors():
        from moeedge.errors import InputError
        from moeedge.ui.console import stderr_console, stdout_console
        from moeedge.ui.model_views import print_widened, widened_json
        from moeedge.ui.progress import byte_bar
        from moeedge.widen.layout import WeightType, make_plan
        from moeedge.widen.shape import RequestedSizes
        from moeedge.widen.writer import check_space, check_target, write

        types = [one.value for one in WeightType]
        if type_ is not None and type_.lower() not in types:
            raise InputError(f'"{type_}" is no type to write.', f"Known: {', '.join(types)}.")
        source = resolve_pair(model, "none").target
        asked = RequestedSizes(embd=embd, ff=ff, heads=heads, heads_kv=heads_kv, head_dim=head_dim, layers=layers)
        plan = make_plan(source, asked, like=like, type_=None if type_ is None else WeightType(type_.lower()))
        if not dry_run:
            check_target(out, source, force=force)
            check_space(plan, out, sparse=sparse)
            with byte_bar(stderr_console(), "widening", plan.data_bytes) as bar:
                write(plan, out, sparse=sparse, on_bytes=bar.add)
        written = None if dry_run else out
        if output is options.Output.JSON:
            typer.echo(widened_json(plan, written), nl=False)
        else:
            print_widened(plan, written, stdout_console())
