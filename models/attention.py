"""Attention for training: a C++ kernel with the norms and the rotation inside, or plain PyTorch."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels import library, pointers, sizes

BLOCK = 64  # the kernel wants a multiple of so many tokens


def rope_tables(n_pos: int, head_dim: int, theta: float, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (n_pos, head_dim / 2), of the rotary embedding."""
    freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(n_pos, dtype=torch.float32)[:, None] * freq
    return angle.cos().to(device), angle.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, NeoX pairing (i, i + head_dim / 2). x: (B, T, H, head_dim); cos, sin: (T, head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class _Attention(torch.autograd.Function):
    """The kernel as a differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_gain: Tensor,
        k_gain: Tensor,
        cos: Tensor,
        sin: Tensor,
        n_head: int,
        n_head_kv: int,
        eps: float,
    ) -> Tensor:
        kernels = library()
        assert kernels is not None
        qkv = qkv.contiguous()
        batch, time, _, dim = qkv.shape
        out = qkv.new_empty(batch, time, n_head, dim)
        ctx.numbers = [*sizes(batch, time, n_head, n_head_kv, dim), ctypes.c_float(eps)]
        kernels.attention_forward(*pointers(qkv, q_gain, k_gain, cos, sin), *ctx.numbers, *pointers(out))
        ctx.save_for_backward(qkv, q_gain, k_gain, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernels = library()
        assert kernels is not None
        qkv, q_gain, k_gain, cos, sin = ctx.saved_tensors
        g_out = grads[0].contiguous()
        g_qkv, g_q_gain, g_k_gain = torch.empty_like(qkv), torch.zeros_like(q_gain), torch.zeros_like(k_gain)
        kernels.attention_backward(
            *pointers(g_out, qkv, q_gain, k_gain, cos, sin), *ctx.numbers, *pointers(g_qkv, g_q_gain, g_k_gain)
        )
        return g_qkv, g_q_gain, g_k_gain, None, None, None, None, None


def attend(
    qkv: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, n_head: int, n_head_kv: int, eps: float
) -> Tensor:
    """Causal grouped-query attention; queries and keys are normalised per head, then rotated.

    qkv: (B, T, n_head + 2 * n_head_kv, head_dim) -> (B, T, n_head, head_dim).
    """
    fits = qkv.shape[1] % BLOCK == 0 and qkv.shape[3] % 32 == 0
    if fits and qkv.device.type == "cpu" and qkv.dtype == torch.float32 and library() is not None:
        out: Tensor = _Attention.apply(qkv, q_gain, k_gain, cos, sin, n_head, n_head_kv, eps)
        return out
    return attend_plain(qkv, q_gain, k_gain, cos, sin, n_head, n_head_kv, eps)


def attend_plain(
    qkv: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, n_head: int, n_head_kv: int, eps: float
) -> Tensor:
    """The same in PyTorch alone."""
    q, k, v = qkv.split((n_head, n_head_kv, n_head_kv), dim=2)
    dim = (qkv.shape[3],)
    q = rotate(F.rms_norm(q, dim, q_gain, eps), cos, sin).transpose(1, 2)
    k = rotate(F.rms_norm(k, dim, k_gain, eps), cos, sin).transpose(1, 2)
    v = v.transpose(1, 2)
    if n_head != n_head_kv:
        k, v = (t.repeat_interleave(n_head // n_head_kv, dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
