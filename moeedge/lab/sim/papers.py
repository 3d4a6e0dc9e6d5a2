"""The simulator against the papers: fit two constants that they leave open on two rows, predict the others.

MoE-SpAc's Table 2 leaves open the bandwidth of the CPU and the acceptance of the draft. The first follows from its row
llama.cpp, the second from llama.cpp with speculation. All other constants come from data files with sources. Published
figures and the way each system is run are in sim/data/papers.json.

The comparison is a calibration: constants of `frameworks` were chosen with Table 2 at hand. Three figures say what that
is worth (`figures`): Table 2 without overheads of programs, Table 2 with the chosen ones, and figures of other
publications from which no constant was chosen. Where the sources of a constant differ a prediction is a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeedge.lab.sim.cases import Case, Cases
from moeedge.lab.sim.constants import SIDES, Side, pick
from moeedge.lab.sim.model_shape import find_model, only_known, read_data
from moeedge.lab.sim.noisy_predictor import PredictorAccuracy
from moeedge.lab.sim.simulate import Range, SimulationConfig, SimulationResult, has_draft
from moeedge.lab.sim.step_costs import Framework, HardwareSpec, find_hardware
from moeedge.speculation import acceptance_for, expected_tokens
from moeedge.trace.steps import RejectedTokenModel

_TOKENS = 520  # of a synthetic text
_STEPS = 80  # verifications per simulation, at most
_ROUNDS = 4  # of the fit of the acceptance
_CLOSE = 0.25  # the aim: predicted over published is within so much of 1


@dataclass(frozen=True)
class Compared:
    """One published figure and the simulated one."""

    table: str
    name: str
    rejected_token_model: RejectedTokenModel  # of the table's systems that have a draft
    range: Range
    published_ts: float | None = None  # None: the paper has a picture or a shape, no number
    fitted: bool = False  # a constant was chosen by this figure
    without_overheads: SimulationResult | None = None

    @property
    def result(self) -> SimulationResult:
        """The simulation with the chosen constants."""
        return self.range.chosen

    @property
    def predicted_ts(self) -> float:
        """Tokens per second."""
        return self.result.tg_ts

    @property
    def ratio(self) -> float | None:
        """Predicted over published."""
        return self._over_published(self.predicted_ts)

    @property
    def without_overheads_ts(self) -> float | None:
        """Tokens per second by bandwidths and operations alone."""
        return None if self.without_overheads is None else self.without_overheads.tg_ts

    @property
    def without_overheads_ratio(self) -> float | None:
        """The same over published."""
        return self._over_published(self.without_overheads_ts)

    @property
    def close(self) -> bool:
        """Whether the prediction with the chosen constants is within 25 % of the published figure."""
        return is_close(self.ratio)

    def _over_published(self, speed_ts: float | None) -> float | None:
        return None if speed_ts is None or self.published_ts is None else speed_ts / self.published_ts

    def row(self) -> dict[str, Any]:
        """Flat, as -o json prints it."""
        about = {"table": self.table, "name": self.name, "published_ts": self.published_ts}
        about |= {"predicted_ts": self.predicted_ts, "predicted_low_ts": self.range.low_ts}
        about |= {"predicted_high_ts": self.range.high_ts, "ratio": self.ratio, "within_25_percent": self.close}
        about |= {"without_overheads_ts": self.without_overheads_ts}
        about |= {"without_overheads_ratio": self.without_overheads_ratio, "fitted": self.fitted}
        return about | self.result.row() | {"rejected_token_model": self.rejected_token_model}


@dataclass(frozen=True)
class Figure:
    """How many rows are within 25 %, and how many pairs of rows in the published order; as -o json prints it."""

    figure: str  # without overheads, calibrated, fed no constant
    rejected_token_model: RejectedTokenModel | None  # None: nothing is drafted
    within_25_percent: int
    rows: int
    pairs_in_order: int | None = None  # None: rows of different models and programs
    pairs_in_order_anyway: int | None = None  # whatever the constants: the ranges do not overlap
    pairs: int | None = None


@dataclass(frozen=True)
class Fit:
    """The constants that Table 2 leaves open."""

    cpu_bytes_per_s: float
    acceptance: float


class Papers:
    """Runs one table after the other, with one model of rejected tokens."""

    def __init__(self, cases: Cases, *, rejected_token_model: RejectedTokenModel = "optimistic", seed: int = 0) -> None:
        self.data = read_data("papers.json")
        self.rejected_token_model = rejected_token_model
        self._cases = cases
        self._seed = seed

    def fit(self) -> Fit:
        """The bandwidth of the CPU from one row of Table 2, the acceptance from another."""
        table = self.data["table2"]
        published_ts = table["published_ts"]
        hardware, config = find_hardware(table["hardware"]), self._config(table)
        name = table["fit_cpu"]
        result = self._cases.run(self._case(name, hardware, table["model"], config))
        cpu_s = result.time.per_token_s("cpu")  # in proportion to 1 / bandwidth
        wanted_s = 1 / published_ts[name] - (result.tpot_s - cpu_s)
        hardware = replace(hardware, cpu_bytes_per_s=hardware.cpu_bytes_per_s * cpu_s / wanted_s)
        name = table["fit_acceptance"]
        acceptance = config.acceptance
        for _ in range(_ROUNDS):
            result = self._cases.run(self._case(name, hardware, table["model"], replace(config, acceptance=acceptance)))
            n_tokens = result.time.tokens / result.time.steps
            wanted = n_tokens * published_ts[name] / result.tg_ts
            reached = expected_tokens(config.gamma, acceptance)
            acceptance = acceptance_for(config.gamma, reached * wanted / n_tokens)
        return Fit(hardware.cpu_bytes_per_s, acceptance)

    def table2(self, fit: Fit) -> list[Compared]:
        """All ten rows, in the published order, with and without overheads of programs."""
        table = self.data["table2"]
        config = self._fitted(table, fit)
        asked = []
        for name, published_ts in table["published_ts"].items():
            fitted = name in (table["fit_cpu"], table["fit_acceptance"])
            asked.append(_Asked(name, name, table["hardware"], table["model"], config, published_ts, fitted))
        return self._compare("table2", asked, fit, with_bare=True)

    def table3(self, fit: Fit) -> list[Compared]:
        """Another model on the same machine: no further constant is fitted."""
        table = self.data["table3"]
        config = replace(self._fitted(table, fit), acceptance=table["acceptance"])
        asked = [
            _Asked(name, name, table["hardware"], table["model"], config, published_ts)
            for name, published_ts in table["published_ts"].items()
        ]
        return self._compare("table3", asked, fit)

    def table4(self, fit: Fit) -> list[Compared]:
        """MoE-SpAc without one of its parts."""
        table, of = self.data["table4"], self.data["table2"]
        config = self._fitted(of, fit)
        asked = []
        for name, published_ts in table["published_ts"].items():
            other = table["run_as"].get(name)  # a system that the paper falls back to
            ablations = frozenset() if other or name == "full" else frozenset({name})
            fitted = other in (of["fit_cpu"], of["fit_acceptance"])
            ablated = replace(config, ablations=ablations)
            asked.append(_Asked(name, other or "MoE-SpAc", of["hardware"], of["model"], ablated, published_ts, fitted))
        return self._compare("table4", asked, fit)

    def figure5(self, fit: Fit) -> list[Compared]:
        """Speed against the cache ratio; the paper's picture gives no numbers."""
        figure, of = self.data["figure5"], self.data["table2"]
        config = self._fitted(of, fit)
        asked = [
            _Asked(name, name, of["hardware"], of["model"], replace(config, cache_ratio=ratio))
            for name in figure["systems"]
            for ratio in figure["cache_ratios"]
        ]
        return self._compare("figure5", asked, fit)

    def cutoff(self) -> list[Compared]:
        """SP-MoE's speed against its cutoff layer, for its three pairs of models."""
        asked = []
        for model in self.data["cutoff"]["models"]:
            n_layers = find_model(model).n_expert_layers
            for layer in [*range(0, n_layers, 4), n_layers]:
                asked.append(self._cut_at(f"{model}, layer {layer}", model, layer))
        return self._compare("cutoff", asked)

    def elsewhere(self) -> list[Compared]:
        """The same programs in other publications: a check of their constants."""
        figure, elsewhere = self.data["cutoff"], self.data["elsewhere"]
        asked = []
        for model, entry in figure["models"].items():
            row = self._cut_at(f"{figure['system']}, baseline, {model}", model, 0)
            asked.append(replace(row, published_ts=1 / entry["baseline_s"], fitted=True))
        for entry in elsewhere["rows"]:
            config = self._config(entry | {"gamma": 0})
            name, model = entry["system"], entry["model"]
            published_ts = 1 / entry["published_s"]
            asked.append(
                _Asked(f"{name}, {model}", name, elsewhere["hardware"], model, config, published_ts, entry["fed"])
            )
        return self._compare("elsewhere", asked)

    def _cut_at(self, name: str, model: str, layer: int) -> _Asked:
        """SP-MoE on one of its pairs, prefetching for so many layers."""
        figure = self.data["cutoff"]
        entry = figure["models"][model]
        config = replace(
            self._config(entry | {"gamma": figure["gamma"]}),
            acceptance=entry["acceptance"],
            accuracy=PredictorAccuracy(critical=entry["critical"]),
            options=(("cutoff_layer", layer),),
        )
        link = find_model(model).expert_bytes / entry["expert_s"]
        return _Asked(
            name, figure["system"], entry["hardware"], model, config, link_bytes_per_s=link, draft_s=entry["draft_s"]
        )

    def _compare(
        self, table: str, asked: Sequence[_Asked], fit: Fit | None = None, *, with_bare: bool = False
    ) -> list[Compared]:
        """Runs the rows of a table with all sides of the constants. with_bare: and without overheads of programs."""
        ranges = self._cases.ranges(
            {
                side: self._case(row.system, row.machine(fit, side), row.model, row.config, side, draft_s=row.draft_s)
                for side in SIDES
            }
            for row in asked
        )
        bare: list[SimulationResult | None] = [None] * len(asked)
        if with_bare:
            bare = list(
                self._cases.all(
                    self._case(row.system, row.machine(fit, "chosen"), row.model, row.config, None) for row in asked
                )
            )
        return [
            Compared(table, row.name, self.rejected_token_model, found, row.published_ts, row.fitted, alone)
            for row, found, alone in zip(asked, ranges, bare, strict=True)
        ]

    def _case(
        self,
        system: str,
        hardware: HardwareSpec,
        model: str,
        config: SimulationConfig,
        side: Side | None = "chosen",
        *,
        draft_s: float | None = None,
    ) -> Case:
        """One system of the table "systems" in its own framework; side None: without the overheads of programs."""
        entry = self.data["systems"][system]
        overheads = self.data["frameworks"][entry["framework"]] | entry.get("transfer", {})
        if side is None:  # what a system moves is no overhead
            overheads = {name: value for name, value in overheads.items() if isinstance(value, bool)}
        framework = Framework(**only_known(pick(overheads, side or "chosen"), Framework))
        if "reach" in entry:
            config = replace(config, accuracy=replace(config.accuracy, reach=entry["reach"]))
        config = replace(config, policy=entry["policy"])
        if not has_draft(config):  # so that the same simulation runs once
            config = replace(config, gamma=0, acceptance=1.0, rejected_token_model="optimistic")
        return Case(
            model=model, n_tokens=_TOKENS, hardware=hardware, framework=framework, config=config, draft_s=draft_s
        )

    def _config(self, table: dict[str, Any]) -> SimulationConfig:
        """The configuration of a table or row; `_case` adds the policy."""
        return SimulationConfig(
            policy="",
            cache_ratio=table["cache_ratio"],
            gamma=table["gamma"],
            rejected_token_model=self.rejected_token_model,
            seed=self._seed,
            max_steps=_STEPS,
        )

    def _fitted(self, table: dict[str, Any], fit: Fit) -> SimulationConfig:
        return replace(self._config(table), acceptance=fit.acceptance)


