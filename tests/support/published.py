"""Headers of models as they are published: every tensor with its shape and type, all metadata that counts, no data.

Sources of the shapes: the metadata that llama.cpp prints of Qwen3-30B-A3B-Q4_K_M.gguf (ggml-org/llama.cpp issue 14235:
241 tensors F32, 289 Q4_K, 49 Q6_K). Which tensors are Q6_K is llama.cpp's rule for Q4_K_M: the output matrix, and
attn_v and ffn_down of the first and last eighth of the layers and of every third between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import gguf
import numpy as np

Mix = Literal["Q4_K_M", "Q8_0"]


def write_qwen3_30b_a3b(path: Path, mix: Mix = "Q4_K_M", *, layers: int = 48) -> Path:
    """The header of Qwen3-30B-A3B in that mix; 18.6 GB or 32.5 GB would follow."""
    embd, heads, heads_kv, head, experts, ff, vocab = 2048, 32, 4, 128, 128, 768, 151936
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name("Qwen3-30B-A3B, its header")
    writer.add_block_count(layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(embd)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads_kv)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(1000000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(8)
    writer.add_expert_feed_forward_length(ff)
    add_vocabulary(writer, vocab)

    def add(name: str, shape: tuple[int, ...], *, more: bool = False) -> None:
        kind = "F32" if len(shape) == 1 or "gate_inp" in name else mix if mix == "Q8_0" else "Q6_K" if more else "Q4_K"
        type_ = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[type_]
        n_bytes = int(np.prod(shape)) // block * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, raw_dtype=type_)

    add("token_embd.weight", (vocab, embd))
    add("output.weight", (vocab, embd), more=True)
    add("output_norm.weight", (embd,))
    for layer in range(layers):
        eighth = layers // 8
        more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", (embd,))
        add(block + "ffn_norm.weight", (embd,))
        add(block + "attn_q_norm.weight", (head,))
        add(block + "attn_k_norm.weight", (head,))
        add(block + "attn_q.weight", (heads * head, embd))
        add(block + "attn_k.weight", (heads_kv * head, embd))
        add(block + "attn_v.weight", (heads_kv * head, embd), more=more)
        add(block + "attn_output.weight", (embd, heads * head))
        add(block + "ffn_gate_inp.weight", (experts, embd))
        add(block + "ffn_gate_exps.weight", (experts, ff, embd))
        add(block + "ffn_up_exps.weight", (experts, ff, embd))
        add(block + "ffn_down_exps.weight", (experts, embd, ff), more=more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, n_tokens: int) -> None:
    """As many tokens as the model has, with names that mean nothing."""
    names = [chr(code) for code in range(33, 127)]
    names += [f"t{i}" for i in range(n_tokens - len(names))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([1] * n_tokens)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(n_tokens - 1)
