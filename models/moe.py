"""The mixture of experts for training: a small C++ kernel, or plain PyTorch where no compiler is found."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels import library, pointers, sizes


class _ExpertMix(torch.autograd.Function):
    """The kernel as a differentiable function; shapes as in `expert_mix`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        kernels = library()
        assert kernels is not None
        x, ids, weight = x.contiguous(), ids.contiguous(), weight.contiguous()
        (n_token, k), (n_expert, dim, wide) = ids.shape, gate_up.shape
        order, where = torch.empty_like(ids), torch.empty_like(ids)
        start = torch.empty(n_expert + 1, dtype=torch.int64)
        kernels.moe_sort(*pointers(ids), *sizes(n_token * k, n_expert), *pointers(order, where, start))
        hidden, rows = x.new_empty(n_token * k, wide), x.new_empty(n_token * k, dim)
        out = torch.empty_like(x)
        ctx.sizes = sizes(n_token, k, n_expert, dim, wide // 2)
        kernels.moe_forward(
            *pointers(x, gate_up, down, weight, order, where, start), *ctx.sizes, *pointers(hidden, rows, out)
        )
        ctx.save_for_backward(x, gate_up, down, weight, hidden, order, where, start)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernels = library()
        assert kernels is not None
        x, gate_up, down, weight, hidden, order, where, start = ctx.saved_tensors
        g_out = grads[0].contiguous()
        rows, g_x = x.new_empty(hidden.shape[0], x.shape[1]), torch.empty_like(x)
        g_gate_up, g_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        g_weight = torch.empty_like(weight)
        kernels.moe_backward(
            *pointers(g_out, x, gate_up, down, weight, hidden, order, where, start),
            *ctx.sizes,
            *pointers(rows, g_x, g_gate_up, g_down, g_weight),
        )
        return g_x, g_gate_up, g_down, None, g_weight


def top_experts(prob: Tensor, k: int) -> Tensor:
    """Ids (N, k) of the most probable experts, the most probable first. prob: (N, E)."""
    kernels = library() if prob.device.type == "cpu" and prob.dtype == torch.float32 and prob.shape[1] <= 1024 else None
    if kernels is None:
        return prob.topk(k, dim=-1).indices
    prob = prob.detach().contiguous()
    ids = torch.empty(prob.shape[0], k, dtype=torch.int64)
    kernels.moe_top(*pointers(prob), *sizes(*prob.shape, k), *pointers(ids))
    return ids


def expert_mix(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' outputs.

    x: (N, D) inputs; gate_up: (E, D, 2 * F); down: (E, F, D); ids: (N, k) int64; weight: (N, k) -> (N, D).
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and library() is not None:
        out: Tensor = _ExpertMix.apply(x, gate_up, down, ids, weight)
        return out
    return expert_mix_plain(x, gate_up, down, ids, weight)


def expert_mix_plain(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """The same in plain PyTorch: one batched product per matrix, every expert padded to the busiest one."""
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