@dataclass(frozen=True)
class _Asked:
    """A row to simulate."""

    name: str
    system: str
    hardware: str
    model: str
    config: SimulationConfig
    published_ts: float | None = None
    fitted: bool = False
    link_bytes_per_s: float | None = None  # instead of the hardware's
    draft_s: float | None = None  # instead of the roofline's

    def machine(self, fit: Fit | None, side: Side) -> HardwareSpec:
        """The hardware with the rates that are known better."""
        hardware = find_hardware(self.hardware, side)
        if fit is not None:
            hardware = replace(hardware, cpu_bytes_per_s=fit.cpu_bytes_per_s)
        return hardware if self.link_bytes_per_s is None else replace(hardware, link_bytes_per_s=self.link_bytes_per_s)


def figures(rows: Sequence[Compared]) -> list[Figure]:
    """The three figures, as far as their tables are among the rows: Table 2 twice, and rows that fed no constant."""
    found = []
    of_table2 = [row for row in rows if row.table == "table2"]
    for model in dict.fromkeys(row.rejected_token_model for row in of_table2):
        table = [row for row in of_table2 if row.rejected_token_model == model]
        free = [row for row in table if not row.fitted]
        right, total = same_order([row.without_overheads_ts for row in table], table)
        bare = sum(is_close(row.without_overheads_ratio) for row in free)
        found.append(Figure("without overheads", model, bare, len(free), right, None, total))
        right, total = same_order([row.predicted_ts for row in table], table)
        close, anyway = sum(row.close for row in free), order_anyway(table)
        found.append(Figure("calibrated", model, close, len(free), right, anyway, total))
    held_out = [row for row in rows if row.table == "elsewhere" and not row.fitted]
    if held_out:
        found.append(Figure("fed no constant", None, sum(row.close for row in held_out), len(held_out)))
    return found


def is_close(ratio: float | None) -> bool:
    """Whether predicted over published is within 25 % of 1."""
    return ratio is not None and abs(ratio - 1) <= _CLOSE


def same_order(speeds: Sequence[float | None], rows: Sequence[Compared]) -> tuple[int, int]:
    """The number of pairs of rows in the published order by these speeds, and of all pairs with both figures."""
    known = [
        (row.published_ts, speed)
        for row, speed in zip(rows, speeds, strict=True)
        if row.published_ts is not None and speed is not None
    ]
    pairs = [(a, b) for i, a in enumerate(known) for b in known[i + 1 :]]
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)


def order_anyway(rows: Sequence[Compared]) -> int:
    """The number of pairs of rows in the published order whose ranges do not overlap."""
    ordered = sorted((row for row in rows if row.published_ts is not None), key=lambda row: row.published_ts or 0.0)
    return sum(
        slower.range.high_ts < faster.range.low_ts for i, slower in enumerate(ordered) for faster in ordered[i + 1 :]
    )
