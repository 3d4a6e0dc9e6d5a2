"""The two architectures in PyTorch, computed as llama.cpp computes them: qwen3moe (target) and qwen3 (draft)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import attend, rope_tables
from models.moe import expert_mix, top_experts


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

    def to_dict(self) -> dict[str, int | float]:
        return asdict(self)


TARGET_SHAPE = Shape()
DRAFT_SHAPE = Shape(n_layer=4, n_embd=96, n_expert=0, n_expert_used=0, n_ff=256)


# Adjacent tokens whose router logits are as alike as this (cosine) are not drawn closer together. The top 8 of 128
# experts then share about 0.4, as in large models (0.38 for Qwen3-30B-A3B, 0.44 for gpt-oss-20b).
LIKENESS = 0.7


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on every query and key head."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.qkv = nn.Linear(s.n_embd, (s.n_head + 2 * s.n_head_kv) * s.head_dim, bias=False)
        self.out = nn.Linear(s.n_head * s.head_dim, s.n_embd, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.rms_eps)
        self.k_norm = RMSNorm(s.head_dim, s.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.s
        batch, time, _ = x.shape
        heads = F.linear(x, self.qkv.weight).view(batch, time, -1, s.head_dim)
        y = attend(heads, self.q_norm.weight, self.k_norm.weight, cos, sin, s.n_head, s.n_head_kv, s.rms_eps)
        return self.out(y.reshape(batch, time, -1))


def alike(logits: Tensor) -> Tensor:
    """Cosine (B, T - 1) of adjacent tokens' router logits (B, T, E), what all tokens have in common left out."""
    z = logits - logits.mean(dim=-1, keepdim=True)
    z = F.normalize(z - z.mean(dim=(0, 1)), dim=-1)
    return (z[:, 1:] * z[:, :-1]).sum(dim=-1)


class MoE(nn.Module):
    """Top-k experts: softmax over all routers' logits, top-k, weights renormalised to sum 1."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.k = s.n_expert_used
        self.router = nn.Linear(s.n_embd, s.n_expert, bias=False)
        # gate and up side by side: (expert, n_embd, 2 * n_ff); down: (expert, n_ff, n_embd)
        self.gate_up = nn.Parameter(torch.empty(s.n_expert, s.n_embd, 2 * s.n_ff))
        self.down = nn.Parameter(torch.empty(s.n_expert, s.n_ff, s.n_embd))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (B, T, n_embd) -> output (B, T, n_embd), losses (2,): balance and change, ids (B * T, k)."""
        logits = self.router(x)  # (B, T, E)
        prob = logits.softmax(dim=-1).flatten(0, 1)  # (B * T, E)
        ids = top_experts(prob, self.k)  # (B * T, k)
        weight = prob.gather(1, ids)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        n_expert = prob.shape[1]
        load = torch.bincount(ids.flatten(), minlength=n_expert) / ids.numel()
        balance = n_expert * (load * prob.mean(dim=0)).sum()  # 1 when evenly spread
        change = (1 - alike(logits)).sub(1 - LIKENESS).relu().mean() if x.shape[1] > 1 else balance.new_zeros(())
        y = expert_mix(x.flatten(0, 1), self.gate_up, self.down, ids, weight)
        return y.view_as(x), torch.stack((balance, change)), ids


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
        self.attn_norm, self.ffn_norm = RMSNorm(s.n_embd, s.rms_eps), RMSNorm(s.n_embd, s.rms_eps)
        self.attn = Attention(s)
        self.ffn: MoE | Dense = MoE(s) if s.n_expert else Dense(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        h = self.ffn_norm(x)
        if isinstance(self.ffn, Dense):
            return x + self.ffn(h), x.new_zeros(2), None
        y, losses, ids = self.ffn(h)
        return x + y, losses, ids


class Network(nn.Module):
    """Token ids in, logits out; the output matrix is the embedding (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.norm = RMSNorm(shape.n_embd, shape.rms_eps)
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

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """tokens: (B, T) -> hidden (B, T, n_embd) after the last norm, routing losses (2,), ids (B * T, k) per layer.

        The routing losses are means over layers: imbalance of the experts' load, change from token to token.
        """
        s = self.shape
        cos, sin = rope_tables(tokens.shape[1], s.head_dim, s.rope_theta, tokens.device)
        x = self.embed(tokens)
        losses, routing = x.new_zeros(2), []
        for block in self.blocks:
            x, layer_losses, ids = block(x, cos, sin)
            losses = losses + layer_losses / s.n_layer
            if ids is not None:
                routing.append(ids)
        return self.norm(x), losses, routing

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., n_embd) -> (..., n_vocab)."""
        return F.linear(hidden, self.embed.weight)
