"""`moeedge profile`: which experts a model uses, step by step, and how well they can be predicted."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from moeedge import paths
from moeedge.cli.common import names, text_of
from moeedge.cli.engine_options import LlamaOptions, PlacementOptions, layer_notes
from moeedge.cli.options import Output, declare, flatten
from moeedge.engine.types import EngineConfig, SamplingConfig, seed_or_random
from moeedge.errors import EmptyPromptError, EngineError, InputError, LayerRangeError

if TYPE_CHECKING:
    from moeedge.analysis.model_profile import ModelProfile
    from moeedge.data.prompts import Prompt
    from moeedge.engine.recording import Recording
    from moeedge.trace.format import Trace
    from moeedge.trace.steps import Steps
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.plots import Plot
    from moeedge.ui.progress import Bar

_REPORTS = (".html", ".json")

declare(
    """
    [Workload]
    * --layer N  Layer to profile, from 0. Default: the last.
    * --layers LIST|all  Layers to profile, such as 0,5,40-47, or all.
    * --trace FILE  Profile this routing trace (docs/lab/traces.md) without running a model.
    --acceptance-chance X  With --trace: cut the text into verifications of --draft-max drafts, each accepted with this
        chance.
    [Output]
    * --report FILE.html|FILE.json  Write all pictures and numbers as one page, or as JSON.
    """,
    "profile",
)
declare(
    "--dataset LIST  ... Several, separated by commas, are compared.",
    "profile budget pair",
    read={names: "dataset"},
)


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The prompts to answer, and the length and the sampling of the answers."""

    prompt: str | None = None
    file: Path | None = None
    dataset: list[str] | None = None
    limit: int = 8
    offline_sample: bool = False
    n_predict: int = 128
    raw: bool = False
    temp: float = 0.0
    seed: int = -1

    @property
    def are_chosen(self) -> bool:
        """Whether the user named a prompt or a data set."""
        return self.prompt is not None or self.file is not None or self.dataset is not None

    def load(self, *, bundled: bool) -> tuple[list[Prompt], dict[str, Any]]:
        """The prompts, and the report's fields about their source. Raises InputError and ValueError for bad options.

        bundled: the bundled model answers, by default prompts of the kind that it was trained on.
        """
        from moeedge.data.datasets import SAMPLE, TOY, load_dataset
        from moeedge.data.prompts import Prompt, user_turns

        if self.n_predict == 0 or self.n_predict < -1:
            raise ValueError(f"-n must be -1 (until the model stops) or at least 1, not {self.n_predict}")
        given = text_of(self.prompt, self.file, "-p", "-f")
        if given is not None:
            if self.dataset is not None:
                raise InputError("-p and --dataset cannot be used together.", "Give one of them.")
            if not given.strip():
                raise EmptyPromptError("The prompt is empty: -p is blank.", "Give some text to answer.")
            prompt = Prompt("prompt", "", user_turns(given))
            return [prompt], {"dataset": "prompt", "prompts": 1}
        chosen = self.dataset or [TOY if bundled else SAMPLE]
        sets = [load_dataset(name, offline_sample=self.offline_sample).limited(self.limit or None) for name in chosen]
        empty = next((found.name for found in sets if not found.prompts), None)
        if empty is not None:
            raise InputError(f'The prompt set "{empty}" is empty.')
        prompts = [replace(prompt, dataset=found.name) for found in sets for prompt in found.prompts]
        return prompts, {
            "dataset": ",".join(found.name for found in sets),
            "prompts": len(prompts),
            "dataset_sha256": ",".join(found.sha256 for found in sets),
        }

    def sampling(self) -> SamplingConfig:
        """Temperature and seed; a drawn seed serves all answers, so that the report and the trace can name it."""
        seed = seed_or_random(self.seed)
        if seed is None and self.temp > 0:
            seed = secrets.randbits(32)
        return SamplingConfig(temperature=self.temp, seed=seed)


