"""Loading a model without reading its experts where its other weights go to a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from moeedge.llama import dense_weights
from moeedge.llama.context import Context
from moeedge.llama.dense_weights import SplitWeights
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.llama.test_lazy_mapping import drop_from_page_cache, on_linux, pages_of, resident_pages
from tests.support.counting import CountingDevice


@on_linux
def test_dense_weights_reach_the_gpu_and_only_the_embeddings_are_kept(
    counting: CountingDevice, tiny: TinyFactory
) -> None:
    path = tiny("qwen3moe", layers=4, embd=256, experts=64, expert_ff=256)
    weights = SplitWeights.read(path)
    embeddings = sum(tensor.size_bytes for tensor in weights.dense if tensor.name == "token_embd.weight")
    logits = []
    for is_lazy in (False, True):
        drop_from_page_cache(path)
        with (
            Model.load(
                path, n_gpu_layers=-1, experts_on_cpu=True, storage="on demand" if is_lazy else "mapped"
            ) as model,
            Context(model, n_ctx=64, n_threads=2) as context,
        ):
            assert model.uses_gpu
            if is_lazy:
                resident = resident_pages(path)
                in_dense = pages_of(weights.dense, len(resident))
                assert resident[pages_of(weights.experts, len(resident)) & ~in_dense].mean() < 0.02
                assert model.dense is not None
                assert embeddings <= model.dense.own_bytes == model.dense.host_bytes < embeddings + 2 * 4096
                assert model.dense.host_bytes < model.dense.n_bytes
            tokens = list(range(65, 80))
            logits.append(np.array(context.decode(tokens, phase=Phase.VERIFY, logits="all")))
    assert np.array_equal(*logits)


@on_linux
def test_without_layers_on_the_gpu_all_dense_weights_are_kept(counting: CountingDevice, tiny: TinyFactory) -> None:
    """The output is then in host memory, too, although a GPU is listed."""
    path = tiny("qwen3moe", layers=4, embd=256)
    weights = SplitWeights.read(path)
    assert any(tensor.name == "output.weight" for tensor in weights.dense)
    with Model.load(path, n_gpu_layers=0, storage="on demand") as model:
        assert model.uses_gpu and model.host_expert_layers == (0, 1, 2, 3)
        assert model.dense is not None
        assert model.dense.n_bytes <= model.dense.own_bytes == model.dense.host_bytes


@on_linux
@pytest.mark.parametrize("experts_on_cpu", [False, True])
def test_experts_that_go_to_the_gpu_are_read_ahead(
    counting: CountingDevice, tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch, experts_on_cpu: bool
) -> None:
    """Those of the last layers, and no others."""
    path = tiny("qwen3moe", layers=4, embd=256, experts=16)
    ahead: list[tuple[int, int]] = []
    monkeypatch.setattr(dense_weights, "_read_ahead", lambda _file, ranges: ahead.extend(ranges))
    with Model.load(path, n_gpu_layers=3, experts_on_cpu=experts_on_cpu, storage="on demand") as model:
        assert model.host_expert_layers == ((0, 1, 2, 3) if experts_on_cpu else (0, 1))
    for tensor in SplitWeights.read(path).experts:
        middle = tensor.offset + tensor.size_bytes // 2
        is_ahead = any(offset <= middle < offset + n_bytes for offset, n_bytes in ahead)
        assert is_ahead == (not experts_on_cpu and tensor.name.startswith(("blk.2.", "blk.3."))), tensor.name
