"""Tensors and metadata of architectures as llama.cpp reads them, and the sizes of public models.

Shapes are written as NumPy writes them (rows first), the reverse of ggml's `ne`. Random weights get a standard
deviation that keeps activations near 1, so that routing and logits vary from token to token (`spread`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

Metadata = dict[str, int | float | bool | list[bool] | list[int]]


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes of a transformer by its config.json; 0: it has none of these. Standard deviations are of random weights."""

    layers: int
    embd: int
    heads: int
    heads_kv: int
    head_dim: int  # of latent attention, the part without positions
    ff: int  # of dense layers
    experts: int = 0
    used: int = 0  # experts per token
    expert_ff: int = 0
    shared_ff: int = 0  # of the shared experts together
    ctx: int = 40960  # tokens it was trained with
    vocab: int = 151936
    tied: bool = False  # the embeddings are the output matrix
    window: int = 0  # tokens of sliding-window layers
    q_rank: int = 0  # of latent attention
    kv_rank: int = 0
    rope_dim: int = 0  # of latent attention, the part of a head with positions
    state_heads_k: int = 0  # of layers with a recurrent state instead of attention
    state_heads: int = 0
    state_dim: int = 0
    dense_type: str = "F32"  # ggml type of matrices that belong to no expert
    expert_type: str = "F32"  # of the routed experts
    residual: float = 0.25  # what attention and feed-forward add to the residual stream, against embeddings of 1
    logit_std: float = 4.0  # spread of the logits over the vocabulary
    router_std: float = 2.0  # spread of the router's logits over the experts


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: name, NumPy shape, normal distribution, ggml type. I64: ascending row numbers of the vocabulary."""

    name: str
    shape: tuple[int, ...]
    std: float
    type: str = "F32"
    mean: float = 0.0
    identity: float = 0.0  # added on the diagonal
    zero_row: int = -1


# Granite multiplies embeddings by 12, what layers add by 0.22, and divides logits by 6
SCALED: dict[str, Any] = {"residual": 14.0, "logit_std": 24.0}
_ROPE, _EPS = "rope.freq_base", "attention.layer_norm_rms_epsilon"

# public models by their config.json: name, architecture, fields of Dims, and metadata that is not the architecture's
_TABLE = """
qwen3-30b-a3b qwen3moe layers=48 embd=2048 heads=32 heads_kv=4 head_dim=128 ff=6144 experts=128 used=8 expert_ff=768
    rope.freq_base=1e6
qwen3-235b-a22b qwen3moe layers=94 embd=4096 heads=64 heads_kv=4 head_dim=128 ff=12288 experts=128 used=8
    expert_ff=1536 rope.freq_base=1e6
qwen3-next-80b-a3b qwen3next layers=48 embd=2048 heads=16 heads_kv=2 head_dim=256 ff=5120 experts=512 used=10
    expert_ff=512 shared_ff=512 ctx=262144 state_heads_k=16 state_heads=32 state_dim=128
    rope.freq_base=1e7 rope.dimension_count=64
gpt-oss-20b gpt-oss layers=24 embd=2880 heads=64 heads_kv=8 head_dim=64 ff=2880 experts=32 used=4 expert_ff=2880
    ctx=131072 vocab=201088 window=128 rope.freq_base=150e3 attention.layer_norm_rms_epsilon=1e-5
gpt-oss-120b gpt-oss layers=36 embd=2880 heads=64 heads_kv=8 head_dim=64 ff=2880 experts=128 used=4 expert_ff=2880
    ctx=131072 vocab=201088 window=128 rope.freq_base=150e3 attention.layer_norm_rms_epsilon=1e-5
deepseek-v2-lite deepseek2 layers=27 embd=2048 heads=16 heads_kv=1 head_dim=128 ff=10944 experts=64 used=6
    expert_ff=1408 shared_ff=2816 ctx=163840 vocab=102400 kv_rank=512 rope_dim=64
granite-3.1-1b-a400m granitemoe layers=24 embd=1024 heads=16 heads_kv=8 head_dim=64 ff=512 experts=32 used=8
    expert_ff=512 ctx=131072 vocab=49155 tied=1 rope.freq_base=5e6 attention.scale=0.015625
