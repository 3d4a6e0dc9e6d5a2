"""The simulator against the papers: fit two constants that they leave open on two rows, predict the others.

MoE-SpAc's Table 2 leaves open the bandwidth of the CPU and the acceptance of the draft. The first follows from its row
llama.cpp, the second from llama.cpp with speculation. All other constants come from data files with sources. Published
figures and the way each system is run are in sim/data/papers.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moeedge.notifications import Notification, Notify, ignore
from moeedge.sim.clock import to_ns
from moeedge.sim.model_shape import find_model, only_known, read_data
from moeedge.sim.noisy_predictor import PredictorAccuracy
from moeedge.sim.simulate import SimulationConfig, SimulationResult, simulate, synthetic_trace
from moeedge.sim.step_costs import Framework, HardwareSpec, find_hardware, roofline_costs
from moeedge.trace.format import Trace

_TOKENS = 520  # of a synthetic text
_STEPS = 80  # verifications per simulation, at most
_ROUNDS = 4  # of the fit of the acceptance
_CLOSE = 0.25  # the aim: predicted over published is within so much of 1


@dataclass(frozen=True)
class Compared:
    """One published figure and the simulated one."""

    table: str
    name: str
    result: SimulationResult
    published_ts: float | None = None  # None: the paper has a picture or a shape, no number
    fitted: bool = False  # the figure was used in the fit

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
        """Whether the prediction is within 25 % of the published figure."""
        return self.ratio is not None and abs(self.ratio - 1) <= _CLOSE

    def row(self) -> dict[str, Any]:
        """Flat, as -o json prints it."""
        about = {"table": self.table, "name": self.name, "published_ts": self.published_ts}
        about |= {"predicted_ts": self.predicted_ts, "ratio": self.ratio, "fitted": self.fitted}
        return about | self.result.row()


@dataclass(frozen=True)
class Fit:
    """The constants that Table 2 leaves open."""

    cpu_bytes_per_s: float
    acceptance: float


class Papers:
    """Runs one table after the other; texts are drawn once per model. notify: called before every simulation."""

    def __init__(self, *, seed: int = 0, notify: Notify = ignore) -> None:
        self.data = read_data("papers.json")
        self._seed = seed
        self._notify = notify
        self._texts: dict[str, Trace] = {}

    def fit(self) -> Fit:
        """The bandwidth of the CPU from one row of Table 2, the acceptance from another."""
        table = self.data["table2"]
        model, published_ts = table["model"], table["published_ts"]
        hardware, config = find_hardware(table["hardware"]), self._config(table)
        name = table["fit_cpu"]
        result = self._run(name, hardware, model, config)
        cpu_s = result.time.per_token_s("cpu")  # in proportion to 1 / bandwidth
        wanted_s = 1 / published_ts[name] - (result.tpot_s - cpu_s)
        hardware = replace(hardware, cpu_bytes_per_s=hardware.cpu_bytes_per_s * cpu_s / wanted_s)
        name = table["fit_acceptance"]
        acceptance = config.acceptance
        for _ in range(_ROUNDS):
            result = self._run(name, hardware, model, replace(config, acceptance=acceptance))
            n_tokens = result.time.tokens / result.time.steps
            wanted = n_tokens * published_ts[name] / result.tg_ts
            reached = expected_tokens(config.gamma, acceptance)
            acceptance = acceptance_for(config.gamma, reached * wanted / n_tokens)
        return Fit(hardware.cpu_bytes_per_s, acceptance)

    def table2(self, fit: Fit) -> list[Compared]:
        """All ten rows, in the published order."""
        table = self.data["table2"]
        hardware, config = self._fitted(table, fit)
        rows = []
        for name, published_ts in table["published_ts"].items():
            result = self._run(name, hardware, table["model"], config)
            fitted = name in (table["fit_cpu"], table["fit_acceptance"])
            rows.append(Compared("table2", name, result, published_ts, fitted))
        return rows

    def table3(self, fit: Fit) -> list[Compared]:
        """Another model on the same machine: no further constant is fitted."""
        table = self.data["table3"]
        hardware, config = self._fitted(table, fit)
        config = replace(config, acceptance=table["acceptance"])
        return [
            Compared("table3", name, self._run(name, hardware, table["model"], config), published_ts)
            for name, published_ts in table["published_ts"].items()
        ]

    def table4(self, fit: Fit) -> list[Compared]:
        """MoE-SpAc without one of its parts."""
        table, of = self.data["table4"], self.data["table2"]
        hardware, config = self._fitted(of, fit)
        rows = []
        for name, published_ts in table["published_ts"].items():
            other = table["run_as"].get(name)  # a system that the paper falls back to
            ablations = frozenset() if other or name == "full" else frozenset({name})
            result = self._run(other or "MoE-SpAc", hardware, of["model"], replace(config, ablations=ablations))
            fitted = other in (of["fit_cpu"], of["fit_acceptance"])
            rows.append(Compared("table4", name, result, published_ts, fitted))
        return rows

    def figure5(self, fit: Fit) -> list[Compared]:
        """Speed against the cache ratio; the paper's picture gives no numbers."""
        figure, of = self.data["figure5"], self.data["table2"]
        hardware, config = self._fitted(of, fit)
        return [
            Compared("figure5", name, self._run(name, hardware, of["model"], replace(config, cache_ratio=ratio)))
            for name in figure["systems"]
            for ratio in figure["cache_ratios"]
        ]

    def cutoff(self) -> list[Compared]:
        """SP-MoE's speed against its cutoff layer, for its three pairs of models."""
        rows = []
        for model in self.data["cutoff"]["models"]:
            n_layers = find_model(model).n_expert_layers
            for layer in [*range(0, n_layers, 4), n_layers]:
                rows.append(Compared("cutoff", f"{model}, layer {layer}", self._cut_at(model, layer)))
        return rows

    def elsewhere(self) -> list[Compared]:
        """The same programs in other publications: a check of their constants."""
        figure, elsewhere = self.data["cutoff"], self.data["elsewhere"]
        rows = []
        for model, entry in figure["models"].items():
            name = f"{figure['system']}, baseline, {model}"
            rows.append(Compared("elsewhere", name, self._cut_at(model, 0), 1 / entry["baseline_s"]))
        hardware = find_hardware(elsewhere["hardware"])
        for entry in elsewhere["rows"]:
            result = self._run(entry["system"], hardware, entry["model"], self._config(entry | {"gamma": 0}))
            rows.append(Compared("elsewhere", f"{entry['system']}, {entry['model']}", result, 1 / entry["published_s"]))
        return rows

    def _cut_at(self, model: str, layer: int) -> SimulationResult:
        """SP-MoE on one of its pairs, prefetching for so many layers."""
        figure = self.data["cutoff"]
        entry = figure["models"][model]
        config = replace(
            self._config(entry | {"gamma": figure["gamma"]}),
            acceptance=entry["acceptance"],
            accuracy=PredictorAccuracy(critical=entry["critical"]),
            options=(("cutoff_layer", layer),),
        )
        hardware = find_hardware(entry["hardware"])
        hardware = replace(hardware, link_bytes_per_s=find_model(model).expert_bytes / entry["expert_s"])
        return self._run(figure["system"], hardware, model, config, draft_s=entry["draft_s"])

    def _run(
        self, system: str, hardware: HardwareSpec, model: str, config: SimulationConfig, *, draft_s: float | None = None
    ) -> SimulationResult:
        """One system of the table "systems", in its own framework. draft_s: of a token, instead of the roofline's."""
        entry = self.data["systems"][system]
        overheads = only_known(self.data["frameworks"][entry["framework"]], Framework) | entry.get("transfer", {})
        self._notify(Notification(f"{system}, {model}, ratio {config.cache_ratio:g}, gamma {config.gamma}"))
        shape = find_model(model)
        costs = roofline_costs(hardware, shape, Framework(**overheads))
        if draft_s is not None:
            costs = replace(costs, draft_ns=to_ns(draft_s))
        if model not in self._texts:
            self._texts[model] = synthetic_trace(shape, _TOKENS, 1, self._seed)
        if "reach" in entry:
            config = replace(config, accuracy=replace(config.accuracy, reach=entry["reach"]))
        return simulate(costs, self._texts[model], replace(config, policy=entry["policy"]))

    def _config(self, table: dict[str, Any]) -> SimulationConfig:
        """The configuration of a table or row; `_run` adds the policy."""
        return SimulationConfig(
            policy="",
            cache_ratio=table["cache_ratio"],
            gamma=table["gamma"],
            seed=self._seed,
            max_steps=_STEPS,
        )

    def _fitted(self, table: dict[str, Any], fit: Fit) -> tuple[HardwareSpec, SimulationConfig]:
        hardware = replace(find_hardware(table["hardware"]), cpu_bytes_per_s=fit.cpu_bytes_per_s)
        return hardware, replace(self._config(table), acceptance=fit.acceptance)


def expected_tokens(gamma: int, acceptance: float) -> float:
    """Expected tokens per verification of gamma drafts: Omega of Leviathan et al. 2023 (MoE-SpAc, Eq. 1)."""
    return sum(acceptance**n for n in range(gamma + 1))


def acceptance_for(gamma: int, n_tokens: float) -> float:
    """The acceptance at which a verification of gamma drafts gives `n_tokens`: the inverse of `expected_tokens`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(gamma, middle) < n_tokens else (low, middle)
    return (low + high) / 2


def same_order(rows: list[Compared]) -> tuple[int, int]:
    """The number of pairs of rows in the published order, and of all pairs."""
    known = [(row.published_ts, row.predicted_ts) for row in rows if row.published_ts is not None]
    pairs = [(a, b) for i, a in enumerate(known) for b in known[i + 1 :]]
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)
