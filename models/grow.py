"""Growing a trained stack deeper without changing what it computes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from models.network import MoE, Network


def grow(small: Network, n_layer: int, seed: int = 0) -> Network:
    """A network of `n_layer` layers with the function of `small`: each layer is followed by copies that are silent.

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
            fresh_router = block.ffn.router.weight.clone() if isinstance(block.ffn, MoE) else None
            block.load_state_dict(old.state_dict())
            if i % copies == 0:
                continue
            nn.init.zeros_(block.attn.out.weight)
            if isinstance(block.ffn, MoE) and fresh_router is not None:
                nn.init.zeros_(block.ffn.down)
                # as wide as the trained router, so that the softmax is as sharp from the start
                block.ffn.router.weight.copy_(fresh_router * (old.ffn.router.weight.std() / fresh_router.std()))
            else:
                nn.init.zeros_(block.ffn.down.weight)
    return big
