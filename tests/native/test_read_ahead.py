"""Experts in RAM that are read before their layer's turn, and what a prompt larger than the slots reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.errors import BackendError
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_tensors
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.native.cache import CacheConfig, ExpertCache
from tests.support.experts import assert_balanced, assert_bytes, resident, write_experts

TOKENS = np.random.default_rng(7).integers(0, 256, 300).tolist()


def test_the_least_useful_go_for_what_is_read_ahead(tmp_path: Path) -> None:
    experts = write_experts(tmp_path / "experts.bin")
    with ExpertCache(experts.config(4 / 32, device="ram")) as cache:  # four slots
        cache.read_ahead(0, np.array([1, 2, 3, 4]))
        cache.drain(5.0)
        assert resident(cache) == {(0, 1), (0, 2), (0, 3), (0, 4)}
        cache.read_ahead(1, np.array([0, 5]))
        cache.drain(5.0)
        assert resident(cache) == {(0, 1), (0, 2), (0, 3), (0, 4)}, "their layer's turn has not come yet"
        assert (cache.stats().ahead, cache.stats().ahead_used) == (4, 0)
        assert_balanced(cache)
        assert_bytes(cache, experts)
        for layer, expert in ((0, 8), (0, -1), (4, 0)):
            with pytest.raises(BackendError):
                cache.read_ahead(layer, np.array([expert]))


def test_a_prompt_reads_what_is_absent_once(tiny_moe: Path) -> None:
    """A batch that needs all experts keeps those of later layers; by use alone nearly all would be read again."""
    with Model.load(tiny_moe, storage="on demand") as model, Context(model, n_ctx=512, n_threads=1) as context:
        info = model.info
        tensors, files = expert_tensors(tiny_moe, n_layers=info.n_layers)
        n_all = info.n_layers * info.n_experts
        shape = {"n_layers": info.n_layers, "n_experts": info.n_experts}
        config = CacheConfig(device="ram", files=files, tensors=tensors, ratio=0.75, **shape)
        with ExpertCache(config) as cache:
            assert context.sensor is not None
            cache.attach(context.sensor)
            for turn in range(3):
                before = cache.stats()
                context.clear()
                context.decode(TOKENS, phase=Phase.PREFILL, logits="all")  # so that the last layer has all tokens, too
                now = cache.stats()
                n_read = now.uploads - before.uploads
                n_absent = n_all if turn == 0 else n_all - cache.info.n_slots
                assert n_absent - 2 <= n_read <= (n_absent if turn == 0 else 3 * n_absent)
                assert now.ahead_used <= now.ahead
                assert turn > 0 or now.ahead_used > 0
            cache.detach()
