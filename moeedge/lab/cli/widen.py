"""`moeedge lab widen`: a file of real size that computes the same as a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moeedge.cli import options
from moeedge.cli.common import emit
from moeedge.cli.declare import Output, option
from moeedge.cli.model_files import resolve_models
from moeedge.errors import InputError

_SHAPE = "Shape"


def _size(*names: str, help: str) -> Any:
    return typer.Option(*names, metavar="N", min=1, help=help, rich_help_panel=_SHAPE)


Out = Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")]
Like = Annotated[
    str | None,
    option(
        _SHAPE,
        "--like NAME",
        "Every size of this model that is possible: qwen3-30b-a3b, qwen3-235b-a22b; for a dense source qwen3-0.6b, "
        "qwen3-4b.",
    ),
]
Embd = Annotated[int | None, _size("--embd", help="Embedding width, a multiple of 32.")]
Ff = Annotated[
    int | None,
    _size(
        "--ff", "--expert-ff", help="Width of an expert, or of a dense model's feed-forward block, a multiple of 32."
    ),
]
Heads = Annotated[int | None, _size("--heads", help="Attention heads.")]
HeadsKv = Annotated[int | None, _size("--heads-kv", help="Heads of keys and values (KV heads).")]
HeadDim = Annotated[int | None, _size("--head-dim", help="Size of a head, a multiple of the source's.")]
NLayers = Annotated[int | None, _size("--layers", help="Layers; the added ones change no result.")]
Type = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="q4_0|q4_k|q8_0|f16",
        help="Type of feed-forward matrices, experts included. Default: the source's types, whose bytes are copied. "
        "Other matrices always keep the source's types.",
    ),
]
Sparse = Annotated[bool, typer.Option("--sparse", help="Write zeros as holes that take no disk space.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.gguf if it exists.")]


def widen(
    out: Out,
    model: options.Model = None,
    like: Like = None,
    embd: Embd = None,
    ff: Ff = None,
    heads: Heads = None,
    heads_kv: HeadsKv = None,
    head_dim: HeadDim = None,
    layers: NLayers = None,
    type_: Type = None,
    sparse: Sparse = False,
    force: Force = False,
    dry_run: options.DryRun = False,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Write a larger model with the same answers, to measure the speed of real sizes without their weights.

    Its matrices are parts of larger ones, which are zero elsewhere. Routing, acceptance and answers stay those of the
    trained model, while memory and memory traffic become those of the real shape. Tokenizer and chat template stay, so
    that the draft fits. The source is the bundled target, or any qwen3moe or qwen3 model.
    """
    from moeedge.lab.views.tables import print_widened, widened_json
    from moeedge.lab.widen.layout import WeightType, make_wide_plan
    from moeedge.lab.widen.shape import RequestedSizes
    from moeedge.lab.widen.writer import check_space, check_target, write
    from moeedge.ui.console import stderr_console
    from moeedge.ui.progress import byte_bar

    types = [weight_type.value for weight_type in WeightType]
    if type_ is not None and type_.lower() not in types:
        raise InputError(f"Unknown type {type_!r}.", f"Choose from: {', '.join(types)}.")
    source = resolve_models(model, "none").target
    asked = RequestedSizes(embd=embd, ff=ff, heads=heads, heads_kv=heads_kv, head_dim=head_dim, layers=layers)
    plan = make_wide_plan(source, asked, like=like, type_=None if type_ is None else WeightType(type_.lower()))
    if not dry_run:
        check_target(out, source, force=force)
        check_space(plan, out, sparse=sparse)
        with byte_bar(stderr_console(), "widening", plan.data_bytes) as bar:
            write(plan, out, sparse=sparse, on_bytes=bar.add)
    written = None if dry_run else out
    emit(output, widened_json, print_widened, plan, written)
