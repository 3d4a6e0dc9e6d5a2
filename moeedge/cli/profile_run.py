"""What `moeedge profile` looks at: prompts whose answers it records, or a recorded trace."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import text_of
from moeedge.cli.declare import list_of
from moeedge.cli.engine_options import layer_notes
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EmptyPromptError, EngineError, InputError, LayerRangeError

if TYPE_CHECKING:
    from moeedge.data.prompts import Prompt
    from moeedge.engine.recording import Recording
    from moeedge.trace.format import Trace
    from moeedge.trace.steps import Steps

Datasets = Annotated[str | None, list_of(options.Dataset)]


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The prompts to answer, and the length and the sampling of the answers."""

    prompt: options.Prompt = None
    file: options.PromptFile = None
    dataset: Datasets = None
    limit: options.Limit = 8
    offline_sample: options.OfflineSample = False
    n_predict: options.NPredict = 128
    raw: options.Raw = False
    temp: options.Temp = 0.0
    seed: options.Seed = -1

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
        if self.limit < 0:
            raise ValueError(f"--limit must be 0 (all) or more, not {self.limit}")
        default = TOY if bundled else SAMPLE
        names = [name.strip() for name in (self.dataset or default).split(",") if name.strip()]
        sets = [load_dataset(name, offline_sample=self.offline_sample).limited(self.limit or None) for name in names]
        empty = next((found.name for found in sets if not found.prompts), None)
        if empty is not None or not sets:
            raise InputError(f'The prompt set "{empty or self.dataset}" is empty.')
        prompts = [replace(prompt, dataset=found.name) for found in sets for prompt in found.prompts]
        return prompts, {
            "dataset": ",".join(found.name for found in sets),
            "prompts": len(prompts),
            "dataset_sha256": ",".join(found.sha256 for found in sets),
        }

    def sampling(self) -> SamplingConfig:
        """Temperature and seed; a drawn seed serves all answers, so that the report and the trace can name it."""
        from moeedge.ui.chat.settings import seed_or_random

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

    @property
    def listed(self) -> str:
        """The layers as --layers has them, where the default is all."""
        return self.layers or self.layer or "all"

    def of(self, n_layers: int, last: int) -> list[int]:
        """Numbers of the layers of a model; last: the default. Raises LayerRangeError for others."""
        from moeedge.engine.recording import parse_layers

        if self.layers is not None:
            return parse_layers(self.layers, n_layers)
        return parse_layers(str(last) if self.layer is None else self.layer, n_layers, single=True)


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
