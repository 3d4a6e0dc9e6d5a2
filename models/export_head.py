"""Write a head's checkpoint as GGUF (architecture eagle3): `python -m models.export_head CHECKPOINT OUT.gguf`.

The file has no embeddings and no output matrix: llama.cpp uses those of the target that it drafts for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize
from tokenizers import Tokenizer
from torch import Tensor

from models import trainer
from models.export import add_tokenizer
from models.head import Head
from models.states import read_tokenizer

KINDS = {"q8_0": (Q.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0), "f32": (Q.F32, gguf.LlamaFileType.ALL_F32)}


def tensors(net: Head) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names with float32 arrays."""
    named: dict[str, Tensor] = {
        "fc": net.fc.weight,
        "output_norm": net.norm.weight,
        "blk.0.attn_norm": net.token_norm.weight,
        "blk.0.attn_norm_2": net.state_norm.weight,
        "blk.0.attn_q": net.q.weight,
        "blk.0.attn_k": net.k.weight,
        "blk.0.attn_v": net.v.weight,
        "blk.0.attn_output": net.attn_out.weight,
        "blk.0.ffn_norm": net.ffn_norm.weight,
        "blk.0.ffn_gate": net.gate.weight,
        "blk.0.ffn_up": net.up.weight,
        "blk.0.ffn_down": net.down.weight,
    }
    for name, value in named.items():
        yield f"{name}.weight", np.ascontiguousarray(value.detach().numpy())


def export_head(net: Head, tokenizer: Tokenizer, path: Path, kind: str, name: str) -> None:
    """Writes `net` to `path`, its matrices as `kind`, its norms in float32."""
    s = net.shape
    quantized, file_type = KINDS[kind]
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "eagle3")
    writer.add_name(name)
    writer.add_description("EAGLE-3 draft of a toy model trained on synthetic text (moeedge, models/train.py).")
    writer.add_license("apache-2.0")
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(s.n_ctx)
    writer.add_embedding_length(s.n_embd)
    writer.add_block_count(1)
    writer.add_feed_forward_length(s.n_ff)
    writer.add_head_count(s.n_head)
    writer.add_head_count_kv(s.n_head_kv)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_freq_base(s.rope_theta)
    writer.add_layer_norm_rms_eps(s.rms_eps)
    writer.add_vocab_size(s.n_vocab)
    writer.add_array("eagle3.target_layers", list(s.layers))
    writer.add_uint32("eagle3.target_hidden_size", s.n_embd)
    add_tokenizer(writer, tokenizer)
    for tensor, array in tensors(net):
        as_type = quantized if array.ndim == 2 else Q.F32
        writer.add_tensor(tensor, quantize(array, as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, default=Path(__file__).parent / "bundled" / "target.gguf")
    parser.add_argument("--type", choices=sorted(KINDS), default="q8_0", help="of the matrices")
    parser.add_argument("--name", default="moeedge toy head")
    args = parser.parse_args()
    net = trainer.load_head(args.checkpoint)
    export_head(net, read_tokenizer(args.target), args.out, args.type, args.name)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
