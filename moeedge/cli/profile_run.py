"""`moeedge profile` once its options are read: answers prompts or reads a trace, and shows the profile."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console

from moeedge import paths
from moeedge.analysis.profile import ModelProfile, complete_report, layer_report, model_report, profile_model, run_facts
from moeedge.cli.engine_options import TextOptions, layer_notes
from moeedge.engine.recording import Recording, check_layers, parse_layers, record_routing, unseen_layers
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError, InputError, LayerRangeError
from moeedge.hardware.provenance import Provenance, read_provenance
from moeedge.run import Run
from moeedge.trace.format import Trace
from moeedge.trace.steps import GAMMA, Steps, simulated_steps
from moeedge.ui import figures
from moeedge.ui.chat.greeting import print_header
from moeedge.ui.chat.interrupt import Interrupt
from moeedge.ui.console import Bar, count_bar, notifier, say, show_figures, stderr_console, stdout_console
from moeedge.ui.plots import Plot
from moeedge.ui.profile_plots import plot_profiles, profile_plots, report_html
from moeedge.ui.profile_views import print_model, print_profiles, run_lines


@dataclass(frozen=True)
class LayerChoice:
    """--layer or --layers, not both; without them the last layer."""

    layer: str | None
    layers: str | None

    def of(self, n_layers: int, last: int) -> list[int]:
        """Numbers of the layers of a model; last: the default. Raises LayerRangeError for others."""
        text = next((text for text in (self.layers, self.layer) if text is not None), str(last))
        return parse_layers(text, n_layers, single=self.layers is None)


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A trace to profile, and how it came about."""

    trace: Trace
    layers: list[int]  # in detail
    provenance: Provenance
    recording: Recording | None = None  # None: the trace was read from a file
    steps: Steps | None = None  # simulated verifications; None: those of the trace
    gamma: int | None = None  # of the simulated ones
    exit_code: int = 0  # not 0 after an interruption


def record(texts: TextOptions, config: EngineConfig, choice: LayerChoice) -> Profiled:
    """Answers the prompts and records the routing."""
    prompts, source = texts.load(bundled=paths.is_bundled(config.model))
    answers, provenance = texts.answers(), read_provenance(config.model)
    err = stderr_console()
    with Session.open(config, run=Run(notifier(err))) as session:
        n_layers = session.model.info.n_layers
        layers = check_layers(session, choice.of(n_layers, n_layers - 1))
        print_header(err, session.info, toy=paths.is_bundled(config.model), warnings=layer_notes(config))
        if unseen := unseen_layers(session):
            say(err, unseen, style="yellow")
        if not session.info.is_device:
            say(err, f"Earlier runs: {figures.earlier_runs(session.info)}")
        with Interrupt(armed=True) as interrupt, count_bar(err, "profiling", "prompts", len(prompts)) as bar:
            try:
                run = Run(cancelled=interrupt, progress=bar)
                recording = record_routing(session, prompts, **answers, source=source, run=run)
            except EngineError:
                if interrupt.exit_code:  # stopped before there was anything to report
                    raise typer.Exit(interrupt.exit_code) from None
                raise
        if (stats := session.placement_stats()) is not None and not stats.is_device:
            show_figures(err, figures.cache_rows(stats))
    if recording.skipped:
        say(err, f"Longer than the context, left out: {', '.join(recording.skipped)}.", style="yellow")
    if interrupt.exit_code:
        say(err, "Stopped: the profile covers the tokens until then.", style="yellow")
    return Profiled(
        trace=recording.trace, layers=layers, recording=recording, exit_code=interrupt.exit_code, provenance=provenance
    )


def profile_trace(
    path: Path, choice: LayerChoice, gamma: int | None, acceptance_chance: float | None, seed: int
) -> Profiled:
    """A recorded trace, with an acceptance chance cut into verifications of `gamma` drafts. Raises InputError."""
    trace, provenance = Trace.load(path), read_provenance(trace=path)
    recorded = trace.expert_layers()
    if not recorded:
        raise InputError(f"{path} has no recorded experts.", "Name another trace.")
    layers = choice.of(trace.meta.n_layers, recorded[-1])
    if not set(layers) & set(recorded):
        raise LayerRangeError(f"{path} has no recorded experts in layer {layers[0]}.", "Name another layer.")
    layers = [layer for layer in layers if layer in recorded]
    if acceptance_chance is None:
        return Profiled(trace=trace, layers=layers, provenance=provenance)
    gamma = GAMMA if gamma is None else gamma
    rng = np.random.default_rng(max(seed, 0))
    steps = simulated_steps(trace, gamma=gamma, acceptance_chance=acceptance_chance, rng=rng)
    return Profiled(trace=trace, layers=layers, provenance=provenance, steps=steps, gamma=gamma)


def show(profiled: Profiled, choice: LayerChoice, *, as_json: bool, plot: Path | None, report: Path | None) -> int:
    """Shows the profile, after a signal of the layers done until then, and writes its files. Returns the exit code."""
    run = run_facts(profiled.trace, profiled.recording, profiled.provenance)
    out, err = stdout_console(), stderr_console()
    n_layers = len(profiled.trace.expert_layers())
    with Interrupt(armed=True) as interrupt, count_bar(err, "profiling", "layers", n_layers) as bar:
        profile = profile_model(
            profiled.trace,
            profiled.layers,
            steps=profiled.steps,
            gamma=profiled.gamma,
            run=Run(cancelled=interrupt, progress=bar),
        )
    if interrupt.exit_code:
        say(err, f"Stopped: curves of {len(profile.curves)} of {n_layers} layers.", style="yellow")
    if as_json:  # an object of one layer, whose model stands in it; an array has no place for the model
        reports = [layer_report(layer, run) for layer in profile.layers]
        is_single = choice.layers is None
        if is_single:
            reports[0]["model_profile"] = model_report(profile)
        typer.echo(json.dumps(reports[0] if is_single else reports, ensure_ascii=False))
    else:
        print_profiles(profile.layers, out)
        print_model(profile, out)
    if plot is not None:
        meta = profile.meta
        plot_profiles(profile.layers, f"{meta.model}, {meta.parameters.get('dataset', '')}, gamma {meta.gamma}", plot)
    code = 0 if report is None else _write_report(report, profile, run)
    return code or interrupt.exit_code


def _write_report(path: Path, profile: ModelProfile, run: dict[str, Any]) -> int:
    """Writes the page or its JSON. After a signal the page has the pictures that were drawn until then."""
    err = stderr_console()
    numbers = complete_report(profile, run)
    is_page = path.suffix.lower() == ".html"
    plots = profile_plots(profile) if is_page else []
    with Interrupt(armed=True) as interrupt, count_bar(err, "drawing", "pictures", len(plots)) as bar:
        text = json.dumps(numbers, ensure_ascii=False, allow_nan=False) + "\n"
        if is_page:
            out = io.StringIO()
            print_model(profile, Console(file=out, width=100))
            head = f"Profile of {profile.meta.model}", run_lines(profile), out.getvalue().strip()
            text = report_html(*head, _until_stopped(plots, bar, interrupt), numbers)
        with paths.write_file(path, "report") as temporary:
            temporary.write_text(text, encoding="utf-8")
    if interrupt.exit_code:
        say(err, "Stopped: pictures are missing.", style="yellow")
    say(err, f"Written: {path}.")
    return interrupt.exit_code


def _until_stopped(plots: Sequence[Plot], bar: Bar, interrupt: Interrupt) -> Iterator[Plot]:
    for plot in plots:
        if interrupt():
            return
        yield plot
        bar.add()
