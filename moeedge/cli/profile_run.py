"""What `moeedge profile` looks at: a run that it records, or a recorded trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moeedge import paths
from moeedge.cli.engine_options import layer_notes
from moeedge.cli.profile_texts import TextOptions
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError, InputError, LayerRangeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moeedge.engine.pair_similarity import PairSimilarity
    from moeedge.engine.recording import Recording
    from moeedge.engine.session import Session
    from moeedge.trace.format import Trace
    from moeedge.trace.steps import Steps
    from moeedge.ui.chat.interrupt import Interrupt


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
    pair: PairSimilarity | None = None
    sensitivity: NDArray[np.float64] | None = None  # [n_layers], for a ranking
    steps: Steps | None = None  # simulated verifications; None: those of the trace
    gamma: int | None = None  # of the simulated ones
    exit_code: int = 0  # not 0 after an interruption


def record(
    texts: TextOptions, config: EngineConfig, choice: LayerChoice, *, with_pair: bool, with_sensitivity: bool
) -> Profiled:
    """Answers the prompts and records the routing.

    with_pair: the draft model is compared with the target, too. with_sensitivity: what a budget in each layer changes.
    """
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
            pair = _compare_pair(session, recording, interrupt) if with_pair else None
            sensitivity = _sensitivity(session, recording, interrupt) if with_sensitivity else None
    if recording.skipped:
        say(err, f"Longer than the context, left out: {', '.join(recording.skipped)}.", style="yellow")
    if interrupt.exit_code:
        say(err, "Stopped: the profile covers the tokens until then.", style="yellow")
    return Profiled(
        trace=recording.trace,
        layers=chosen,
        recording=recording,
        pair=pair,
        sensitivity=sensitivity,
        exit_code=interrupt.exit_code,
    )


def _sensitivity(session: Session, recording: Recording, interrupt: Interrupt) -> NDArray[np.float64] | None:
    """What an expert budget in each layer changes, on the recorded texts; None, with a note, where it is unknown."""
    from moeedge.engine.layer_sensitivity import measure_sensitivity
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.progress import count_bar

    err = stderr_console()
    found = None
    try:
        with count_bar(err, "measuring budgets", "layers", len(session.model.info.expert_layers)) as bar:
            found = measure_sensitivity(
                session.model,
                recording.conversations,
                gamma=session.info.gamma,
                n_threads=session.info.n_threads,
                cancel=interrupt,
                on_layer=bar.add,
            )
    except EngineError as error:  # the recording is complete
        say(err, error.message, style="yellow")
    if found is None:
        say(err, "The ranking lacks the layers' sensitivity; layers are fitted by their loss alone.", style="yellow")
    return found


def _compare_pair(session: Session, recording: Recording, interrupt: Interrupt) -> PairSimilarity | None:
    """How similar draft and target are on the recorded texts; None, with a note, where they cannot be compared."""
    from moeedge.engine.head_draft import HeadDraft
    from moeedge.engine.pair_similarity import MAX_TOKENS, compare_pair
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.progress import count_bar

    if interrupt():
        return None
    err = stderr_console()
    if session.draft_context is None:
        if isinstance(session.draft, HeadDraft):
            say(err, "Draft and target are not compared: a head reads the target's own states.")
        return None
    n_tokens = min(sum(map(len, recording.conversations)), MAX_TOKENS)
    try:
        with count_bar(err, "comparing draft and target", "tokens", n_tokens) as bar:
            pair, reason = compare_pair(session, recording.conversations, cancel=interrupt, on_tokens=bar.add)
    except EngineError as error:  # the recording is complete
        pair, reason = None, error.message
    if pair is None and not interrupt():
        say(err, f"Draft and target are not compared: {reason.rstrip('.')}.")
    return pair


def profile_trace(
    path: Path, choice: LayerChoice, *, gamma: int | None, acceptance_chance: float | None, seed: int
) -> Profiled:
    """A recorded trace to profile; with an acceptance chance, its text cut into verifications of `gamma` drafts.

    Raises InputError for an unusable file, LayerRangeError for a layer that does not exist or was not recorded.
    """
    import numpy as np

    from moeedge.trace.importers import read_trace
    from moeedge.trace.schedule import GAMMA
    from moeedge.trace.steps import simulated_steps

    trace = read_trace(path)
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