olmoe-1b-7b olmoe layers=16 embd=2048 heads=16 heads_kv=16 head_dim=128 ff=1024 experts=64 used=8 expert_ff=1024
    ctx=4096 vocab=50304 attention.layer_norm_rms_epsilon=1e-5
mixtral-8x7b llama layers=32 embd=4096 heads=32 heads_kv=8 head_dim=128 ff=14336 experts=8 used=2 expert_ff=14336
    ctx=32768 vocab=32000 rope.freq_base=1e6 attention.layer_norm_rms_epsilon=1e-5
qwen3-0.6b qwen3 layers=28 embd=1024 heads=16 heads_kv=8 head_dim=128 ff=3072 tied=1 rope.freq_base=1e6
qwen3-1.7b qwen3 layers=28 embd=2048 heads=16 heads_kv=8 head_dim=128 ff=6144 tied=1 rope.freq_base=1e6
qwen3-4b qwen3 layers=36 embd=2560 heads=32 heads_kv=8 head_dim=128 ff=9728 tied=1 rope.freq_base=1e6
"""


def _read_table() -> dict[str, tuple[str, Dims, Metadata]]:
    models: dict[str, tuple[str, Dims, Metadata]] = {}
    for row in _TABLE.replace("\n    ", " ").strip().splitlines():
        name, arch, *words = row.split()
        pairs = [word.split("=") for word in words]
        values: Metadata = {key: int(text) if text.isdecimal() else float(text) for key, text in pairs}
        sizes: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
        sizes |= {"tied": bool(sizes.get("tied"))} | (SCALED if arch == "granitemoe" else {})
        models[name] = (arch, Dims(**sizes), {key: value for key, value in values.items() if "." in key})
    return models


MODELS: dict[str, tuple[str, Dims, Metadata]] = _read_table()


def metadata(arch: str, d: Dims) -> Metadata:
    """Returns the architecture's keys without their prefix."""
    keys: Metadata = {
        "block_count": d.layers,
        "context_length": d.ctx,
        "embedding_length": d.embd,
        "feed_forward_length": d.ff,
        "attention.head_count": d.heads,
        "attention.head_count_kv": d.heads_kv,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        _EPS: 1e-6,
        "rope.dimension_count": d.head_dim,
        _ROPE: 10000.0,
    }
    if d.experts:
        keys |= {"expert_count": d.experts, "expert_used_count": d.used}
        named_as_dense = arch in ("llama", "olmoe") or arch.startswith("granite")
        keys["feed_forward_length" if named_as_dense else "expert_feed_forward_length"] = d.expert_ff
    if arch.startswith("granite"):  # Granite 3.1 1B-A400M's factors
        keys |= {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0}
        keys["attention.scale"] = d.head_dim**-0.5
    if arch == "gpt-oss":
        keys["attention.sliding_window"] = d.window
    if arch == "qwen3next":
        keys |= {"expert_shared_feed_forward_length": d.shared_ff, "full_attention_interval": 4}
    if d.state_dim:
        keys |= {"ssm.conv_kernel": 4, "ssm.state_size": d.state_dim, "ssm.group_count": d.state_heads_k}
        keys |= {"ssm.time_step_rank": d.state_heads, "ssm.inner_size": d.state_heads * d.state_dim}
    if d.kv_rank:
        keys |= {
            "attention.head_count_kv": 1,  # the latent vector is shared by all heads
            "attention.q_lora_rank": d.q_rank,
            "attention.kv_lora_rank": d.kv_rank,
            "attention.key_length": d.kv_rank + d.rope_dim,
            "attention.value_length": d.kv_rank,
            "attention.key_length_mla": d.head_dim + d.rope_dim,
            "attention.value_length_mla": d.head_dim,
            "rope.dimension_count": d.rope_dim,
            "leading_dense_block_count": 1,
            "expert_shared_count": d.shared_ff // d.expert_ff,
        }
    return keys


