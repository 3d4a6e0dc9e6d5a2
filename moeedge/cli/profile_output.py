"""The outputs of `moeedge profile`: text or JSON, pictures, the report, a ranking; of a run or of a recorded trace."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moeedge.errors import InputError, LayerRangeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moeedge.analysis.model_profile import ModelProfile
    from moeedge.analysis.profile import LayerProfile
    from moeedge.engine.pair_similarity import PairSimilarity
    from moeedge.engine.recording import Recording
    from moeedge.trace.format import Trace
    from moeedge.trace.steps import Steps

_REPORTS = (".html", ".json")


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What is profiled: a trace and what is known beside it."""

    trace: Trace
    layers: list[int]  # in detail
    recording: Recording | None = None  # None: the trace was read from a file
    pair: PairSimilarity | None = None
    sensitivity: NDArray[np.float64] | None = None  # [n_layers], for a ranking
    steps: Steps | None = None  # simulated verifications; None: those of the trace
    gamma: int | None = None  # of the simulated ones


@dataclass(frozen=True, kw_only=True)
class ProfileOutput:
    """Where the results go. Raises InputError for a place that cannot be written."""

    as_json: bool
    single: bool  # one object instead of an array
    plot: Path | None
    report: Path | None
    pictures: Path | None  # a folder
    compare: Path | None  # a trace
    save_ranking: Path | None

    def __post_init__(self) -> None:
        from moeedge.ui.console import check_output, check_picture

        if self.plot is not None:
            check_picture(self.plot)
        if self.report is not None:
            if self.report.suffix.lower() not in _REPORTS:
                raise InputError(f"--report cannot write {self.report.name}.", "End the name in .html or .json.")
            check_output(self.report)
        if self.pictures is not None and self.pictures.exists() and not self.pictures.is_dir():
            raise InputError(f"{self.pictures} is not a folder.", "Name a folder for --pictures.")
        if self.compare is not None and self.report is None and self.pictures is None:
            raise InputError("--compare shows the two profiles in a report.", "Add --report FILE.html.")

    @property
    def wants_model(self) -> bool:
        """Whether more than the layers asked for is profiled."""
        return self.report is not None or self.pictures is not None or (self.as_json and self.single)

    def write(self, profiled: Profiled) -> int:
        """Computes what is asked for, and writes it. Returns the exit code: not 0 after an interruption."""
        from moeedge.analysis.profile_json import layer_report, model_report, run_facts
        from moeedge.ui.console import stdout_console
        from moeedge.ui.plots import draw_profiles
        from moeedge.ui.trace_views import print_profiles

        if self.save_ranking is not None:
            from moeedge.analysis.expert_ranking import rank_experts, write_ranking

            write_ranking(rank_experts(profiled.trace, profiled.sensitivity), self.save_ranking)
        run = run_facts(profiled.trace, profiled.recording)
        model, code = _model_profile(profiled) if self.wants_model else (None, 0)
        layers = _layer_profiles(profiled) if model is None else model.layers
        if self.as_json:
            reports = [layer_report(layer, run) for layer in layers]
            if self.single and model is not None:
                reports[0]["model_profile"] = model_report(model)
            typer.echo(json.dumps(reports[0] if self.single else reports, ensure_ascii=False))
        else:
            print_profiles(layers, stdout_console())
        if self.plot is not None:
            meta = profiled.trace.meta
            draw_profiles(layers, f"{meta.model}, {meta.parameters.get('dataset', '')}, gamma {meta.gamma}", self.plot)
        if model is not None and (self.report is not None or self.pictures is not None):
            self._write_report(model, run)
        return code

    def _write_report(self, profile: ModelProfile, run: dict[str, Any]) -> None:
        """The page or its JSON, and the pictures as files."""
        from moeedge.analysis.model_profile import routing_agreement
        from moeedge.analysis.profile_json import complete_report, run_facts
        from moeedge.ui.console import say, stderr_console
        from moeedge.ui.pictures import save_picture
        from moeedge.ui.profile_findings import findings, page_title, run_lines
        from moeedge.ui.profile_pictures import profile_pictures
        from moeedge.ui.progress import count_bar
        from moeedge.ui.report import report_html, write_report

        err = stderr_console()
        other, compared = None, None
        if self.compare is not None:
            other_trace = _read(self.compare)
            chosen = [each.layer for each in profile.layers if each.layer in other_trace.expert_layers()]
            other, _ = _model_profile(Profiled(trace=other_trace, layers=chosen))
            profile = replace(profile, agreement=routing_agreement(profile.trace, other.trace))
            compared = (other, run_facts(other.trace))
        numbers: dict[str, Any] = complete_report(profile, run, compared)
        pictures = profile_pictures(profile, other)
        if self.report is not None and self.report.suffix.lower() == ".json":
            write_report(self.report, json.dumps(numbers, ensure_ascii=False, allow_nan=False) + "\n")
        elif self.report is not None:
            facts, sentences = run_lines(profile, other), findings(profile, other)
            write_report(self.report, report_html(page_title(profile, other), facts, sentences, pictures, numbers))
        if self.pictures is not None:
            self.pictures.mkdir(parents=True, exist_ok=True)
            with count_bar(err, "drawing", "pictures", len(pictures)) as bar:
                for picture in pictures:
                    save_picture(picture, self.pictures / f"{picture.key}.png")
                    bar.add()
        written = [str(path) for path in (self.report, self.pictures) if path is not None]
        say(err, f"Written: {', '.join(written)}.")


