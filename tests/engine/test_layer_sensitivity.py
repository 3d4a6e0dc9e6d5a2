"""The divergence that a budget in one layer causes, against two contexts side by side."""

from __future__ import annotations

import numpy as np
import pytest

from moeedge.engine.layer_sensitivity import measure_sensitivity
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.sequence import Logits
from moeedge.native.abi import Phase
from moeedge.policies.expert_budget import ExpertBudget
from tests.conftest import TinyFactory

TEXT = np.random.default_rng(2).integers(0, 256, 20).tolist()


def probabilities(logits: Logits) -> np.ndarray:
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(wide / wide.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2"])
def test_divergence_is_that_of_two_contexts(arch: str, tiny: TinyFactory) -> None:
    library.start()
    seen: list[int] = []
    with Model.load(tiny(arch)) as model:
        found = measure_sensitivity(model, [[1], TEXT], gamma=4, n_threads=1, on_layer=seen.append)
        info = model.info
        assert found is not None and len(seen) == len(info.expert_layers)
        with Context(model, n_ctx=64, n_threads=1, has_budget=True) as context:
            for layer in range(info.n_layers):
                if layer not in info.expert_layers:
                    assert found[layer] == 0.0
                    continue
                budgets = tuple(info.n_expert_used if i == layer else info.n_experts for i in range(info.n_layers))
                both = []
                for budget in (None, ExpertBudget(budget=budgets)):
                    context.set_budget(budget)
                    context.clear()
                    parts = [TEXT[start : start + 5] for start in range(0, len(TEXT), 5)]
                    both.append(
                        np.concatenate(
                            [probabilities(context.decode(part, phase=Phase.VERIFY, logits="all")) for part in parts]
                        )
                    )
                divergence = (both[0] * np.log(both[0] / both[1])).sum(axis=1).mean()
                assert found[layer] == pytest.approx(divergence, rel=1e-3, abs=1e-6) and found[layer] > 0


def test_no_text_and_a_cancellation_give_none(tiny: TinyFactory) -> None:
    library.start()
    with Model.load(tiny("qwen3moe")) as model:
        assert measure_sensitivity(model, [[1]], gamma=4, n_threads=1) is None
        assert measure_sensitivity(model, [TEXT], gamma=4, n_threads=1, cancel=lambda: True) is None