def tensors(arch: str, d: Dims) -> Iterator[TensorSpec]:
    """Yields every tensor of one of the architectures of MODELS."""
    yield tensor(d, "token_embd.weight", d.vocab, d.embd)
    for layer in range(d.layers):
        for spec in _layer(arch, d, layer):
            yield replace(spec, name=f"blk.{layer}.{spec.name}")
    yield tensor(d, "output_norm.weight", d.embd)
    if not d.tied:
        yield tensor(d, "output.weight", d.vocab, d.embd)


def _layer(arch: str, d: Dims, layer: int) -> Iterator[TensorSpec]:
    yield tensor(d, "attn_norm.weight", d.embd)
    if arch == "deepseek2":
        yield from latent_attention(d)
        yield tensor(d, "attn_output.weight", d.embd, d.heads * d.head_dim)
    elif arch == "qwen3next" and (layer + 1) % 4:
        yield from delta_net(d, "ssm_ba")
    else:
        yield from attention(d, n_queries=2 if arch == "qwen3next" else 1)
        yield from attention_parts(arch, d)
    yield tensor(d, f"{'post_attention' if arch in ('gpt-oss', 'qwen3next') else 'ffn'}_norm.weight", d.embd)
    if not d.experts or (arch == "deepseek2" and layer == 0):
        yield from swiglu(d, "", d.ff)
        return
    yield tensor(d, "ffn_gate_inp.weight", d.experts, d.embd)
    yield from expert_matrices(d, d.expert_ff)
    if arch == "gpt-oss":
        yield from expert_biases(d)
    if arch == "qwen3next":
        yield tensor(d, "ffn_gate_inp_shexp.weight", d.embd)
    if d.shared_ff:
        yield from swiglu(d, "_shexp", d.shared_ff)


def attention(d: Dims, n_queries: int = 1) -> Iterator[TensorSpec]:
    """Yields the projections of grouped-query attention; n_queries: 2 with a gate per head."""
    yield tensor(d, "attn_q.weight", n_queries * d.heads * d.head_dim, d.embd)
    yield tensor(d, "attn_k.weight", d.heads_kv * d.head_dim, d.embd)
    yield tensor(d, "attn_v.weight", d.heads_kv * d.head_dim, d.embd)
    yield tensor(d, "attn_output.weight", d.embd, d.heads * d.head_dim)


def attention_parts(arch: str, d: Dims) -> Iterator[TensorSpec]:
    """Yields norms, biases and sinks of an architecture's attention."""
    q_width, kv_width = d.heads * d.head_dim, d.heads_kv * d.head_dim
    if arch in ("qwen3", "qwen3moe", "qwen3next"):  # per head
        yield tensor(d, "attn_q_norm.weight", d.head_dim)
        yield tensor(d, "attn_k_norm.weight", d.head_dim)
    if arch == "olmoe":  # over all heads
        yield tensor(d, "attn_q_norm.weight", q_width)
        yield tensor(d, "attn_k_norm.weight", kv_width)
    if arch in ("qwen2moe", "gpt-oss"):
        for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            yield tensor(d, f"attn_{name}.bias", width)
    if arch == "gpt-oss":
        yield tensor(d, "attn_output.bias", d.embd)
        yield tensor(d, "attn_sinks.weight", d.heads)


def latent_attention(d: Dims) -> Iterator[TensorSpec]:
    """Yields DeepSeek's latent attention without its output: [heads, rows, columns] where heads have matrices."""
    q_width = d.heads * (d.head_dim + d.rope_dim)
    if d.q_rank:
        yield tensor(d, "attn_q_a.weight", d.q_rank, d.embd)
        yield tensor(d, "attn_q_a_norm.weight", d.q_rank)
        yield tensor(d, "attn_q_b.weight", q_width, d.q_rank)
    else:
        yield tensor(d, "attn_q.weight", q_width, d.embd)
    yield tensor(d, "attn_kv_a_mqa.weight", d.kv_rank + d.rope_dim, d.embd)
    yield tensor(d, "attn_kv_a_norm.weight", d.kv_rank)
    yield tensor(d, "attn_k_b.weight", d.heads, d.kv_rank, d.head_dim)
    yield tensor(d, "attn_v_b.weight", d.heads, d.head_dim, d.kv_rank)