def _layer_profiles(profiled: Profiled) -> list[LayerProfile]:
    from moeedge.analysis.profile import profile_layers, profile_steps

    if profiled.steps is None:
        return profile_layers(profiled.trace, profiled.layers)
    return profile_steps(profiled.trace, profiled.steps, profiled.layers, profiled.gamma or 0)


def _model_profile(profiled: Profiled) -> tuple[ModelProfile, int]:
    """The profile, and the exit code: after a signal it has the layers done until then."""
    from moeedge.analysis.model_profile import profile_model
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.progress import count_bar

    err = stderr_console()
    n_layers = len(profiled.trace.expert_layers())
    with Interrupt() as interrupt, count_bar(err, "profiling", "layers", n_layers) as bar:
        interrupt.arm()
        profile = profile_model(
            profiled.trace,
            profiled.layers,
            steps=profiled.steps,
            gamma=profiled.gamma,
            pair=profiled.pair,
            on_layer=lambda done: bar.update(completed=done),
            cancel=interrupt,
        )
    if interrupt.exit_code:
        say(err, f"Stopped: curves of {len(profile.curves)} of {n_layers} layers.", style="yellow")
    return profile, interrupt.exit_code


def profile_trace(
    path: Path, layer: str | None, layers: str | None, *, gamma: int | None, acceptance_chance: float | None, seed: int
) -> Profiled:
    """A recorded trace to profile; with an acceptance chance, its text cut into verifications of `gamma` drafts.

    Raises InputError for an unusable file, LayerRangeError for a layer that does not exist or was not recorded.
    """
    import numpy as np

    from moeedge.engine.recording import parse_layers
    from moeedge.trace.schedule import GAMMA
    from moeedge.trace.steps import simulated_steps

    trace = _read(path)
    recorded = trace.expert_layers()
    if not recorded:
        raise InputError(f"{path} has no recorded experts.", "Name another trace.")
    n_layers = trace.meta.n_layers
    if layers is None:
        asked = parse_layers(str(recorded[-1]) if layer is None else layer, n_layers, single=True)
    else:
        asked = parse_layers(layers, n_layers)
    chosen = [each for each in asked if each in recorded]
    if not chosen:
        raise LayerRangeError(f"{path} has no recorded experts in layer {asked[0]}.", "Name another layer.")
    if acceptance_chance is None:
        return Profiled(trace=trace, layers=chosen)
    gamma = GAMMA if gamma is None else gamma
    rng = np.random.default_rng(max(seed, 0))
    steps = simulated_steps(trace, gamma=gamma, acceptance_chance=acceptance_chance, rng=rng)
    return Profiled(trace=trace, layers=chosen, steps=steps, gamma=gamma)


def _read(path: Path) -> Trace:
    from moeedge.trace.importers import read_trace

    return read_trace(path)
