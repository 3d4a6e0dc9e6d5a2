"""A wider model that says the same: every matrix in the corner of a larger one, zeros elsewhere.

    python -m tests.support.widen --out wide.gguf --embd 2048 --expert-ff 768

Routing, acceptance and answers stay those of the trained model, while the memory traffic becomes that of a real one:
the bundled target becomes the shape of Qwen3-30B-A3B in Q4_0 (48 layers, 128 experts, 16 GB of them), but for its
attention and its vocabulary, which stay small. Only the corners are written: the file is sparse.

Normalisation divides by the root of the mean square, which zeros make smaller: its weights and its epsilon make up for
that, so that nothing changes but the rounding. Widths stay multiples of a quantisation block, whose bytes are copied.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moeedge import paths

EXPERTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")


@dataclass(frozen=True)
class Widths:
    """What is widened, and to what."""

    embd: int
    wide_embd: int
    expert_ff: int
    wide_expert_ff: int

    def of(self, role: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The wide shape of a tensor, in ggml's order (columns first)."""
        columns, *rows = shape
        if role in EXPERTS[:2]:
            return (self.wide_embd, self.wide_expert_ff, *rows[1:])
        if role == EXPERTS[2]:
            return (self.wide_expert_ff, self.wide_embd, *rows[1:])
        if role == "attn_output.weight":
            return (columns, self.wide_embd)
        if role in ("attn_q_norm.weight", "attn_k_norm.weight"):  # per head
            return shape
        return (self.wide_embd, *rows)

    @property
    def norm_scale(self) -> float:
        """Of the weights of a normalisation over the wide rows."""
        return float(np.sqrt(self.embd / self.wide_embd))


def widen(source: Path, out: Path, *, wide_embd: int, wide_expert_ff: int) -> None:
    """Writes the wide qwen3moe model; widths must be multiples of 32."""
    reader = gguf.GGUFReader(source)
    keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith("qwen3moe.")}
    if not keys:
        raise ValueError(f"{source.name} is no qwen3moe model")
    widths = Widths(
        keys["qwen3moe.embedding_length"], wide_embd, keys["qwen3moe.expert_feed_forward_length"], wide_expert_ff
    )
    if wide_embd % 32 or wide_expert_ff % 32 or wide_embd < widths.embd or wide_expert_ff < widths.expert_ff:
        raise ValueError(f"{wide_embd} and {wide_expert_ff} are no multiples of 32, or narrower than the model")
    _write_header(reader, out, widths)
    # written through a mapping of the sparse file: what stays zero takes no space
    for narrow, wide in _pairs(reader, gguf.GGUFReader(out, "r+")):
        corner = wide.data
        for axis, length in enumerate(narrow.data.shape):
            corner = corner[(slice(None),) * axis + (slice(0, length),)]
        over_embd = narrow.name.endswith("norm.weight") and not narrow.name.endswith(("q_norm.weight", "k_norm.weight"))
        corner[...] = narrow.data * np.float32(widths.norm_scale) if over_embd else narrow.data


def _pairs(narrow: gguf.GGUFReader, wide: gguf.GGUFReader) -> Iterator[tuple[Any, Any]]:
    by_name = {tensor.name: tensor for tensor in wide.tensors}
    for tensor in narrow.tensors:
        yield tensor, by_name[tensor.name]


def _write_header(reader: gguf.GGUFReader, out: Path, widths: Widths) -> None:
    """Metadata and tensor list, and room for the data behind them."""
    writer = gguf.GGUFWriter(out, "qwen3moe")
    changed = {
        "qwen3moe.embedding_length": widths.wide_embd,
        "qwen3moe.expert_feed_forward_length": widths.wide_expert_ff,
        "qwen3moe.attention.layer_norm_rms_epsilon": reader.fields[
            "qwen3moe.attention.layer_norm_rms_epsilon"
        ].contents()
        * widths.embd
        / widths.wide_embd,
        "general.name": f"{reader.fields['general.name'].contents()}, widened to {widths.wide_embd}",
    }
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.get(name, field.contents()), field.types[0], sub_type=sub_type)
    n_bytes = 0
    for tensor in reader.tensors:
        role = tensor.name.split(".", 2)[2] if tensor.name.startswith("blk.") else tensor.name
        shape = widths.of(role, tuple(int(n) for n in tensor.shape))
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        size = int(np.prod(shape)) // block * block_bytes
        writer.add_tensor_info(
            tensor.name, tuple(reversed(shape)), np.dtype(np.float32), size, raw_dtype=tensor.tensor_type
        )
        n_bytes += writer.ggml_pad(size, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    file.truncate(writer.ggml_pad(file.tell(), writer.data_alignment) + n_bytes)
    writer.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Widen a small qwen3moe model without changing what it says.")
    parser.add_argument("--source", type=Path, default=None, help="the bundled target unless given")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--embd", type=int, default=2048)
    parser.add_argument("--expert-ff", type=int, default=768)
    options = parser.parse_args(arguments)
    source = options.source or paths.bundled_target()
    widen(source, options.out, wide_embd=options.embd, wide_expert_ff=options.expert_ff)
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
