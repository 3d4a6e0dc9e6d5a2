"""Checkpoints written as GGUF compute the same in llama.cpp as in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the training extra (torch)")

from models.export import compare, export  # noqa: E402
from models.network import Network, Shape  # noqa: E402
from models.tokenizer import train_tokenizer  # noqa: E402

SMALL = Shape(n_vocab=1024, n_layer=3, n_expert=16, n_expert_used=4)
DENSE = Shape(n_vocab=1024, n_layer=2, n_embd=96, n_expert=0, n_expert_used=0, n_ff=64)


@pytest.mark.parametrize(
    ("kind", "error", "greedy"), [("f32", 0.01, 0.97), ("q8_0", 0.05, 0.9), ("q4_0", 0.3, 0.4)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("shape", [SMALL, DENSE], ids=["qwen3moe", "qwen3"])
def test_gguf_agrees_with_pytorch(shape: Shape, kind: str, error: float, greedy: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Network(shape)
    path = tmp_path / "model.gguf"
    export(net, train_tokenizer(n_chats=3000, vocab_size=1024), path, kind, "test")
    result = compare(net, path, n_chats=4)
    assert result.relative_error < error
    assert result.greedy > greedy


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_routers_and_norms_stay_in_float32_and_experts_get_their_type(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    path = tmp_path / "model.gguf"
    export(Network(SMALL), train_tokenizer(n_chats=3000, vocab_size=1024), path, kind, "test")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    for name, found in types.items():
        wanted = kind.upper() if "_exps" in name else "F32" if "norm" in name or "ffn_gate_inp" in name else "Q8_0"
        assert found == wanted, name
    assert list(tmp_path.iterdir()) == [path], "no other file is left"
