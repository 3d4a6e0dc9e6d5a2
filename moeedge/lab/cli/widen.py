"""`moeedge lab widen` and `make-model`: files of real size without the real weights.

One computes the same as a small model, the other has a real model's shapes and types and random weights.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge.cli.common import emit
from moeedge.cli.model_files import resolve_models
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError
from moeedge.ui.console import BYTES, count_bar, say, stderr_console
from moeedge.ui.tables import Column, json_text, print_table, text_column
from moeedge.units import format_bytes, visible

if TYPE_CHECKING:
    from rich.console import Console

    from moeedge.lab.widen.layout import WidePlan
    from moeedge.lab.widen.random_model import RandomModel
    from moeedge.lab.widen.writer import FilePlan

_SIZE = {"min": 1}
declare(
    """
    [Shape]
    --like NAME  Every size of this model that is possible: qwen3-30b-a3b, qwen3-235b-a22b; for a dense source
        qwen3-0.6b, qwen3-4b.
    --embd N  Embedding width, a multiple of 32.
    --ff, --expert-ff N  Width of an expert, or of a dense model's feed-forward block, a multiple of 32.
    --heads N  Attention heads.
    --heads-kv N  Heads of keys and values (KV heads).
    --head-dim N  Size of a head, a multiple of the source's.
    --layers N  Layers; the added ones change no result.
    []
    --type q4_0|q4_k|q8_0|f16  Type of feed-forward matrices, experts included. Default: the source's types, whose bytes
        are copied. Other matrices always keep the source's types.
    --sparse  Write zeros as holes that take no disk space.
    """,
    "widen",
    embd=_SIZE,
    ff=_SIZE,
    heads=_SIZE,
    heads_kv=_SIZE,
    head_dim=_SIZE,
    layers=_SIZE,
)
declare(
    """
    [Model]
    --like NAME  Shapes and vocabulary size of this model: qwen3-30b-a3b, gpt-oss-20b, deepseek-v2-lite,
        granite-3.1-1b-a400m, qwen3-0.6b and others; a wrong name lists them.
    --quant QUANT  Tensor types of this quantization, mixed as llama.cpp does: q4_k_m, q5_k_m, q3_k_m, iq4_xs, mxfp4,
        q8_0, q4_0, q6_k, bf16, f16. Default: q4_k_m.
    --layers N  Layers. Default: the model's.
    --vocab N  Tokens of the vocabulary, 304 or more; a draft needs as many as its target. Default: the model's.
    --header FILE  Shapes, types, metadata and tokenizer from the header of this GGUF file, in place of --like; the file
        may end after its header.
    """,
    "make_model",
    layers={"min": 1},
    vocab={"min": 1},
)
declare("--force  Replace OUT.gguf if it exists.", "widen make_model")
Out = Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")]


@flatten
def widen(
    out: Out,
    model: Path | None = None,
    like: str | None = None,
    embd: int | None = None,
    ff: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
    head_dim: int | None = None,
    layers: int | None = None,
    type: str | None = None,
    sparse: bool = False,
    force: bool = False,
    dry_run: bool = False,
    output: Output = Output.TEXT,
) -> None:
    """Write a larger model with the same answers, to measure the speed of real sizes without their weights.

    Its matrices are parts of larger ones, which are zero elsewhere. Routing, acceptance and answers stay those of the
    trained model, while memory and memory traffic become those of the real shape. Tokenizer and chat template stay, so
    that the draft fits. The source is the bundled target, or any qwen3moe or qwen3 model.
    """
    from moeedge.lab.widen.layout import TYPES, make_wide_plan

    type_ = None if type is None else type.lower()
    if type_ is not None and type_ not in TYPES:
        raise InputError(f"Unknown type {type!r}.", f"Choose from: {', '.join(TYPES)}.")
    source = resolve_models(model, "none").target
    named = {"embd": embd, "ff": ff, "heads": heads, "heads_kv": heads_kv, "head_dim": head_dim, "layers": layers}
    sizes = {name: size for name, size in named.items() if size is not None}
    plan = make_wide_plan(source, sizes, like=like, type_=type_)
    if not dry_run:
        _write(plan, out, source, "widening", force=force, sparse=sparse)
    emit(output, widened_json, print_widened, plan, None if dry_run else out)


def print_widened(plan: WidePlan, out: Path | None, console: Console) -> None:
    """The table on `console`, notes on standard error; out: the written file, None for a dry run."""
    from moeedge.lab.widen.layout import SIZE_NAMES

    err = stderr_console()
    for note in plan.notes:
        say(err, note)
    before, after = asdict(plan.source_shape), asdict(plan.shape)
    rows = [(label, f"{before[name]:,}", f"{after[name]:,}") for name, label in SIZE_NAMES.items() if before[name]]
    rows.append(("feed-forward types", ", ".join(plan.source_types), ", ".join(plan.types)))
    if plan.expert_bytes:
        rows.append(("bytes of experts", format_bytes(plan.source_expert_bytes), format_bytes(plan.expert_bytes)))
    rows.append(("file", format_bytes(plan.source.stat().st_size), format_bytes(_size(plan, out))))
    print_table(console, [text_column("", 0), Column("source", 1), Column("widened", 2)], rows)
    _print_written(out, console)


def widened_json(plan: WidePlan, out: Path | None) -> str:
    """One JSON object; sizes in bytes."""
    record = {
        "source": str(plan.source),
        "out": None if out is None else str(out),
        "bytes": _size(plan, out),
        "expert_bytes": plan.expert_bytes,
        "types": plan.types,
        "source_shape": asdict(plan.source_shape),
        "shape": asdict(plan.shape),
        "notes": plan.notes,
    }
    return json_text(record, indent=None)


@flatten
def make_model(
    out: Out,
    like: str | None = None,
    quant: str | None = None,
    layers: int | None = None,
    vocab: int | None = None,
    header: Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    output: Output = Output.TEXT,
) -> None:
    """Write a model of a real one's shapes, types and size with random weights, to measure speed without a download.

    Memory, disk traffic and the time of each operation are those of the real file. Routing is that of random experts,
    drafts are hardly ever accepted, and answers mean nothing. Models with as many tokens have the same vocabulary.
    """
    from moeedge.lab.widen.random_model import model_like, model_of_header

    if (like is None) == (header is None):
        raise InputError("A model needs a shape.", "Give either --like NAME or --header FILE.")
    if header is not None and any(value is not None for value in (quant, layers, vocab)):
        raise InputError("--quant, --layers and --vocab change a model of --like.", "Leave them out with --header.")
    if header is not None:
        model = model_of_header(header)
    else:
        model = model_like(like or "", quant or "q4_k_m", layers=layers, vocab=vocab)
    if not dry_run:
        _write(model, out, header, "writing", force=force)
    emit(output, made_json, print_made, model, None if dry_run else out)


def print_made(model: RandomModel, out: Path | None, console: Console) -> None:
    """The table on `console`; out: the written file, None for a dry run."""
    rows = [("architecture", model.architecture), ("layers", f"{model.layers:,}"), ("vocabulary", f"{model.n_vocab:,}")]
    rows += [(f"bytes of {name}", format_bytes(n_bytes)) for name, n_bytes in model.types.items()]
    if model.expert_bytes:
        rows.append(("bytes of experts", format_bytes(model.expert_bytes)))
    rows.append(("file", format_bytes(_size(model, out))))
    print_table(console, [text_column("", 0), Column(model.name, 1)], rows)
    _print_written(out, console)


def made_json(model: RandomModel, out: Path | None) -> str:
    """One JSON object; sizes in bytes."""
    record = {
        "model": model.name,
        "architecture": model.architecture,
        "out": None if out is None else str(out),
        "bytes": _size(model, out),
        "expert_bytes": model.expert_bytes,
        "layers": model.layers,
        "vocabulary": model.n_vocab,
        "types": model.types,
    }
    return json_text(record, indent=None)


def _write(plan: FilePlan, out: Path, source: Path | None, label: str, *, force: bool, sparse: bool = False) -> None:
    """Writes the file under a bar. source: the file that is read, if any."""
    from moeedge.lab.widen.writer import check_target

    check_target(out, source, force=force)
    plan.check_space(out, sparse=sparse)
    with count_bar(stderr_console(), label, BYTES, plan.data_bytes) as bar:
        plan.write(out, sparse=sparse, on_bytes=bar.add)


def _print_written(out: Path | None, console: Console) -> None:
    console.print(visible(f"{out} is written." if out else "No file is written (--dry-run)."), soft_wrap=True)


def _size(model: FilePlan, out: Path | None) -> int:
    """Bytes of the file; before it is written, of its tensors."""
    return out.stat().st_size if out else model.data_bytes
