"""The simulator against the papers: fit two constants that they leave open on two rows, predict the others.

MoE-SpAc's Table 2 leaves open the bandwidth of the CPU and the acceptance of the draft. The first follows from its row
llama.cpp, the second from llama.cpp with speculation. All other constants come from data files with sources. Published
figures and the way each system is run are in sim/data/papers.json.

The comparison is a calibration: constants of `frameworks` were chosen with Table 2 at hand. Three figures say what that
is worth (`figures`): Table 2 without overheads of programs, Table 2 with the chosen ones, and figures of other
publications from which no constant was chosen. Where the sources of a constant differ a prediction is a range.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any

from moeedge.lab.sim.model_shape import SIDES, Side, entry_of, find_model, only_known, pick, read_data
from moeedge.lab.sim.noisy_predictor import PredictorAccuracy
from moeedge.lab.sim.simulate import Range, SimulationConfig, SimulationResult, has_draft, simulate, synthetic_trace
from moeedge.lab.sim.step_costs import Framework, HardwareSpec, find_hardware, roofline_costs, to_ns
from moeedge.run import Closing, Run
from moeedge.speculation import acceptance_for, expected_tokens
from moeedge.trace.format import Trace
from moeedge.trace.steps import RejectedTokenModel

_TOKENS = 520  # of a synthetic text
_STEPS = 80  # verifications per simulation, at most
_ROUNDS = 4  # of the fit of the acceptance
_CLOSE = 0.25  # the aim: predicted over published is within so much of 1
_WORKERS_MAX = 8


@dataclass(frozen=True)
class Case:
    """One simulation of a built-in model; the text is drawn by the seed of `config`."""

    model: str
    n_tokens: int  # of text
    hardware: HardwareSpec
    framework: Framework
    config: SimulationConfig
    draft_s: float | None = None  # of a draft token, instead of the roofline's


class Cases(Closing):
    """Runs cases in several processes, each once. run: told of each case."""

    def __init__(self, run: Run | None = None) -> None:
        self._results: dict[Case, SimulationResult] = {}
        self._run = run or Run()
        n_workers = min(os.cpu_count() or 1, _WORKERS_MAX)
        self._pool = ProcessPoolExecutor(n_workers, mp_context=multiprocessing.get_context("spawn"))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def all(self, cases: Iterable[Case]) -> list[SimulationResult]:
        """The results of cases, in their order."""
        wanted = list(cases)
        new = [case for case in dict.fromkeys(wanted) if case not in self._results]
        results = map(run_case, new) if len(new) == 1 else self._pool.map(run_case, new)
        for case, result in zip(new, results, strict=True):
            self._results[case] = result
            config = case.config
            where = f"{config.policy}, {case.model} on {case.hardware.name}"
            options = f"ratio {config.cache_ratio:g}, gamma {result.gamma}"
            self._run.say(f"{where}, {options}: {result.tg_ts:.2f} tokens/s")
        return [self._results[case] for case in wanted]


def run_case(case: Case) -> SimulationResult:
    costs = roofline_costs(case.hardware, find_model(case.model), case.framework)
    if case.draft_s is not None:
        costs = replace(costs, draft_ns=to_ns(case.draft_s))
    return simulate(costs, _text(case.model, case.n_tokens, case.config.seed), case.config)


@cache
def _text(model: str, n_tokens: int, seed: int) -> Trace:
    return synthetic_trace(find_model(model), n_tokens, seed)


@dataclass(frozen=True)
class Compared:
    """One published figure and the simulated one."""

    table: str
    name: str
    rejected_token_model: RejectedTokenModel  # of the table's systems that have a draft
    range: Range
    published_ts: float | None = None  # None: the paper has a picture or a shape, no number
    fitted: bool = False  # a constant was chosen by this figure
    without_overheads_ts: float | None = None  # tokens per second by bandwidths and operations alone

    @property
    def result(self) -> SimulationResult:
        """The simulation with the chosen constants."""
        return self.range.chosen

    @property
    def predicted_ts(self) -> float:
        return self.result.tg_ts

    @property
    def ratio(self) -> float | None:
        """Predicted over published."""
        return self.published_ts and self.predicted_ts / self.published_ts

    @property
    def without_overheads_ratio(self) -> float | None:
        """`without_overheads_ts` over published."""
        return self.published_ts and self.without_overheads_ts and self.without_overheads_ts / self.published_ts

    @property
    def close(self) -> bool:
        """Whether the prediction with the chosen constants is within 25 % of the published figure."""
        return is_close(self.ratio)

    def row(self) -> dict[str, Any]:
        """Flat, as -o json prints it."""
        about = {
            "table": self.table,
            "name": self.name,
            "published_ts": self.published_ts,
            "predicted_ts": self.predicted_ts,
            "predicted_low_ts": self.range.low_ts,
            "predicted_high_ts": self.range.high_ts,
            "ratio": self.ratio,
            "within_25_percent": self.close,
            "without_overheads_ts": self.without_overheads_ts,
            "without_overheads_ratio": self.without_overheads_ratio,
            "fitted": self.fitted,
        }
        return about | self.result.row() | {"rejected_token_model": self.rejected_token_model}


@dataclass(frozen=True)
class PublishedCount:
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


@dataclass(frozen=True)
class _Row:
    name: str
    system: str
    hardware: str
    model: str
    config: SimulationConfig
    published_ts: float | None = None
    fitted: bool = False
    rates: dict[str, Any] = field(default_factory=dict)  # of the hardware, where they are known better
    draft_s: float | None = None  # instead of the roofline's


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
        row = self._row(table, table["fit_cpu"])
        assert row.published_ts is not None
        (result,) = self._cases.all([self._case(row)])
        cpu_s = result.time.per_token_s("cpu")  # in proportion to 1 / bandwidth
        wanted_s = 1 / row.published_ts - (result.time.tpot_s - cpu_s)
        rate = find_hardware(row.hardware).cpu_bytes_per_s * cpu_s / wanted_s
        row = self._row(table, table["fit_acceptance"])
        assert row.published_ts is not None
        acceptance, gamma = row.config.acceptance, row.config.gamma
        for _ in range(_ROUNDS):
            config = replace(row.config, acceptance=acceptance)
            (result,) = self._cases.all([self._case(replace(row, config=config, rates={"cpu_bytes_per_s": rate}))])
            n_tokens = result.time.tokens / result.time.steps
            wanted = n_tokens * row.published_ts / result.tg_ts
            acceptance = acceptance_for(gamma, expected_tokens(gamma, acceptance) * wanted / n_tokens)
        return Fit(rate, acceptance)

    def part(self, name: str, fit: Fit | None = None) -> list[Compared]:
        """A table or figure: every row with all sides of the constants, in Table 2 also without overheads of programs.

        fit: of Table 2, for MoE-SpAc's tables and figure.
        """
        rows = self._systems(name, fit) if name in ("table2", "table3") else getattr(self, f"_{name}")(fit)
        with_bare = name == "table2"
        sides = (*SIDES, None) if with_bare else SIDES
        results = iter(self._cases.all(self._case(row, side) for row in rows for side in sides))
        return [
            Compared(
                name,
                row.name,
                self.rejected_token_model,
                Range(**{side: next(results) for side in SIDES}),
                row.published_ts,
                row.fitted,
                next(results).tg_ts if with_bare else None,
            )
            for row in rows
        ]

    def _systems(self, name: str, fit: Fit | None) -> list[_Row]:
        """The systems of Table 2 or 3, in the published order. Table 3 is another model on the same machine."""
        return [self._row(self.data[name], system, fit) for system in self.data[name]["published_ts"]]

    def _table4(self, fit: Fit) -> list[_Row]:
        """MoE-SpAc without one of its parts."""
        table = self.data["table4"]
        rows = []
        for name, published_ts in table["published_ts"].items():
            other = table["run_as"].get(name)  # a system that the paper falls back to
            ablations = frozenset() if other or name == "full" else frozenset({name})
            row = self._row(self.data["table2"], other or "MoE-SpAc", fit, ablations=ablations)
            rows.append(replace(row, name=name, published_ts=published_ts))
        return rows

    def _figure5(self, fit: Fit) -> list[_Row]:
        """Speed against the cache ratio; the paper's picture gives no numbers."""
        figure = self.data["figure5"]
        return [
            replace(self._row(self.data["table2"], system, fit, cache_ratio=ratio), published_ts=None, fitted=False)
            for system in figure["systems"]
            for ratio in figure["cache_ratios"]
        ]

    def _cutoff(self, fit: None) -> list[_Row]:
        """SP-MoE's speed against its cutoff layer, for its three pairs of models."""
        rows = []
        for model in self.data["cutoff"]["models"]:
            n_layers = find_model(model).n_expert_layers
            rows += [self._cut_at(layer, model) for layer in (*range(0, n_layers, 4), n_layers)]
        return rows

    def _elsewhere(self, fit: None) -> list[_Row]:
        """The same programs in other publications: a check of their constants."""
        elsewhere = self.data["elsewhere"]
        rows = []
        for model, entry in self.data["cutoff"]["models"].items():
            row = self._cut_at(0, model)
            name = f"{row.system}, baseline, {model}"
            rows.append(replace(row, name=name, published_ts=1 / entry["baseline_s"], fitted=True))
        for entry in elsewhere["rows"]:
            row = self._row(entry | {"gamma": 0, "hardware": elsewhere["hardware"]}, entry["system"])
            name, published_ts = f"{row.system}, {row.model}", 1 / entry["published_s"]
            rows.append(replace(row, name=name, published_ts=published_ts, fitted=entry["fed"]))
        return rows

    def _cut_at(self, layer: int, model: str) -> _Row:
        """SP-MoE on one of its pairs, prefetching for so many layers."""
        figure = self.data["cutoff"]
        entry = figure["models"][model]
        accuracy = PredictorAccuracy(critical=entry["critical"])
        table = entry | {"model": model, "gamma": figure["gamma"], "hardware": figure["hardware"]}
        row = self._row(table, figure["system"], accuracy=accuracy, cutoff_layer=layer)
        rates = {"link_bytes_per_s": find_model(model).expert_bytes / entry["expert_s"]}
        return replace(row, name=f"{model}, layer {layer}", rates=rates, draft_s=entry["draft_s"])

    def _row(self, table: dict[str, Any], system: str, fit: Fit | None = None, **changes: Any) -> _Row:
        """A system in the setting of a table, with the table's own acceptance or the fitted one."""
        acceptance = SimulationConfig.acceptance if fit is None else fit.acceptance
        config = SimulationConfig(
            policy=self.data["systems"][system]["policy"],
            cache_ratio=table["cache_ratio"],
            gamma=table["gamma"],
            acceptance=table.get("acceptance", acceptance),
            rejected_token_model=self.rejected_token_model,
            seed=self._seed,
            max_steps=_STEPS,
        )
        published_ts = table.get("published_ts", {}).get(system)
        fitted = system in (table.get("fit_cpu"), table.get("fit_acceptance"))
        rates = {} if fit is None else {"cpu_bytes_per_s": fit.cpu_bytes_per_s}
        config = replace(config, **changes)
        return _Row(system, system, table["hardware"], table["model"], config, published_ts, fitted, rates)

    def _case(self, row: _Row, side: Side | None = "chosen") -> Case:
        """A row's system in its own framework; side None: without the overheads of programs."""
        entry = self.data["systems"][row.system]
        overheads = entry_of(self.data["frameworks"], entry["framework"]) | entry.get("transfer", {})
        if side is None:  # what a system moves is no overhead
            overheads = {name: value for name, value in overheads.items() if isinstance(value, bool)}
        side = side or "chosen"
        framework, config = Framework(**only_known(pick(overheads, side), Framework)), row.config
        if "reach" in entry:
            config = replace(config, accuracy=replace(config.accuracy, reach=entry["reach"]))
        if not has_draft(config):  # so that the same simulation runs once
            config = replace(config, gamma=0, acceptance=1.0, rejected_token_model="optimistic")
        hardware = replace(find_hardware(row.hardware, side), **row.rates)
        return Case(row.model, _TOKENS, hardware, framework, config, row.draft_s)


