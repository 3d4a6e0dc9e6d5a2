"""Does a GGUF file compute what its checkpoint computes? Logits through llama.cpp against PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.generator import held_back, render_chat
from models.llama_runner import Runner
from models.network import Network


@dataclass(frozen=True)
class Agreement:
    """Over all tokens of some held-back chats."""

    tokens: int
    relative_error: float  # root mean square of the difference over that of the logits
    greedy: float  # share of tokens with the same most likely successor

    def __str__(self) -> str:
        return f"{self.tokens} tokens: relative error {self.relative_error:.4f}, same greedy choice {self.greedy:.4f}"


def compare(net: Network, path: Path, n_chats: int = 20) -> Agreement:
    """Read `n_chats` chats with both; quantisation shows as error, a wrong layout as nonsense."""
    wanted, got = [], []
    with Runner(path) as runner, torch.no_grad():
        for chat in held_back(n_chats):
            ids = runner.encode(render_chat(chat))
            runner.cut(0)
            got.append(runner.eval(ids))
            wanted.append(net.logits(net(torch.tensor([ids]))[0])[0].numpy())
    a, b = np.concatenate(wanted), np.concatenate(got)
    error = float(np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2)))
    return Agreement(len(a), error, float((a.argmax(-1) == b.argmax(-1)).mean()))
