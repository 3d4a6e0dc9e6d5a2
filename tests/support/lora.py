"""Tiny LoRA adapters in GGUF format, drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from moeedge.llama.gguf_file import read_tensors

RANK = 4


def make_adapter(path: Path, model: Path, tensors: Sequence[str], *, arch: str = "qwen3moe", std: float = 0.1) -> Path:
    """Writes an adapter that changes the matrices of `model` with these names; of an expert tensor, each expert's."""
    shapes = {tensor.name: tensor.shape for tensor in read_tensors(model)}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * RANK)
    rng = np.random.default_rng(11)
    for name in tensors:
        n_in, n_out, n_experts, _ = shapes[name]
        for suffix, shape in (("lora_a", (RANK, n_in)), ("lora_b", (n_out, RANK))):
            full = (n_experts, *shape) if n_experts > 1 else shape
            writer.add_tensor(f"{name}.{suffix}", rng.standard_normal(full, dtype=np.float32) * np.float32(std))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
