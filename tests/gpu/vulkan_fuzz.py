"""Random settings for the Vulkan lane, each from a seed of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeedge.policies.registry import POLICIES
from tests.gpu.vulkan_cases import ALL_LAYERS, MODELS, Case, n_layers

RATIOS = (0.05, 0.17, 0.3, 0.5, 0.8, 1.0)
GAMMAS = (0, 1, 2, 4, 8)
PROMPTS = (1, 2, 9, 17, 31, 70)  # tokens
PREFILLS = ("cpu", "resident", "stream")
PATHS = ("pairs", "columns", "ahead")  # of small batches on the device
DRAFTS = ("device", "cpu", "ngram")


def fuzz_case(seed: int) -> Case:
    """Every choice is independent of the others. A prompt of a length is always the same: stock answers it once."""
    rng = np.random.default_rng(seed)

    def pick(values: Any) -> Any:
        values = list(values)
        return values[int(rng.integers(len(values)))]

    model = pick(MODELS)
    settings = {
        "seed": seed,
        "ngl": pick([*range(n_layers(model) + 1), ALL_LAYERS]),
        "ratio": pick(RATIOS),
        "gamma": pick(GAMMAS),
        "draft": pick(DRAFTS),
        "policy": pick(POLICIES),
        "prompt": pick(PROMPTS),
        "prefill": pick(PREFILLS),
        "path": pick(PATHS),
        "predict": 4,
    }
    return Case(model, "fuzz", settings)


def fuzz_cases(n_cases: int, first_seed: int = 0) -> list[Case]:
    """The cases of that many seeds, by model, so that each model's kernels are compiled once."""
    cases = [fuzz_case(first_seed + i) for i in range(n_cases)]
    return sorted(cases, key=lambda case: MODELS.index(case.model))
