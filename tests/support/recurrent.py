"""A tiny random Mamba: a model whose memory is a state, from which single tokens cannot be taken back."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from moeedge.lab.widen.random_model import N_VOCAB, add_vocabulary

LAYERS, EMBD, INNER, STATE, CONV, RANK = 2, 32, 64, 16, 4, 4


def make_mamba(path: Path) -> Path:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(EMBD)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    add_vocabulary(writer)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_VOCAB, EMBD), "output_norm.weight": (EMBD,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (EMBD,),
            "ssm_in.weight": (2 * INNER, EMBD),
            "ssm_conv1d.weight": (INNER, CONV),
            "ssm_conv1d.bias": (INNER,),
            "ssm_x.weight": (RANK + 2 * STATE, INNER),
            "ssm_dt.weight": (INNER, RANK),
            "ssm_dt.bias": (INNER,),
            "ssm_a": (INNER, STATE),
            "ssm_d": (INNER,),
            "ssm_out.weight": (EMBD, INNER),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        values = rng.normal(0, 1 if len(shape) == 1 else shape[-1] ** -0.5, shape).astype(np.float32)
        if name.endswith("ssm_a"):
            values = -np.abs(values) - 0.1  # a state that fades
        elif name.endswith("norm.weight"):
            values = np.full(shape, 4, dtype=np.float32)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
