"""MoE-Spec's Table 1 as far as its publication allows: the gain of an expert budget over EAGLE with trees of 63 tokens.

A step's time is a sum: the layers without their experts, the experts in use, the draft. With T(U) for a verification
that uses U experts per layer, and tokens per step tau, EAGLE is tau T_AR / T(U) times as fast as plain decoding, a
budget of B experts tau_B / tau * T(U) / T(B) times as fast as EAGLE. T(U) - T(B) follows from sizes and a bandwidth
(`roofline_costs`); what the programs add is not published. So there are several readings of it (data/moe_spec.json),
and where a reading has an unknown draft time it is fitted on the published EAGLE rows, none on those of MoE-Spec.

Table 1 does not name the budget of any row: it is the fastest whose quality is within one standard deviation of
EAGLE's. A gain can thus not be predicted row by row. Predicted are the gains over the published ranges of budgets, and
the budget at which the published mean gain is reached.

The distinct experts of a tree are published for OLMoE alone, at 31 and 127 tokens. They follow N (1 - (1 - k/N)^s) with
s effective tokens, a power of the tree's tokens; other models are taken to share s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from moeedge.lab.sim.model_shape import ModelShape, find_model, only_known, read_data
from moeedge.lab.sim.step_costs import TOKENS_MAX, Framework, find_hardware, roofline_costs

_CHAIN_TEXT = 600  # tokens of synthetic text
_CHAIN_LAYERS = 8


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the published program adds to the bytes of the weights."""

    name: str
    layer_overhead_s: float  # of every layer
    expert_factor: float  # time of an expert over that of reading its bytes once
    fits_draft: bool  # on the published speed of EAGLE; otherwise drafting takes no time
    routing: Literal["trees", "chains"]  # whose distinct experts


@dataclass(frozen=True, kw_only=True)
class Gains:
    """One model, reading and number of tokens per verification; the fields are those of -o json."""

    model: str
    reading: str
    tokens: int  # of a verification
    experts: float  # distinct per layer without a budget
    expert_s: float  # one expert of every layer
    plain_step_s: float  # one token
    step_s: float  # a verification with its drafts
    draft_s: float
    eagle_speedup: float | None  # over plain decoding, mean of the rows; None: EAGLE has trees
    eagle_speedup_published: float
    gains: tuple[tuple[int, float], ...]  # budget, speed over EAGLE's at equal tokens per step
    gain_published: float | None  # mean of the rows, without the change in tokens per step; None: not published
    budget_at_published_gain: float | None  # None: not published, or no budget reaches it
    is_within_range: bool | None  # of the published budgets


@dataclass(frozen=True, kw_only=True)
class Figure4:
    """The gain of OLMoE's budget in large trees."""

    reading: str
    tokens: int
    budget: int
    gain: float
    gain_published: float


