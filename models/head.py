"""An EAGLE-3 draft for the target in PyTorch, computed as llama.cpp computes it, and its loss over drafts in a row.

Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via training-time test", 2025. One layer
reads a token and a state: of the target for the first draft, its own for those after it. It is trained on both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import rope_tables
from models.network import RMSNorm


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head that uses the target's embeddings and output matrix, so that it is as wide as the target."""

    n_vocab: int = 2048
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 384
    n_ctx: int = 2048
    rope_theta: float = 100_000.0
    rms_eps: float = 1e-6
    layers: tuple[int, ...] = (2, 24, 47)  # of the target: the head reads their inputs

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs (2i, 2i + 1). x: (B, T, H, head_dim); cos, sin: (T, head_dim / 2)."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def later(x: Tensor, n: int) -> Tensor:
    """Moves (B, T, ...) by `n` positions to later ones; zeros come first."""
    return torch.cat((torch.zeros_like(x[:, :n]), x[:, : x.shape[1] - n]), dim=1) if n else x


class Head(nn.Module):
    """Tokens and states in, states out. The target's embeddings and output matrix are not trained."""

    embed: Tensor
    output: Tensor

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = s = shape
        self.register_buffer("embed", torch.zeros(s.n_vocab, s.n_embd))
        self.register_buffer("output", torch.zeros(s.n_vocab, s.n_embd))
        self.fc = nn.Linear(len(s.layers) * s.n_embd, s.n_embd, bias=False)
        self.token_norm, self.state_norm = RMSNorm(s.n_embd, s.rms_eps), RMSNorm(s.n_embd, s.rms_eps)
        self.q = nn.Linear(2 * s.n_embd, s.n_head * s.head_dim, bias=False)
        self.k = nn.Linear(2 * s.n_embd, s.n_head_kv * s.head_dim, bias=False)
        self.v = nn.Linear(2 * s.n_embd, s.n_head_kv * s.head_dim, bias=False)
        self.attn_out = nn.Linear(s.n_head * s.head_dim, s.n_embd, bias=False)
        self.ffn_norm, self.norm = RMSNorm(s.n_embd, s.rms_eps), RMSNorm(s.n_embd, s.rms_eps)
        self.gate = nn.Linear(s.n_embd, s.n_ff, bias=False)
        self.up = nn.Linear(s.n_embd, s.n_ff, bias=False)
        self.down = nn.Linear(s.n_ff, s.n_embd, bias=False)

    def start(self, embed: Tensor, norm: Tensor, states: Tensor) -> None:
        """Takes the target's embeddings, which are its output matrix, too, and the weight of its last norm.

        states: (n, 3 * n_embd) of the target: `fc` makes them equally large.
        """
        n = self.shape.n_embd
        with torch.no_grad():
            self.embed.copy_(embed)
            self.output.copy_(embed)
            size = states.float().pow(2).mean(dim=0).sqrt().clamp(min=1e-6)  # (3 * n_embd,): some are far larger
            last = size[-n:]
            self.fc.weight.normal_(std=0.2 * n**-0.5).div_(size)
            self.fc.weight[:, -n:] += torch.diag(1 / last)
            self.norm.weight.copy_(norm * last / last.pow(2).mean().sqrt())
            for small in (self.attn_out, self.down):
                small.weight.mul_(0.5)

    def forward(self, tokens: Tensor, states: Tensor, n_drafts: int) -> list[Tensor]:
        """The states that each draft in a row leaves, after the last norm: `n_drafts` times (B, T, n_embd).

        tokens: (B, T); states: (B, T, 3 * n_embd) of the target at the position before each token. Entry t of the
        first list element knows the target's state of t - 1; of the second, that of t - 2 and the head's own; ...
        Entries t < draft are of positions before the text, and mean nothing.
        """
        s = self.shape
        batch, time = tokens.shape
        cos, sin = rope_tables(time, s.head_dim, s.rope_theta)
        token = self.token_norm(F.embedding(tokens, self.embed))
        state = self.fc(states)
        ahead = torch.arange(time)[None, :] - torch.arange(time)[:, None]  # (query, key): > 0 is the future
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(n_drafts):
            hidden = ahead > -step
            hidden[1:, 0] = True  # the first token of a text has no entry: no state is before it
            x = torch.cat((token, self.state_norm(state)), dim=-1)
            q = rotate_pairs(self.q(x).view(batch, time, s.n_head, s.head_dim), cos, sin)
            keys.append(rotate_pairs(self.k(x).view(batch, time, s.n_head_kv, s.head_dim), cos, sin))
            values.append(self.v(x).view(batch, time, s.n_head_kv, s.head_dim))
            y = self._attend(q, keys, values, hidden)
            state = state + self.attn_out(y.flatten(2))
            h = self.ffn_norm(state)
            state = state + self.down(F.silu(self.gate(h)) * self.up(h))
            found.append(self.norm(state))
            state = later(state, 1)
        return found

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], hidden: Tensor) -> Tensor:
        """Attention of the last draft to the entries of the target's states, and to those of the drafts before it.

        q: (B, T, H, D); keys, values: per draft (B, T, H_kv, D); hidden: (T, T), what of the first draft's entries is
        replaced by later ones -> (B, T, H, D).
        """
        s, last = self.shape, len(keys) - 1
        groups = s.n_head // s.n_head_kv
        k, v = (t[0].repeat_interleave(groups, dim=2).transpose(1, 2) for t in (keys, values))  # (B, H, T, D)
        q = q.transpose(1, 2) * s.head_dim**-0.5
        scores = (q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf"))
        own_k = [later(x, last - i).repeat_interleave(groups, dim=2).transpose(1, 2) for i, x in enumerate(keys) if i]
        own_v = [later(x, last - i).repeat_interleave(groups, dim=2).transpose(1, 2) for i, x in enumerate(values) if i]
        own = [(q * x).sum(dim=-1, keepdim=True) for x in own_k]
        weights = torch.cat((scores, *own), dim=-1).softmax(dim=-1)
        y = weights[..., : k.shape[2]] @ v
        for i, x in enumerate(own_v):
            y = y + weights[..., k.shape[2] + i, None] * x
        return y.transpose(1, 2)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., n_embd) -> (..., n_vocab)."""
        return F.linear(hidden, self.output)


def draft_loss(
    net: Head, tokens: Tensor, states: Tensor, ids: Tensor, probabilities: Tensor, weights: Tensor, n_drafts: int
) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy against the target's distribution, later drafts counted less, over tokens of weight 1.

    tokens: (B, T); states: (B, T, 3 * n_embd) of these tokens; ids, probabilities: (B, T, k), the target's likeliest
    successors; weights: (B, T) of the successor.
    """
    hidden = net(tokens, later(states, 1), n_drafts)
    total = tokens.new_zeros((), dtype=torch.float32)
    facts: dict[str, float] = {}
    for draft, h in enumerate(hidden):
        chosen = weights == 1
        chosen[:, : draft + 1] = False
        log_p = net.logits(h[chosen]).log_softmax(dim=-1)  # (n, V)
        wanted, p = ids[chosen], probabilities[chosen]
        loss = -(log_p.gather(1, wanted) * p).sum(dim=-1).mean()
        total = total + 0.85**draft * loss
        facts[f"agree_{draft + 1}"] = round((log_p.argmax(-1) == wanted[:, 0]).float().mean().item(), 4)
        if draft == 0:
            facts["loss"] = round(loss.item(), 4)
    return total, facts