def figures(rows: Sequence[Compared]) -> list[PublishedCount]:
    """The three figures, as far as their tables are among the rows: Table 2 twice, and rows that fed no constant."""
    found = []
    of_table2 = [row for row in rows if row.table == "table2"]
    for model in dict.fromkeys(row.rejected_token_model for row in of_table2):
        table = [row for row in of_table2 if row.rejected_token_model == model]
        free = [row for row in table if not row.fitted]
        right, total = same_order([row.without_overheads_ts for row in table], table)
        bare = sum(is_close(row.without_overheads_ratio) for row in free)
        found.append(PublishedCount("without overheads", model, bare, len(free), right, None, total))
        right, total = same_order([row.predicted_ts for row in table], table)
        ordered = sorted((row for row in table if row.published_ts), key=lambda row: row.published_ts or 0.0)
        anyway = sum(slower.range.high_ts < faster.range.low_ts for slower, faster in combinations(ordered, 2))
        close = sum(row.close for row in free)
        found.append(PublishedCount("calibrated", model, close, len(free), right, anyway, total))
    held_out = [row for row in rows if row.table == "elsewhere" and not row.fitted]
    if held_out:
        found.append(PublishedCount("fed no constant", None, sum(row.close for row in held_out), len(held_out)))
    return found


def is_close(ratio: float | None) -> bool:
    """Whether predicted over published is within 25 % of 1."""
    return ratio is not None and abs(ratio - 1) <= _CLOSE


def same_order(speeds: Sequence[float | None], rows: Sequence[Compared]) -> tuple[int, int]:
    """The number of pairs of rows in the published order by these speeds, and of all pairs with both figures."""
    both = [(row.published_ts, speed) for row, speed in zip(rows, speeds, strict=True)]
    known = [(published, speed) for published, speed in both if published is not None and speed is not None]
    pairs = list(combinations(known, 2))
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)
