"""`moeedge profile`: which experts a model uses, step by step, and how well they can be predicted."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge.cli import options
from moeedge.cli.common import show_log
from moeedge.cli.declare import Output, flatten, option
from moeedge.cli.engine_options import EngineOptions, PlacementOptions, parse_ram
from moeedge.cli.llama_options import LlamaOptions
from moeedge.cli.profile_run import LayerChoice, Profiled, TextOptions, profile_trace, record
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.analysis.model_profile import ModelProfile
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.pictures import Picture
    from moeedge.ui.progress import Bar

_REPORTS = (".html", ".json")

Layer = Annotated[str | None, option(options.WORK, "--layer N", "Layer to profile, from 0. Default: the last.")]
Layers = Annotated[
    str | None, option(options.WORK, "--layers LIST|all", "Layers to profile, such as 0,5,40-47, or all.")
]
ProfiledTrace = Annotated[
    Path | None,
    option(options.WORK, "--trace FILE", "Profile this routing trace (docs/lab/traces.md) without running a model."),
]
AcceptanceChance = Annotated[
    float | None,
    option(
        options.WORK,
        "--acceptance-chance X",
        "With --trace: cut the text into verifications of --draft-max drafts, each accepted with this chance.",
    ),
]

Report = Annotated[
    Path | None,
    option(options.OUTPUT, "--report FILE.html|FILE.json", "Write all pictures and numbers as one page, or as JSON."),
]


@flatten
def profile(
    layer: Layer = None,
    layers: Layers = None,
    trace: ProfiledTrace = None,
    acceptance_chance: AcceptanceChance = None,
    *,
    texts: TextOptions,
    engine: EngineOptions,
    llama: LlamaOptions,
    placement: PlacementOptions,
    report: Report = None,
    plot: options.Plot = None,
    ram: options.Ram = "auto",
    trace_out: options.TraceOut = None,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Show which experts a model's tokens use, and how well the next ones can be predicted.

    The model answers a few prompts, and every choice of its routers is recorded: how often each expert is used, how
    many experts neighbouring tokens share, how well the experts of a step predict those of the next.

    The profile goes to standard output, everything else to standard error. JSON is an object for --layer, an array for
    --layers. After Ctrl-C the profile covers the tokens until then.
    """
    engine.limit_openmp_spin(ram=ram)
    from moeedge.analysis.profile_json import run_facts
    from moeedge.ui.console import check_output, check_picture
    from moeedge.ui.profile_pictures import plot_profiles

    choice = LayerChoice(layer, layers)
    if trace_out is not None:
        check_output(trace_out)
    if trace is not None and (texts.are_chosen or engine.model is not None or trace_out is not None):
        raise InputError("--trace takes no model, prompt or data set, and no --trace-out.", "Leave them out.")
    if trace is None and acceptance_chance is not None:
        raise InputError(
            "--acceptance-chance is for --trace only.", "Leave it out: with a model, accepted drafts are counted."
        )
    if verbose:
        show_log()
    if plot is not None:
        check_picture(plot)
    if report is not None:
        if report.suffix.lower() not in _REPORTS:
            raise InputError(f"--report cannot write {report.name}.", "End the name in .html or .json.")
        check_output(report)
    if trace is not None:
        profiled = profile_trace(
            trace, choice, gamma=engine.fixed_draft_max, acceptance_chance=acceptance_chance, seed=texts.seed
        )
    else:
        profiled = record(
            texts,
            replace(llama.apply(engine.config(placement.config())), ram=parse_ram(ram)),
            choice,
        )
        if trace_out is not None:
            profiled.trace.save(trace_out)
    run = run_facts(profiled.trace, profiled.recording)
    model, code = _model_profile(profiled)
    _print(model, run, as_json=output is Output.JSON, single=choice.single)
    if plot is not None:
        meta = model.meta
        plot_profiles(model.layers, f"{meta.model}, {meta.parameters.get('dataset', '')}, gamma {meta.gamma}", plot)
    if report is not None:
        code = _write_report(report, model, run) or code
    if code or profiled.exit_code:
        raise typer.Exit(code or profiled.exit_code)


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
            on_layer=lambda done: bar.update(completed=done),
            cancel=interrupt,
        )
    if interrupt.exit_code:
        say(err, f"Stopped: curves of {len(profile.curves)} of {n_layers} layers.", style="yellow")
    return profile, interrupt.exit_code


def _print(model: ModelProfile, run: dict[str, Any], *, as_json: bool, single: bool) -> None:
    """The profile on standard output. single: one object instead of an array, which has no place for the model."""
    from moeedge.analysis.profile_json import layer_report, model_report
    from moeedge.ui.console import stdout_console
    from moeedge.ui.profile_views import print_model, print_profiles

    if not as_json:
        print_profiles(model.layers, stdout_console())
        print_model(model, stdout_console())
        return
    reports = [layer_report(layer, run) for layer in model.layers]
    if single:
        reports[0]["model_profile"] = model_report(model)
    typer.echo(json.dumps(reports[0] if single else reports, ensure_ascii=False))


def _write_report(path: Path, profile: ModelProfile, run: dict[str, Any]) -> int:
    """The page or its JSON. After a signal the page has the pictures that were drawn until then."""
    from rich.console import Console

    from moeedge.analysis.profile_json import complete_report
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.pictures import report_html, write_report
    from moeedge.ui.profile_pictures import profile_pictures
    from moeedge.ui.profile_views import print_model, run_lines
    from moeedge.ui.progress import count_bar

    err = stderr_console()
    numbers = complete_report(profile, run)
    is_page = path.suffix.lower() == ".html"
    pictures = profile_pictures(profile) if is_page else []
    with Interrupt() as interrupt, count_bar(err, "drawing", "pictures", len(pictures)) as bar:
        interrupt.arm()
        if is_page:
            text = io.StringIO()
            print_model(profile, Console(file=text, width=100))
            head = f"Profile of {profile.meta.model}", run_lines(profile), text.getvalue().strip()
            write_report(path, report_html(*head, _until_stopped(pictures, bar, interrupt), numbers))
        else:
            write_report(path, json.dumps(numbers, ensure_ascii=False, allow_nan=False) + "\n")
    if interrupt.exit_code:
        say(err, "Stopped: pictures are missing.", style="yellow")
    say(err, f"Written: {path}.")
    return interrupt.exit_code


def _until_stopped(pictures: Sequence[Picture], bar: Bar, interrupt: Interrupt) -> Iterator[Picture]:
    for picture in pictures:
        if interrupt():
            return
        yield picture
        bar.add()