def delta_net(d: Dims, *decay: str) -> Iterator[TensorSpec]:
    """Yields linear attention by the gated delta rule; decay: the one or two matrices of beta and alpha."""
    keys, values = d.state_heads_k * d.state_dim, d.state_heads * d.state_dim
    yield tensor(d, "attn_qkv.weight", 2 * keys + values, d.embd)
    yield tensor(d, "attn_gate.weight", values, d.embd)
    yield replace(tensor(d, "ssm_conv1d.weight", 2 * keys + values, 4), type="F32")
    yield tensor(d, "ssm_dt.bias", d.state_heads)
    yield tensor(d, "ssm_a", d.state_heads)
    for name in decay:
        yield tensor(d, f"{name}.weight", 2 * d.state_heads // len(decay), d.embd)
    yield tensor(d, "ssm_norm.weight", d.state_dim)
    yield tensor(d, "ssm_out.weight", d.embd, values)


def expert_matrices(
    d: Dims, width: int, *, down_type: str = "", suffix: str = "exps", n: int = 0
) -> Iterator[TensorSpec]:
    """Yields gate, up and down of `n` experts, of all by default. down_type: where it differs."""
    for name in ("gate", "up"):
        yield tensor(d, f"ffn_{name}_{suffix}.weight", n or d.experts, width, d.embd)
    down = tensor(d, f"ffn_down_{suffix}.weight", n or d.experts, d.embd, width)
    yield replace(down, type=down_type or down.type)


def expert_biases(d: Dims) -> Iterator[TensorSpec]:
    """Yields the biases of gpt-oss's router and experts."""
    for name, *shape in (("inp", d.experts), ("exps", d.experts, d.expert_ff)):
        yield tensor(d, f"ffn_gate_{name}.bias", *shape)
    yield tensor(d, "ffn_up_exps.bias", d.experts, d.expert_ff)
    yield tensor(d, "ffn_down_exps.bias", d.experts, d.embd)


def swiglu(d: Dims, suffix: str, width: int) -> Iterator[TensorSpec]:
    """Yields a dense feed-forward block."""
    yield tensor(d, f"ffn_gate{suffix}.weight", width, d.embd)
    yield tensor(d, f"ffn_up{suffix}.weight", width, d.embd)
    yield tensor(d, f"ffn_down{suffix}.weight", d.embd, width)


def tensor(d: Dims, name: str, *shape: int) -> TensorSpec:
    """Returns a tensor with the spread and type of its role."""
    std, mean = spread(d, name, shape)
    is_matrix = len(shape) == 2 and name.endswith(".weight") and "gate_inp" not in name
    routed = len(shape) == 3 and "exps." in name
    return TensorSpec(name, shape, std, d.expert_type if routed else d.dense_type if is_matrix else "F32", mean)


def spread(d: Dims, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Returns standard deviation and mean of random weights by the tensor's role, which its name without layer says."""
    role = re.sub(r"^blk\.\d+\.", "", name)
    # with the embeddings as output matrix, answers would go to and fro between two tokens if layers added little
    residual = d.residual * (4 if d.tied else 1)
    if role == "output_norm.weight" and d.tied:
        # random signs: with the embeddings as output matrix, each token would predict itself
        return d.logit_std / d.embd**0.5, 0.0
    if "norm" in role:
        return 0.1, 1.0
    if role.endswith("bias"):
        return 0.3 if role.startswith(("ffn_", "ssm_")) else 0.1, 0.0
    if role == "ssm_a":
        return 0.1, -0.5  # a state that fades
    if role in ("token_embd.weight", "attn_sinks.weight"):
        return 1.0, 0.0
    if role.endswith("scale"):
        return 0.1, 1.0
    stem = role.split(".")[0]
    gains = {"output": d.logit_std, "ffn_gate_inp": d.router_std, "attn_output": residual, "ssm_out": residual}
    gains |= {"attn_q": 2.0, "attn_q_b": 2.0}  # attention that picks rather than averages
    gain = 2.0 * residual if stem.startswith("ffn_down") else gains.get(stem, 1.0)
    return gain / shape[-1] ** 0.5, 0.0
