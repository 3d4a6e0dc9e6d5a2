"""The simulator against the papers: fit what they leave open on two rows, predict the others.

MoE-SpAc's Table 2 leaves open the bandwidth of the CPU and the acceptance of the draft: the first follows from its row
llama.cpp, the second from llama.cpp with speculation. Everything else comes from data files with sources. Published
figures and how each system is run are in sim/data/papers.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moeedge.sim.clock import to_ns
from moeedge.sim.machine import Framework, Hardware, find_hardware, from_hardware
from moeedge.sim.model_shape import find_model, only_known, read_data
from moeedge.sim.noisy_predictor import Accuracy
from moeedge.sim.simulate import Result, Setup, Source, simulate, synthetic

Tell = Callable[[str], None]
_TOKENS = 520  # of text
_STEPS = 80  # verifications per simulation, at most
_ROUNDS = 4  # of the fit of the acceptance
_CLOSE = 0.25  # the aim: predicted within so much of published


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One published figure and what the simulation says."""

    table: str
    name: str
    result: Result
    published_ts: float | None = None  # None: the paper has a picture or a shape, no number
    fitted: bool = False  # the figure was used

    @property
    def predicted_ts(self) -> float:
        """Tokens per second."""
        return self.result.tg_ts

    @property
    def ratio(self) -> float | None:
        """Predicted over published."""
        return None if self.published_ts is None else self.predicted_ts / self.published_ts

    @property
    def close(self) -> bool:
        """Within 25 % of what is published."""
        return self.ratio is not None and abs(self.ratio - 1) <= _CLOSE

    def row(self) -> dict[str, Any]:
        """Flat, as -o json prints it."""
        about = {"table": self.table, "name": self.name, "published_ts": self.published_ts}
        about |= {"predicted_ts": self.predicted_ts, "ratio": self.ratio, "fitted": self.fitted}
        return about | self.result.row()


@dataclass(frozen=True)
class Fit:
    """What Table 2 leaves open."""

    cpu_bytes_per_s: float
    acceptance: float


