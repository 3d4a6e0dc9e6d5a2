"""`moeedge profile`: which experts a model uses, step by step, and how well that can be foreseen."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moeedge.cli import options, profile_options
from moeedge.cli.common import Output, cli_errors, show_log
from moeedge.cli.pair import check_device, layer_notes, limit_openmp_spin, placement_config, resolve_pair
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EmptyPromptError, EngineError, InputError

if TYPE_CHECKING:
    from moeedge.engine.recording import Question, Recording


_DEFAULT_LIMIT = 8  # prompts


def profile(
    layer: profile_options.Layer = None,
    layers: profile_options.Layers = None,
    prompt: profile_options.Prompt = None,
    dataset: profile_options.Dataset = None,
    limit: profile_options.Limit = _DEFAULT_LIMIT,
    offline_sample: profile_options.OfflineSample = False,
    n_predict: profile_options.NPredict = 128,
    raw: profile_options.Raw = False,
    output: profile_options.OutputFormat = Output.TABLE,
    plot: profile_options.Plot = None,
    trace_out: profile_options.TraceOut = None,
    verbose: profile_options.Verbose = False,
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    draft_max: options.DraftMax = None,
    temp: profile_options.Temp = 0.0,
    seed: profile_options.Seed = -1,
    ctx_size: options.CtxSize = 0,
    threads: options.Threads = 0,
    n_gpu_layers: options.NGpuLayers = None,
    device: options.Device = "auto",
    vram: options.Vram = None,
    cache_ratio: options.CacheRatio = None,
    policy: options.Policy = "spac",
    ablate: options.Ablate = [],  # noqa: B006 (typer copies it)
    utility_cap: options.UtilityCap = 4,
    forgetting: options.Forgetting = 0.1,
    prefill_path: options.PrefillPath = "auto",
    no_calibrate: options.NoCalibrate = False,
) -> None:
    """Look inside a model: which experts its tokens use, and how well the next step's experts can be foreseen.

    The profile goes to standard output, everything else to standard error. After Ctrl-C it covers what there is.
    """
    from moeedge.ui.chat.settings import seed_or_random

    with cli_errors():
        limit_openmp_spin(device)
        if layer is not None and layers is not None:
            raise InputError("--layer and --layers exclude each other.", "Give one of them.")
        if n_predict == 0 or n_predict < -1:
            raise ValueError(f"-n must be -1 (until the model stops) or at least 1, not {n_predict}")
        _check_outputs(plot, trace_out)
        check_device(device)
        questions, source = _questions(prompt, dataset, limit, offline_sample)
        pair = resolve_pair(model, model_draft)
        config = pair.engine_config(
            ctx_size=ctx_size,
            threads=threads,
            draft_max=draft_max,
            n_gpu_layers=n_gpu_layers,
            device=device,
            placement=placement_config(
                vram=vram,
                cache_ratio=cache_ratio,
                policy=policy,
                ablate=ablate,
                utility_cap=utility_cap,
                forgetting=forgetting,
                prefill_path=prefill_path,
                no_calibrate=no_calibrate,
            ),
        )
        drawn = seed_or_random(seed)
        if drawn is None and temp > 0:
            drawn = secrets.randbits(32)  # once for all answers, so that the report and the trace can name it
        sampling = SamplingConfig(temperature=temp, seed=drawn)
        if verbose:
            show_log()
        task = _Task(config, pair.bundled, questions, source, n_predict, sampling, raw, layer, layers)
        recording, chosen, code = task.run()
        if trace_out is not None:
            recording.trace.save(trace_out)
        _report(recording, chosen, as_json=output is Output.JSON, single=layers is None, plot=plot)
        if code:
            raise typer.Exit(code)


def _check_outputs(plot: Path | None, trace_out: Path | None) -> None:
    """Before the model runs for minutes: can the files be written?"""
    from moeedge.ui.console import check_output, check_picture

    if plot is not None:
        check_picture(plot)
    if trace_out is not None:
        check_output(trace_out)


def _questions(
    prompt: str | None, dataset: str | None, limit: int, offline_sample: bool
) -> tuple[list[Question], dict[str, object]]:
    """What is to be answered, and how the report calls it."""
    from moeedge.cli.prompt_input import valid_text
    from moeedge.data import load_dataset
    from moeedge.engine.recording import Question

    if prompt is not None:
        if dataset is not None:
            raise InputError("-p and --dataset exclude each other.", "Give one of them.")
        if not prompt.strip():
            raise EmptyPromptError("The prompt is empty: -p is blank.", "Give some text to answer.")
        return [Question.single(valid_text(prompt))], {"dataset": "prompt", "prompts": 1}
    if limit < 0:
        raise ValueError(f"--limit must be >= 0, not {limit}")
    loaded = load_dataset(dataset or "sample", offline_sample=offline_sample).limited(limit or None)
    questions = [
        Question(item.id, tuple([message.as_dict() for message in turn] for turn in item.turns))
        for item in loaded.prompts
    ]
    if not questions:
        raise InputError(f'The prompt set "{loaded.name}" is empty.')
    return questions, {"dataset": loaded.name, "prompts": len(questions), "dataset_sha256": loaded.sha256}


@dataclass(frozen=True)
class _Task:
    """One run of the model, as the options describe it."""

    config: EngineConfig
    toy: bool
    questions: list[Question]
    source: dict[str, object]
    n_predict: int
    sampling: SamplingConfig
    raw: bool
    layer: str | None
    layers: str | None

    def run(self) -> tuple[Recording, list[int], int]:
        """The recording, the layers to report and the exit code (not 0 after an interruption)."""
        from moeedge.engine.recording import check_layers, parse_layers, record_routing
        from moeedge.engine.session import Session
        from moeedge.ui.chat.greeting import print_header
        from moeedge.ui.chat.interrupt import Interrupt
        from moeedge.ui.console import notifier, say, stderr_console
        from moeedge.ui.progress import ProfileProgress

        err = stderr_console()
        with Session.open(self.config, notify=notifier(err)) as session:
            n_layers = session.model.info.n_layers
            if self.layers is not None:
                wanted = parse_layers(self.layers, n_layers)
            else:
                last = str(n_layers - 1)
                wanted = parse_layers(last if self.layer is None else self.layer, n_layers, single=True)
            chosen = check_layers(session, wanted)
            notes = layer_notes(self.config.n_gpu_layers or 0)
            print_header(err, session.info, toy=self.toy, warnings=notes)
            with Interrupt() as interrupt, ProfileProgress(len(self.questions), err) as progress:
                interrupt.arm()
                try:
                    recording = record_routing(
                        session,
                        self.questions,
                        n_predict=self.n_predict,
                        sampling=self.sampling,
                        raw=self.raw,
                        source=self.source,
                        cancel=interrupt,
                        on_step=progress.step,
                    )
                except EngineError:
                    if interrupt.exit_code:  # stopped before anything was there to report
                        raise typer.Exit(interrupt.exit_code) from None
                    raise
        if recording.skipped:
            say(err, f"Longer than the context, left out: {', '.join(recording.skipped)}.", style="yellow")
        if interrupt.exit_code:
            say(err, "Stopped: the profile covers what was generated until then.", style="yellow")
        return recording, chosen, interrupt.exit_code


def _report(recording: Recording, layers: list[int], *, as_json: bool, single: bool, plot: Path | None) -> None:
    import json

    from moeedge.analysis.profile import layer_report, profile_layers
    from moeedge.ui.console import stdout_console
    from moeedge.ui.plots import draw_profiles
    from moeedge.ui.trace_views import print_profiles

    profiles = profile_layers(recording.trace, layers)
    if as_json:
        reports = [layer_report(one, recording) for one in profiles]
        typer.echo(json.dumps(reports[0] if single else reports, ensure_ascii=False))
    else:
        print_profiles(profiles, stdout_console())
    if plot is not None:
        meta = recording.trace.meta
        draw_profiles(profiles, f"{meta.model}, {meta.parameters.get('dataset', '')}, gamma {meta.gamma}", plot)
