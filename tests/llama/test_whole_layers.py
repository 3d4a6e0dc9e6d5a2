"""Which layers have their experts on a GPU, against llama.cpp's own account of the memory there."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_bytes, expert_tensors, most_whole_layers, whole_layers
from moeedge.llama.model import Model
from moeedge.native.cache import ExpertTensor
from moeedge.native.devices import DRY_RUN_GPU


def _tensor(layer: int, stride: int) -> ExpertTensor:
    return ExpertTensor(
        layer=layer, type=0, ne0=1, ne1=1, n_experts=4, file=0, offset=0, stride=stride, name=f"blk.{layer}.ffn_up_exps"
    )


# layer 0 is dense, and the last layer has larger experts
_TENSORS = [_tensor(layer, stride) for layer, stride in ((1, 10), (2, 10), (3, 10), (4, 20))]


def test_the_last_layers_are_taken() -> None:
    assert (whole_layers(_TENSORS, 5, 0).n_cpu_moe, whole_layers(_TENSORS, 5, 0).expert_bytes) == (5, 0)
    assert (whole_layers(_TENSORS, 5, 2).n_cpu_moe, whole_layers(_TENSORS, 5, 2).expert_bytes) == (3, 120)
    assert whole_layers(_TENSORS, 5, 9) == whole_layers(_TENSORS, 5, 4)


@pytest.mark.parametrize(("n_bytes", "n_whole"), [(0, 0), (79, 0), (80, 1), (119, 1), (120, 2), (200, 4), (999, 4)])
def test_as_many_as_fit(n_bytes: int, n_whole: int) -> None:
    assert most_whole_layers(_TENSORS, 5, n_bytes).n_whole == n_whole
    assert most_whole_layers([], 5, n_bytes).n_whole == 0


def _weights_on_gpu(path: Path, n_cpu_moe: int | None) -> int:
    load = Model.load(
        path, n_gpu_layers=-1, device=DRY_RUN_GPU, experts_on_cpu=True, n_cpu_moe=n_cpu_moe, header_only=True
    )
    with load as model, Context(model, n_ctx=256, n_threads=1) as context:
        return sum(use.weights_bytes for use in context.memory_uses() if use.on_gpu)


def test_llama_cpp_stores_them_there(tiny_moe: Path) -> None:
    with Model.load(tiny_moe, header_only=True) as header:
        n_layers = header.info.n_layers
    tensors, _ = expert_tensors(tiny_moe)
    dense = _weights_on_gpu(tiny_moe, None)
    for n_whole in range(n_layers + 1):
        chosen = whole_layers(tensors, n_layers, n_whole)
        padding = _weights_on_gpu(tiny_moe, chosen.n_cpu_moe) - dense - chosen.expert_bytes
        assert 0 <= padding <= 1024 * n_whole  # llama.cpp aligns each tensor
    assert chosen.expert_bytes == expert_bytes(tensors)