@dataclass(frozen=True)
class LayerChoice:
    """--layer and --layers; without both the last layer. Raises InputError where both are given."""

    layer: str | None
    layers: str | None

    def __post_init__(self) -> None:
        if self.layer is not None and self.layers is not None:
            raise InputError("--layer and --layers cannot be used together.", "Give one of them.")

    @property
    def single(self) -> bool:
        """Whether one layer is profiled."""
        return self.layers is None

    def of(self, n_layers: int, last: int) -> list[int]:
        """Numbers of the layers of a model; last: the default. Raises LayerRangeError for others."""
        from moeedge.engine.recording import parse_layers

        if self.layers is not None:
            return parse_layers(self.layers, n_layers)
        return parse_layers(str(last) if self.layer is None else self.layer, n_layers, single=True)


@flatten
def profile(
    layer: str | None = None,
    layers: str | None = None,
    trace: Path | None = None,
    acceptance_chance: float | None = None,
    *,
    texts: TextOptions,
    engine: LlamaOptions,
    placement: PlacementOptions,
    report: Path | None = None,
    plot: Path | None = None,
    ram: int | Literal["auto", "off"] = "auto",
    trace_out: Path | None = None,
    output: Output = Output.TEXT,
    verbose: bool = False,
) -> None:
    """Show which experts a model's tokens use, and how well the next ones can be predicted.

    The model answers a few prompts, and every choice of its routers is recorded: how often each expert is used, how
    many experts neighbouring tokens share, how well the experts of a step predict those of the next.

    The profile goes to standard output, everything else to standard error. JSON is an object for --layer, an array for
    --layers. After Ctrl-C the profile covers the tokens until then.
    """
    engine.limit_openmp_spin(ram=ram)
    from moeedge.analysis.model_profile import run_facts
    from moeedge.ui.console import check_output, check_picture
    from moeedge.ui.profile_plots import plot_profiles

    choice = LayerChoice(layer, layers)
    if trace_out is not None:
        check_output(trace_out)
    if trace is not None and (texts.are_chosen or engine.model is not None or trace_out is not None):
        raise InputError("--trace takes no model, prompt or data set, and no --trace-out.", "Leave them out.")
    if trace is None and acceptance_chance is not None:
        raise InputError(
            "--acceptance-chance is for --trace only.", "Leave it out: with a model, accepted drafts are counted."
        )
    if plot is not None:
        check_picture(plot)
    if report is not None:
        if report.suffix.lower() not in _REPORTS:
            raise InputError(f"--report cannot write {report.name}.", "End the name in .html or .json.")
        check_output(report)
    if trace is not None:
        gamma = engine.draft_max
        if gamma == "auto":
            raise InputError("--draft-max auto measures steps, and no model runs here.", "Give a number.")
        profiled = profile_trace(trace, choice, gamma=gamma, acceptance_chance=acceptance_chance, seed=texts.seed)
    else:
        profiled = record(texts, replace(engine.config(placement.config()), ram=ram), choice)
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
            run=Run(cancelled=interrupt, progress=bar),
        )
    if interrupt.exit_code:
        say(err, f"Stopped: curves of {len(profile.curves)} of {n_layers} layers.", style="yellow")
    return profile, interrupt.exit_code


