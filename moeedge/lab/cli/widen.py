"""`moeedge lab widen`: a file of real size that computes the same as a small model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge.cli import options
from moeedge.cli.common import emit
from moeedge.cli.declare import Output, option
from moeedge.cli.model_files import resolve_models
from moeedge.errors import InputError
from moeedge.ui.console import say, stderr_console, visible
from moeedge.ui.tables import Column, json_text, print_table, text_column
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from moeedge.lab.widen.layout import WidePlan

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
    from moeedge.lab.widen.layout import WeightType, make_wide_plan
    from moeedge.lab.widen.shape import RequestedSizes
    from moeedge.lab.widen.writer import check_space, check_target, write
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


def print_widened(plan: WidePlan, out: Path | None, console: Console) -> None:
    """The table on `console`, notes on standard error; out: the written file, None for a dry run."""
    from moeedge.lab.widen.shape import SIZE_NAMES

    err = stderr_console()
    for note in plan.notes:
        say(err, note)
    before, after = dataclasses.asdict(plan.source_shape), dataclasses.asdict(plan.shape)
    rows = [(label, f"{before[name]:,}", f"{after[name]:,}") for name, label in SIZE_NAMES.items() if before[name]]
    rows.append(("feed-forward types", ", ".join(plan.source_types), ", ".join(plan.types)))
    if plan.expert_bytes:
        rows.append(("bytes of experts", format_bytes(plan.source_expert_bytes), format_bytes(plan.expert_bytes)))
    rows.append(("file", format_bytes(plan.source.stat().st_size), format_bytes(_file_bytes(plan, out))))
    print_table(console, [text_column("", 0), Column("source", 1), Column("widened", 2)], rows)
    console.print(visible(f"{out} is written." if out else "No file is written (--dry-run)."), soft_wrap=True)


def widened_json(plan: WidePlan, out: Path | None) -> str:
    """One JSON object; sizes in bytes."""
    record = {
        "source": str(plan.source),
        "out": None if out is None else str(out),
        "bytes": _file_bytes(plan, out),
        "expert_bytes": plan.expert_bytes,
        "types": plan.types,
        "source_shape": dataclasses.asdict(plan.source_shape),
        "shape": dataclasses.asdict(plan.shape),
        "notes": plan.notes,
    }
    return json_text(record, indent=None)


def _file_bytes(plan: WidePlan, out: Path | None) -> int:
    """Size of the written file; before that, of its tensors."""
    return plan.data_bytes if out is None else out.stat().st_size
