"""The two architectures in PyTorch, computed as llama.cpp computes them: qwen3moe (target) and qwen3 (draft)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `n_expert` = 0 makes it dense (qwen3) with a feed-forward width of `n_ff`."""

    n_vocab: int = 2048
    n_layer: int = 48
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_expert: int = 128
    n_expert_used: int = 8
    n_ff: int = 32  # width of one expert, or of the dense feed-forward block
    n_ctx: int = 2048  # written to the GGUF; trained on shorter sequences
    rope_theta: float = 100_000.0
    rms_eps: float = 1e-6


TARGET_SHAPE = Shape()
DRAFT_SHAPE = Shape(n_layer=4, n_embd=96, n_expert=0, n_expert_used=0, n_ff=256)


# Adjacent tokens whose router logits are as alike as this (cosine) are not drawn closer together. The top 8 of 128
# experts then share about 0.4, as in large models (0.38 for Qwen3-30B-A3B, 0.44 for gpt-oss-20b).
LIKENESS = 0.7


def rope_tables(n_pos: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (n_pos, head_dim / 2), of the rotary embedding."""
    freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(n_pos, dtype=torch.float32)[:, None] * freq
    return angle.cos().to(device), angle.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, NeoX pairing (i, i + head_dim / 2). x: (B, T, H, head_dim); cos, sin: (T, head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on every query and key head."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.qkv = nn.Linear(s.n_embd, (s.n_head + 2 * s.n_head_kv) * s.head_dim, bias=False)
        self.out = nn.Linear(s.n_head * s.head_dim, s.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(s.head_dim, s.rms_eps)
        self.k_norm = nn.RMSNorm(s.head_dim, s.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.s
        batch, time, _ = x.shape
        heads = self.qkv(x).view(batch, time, -1, s.head_dim)
        q, k, v = heads.split((s.n_head, s.n_head_kv, s.n_head_kv), dim=2)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


def alike(logits: Tensor) -> Tensor:
    """Cosine (B, T - 1) of adjacent tokens' router logits (B, T, E), what all tokens have in common left out."""
    z = logits - logits.mean(dim=-1, keepdim=True)
    z = F.normalize(z - z.mean(dim=(0, 1)), dim=-1)
    return (z[:, 1:] * z[:, :-1]).sum(dim=-1)


def expert_mix(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' outputs: a batched product per matrix, experts padded to the busiest one.

    x: (N, D) inputs; gate_up: (E, D, 2 * F); down: (E, F, D); ids: (N, k) int64; weight: (N, k) -> (N, D).
    """
    n_token, k = ids.shape
    n_expert, dim, _ = gate_up.shape
    flat = ids.flatten()
    count = torch.bincount(flat, minlength=n_expert)
    order = flat.argsort()
    start = count.cumsum(0) - count
    rank = torch.empty_like(flat)
    rank[order] = torch.arange(flat.numel(), device=x.device) - start[flat[order]]
    capacity = int(count.max())
    slot = flat * capacity + rank  # (N * k): where each pair sits in the padded table
    source = torch.zeros(n_expert * capacity, dtype=torch.int64, device=x.device)
    source[slot] = torch.arange(n_token, device=x.device).repeat_interleave(k)
    rows = x.index_select(0, source).view(n_expert, capacity, dim)  # empty slots repeat token 0 and are not read
    gate, up = torch.bmm(rows, gate_up).chunk(2, dim=-1)
    y = torch.bmm(F.silu(gate) * up, down).view(-1, dim)  # (E * capacity, D)
    picked = y.index_select(0, slot).view(n_token, k, dim)
    return torch.einsum("nkd,nk->nd", picked, weight)


class MoE(nn.Module):
    """Top-k experts: softmax over all routers' logits, top-k, weights renormalised to sum 1."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.k = s.n_expert_used
        self.router = nn.Linear(s.n_embd, s.n_expert, bias=False)
        # gate and up side by side: (expert, n_embd, 2 * n_ff); down: (expert, n_ff, n_embd)
        self.gate_up = nn.Parameter(torch.empty(s.n_expert, s.n_embd, 2 * s.n_ff))
        self.down = nn.Parameter(torch.empty(s.n_expert, s.n_ff, s.n_embd))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: (B, T, n_embd) -> output (B, T, n_embd), losses (2,): balance and change."""
        logits = self.router(x)  # (B, T, E)
        prob = logits.softmax(dim=-1).flatten(0, 1)  # (B * T, E)
        ids = prob.topk(self.k, dim=-1).indices  # (B * T, k)
        weight = prob.gather(1, ids)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        n_expert = prob.shape[1]
        load = torch.bincount(ids.flatten(), minlength=n_expert) / ids.numel()
        balance = n_expert * (load * prob.mean(dim=0)).sum()  # 1 when evenly spread
        change = (1 - alike(logits)).sub(1 - LIKENESS).relu().mean() if x.shape[1] > 1 else balance.new_zeros(())
        y = expert_mix(x.flatten(0, 1), self.gate_up, self.down, ids, weight)
        return y.view_as(x), torch.stack((balance, change))


class Dense(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(s.n_embd, 2 * s.n_ff, bias=False)
        self.down = nn.Linear(s.n_ff, s.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and feed-forward (MoE or dense) with residual connections."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(s.n_embd, s.rms_eps), nn.RMSNorm(s.n_embd, s.rms_eps)
        self.attn = Attention(s)
        self.ffn: MoE | Dense = MoE(s) if s.n_expert else Dense(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        h = self.ffn_norm(x)
        if isinstance(self.ffn, Dense):
            return x + self.ffn(h), x.new_zeros(2)
        y, losses = self.ffn(h)
        return x + y, losses


class Network(nn.Module):
    """Token ids in, logits out; the output matrix is the embedding (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.norm = nn.RMSNorm(shape.n_embd, shape.rms_eps)
        self.init_weights()

    def init_weights(self) -> None:
        """Normal weights scaled by fan-in; what writes into the residual stream starts small."""
        depth_scale = (2 * self.shape.n_layer) ** -0.5
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            fan_in = p.shape[1] if p.dim() == 2 else p.shape[-2]
            std = 0.5 * fan_in**-0.5 if "embed" not in name else fan_in**-0.5
            if name.endswith(("attn.out.weight", "ffn.down", "ffn.down.weight")):
                std *= 2 * depth_scale
            nn.init.normal_(p, std=std)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: (B, T) -> hidden (B, T, n_embd) after the last norm, routing losses (2,).

        The routing losses are means over layers: imbalance of the experts' load, change from token to token.
        """
        s = self.shape
        cos, sin = rope_tables(tokens.shape[1], s.head_dim, s.rope_theta, tokens.device)
        x = self.embed(tokens)
        losses = x.new_zeros(2)
        for block in self.blocks:
            x, layer_losses = block(x, cos, sin)
            losses = losses + layer_losses / s.n_layer
        return self.norm(x), losses

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., n_embd) -> (..., n_vocab)."""
        return F.linear(hidden, self.embed.weight)


def grow(small: Network, n_layer: int, seed: int = 0) -> Network:
    """A network of `n_layer` layers with the function of `small`, an MoE: each layer is followed by silent copies.

    A copy's output matrices (attention out, expert down) are zero, so the residual stream passes through unchanged;
    they receive gradients at once. Its router is drawn anew, so no two layers route alike.
    """
    if n_layer % small.shape.n_layer:
        raise ValueError(f"{n_layer} layers cannot be grown evenly from {small.shape.n_layer}")
    copies = n_layer // small.shape.n_layer
    torch.manual_seed(seed)
    big = Network(replace(small.shape, n_layer=n_layer))
    big.embed.load_state_dict(small.embed.state_dict())
    big.norm.load_state_dict(small.norm.state_dict())
    with torch.no_grad():
        for i, block in enumerate(big.blocks):
            old = small.blocks[i // copies]
            fresh_router = block.ffn.router.weight.clone()
            block.load_state_dict(old.state_dict())
            if i % copies:
                nn.init.zeros_(block.attn.out.weight)
                nn.init.zeros_(block.ffn.down)
                # as wide as the trained router, so that the softmax is as sharp from the start
                block.ffn.router.weight.copy_(fresh_router * (old.ffn.router.weight.std() / fresh_router.std()))
    return big