def _print(model: ModelProfile, run: dict[str, Any], *, as_json: bool, single: bool) -> None:
    """The profile on standard output. single: one object instead of an array, which has no place for the model."""
    from moeedge.analysis.model_profile import layer_report, model_report
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

    from moeedge.analysis.model_profile import complete_report
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.profile_plots import profile_plots, report_html
    from moeedge.ui.profile_views import print_model, run_lines
    from moeedge.ui.progress import count_bar

    err = stderr_console()
    numbers = complete_report(profile, run)
    is_page = path.suffix.lower() == ".html"
    plots = profile_plots(profile) if is_page else []
    with Interrupt() as interrupt, count_bar(err, "drawing", "pictures", len(plots)) as bar:
        interrupt.arm()
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


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What is profiled: a trace and what is known beside it."""

    trace: Trace
    layers: list[int]  # in detail
    recording: Recording | None = None  # None: the trace was read from a file
    steps: Steps | None = None  # simulated verifications; None: those of the trace
    gamma: int | None = None  # of the simulated ones
    exit_code: int = 0  # not 0 after an interruption


def record(texts: TextOptions, config: EngineConfig, choice: LayerChoice) -> Profiled:
    """Answers the prompts and records the routing."""
    from moeedge.engine.recording import check_layers, record_routing, unseen_layers
    from moeedge.engine.session import Session
    from moeedge.ui import figures
    from moeedge.ui.chat.greeting import print_header
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import notifier, say, show_figures, stderr_console
    from moeedge.ui.progress import ProfileProgress

    prompts, source = texts.load(bundled=paths.is_bundled(config.model))
    sampling = texts.sampling()
    err = stderr_console()
    with Session.open(config, notify=notifier(err)) as session:
        n_layers = session.model.info.n_layers
        chosen = check_layers(session, choice.of(n_layers, n_layers - 1))
        print_header(err, session.info, toy=paths.is_bundled(config.model), warnings=layer_notes(config))
        if unseen := unseen_layers(session):
            say(err, unseen, style="yellow")
        if figures.is_ram(session.info.device):
            say(err, f"Earlier runs: {figures.earlier_runs(session.info)}")
        with Interrupt() as interrupt:
            interrupt.arm()
            with ProfileProgress(len(prompts), err) as progress:
                try:
                    recording = record_routing(
                        session,
                        prompts,
                        n_predict=texts.n_predict,
                        sampling=sampling,
                        raw=texts.raw,
                        source=source,
                        cancel=interrupt,
                        on_step=progress.step,
                    )
                except EngineError:
                    if interrupt.exit_code:  # stopped before there was anything to report
                        raise typer.Exit(interrupt.exit_code) from None
                    raise
                progress.update(completed=len(prompts))
            if figures.is_ram(session.info.device) and (stats := session.placement_stats()) is not None:
                show_figures(err, figures.cache_rows(stats))
    if recording.skipped:
        say(err, f"Longer than the context, left out: {', '.join(recording.skipped)}.", style="yellow")
    if interrupt.exit_code:
        say(err, "Stopped: the profile covers the tokens until then.", style="yellow")
    return Profiled(trace=recording.trace, layers=chosen, recording=recording, exit_code=interrupt.exit_code)


def profile_trace(
    path: Path, choice: LayerChoice, *, gamma: int | None, acceptance_chance: float | None, seed: int
) -> Profiled:
    """A recorded trace to profile; with an acceptance chance, its text cut into verifications of `gamma` drafts.

    Raises InputError for an unusable file, LayerRangeError for a layer that does not exist or was not recorded.
    """
    import numpy as np

    from moeedge.trace.format import Trace
    from moeedge.trace.steps import GAMMA, simulated_steps

    trace = Trace.load(path)
    recorded = trace.expert_layers()
    if not recorded:
        raise InputError(f"{path} has no recorded experts.", "Name another trace.")
    asked = choice.of(trace.meta.n_layers, recorded[-1])
    chosen = [each for each in asked if each in recorded]
    if not chosen:
        raise LayerRangeError(f"{path} has no recorded experts in layer {asked[0]}.", "Name another layer.")
    if acceptance_chance is None:
        return Profiled(trace=trace, layers=chosen)
    gamma = GAMMA if gamma is None else gamma
    rng = np.random.default_rng(max(seed, 0))
    steps = simulated_steps(trace, gamma=gamma, acceptance_chance=acceptance_chance, rng=rng)
    return Profiled(trace=trace, layers=chosen, steps=steps, gamma=gamma)
