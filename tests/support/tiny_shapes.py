"""What is in the tiny test models: dimensions, tensors and metadata of each architecture as llama.cpp reads them.

The product has the architectures that `moeedge lab make-model` writes and the parts of others that are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeedge.lab.widen import architectures
from moeedge.lab.widen.architectures import Dims, Metadata, TensorSpec, swiglu, tensor
from moeedge.lab.widen.random_model import N_VOCAB


@dataclass(frozen=True, kw_only=True)
class TinyDims(Dims):
    """Dimensions of a tiny model; quantised rows need widths that are multiples of 32."""

    layers: int = 3
    embd: int = 64
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    ff: int = 128
    experts: int = 16
    used: int = 4
    expert_ff: int = 32
    shared_ff: int = 64
    ctx: int = 4096
    vocab: int = N_VOCAB  # tokens; those above N_VOCAB are fillers
    window: int = 32
    expert_type: str = "Q4_0"  # F32, F16, Q8_0, Q4_0, MXFP4 or IQ1_M
    odd_down_type: str = ""  # of the down experts of odd layers where it differs, as mixed quantisations do
    expert_scales: bool = False  # a factor per expert after each of its matrices, as NVFP4 files have
    merged: bool = False  # gate and up experts in one tensor (deepseek2)
    sigmoid: bool = False  # deepseek2: sigmoid router with selection bias, groups and scale, as in DeepSeek-V3
    mtp: int = 0  # heads after the layers that predict further tokens (deepseek2, glm4moe)
    target_embd: int = 64  # eagle3: width of the target
    target_layers: str = "0,1,2"  # eagle3, dflash: the layers whose inputs it reads
    draft_vocab: int = 0  # eagle3, dflash: tokens of a vocabulary of its own; 0: the target's embeddings and output
    block: int = 8  # dflash: tokens of a block
    variant: str = ""  # dflash: "dspark" (a Markov head), "selector" (DFlash 2, refused) or "sections" (M-RoPE)
    per_layer: bool = False  # experts per token differ by layer; of nemotron_h_moe their width, too (Puzzle)
    mask: int = N_VOCAB - 3  # dflash: the token that stands for one to be predicted; -1: none


_FIRST_DENSE = ("deepseek2", "glm4moe", "step35", "hy_v3", "mimo2", "cohere2moe")  # the first layer has no experts
_WINDOWED = ("step35", "mimo2", "cohere2moe", "gemma4")  # with sliding windows
_MAMBA = ("granitehybrid", "nemotron_h_moe")  # with Mamba-2 layers
# whose head-wise norms of queries and keys are those of qwen3
_HEAD_NORMS = ("qwen35moe", "step35", "hy_v3", "gemma4", "grovemoe")


def _ranks(arch: str, d: TinyDims) -> TinyDims:
    """Adds the sizes of latent attention and of recurrent states, which follow from others."""
    if arch == "deepseek2":
        return replace(d, q_rank=d.embd // 2, kv_rank=d.embd // 2, rope_dim=d.head_dim)
    if arch == "qwen35moe":
        return replace(d, state_heads_k=d.heads_kv, state_heads=d.heads, state_dim=d.head_dim)
    return d


def metadata(arch: str, d: TinyDims) -> Metadata:
    """The architecture's keys without their prefix."""
    d = _ranks(arch, d)
    keys = architectures.metadata(arch, d)
    keys["block_count"] = d.layers + d.mtp
    if arch == "gemma4":
        keys["feed_forward_length"] = d.shared_ff
    if arch in ("step35", "hy_v3", "cohere2moe"):
        keys |= {"expert_shared_feed_forward_length": d.shared_ff, "expert_shared_count": 1}
        keys |= {"expert_weights_norm": True, "expert_weights_scale": 1.5}
    if arch in _WINDOWED:  # in every other layer, and in the heads
        pattern = [layer % 2 == 1 or layer >= d.layers for layer in range(d.layers + d.mtp)]
        keys |= {"attention.sliding_window": 32, "attention.sliding_window_pattern": pattern}
        keys["rope.freq_base_swa"] = 5000.0
    if arch == "gemma4":
        keys |= {"embedding_length_per_layer_input": 0, "final_logit_softcapping": 30.0}
        keys |= {"attention.key_length_swa": d.head_dim, "attention.value_length_swa": d.head_dim}
        keys["rope.dimension_count_swa"] = d.head_dim
    if arch == "cohere2moe":
        keys |= {"logit_scale": 1.0, "leading_dense_block_count": 1, "attention.sliding_window_pattern": 2}
    if arch == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = d.shared_ff
    if arch == "grovemoe":
        keys |= {"expert_chunk_feed_forward_length": d.expert_ff, "expert_group_scale": 0.5, "experts_per_group": 2}
    if arch in _MAMBA:
        keys |= {"ssm.conv_kernel": 4, "ssm.inner_size": 2 * d.embd, "ssm.state_size": 16, "ssm.group_count": 1}
        keys |= {"ssm.time_step_rank": d.heads, "expert_shared_feed_forward_length": d.shared_ff}
        layers = range(d.layers)
        keys["attention.head_count_kv"] = [d.heads_kv if has_attention(arch, layer) else 0 for layer in layers]
    if arch == "nemotron_h_moe":
        keys["attention.layer_norm_epsilon"] = 1e-6
        keys |= {"expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 2.5}
        keys["expert_gating_func"] = 2
        keys["feed_forward_length"] = [d.ff if layer % 2 else 0 for layer in range(d.layers)]
    if arch == "llama4":
        keys |= {"interleave_moe_layer_step": 2, "vocab_size": d.vocab}
    if d.sigmoid and arch == "deepseek2":
        keys |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
        keys |= {"expert_group_count": 4, "expert_group_used_count": 2}
    if arch == "qwen35moe":
        keys |= {"expert_shared_feed_forward_length": d.shared_ff}
        keys |= {"full_attention_interval": 2, "rope.dimension_sections": [3, 3, 2, 0]}
    if arch == "glm4moe":
        keys |= {"expert_shared_count": d.shared_ff // d.expert_ff, "leading_dense_block_count": 1}
        keys |= {"expert_weights_norm": True, "expert_weights_scale": 1.5}
    if arch == "eagle3":
        keys |= {
            "target_layers": [int(layer) for layer in d.target_layers.split(",")],
            "target_hidden_size": d.target_embd,
        }
    if arch == "dflash":
        keys |= {"target_layers": [int(layer) for layer in d.target_layers.split(",")], "block_size": d.block}
        if d.variant == "selector":
            keys |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 4}
        if d.variant == "sections":
            keys["rope.dimension_sections"] = [d.head_dim // 2, 0, 0, 0]
    if d.per_layer:
        keys["expert_used_count"] = [n_used(arch, d, layer) for layer in range(d.layers + d.mtp)]
        keys["expert_feed_forward_length"] = [expert_width(arch, d, layer) for layer in range(d.layers + d.mtp)]
    if d.mtp:
        keys["nextn_predict_layers"] = d.mtp
    return keys


def n_used(arch: str, d: TinyDims, layer: int) -> int:
    """Experts per token of a layer. Only Nemotron's graph selects each layer's own number; others take the first's."""
    if arch != "nemotron_h_moe" or not d.per_layer:
        return d.used
    return max(d.used - layer // 2, 1) if layer % 2 else 0


def expert_width(arch: str, d: TinyDims, layer: int) -> int:
    """Of one expert's hidden layer."""
    return d.expert_ff * (1 + layer // 2 if arch == "nemotron_h_moe" and d.per_layer else 1)


def tensors(arch: str, d: TinyDims) -> Iterator[TensorSpec]:
    """Every tensor of the model, in file order."""
    if arch in ("eagle3", "dflash"):
        yield from (_eagle(d) if arch == "eagle3" else _dflash(d))
        return
    d = _ranks(arch, d)
    embeddings = tensor(d, "token_embd.weight", d.vocab, d.embd)
    # Gemma multiplies embeddings by the root of their width
    yield replace(embeddings, std=d.embd**-0.5 if arch == "gemma4" else 1.0)
    if arch == "gemma4":
        yield TensorSpec("rope_freqs.weight", (d.head_dim // 2,), 0.0, mean=1.0)
    for layer in range(d.layers + d.mtp):
        for spec in _layer(arch, d, layer):
            yield replace(spec, name=f"blk.{layer}.{spec.name}")
    for layer in range(d.layers, d.layers + d.mtp):
        # the token's embedding goes on nearly as it is, so that the head guesses right now and then
        yield TensorSpec(f"blk.{layer}.nextn.eh_proj.weight", (d.embd, 2 * d.embd), 0.1 / d.embd**0.5, identity=1.0)
        yield tensor(d, f"blk.{layer}.nextn.enorm.weight", d.embd)
        yield tensor(d, f"blk.{layer}.nextn.hnorm.weight", d.embd)
    yield tensor(d, "output_norm.weight", d.embd)
    yield tensor(d, "output.weight", d.vocab, d.embd)


def _layer(arch: str, d: TinyDims, layer: int) -> Iterator[TensorSpec]:
    """One layer: attention or a recurrent state, then experts; of Nemotron one of these."""
    if arch == "nemotron_h_moe":
        if layer % 2:
            yield tensor(d, "attn_norm.weight", d.embd)
            yield from _feed_forward(arch, d, layer)
        else:
            yield from _attention(arch, d) if has_attention(arch, layer) else _mamba(d)
        return
    if arch in _MAMBA and not has_attention(arch, layer):
        yield from _mamba(d)
    else:
        yield from _delta_net(d) if is_recurrent(arch, d, layer) else _attention(arch, d)
    yield from _feed_forward(arch, d, layer)


def has_attention(arch: str, layer: int) -> bool:
    """Of architectures with Mamba layers: whether this layer has attention instead."""
    return layer == 1 if arch == "granitehybrid" else layer % 4 == 2


def _attention(arch: str, d: TinyDims) -> Iterator[TensorSpec]:
    q_width, kv_width = d.heads * d.head_dim, d.heads_kv * d.head_dim
    yield tensor(d, "attn_norm.weight", d.embd)
    if arch in ("deepseek2", "mimo2"):
        if arch == "deepseek2":
            yield from architectures.latent_attention(d)
        else:
            yield TensorSpec("attn_qkv.weight", (q_width + 2 * kv_width, d.embd), 1.5 / d.embd**0.5, d.dense_type)
        yield tensor(d, "attn_output.weight", d.embd, q_width)
    else:
        yield from architectures.attention(d, n_queries=2 if arch == "qwen35moe" else 1)
    if arch == "step35":
        yield tensor(d, "attn_gate.weight", d.heads, d.embd)
    yield from architectures.attention_parts("qwen3" if arch in _HEAD_NORMS else arch, d)


def is_recurrent(arch: str, d: TinyDims, layer: int) -> bool:
    """Whether the layer has a recurrent state instead of attention."""
    return arch == "qwen35moe" and layer < d.layers and layer % 2 == 0


def _delta_net(d: TinyDims) -> Iterator[TensorSpec]:
    yield tensor(d, "attn_norm.weight", d.embd)
    yield from architectures.delta_net(d, "ssm_beta", "ssm_alpha")


def _mamba(d: TinyDims) -> Iterator[TensorSpec]:
    """A Mamba-2 mixer: twice the width, one group, a state of 16, as many heads as attention."""
    inner, state = 2 * d.embd, 16
    yield tensor(d, "attn_norm.weight", d.embd)
    yield tensor(d, "ssm_in.weight", 2 * inner + 2 * state + d.heads, d.embd)
    yield TensorSpec("ssm_conv1d.weight", (inner + 2 * state, 4), 0.5)
    yield TensorSpec("ssm_conv1d.bias", (inner + 2 * state,), 0.1)
    yield TensorSpec("ssm_dt.bias", (d.heads,), 0.3)
    yield TensorSpec("ssm_a", (d.heads, 1), 0.1, mean=-0.5)  # a state that fades
    yield TensorSpec("ssm_d", (d.heads, 1), 0.1, mean=1.0)
    yield TensorSpec("ssm_norm.weight", (1, inner), 0.1, mean=1.0)
    yield tensor(d, "ssm_out.weight", d.embd, inner)


def _feed_forward(arch: str, d: TinyDims, layer: int) -> Iterator[TensorSpec]:
    if arch == "gemma4":
        yield from _gemma_norms(d)
    after_attention = arch in ("gpt-oss", "glm4moe", "qwen35moe")
    if arch not in ("cohere2moe", "gemma4", "nemotron_h_moe"):  # the first: next to attention
        yield tensor(d, "post_attention_norm.weight" if after_attention else "ffn_norm.weight", d.embd)
    dense = not d.experts or (arch in _FIRST_DENSE and layer == 0) or (arch == "llama4" and layer % 2 == 0)
    dense = dense or (arch == "mimo2" and layer >= d.layers)
    if dense:
        yield from swiglu(d, "", d.ff)
        return
    router = tensor(d, "ffn_gate_inp.weight", d.experts, d.embd)
    yield replace(router, std=d.router_std) if arch == "gemma4" else router
    experts, ff = d.experts, expert_width(arch, d, layer)
    down_type = d.odd_down_type if layer % 2 else ""
    gate, up, down = architectures.expert_matrices(d, ff, down_type=down_type)
    if d.merged:
        yield tensor(d, "ffn_gate_up_exps.weight", experts, 2 * ff, d.embd)
        yield down
    else:  # Nemotron's experts have two matrices, and a squared ReLU between them
        yield from (up, down) if arch == "nemotron_h_moe" else (gate, up, down)
    if arch == "grovemoe":  # a second block, with an expert for each two of the first
        yield from architectures.expert_matrices(d, ff, suffix="chexps", n=experts // 2)
    if arch == "gpt-oss":
        yield from architectures.expert_biases(d)
    if d.expert_scales:
        for name in ("gate", "up", "down"):
            yield TensorSpec(f"ffn_{name}_exps.scale", (experts,), 0.3, mean=1.0)
    if arch in ("qwen2moe", "qwen35moe"):
        yield tensor(d, "ffn_gate_inp_shexp.weight", d.embd)
    if arch in ("qwen2moe", "qwen35moe", "deepseek2", "glm4moe", "step35", "hy_v3", "cohere2moe", "granitehybrid"):
        yield from swiglu(d, "_shexp", d.shared_ff)
    if arch == "nemotron_h_moe":
        yield tensor(d, "ffn_up_shexp.weight", d.shared_ff, d.embd)
        yield tensor(d, "ffn_down_shexp.weight", d.embd, d.shared_ff)
    if arch == "llama4":
        yield from swiglu(d, "_shexp", d.expert_ff)
    if arch == "gemma4":
        yield from swiglu(d, "", d.shared_ff)
    if d.sigmoid or arch in ("glm4moe", "step35", "mimo2", "nemotron_h_moe"):
        yield tensor(d, "exp_probs_b.bias", experts)


def _gemma_norms(d: TinyDims) -> Iterator[TensorSpec]:
    """Norms before and after each part; those after it have what it adds to the residual stream."""
    for name in ("ffn_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        yield tensor(d, f"{name}.weight", d.embd)
    for name in ("post_attention_norm", "post_ffw_norm"):
        yield TensorSpec(f"{name}.weight", (d.embd,), 0.1 * d.residual, mean=d.residual)
    yield TensorSpec("ffn_gate_inp.scale", (d.embd,), 0.1, mean=1.0)


def _eagle(d: TinyDims) -> Iterator[TensorSpec]:
    """An EAGLE-3 draft whose attention hands on the token's embedding, so that it guesses right now and then."""
    width = d.heads * d.head_dim
    yield TensorSpec("fc.weight", (d.embd, 3 * d.target_embd), 0.05)
    yield tensor(d, "output_norm.weight", d.embd)
    if d.draft_vocab:
        yield TensorSpec("token_embd.weight", (d.vocab, d.embd), 1.0)
        yield TensorSpec("output.weight", (d.draft_vocab, d.embd), d.logit_std / d.embd**0.5)
        yield TensorSpec("d2t", (d.draft_vocab,), 0.0, "I64")
    yield tensor(d, "blk.0.attn_norm.weight", d.embd)
    yield tensor(d, "blk.0.attn_norm_2.weight", d.embd)
    for name in ("q", "k"):
        yield TensorSpec(f"blk.0.attn_{name}.weight", (width, 2 * d.embd), 0.1 / d.embd**0.5, identity=1.5)
    yield TensorSpec("blk.0.attn_v.weight", (width, 2 * d.embd), 0.1 / d.embd**0.5, identity=1.0)
    yield TensorSpec("blk.0.attn_output.weight", (d.embd, width), 0.1 / width**0.5, identity=2.0)
    yield tensor(d, "blk.0.ffn_norm.weight", d.embd)
    for spec in swiglu(d, "", d.ff):
        yield replace(spec, name=f"blk.0.{spec.name}")


def _dflash(d: TinyDims) -> Iterator[TensorSpec]:
    """A DFlash draft whose masks take over the last token's embedding, so that it guesses right now and then.

    With a vocabulary of its own the mask is nothing but a place for that.
    """
    width, kv_width = d.heads * d.head_dim, d.heads_kv * d.head_dim
    n_layers = len(d.target_layers.split(","))
    yield TensorSpec("fc.weight", (d.embd, n_layers * d.embd), 0.05)
    yield TensorSpec("enc.output_norm.weight", (d.embd,), 0.005, mean=0.02)
    yield tensor(d, "output_norm.weight", d.embd)
    if d.draft_vocab:
        yield TensorSpec("token_embd.weight", (d.vocab, d.embd), 1.0, zero_row=d.mask)
        yield TensorSpec("output.weight", (d.draft_vocab, d.embd), d.logit_std / d.embd**0.5)
        if d.draft_vocab < d.vocab:
            yield TensorSpec("d2t", (d.draft_vocab,), 0.0, "I64")
    if d.variant == "dspark":
        yield TensorSpec("markov_w1.weight", (d.vocab, 16), 1.0)
        yield TensorSpec("markov_w2.weight", (d.draft_vocab or d.vocab, 16), 0.25)
    if d.variant == "selector":
        yield TensorSpec("selector_predecessor.weight", (d.vocab, 16), 1.0)
        yield TensorSpec("selector_successor.weight", (d.vocab, 16), 0.1)
        yield TensorSpec("selector_hidden.weight", (16, d.embd), 0.1)
    for layer in range(d.layers):
        gain = 1.0 if layer == 0 else 0.1
        specs = [
            tensor(d, "attn_norm.weight", d.embd),
            TensorSpec("attn_q.weight", (width, d.embd), d.embd**-0.5, d.dense_type),
            tensor(d, "attn_k.weight", kv_width, d.embd),
            TensorSpec("attn_v.weight", (kv_width, d.embd), 0.1 / d.embd**0.5, identity=gain),
            TensorSpec("attn_output.weight", (d.embd, width), 0.1 / width**0.5, identity=gain),
            tensor(d, "attn_q_norm.weight", d.head_dim),
            tensor(d, "attn_k_norm.weight", d.head_dim),
            tensor(d, "ffn_norm.weight", d.embd),
            tensor(d, "ffn_gate.weight", d.ff, d.embd),
            tensor(d, "ffn_up.weight", d.ff, d.embd),
            replace(tensor(d, "ffn_down.weight", d.embd, d.ff), std=0.1 * d.residual / d.ff**0.5),
        ]
        if d.variant == "selector":
            n_projected = 2 * 2 * d.embd // 16  # both sides of the block, two taps, groups of 16
            for name in ("attn", "ffn"):
                specs += [
                    TensorSpec(f"{name}_conv_base", (2, 2, d.embd), 0.05, mean=0.5),
                    TensorSpec(f"{name}_conv_proj.weight", (n_projected, d.embd), 0.02),
                ]
        yield from (replace(spec, name=f"blk.{layer}.{spec.name}") for spec in specs)
