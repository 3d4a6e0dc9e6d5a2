"""Loading a model without reading its experts where its other weights go to a GPU."""

from __future__ import annotations

import numpy as np

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
            Model.load(path, n_gpu_layers=-1, experts_on_cpu=True, free_bytes=0, experts_from_file=is_lazy) as model,
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
