"""`moeedge lab make-model`: a file of a real model's shapes and types with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge.cli.common import emit
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError
from moeedge.ui.console import stderr_console, visible
from moeedge.ui.progress import BYTES, count_bar
from moeedge.ui.tables import Column, json_text, print_table, text_column
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from moeedge.lab.widen.random_model import RandomModel

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
    []
    --force  Replace OUT.gguf if it exists.
    """,
    "make_model",
    layers={"min": 1},
    vocab={"min": 1},
)
Out = Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")]


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
    from moeedge.lab.widen.random_model import check_space, model_like, model_of_header, write
    from moeedge.lab.widen.writer import check_target

    if (like is None) == (header is None):
        raise InputError("A model needs a shape.", "Give either --like NAME or --header FILE.")
    if header is not None and any(value is not None for value in (quant, layers, vocab)):
        raise InputError("--quant, --layers and --vocab change a model of --like.", "Leave them out with --header.")
    if header is not None:
        model = model_of_header(header)
    else:
        model = model_like(like or "", quant or "q4_k_m", layers=layers, vocab=vocab)
    if not dry_run:
        check_target(out, header, force=force)
        check_space(model, out)
        with count_bar(stderr_console(), "writing", BYTES, model.data_bytes) as bar:
            write(model, out, on_bytes=bar.add)
    emit(output, made_json, print_made, model, None if dry_run else out)


def print_made(model: RandomModel, out: Path | None, console: Console) -> None:
    """The table on `console`; out: the written file, None for a dry run."""
    rows = [("architecture", model.architecture), ("layers", f"{model.layers:,}"), ("vocabulary", f"{model.n_vocab:,}")]
    rows += [(f"bytes of {name}", format_bytes(n_bytes)) for name, n_bytes in model.types.items()]
    if model.expert_bytes:
        rows.append(("bytes of experts", format_bytes(model.expert_bytes)))
    rows.append(("file", format_bytes(_size(model, out))))
    print_table(console, [text_column("", 0), Column(model.name, 1)], rows)
    console.print(visible(f"{out} is written." if out else "No file is written (--dry-run)."), soft_wrap=True)


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


def _size(model: RandomModel, out: Path | None) -> int:
    """Bytes of the file; before it is written, of its tensors."""
    return out.stat().st_size if out else model.data_bytes