class MoeSpec:
    """The comparison, with the constants of its data file."""

    def __init__(self, seed: int = 0) -> None:
        self.data = read_data("moe_spec.json")
        self.readings = [
            Reading(name=name, **only_known(entry, Reading)) for name, entry in self.data["readings"].items()
        ]
        self._seed = seed
        entry = self.data["hardware"]
        self._hardware = replace(
            find_hardware(entry["like"]),
            gpu_bytes_per_s=entry["gpu_bytes_per_s"],
            gpu_memory_bytes=entry["gpu_memory_bytes"],
            layer_overhead_s=0.0,  # part of the reading
        )

    def rows(self) -> list[Gains]:
        """All models and readings: trees, and chains of the engine's draft length with the same draft time."""
        found = []
        for model in self.data["models"]:
            shape = self.shape(model)
            for reading in self.readings:
                if reading.routing == "chains" and shape.routing is None:
                    continue
                tree = self._gains(shape, reading, self.data["tree_tokens"], None)
                found += [tree, self._gains(shape, reading, self.data["chain_tokens"], tree.draft_s)]
        return found

    def figure4(self) -> list[Figure4]:
        """OLMoE in trees of 255 tokens: the only row with a published budget and number of distinct experts."""
        figure = self.data["figure4"]
        shape = self.shape(figure["model"])
        found = []
        for reading in self.readings:
            if reading.routing == "chains":
                continue
            draft_s = self._gains(shape, reading, self.data["tree_tokens"], None).draft_s
            steps = [self._step_s(shape, reading, figure["tokens"], n) for n in (figure["experts"], figure["budget"])]
            gain = (steps[0] + draft_s) / (steps[1] + draft_s) / (1 + self.data["selection_share"])
            published = figure["budget_speedup"] / figure["eagle_speedup"]
            found.append(
                Figure4(
                    reading=reading.name,
                    tokens=figure["tokens"],
                    budget=figure["budget"],
                    gain=gain,
                    gain_published=published,
                )
            )
        return found

    def shape(self, model: str) -> ModelShape:
        """Sizes of a model of the table."""
        own = self.data["shapes"]
        if model in own:
            return ModelShape(name=model, **only_known(own[model], ModelShape))
        return replace(find_model(f"{model}:F16"), name=model)

    def tree_experts(self, shape: ModelShape, n_tokens: int) -> float:
        """Distinct experts per layer of a tree, by the effective tokens of OLMoE's."""
        known = self.data["unique_experts"]
        of = self.shape(known["model"])
        low, high = (_effective_tokens(of, experts) for experts in known["experts"])
        first, last = known["tokens"]
        power = math.log(high / low) / math.log(last / first)
        effective = low * (n_tokens / first) ** power
        return shape.n_experts * float(1 - (1 - shape.k / shape.n_experts) ** effective)

    def chain_experts(self, shape: ModelShape, n_tokens: int) -> float:
        """Distinct experts per layer of so many tokens in a row, by the model's synthetic routing."""
        assert shape.routing is not None
        rng = np.random.default_rng(self._seed)
        (ids,) = shape.routing.draw(_CHAIN_LAYERS, shape.n_experts, shape.k, [_CHAIN_TEXT], rng)
        starts = range(0, _CHAIN_TEXT - n_tokens, max(n_tokens // 2, 1))
        return float(
            np.mean([np.unique(ids[at : at + n_tokens, layer]).size for at in starts for layer in range(_CHAIN_LAYERS)])
        )

    def _gains(self, shape: ModelShape, reading: Reading, n_tokens: int, draft_s: float | None) -> Gains:
        """draft_s: None where it is to be fitted, if the reading says so."""
        table = self.data["models"][shape.name]
        eagle_tokens, eagle = np.array(table["eagle_tokens_per_step"]), np.array(table["eagle_speedup"])
        own_tokens, own = np.array(table["budget_tokens_per_step"]), np.array(table["budget_speedup"])
        experts_of = self.tree_experts if reading.routing == "trees" else self.chain_experts
        experts = experts_of(shape, n_tokens)
        plain_s = self._step_s(shape, reading, 1, shape.k)
        verify_s = self._step_s(shape, reading, n_tokens, experts)
        if draft_s is None:
            step_over_plain = float((eagle_tokens / eagle).mean())
            draft_s = max(step_over_plain * plain_s - verify_s, 0.0) if reading.fits_draft else 0.0
        step_s = verify_s + draft_s
        selection = 1 + float(self.data["selection_share"])

        def gain(budget: float) -> float:
            if budget >= experts:
                return 1.0
            return step_s / ((self._step_s(shape, reading, n_tokens, budget) + draft_s) * selection)

        published, at, eagle_speedup = None, None, None
        if n_tokens == self.data["tree_tokens"]:
            published = 1 / float(((own_tokens / own) / (eagle_tokens / eagle)).mean())
            at = _budget_at(published, gain, shape.k, experts)
            eagle_speedup = float(eagle_tokens.mean()) * plain_s / step_s
        return Gains(
            model=shape.name,
            reading=reading.name,
            tokens=n_tokens,
            experts=experts,
            expert_s=self._expert_s(shape, reading, 1.0),
            plain_step_s=plain_s,
            step_s=step_s,
            draft_s=draft_s,
            eagle_speedup=eagle_speedup,
            eagle_speedup_published=float(eagle.mean()),
            gains=tuple((budget, gain(budget)) for budget in table["budgets"]),
            gain_published=published,
            budget_at_published_gain=at,
            is_within_range=None
            if published is None
            else at is not None and table["budgets"][0] <= at <= table["budgets"][-1],
        )

    def _step_s(self, shape: ModelShape, reading: Reading, n_tokens: int, experts: float) -> float:
        """A pass over `n_tokens` that uses so many experts per layer."""
        costs = roofline_costs(self._hardware, shape, Framework(layer_overhead_s=reading.layer_overhead_s))
        dense_s = (shape.n_layers * costs.dense_ns + costs.head_ns) * 1e-9
        return dense_s + experts * self._expert_s(shape, reading, n_tokens * shape.k / experts)

    def _expert_s(self, shape: ModelShape, reading: Reading, n_tokens: float) -> float:
        """One expert of every layer, each with so many tokens."""
        costs = roofline_costs(self._hardware, shape)
        expert_ns = int(costs.device_ns[min(max(round(n_tokens), 1), TOKENS_MAX)])
        return reading.expert_factor * shape.n_expert_layers * expert_ns * 1e-9


def _effective_tokens(shape: ModelShape, experts: float) -> float:
    """The independent tokens of uniform routing that use so many distinct experts."""
    return math.log(1 - experts / shape.n_experts) / math.log(1 - shape.k / shape.n_experts)


def _budget_at(wanted: float, gain: Callable[[float], float], low: float, high: float) -> float | None:
    """The largest budget with that gain, between k and the distinct experts; None where k's is lower."""
    if gain(low) < wanted:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) < wanted else (middle, high)
    return low


def to_rows(items: Sequence[Gains | Figure4]) -> list[dict[str, Any]]:
    """Flat, as -o json prints them."""
    return [asdict(item) for item in items]
