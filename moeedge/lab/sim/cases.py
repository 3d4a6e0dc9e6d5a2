"""Many simulations of built-in models, each run once, in several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from types import TracebackType

from moeedge.lab.sim.clock import to_ns
from moeedge.lab.sim.constants import SIDES, Side
from moeedge.lab.sim.model_shape import find_model
from moeedge.lab.sim.simulate import Range, SimulationConfig, SimulationResult, simulate, synthetic_trace
from moeedge.lab.sim.step_costs import Framework, HardwareSpec, roofline_costs
from moeedge.notifications import Notification, Notify, ignore
from moeedge.trace.format import Trace

_WORKERS_MAX = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulation; the text is drawn by the seed of `config`."""

    model: str
    n_tokens: int  # of text
    hardware: HardwareSpec
    framework: Framework
    config: SimulationConfig
    draft_s: float | None = None  # of a draft token, instead of the roofline's


class Cases:
    """Runs cases and keeps their results; a context manager that ends its processes. notify: called once a case."""

    def __init__(self, notify: Notify = ignore) -> None:
        self._results: dict[Case, SimulationResult] = {}
        self._notify = notify
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Cases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def run(self, case: Case) -> SimulationResult:
        """The result of one case."""
        self._run_all([case])
        return self._results[case]

    def all(self, cases: Iterable[Case]) -> list[SimulationResult]:
        """The results of cases, in their order."""
        wanted = list(cases)
        self._run_all(wanted)
        return [self._results[case] for case in wanted]

    def ranges(self, cases: Iterable[Mapping[Side, Case]]) -> list[Range]:
        """The results of cases with a case for each side."""
        wanted = list(cases)
        self._run_all(case for sides in wanted for case in sides.values())
        return [Range(**{side: self._results[sides[side]] for side in SIDES}) for sides in wanted]

    def _run_all(self, cases: Iterable[Case]) -> None:
        new = [case for case in dict.fromkeys(cases) if case not in self._results]
        results = map(run_case, new)
        n_workers = min(os.cpu_count() or 1, _WORKERS_MAX)
        if len(new) > 1 and n_workers > 1:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(n_workers, mp_context=context)
            results = self._pool.map(run_case, new)  # type: ignore[assignment]
        for case, result in zip(new, results, strict=True):
            self._results[case] = result
            config = case.config
            where = f"{config.policy}, {case.model} on {case.hardware.name}"
            options = f"ratio {config.cache_ratio:g}, gamma {result.gamma}"
            self._notify(Notification(f"{where}, {options}: {result.tg_ts:.2f} tokens/s"))


def run_case(case: Case) -> SimulationResult:
    """Simulates one case."""
    costs = roofline_costs(case.hardware, find_model(case.model), case.framework)
    if case.draft_s is not None:
        costs = replace(costs, draft_ns=to_ns(case.draft_s))
    return simulate(costs, _text(case.model, case.n_tokens, case.config.seed), case.config)


@cache
def _text(model: str, n_tokens: int, seed: int) -> Trace:
    return synthetic_trace(find_model(model), n_tokens, 1, seed)