class Papers:
    """Runs one table after the other; texts are drawn once per model."""

    def __init__(self, *, seed: int = 0, tell: Tell = lambda text: None) -> None:
        self.data = read_data("papers.json")
        self._seed = seed
        self._tell = tell
        self._texts: dict[str, Source] = {}

    def fit(self) -> Fit:
        """Bandwidth of the CPU from one row, acceptance from the other."""
        table = self.data["table2"]
        hardware, setup = find_hardware(table["hardware"]), self._setup(table)
        name = table["fit_cpu"]
        result = self._run(name, hardware, table["model"], setup)
        cpu_s = result.account.ns["cpu"] * 1e-9 / result.account.tokens  # in proportion to 1 / bandwidth
        wanted_s = 1 / table["published_ts"][name] - (result.tpot_s - cpu_s)
        cpu_bytes_per_s = hardware.cpu_bytes_per_s * cpu_s / wanted_s
        hardware = replace(hardware, cpu_bytes_per_s=cpu_bytes_per_s)
        name = table["fit_acceptance"]
        acceptance = setup.acceptance
        for _ in range(_ROUNDS):
            result = self._run(name, hardware, table["model"], replace(setup, acceptance=acceptance))
            n_tokens = result.account.tokens / result.account.steps
            wanted = n_tokens * table["published_ts"][name] / result.tg_ts
            reached = expected_tokens(setup.gamma, acceptance)
            acceptance = acceptance_for(setup.gamma, reached * wanted / n_tokens)
        return Fit(cpu_bytes_per_s, acceptance)

    def table2(self, fit: Fit) -> list[Compared]:
        """All ten rows, in the published order."""
        table = self.data["table2"]
        hardware = self._hardware(table["hardware"], fit)
        setup = replace(self._setup(table), acceptance=fit.acceptance)
        fitted = (table["fit_cpu"], table["fit_acceptance"])
        return [
            Compared(
                table="table2",
                name=name,
                result=self._run(name, hardware, table["model"], setup),
                published_ts=published_ts,
                fitted=name in fitted,
            )
            for name, published_ts in table["published_ts"].items()
        ]

    def table3(self, fit: Fit) -> list[Compared]:
        """Another model on the same machine: nothing is fitted."""
        table = self.data["table3"]
        hardware = self._hardware(table["hardware"], fit)
        setup = replace(self._setup(table), acceptance=table["acceptance"])
        return [
            Compared(
                table="table3",
                name=name,
                result=self._run(name, hardware, table["model"], setup),
                published_ts=published_ts,
            )
            for name, published_ts in table["published_ts"].items()
        ]

    def table4(self, fit: Fit) -> list[Compared]:
        """MoE-SpAc without one of its parts."""
        table, of = self.data["table4"], self.data["table2"]
        hardware = self._hardware(of["hardware"], fit)
        setup = replace(self._setup(of), acceptance=fit.acceptance)
        rows = []
        for name, published_ts in table["published_ts"].items():
            other = table["run_as"].get(name)  # a system that the paper falls back to
            ablations = frozenset() if other or name == "full" else frozenset({name})
            result = self._run(other or "MoE-SpAc", hardware, of["model"], replace(setup, ablations=ablations))
            row = Compared(table="table4", name=name, result=result, published_ts=published_ts)
            rows.append(replace(row, fitted=other in (of["fit_cpu"], of["fit_acceptance"])))
        return rows

    def figure5(self, fit: Fit) -> list[Compared]:
        """Speed against the cache ratio; the paper's picture gives no numbers."""
        figure, of = self.data["figure5"], self.data["table2"]
        hardware = self._hardware(of["hardware"], fit)
        setup = replace(self._setup(of), acceptance=fit.acceptance)
        return [
            Compared(
                table="figure5",
                name=name,
                result=self._run(name, hardware, of["model"], replace(setup, cache_ratio=ratio)),
            )
            for name in figure["systems"]
            for ratio in figure["cache_ratios"]
        ]

    def cutoff(self) -> list[Compared]:
        """SP-MoE's speed against its cutoff layer, for its three pairs."""
        rows = []
        for model in self.data["cutoff"]["models"]:
            n_layers = find_model(model).n_expert_layers
            for layer in [*range(0, n_layers, 4), n_layers]:
                rows.append(Compared(table="cutoff", name=f"{model}, layer {layer}", result=self._cut_at(model, layer)))
        return rows

    def elsewhere(self) -> list[Compared]:
        """The same programs in other publications: how well their constants hold there."""
        rows = []
        for model, entry in self.data["cutoff"]["models"].items():
            name = f"{self.data['cutoff']['system']}, baseline, {model}"
            result = self._cut_at(model, 0)
            rows.append(Compared(table="elsewhere", name=name, result=result, published_ts=1 / entry["baseline_s"]))
        elsewhere = self.data["elsewhere"]
        hardware = find_hardware(elsewhere["hardware"])
        for entry in elsewhere["rows"]:
            setup = Setup(policy="", cache_ratio=entry["cache_ratio"], gamma=0, seed=self._seed, max_steps=_STEPS)
            result = self._run(entry["system"], hardware, entry["model"], setup)
            name = f"{entry['system']}, {entry['model']}"
            rows.append(Compared(table="elsewhere", name=name, result=result, published_ts=1 / entry["published_s"]))
        return rows

    def _cut_at(self, model: str, layer: int) -> Result:
        """SP-MoE on one of its pairs, prefetching for so many layers."""
        figure = self.data["cutoff"]
        entry = figure["models"][model]
        setup = Setup(
            policy="",
            cache_ratio=entry["cache_ratio"],
            gamma=figure["gamma"],
            acceptance=entry["acceptance"],
            accuracy=Accuracy(critical=entry["critical"]),
            seed=self._seed,
            max_steps=_STEPS,
            options=(("cutoff_layer", layer),),
        )
        hardware = find_hardware(entry["hardware"])
        hardware = replace(hardware, link_bytes_per_s=find_model(model).expert_bytes / entry["expert_s"])
        return self._run(figure["system"], hardware, model, setup, draft_s=entry["draft_s"])

    def _run(
        self, system: str, hardware: Hardware, model: str, setup: Setup, *, draft_s: float | None = None
    ) -> Result:
        """One system of the table "systems", in its own framework."""
        entry = self.data["systems"][system]
        overheads = only_known(self.data["frameworks"][entry["framework"]], Framework) | entry.get("transfer", {})
        self._tell(f"{system}, {model}, ratio {setup.cache_ratio:g}, gamma {setup.gamma}")
        shape = find_model(model)
        machine = from_hardware(hardware, shape, Framework(**overheads))
        if draft_s is not None:
            machine = replace(machine, draft_ns=to_ns(draft_s))
        if model not in self._texts:
            self._texts[model] = synthetic(shape, _TOKENS, 1, self._seed)
        if "reach" in entry:
            setup = replace(setup, accuracy=replace(setup.accuracy, reach=entry["reach"]))
        return simulate(machine, self._texts[model], replace(setup, policy=entry["policy"]))

    def _setup(self, table: dict[str, Any]) -> Setup:
        return Setup(
            policy="",
            cache_ratio=table["cache_ratio"],
            gamma=table["gamma"],
            seed=self._seed,
            max_steps=_STEPS,
        )

    def _hardware(self, name: str, fit: Fit) -> Hardware:
        return replace(find_hardware(name), cpu_bytes_per_s=fit.cpu_bytes_per_s)


def expected_tokens(gamma: int, acceptance: float) -> float:
    """Omega of Leviathan et al. 2023 (MoE-SpAc, Eq. 1): tokens that a verification of gamma drafts gives."""
    return sum(acceptance**n for n in range(gamma + 1))


def acceptance_for(gamma: int, n_tokens: float) -> float:
    """The acceptance at which a verification gives so many tokens: the inverse of `expected_tokens`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(gamma, middle) < n_tokens else (low, middle)
    return (low + high) / 2


def same_order(rows: list[Compared]) -> tuple[int, int]:
    """How many pairs of rows come in the published order, and how many pairs there are."""
    known = [(row.published_ts, row.predicted_ts) for row in rows if row.published_ts is not None]
    pairs = [(a, b) for i, a in enumerate(known) for b in known[i + 1 :]]
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)
