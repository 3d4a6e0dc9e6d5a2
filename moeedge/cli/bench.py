"""`moeedge bench`: stock llama.cpp, the same with drafts, and moeedge, side by side in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moeedge import paths
from moeedge.cli import bench_options, options
from moeedge.cli.common import EXIT_FAILURE, cli_errors, print_error, show_log
from moeedge.cli.pair import check_device, limit_openmp_spin, placement_config, resolve_pair
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.bench.config import BenchMode, BenchPlan, Sweep
    from moeedge.bench.records import BenchRow
    from moeedge.data import Dataset


# llama-bench's
_SYNTHETIC_PROMPT = 512
_SYNTHETIC_ANSWER = 128


def bench(
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    draft_max: options.DraftMax = None,
    dataset: bench_options.Dataset = None,
    offline_sample: bench_options.OfflineSample = False,
    limit: bench_options.Limit = None,
    n_prompt: bench_options.NPrompt = None,
    n_predict: bench_options.NPredict = None,
    repetitions: bench_options.Repetitions = None,
    score: bench_options.Score = False,
    run_code: bench_options.RunCode = False,
    modes: bench_options.Modes = bench_options.DEFAULT_MODES,
    ignore_eos: bench_options.IgnoreEos = False,
    no_warmup: bench_options.NoWarmup = False,
    policy: bench_options.Policy = None,
    cache_ratio: bench_options.CacheRatio = None,
    plot: bench_options.Plot = None,
    trace_out: bench_options.TraceOut = None,
    output: bench_options.OutputFormat = bench_options.Output.MD,
    ctx_size: bench_options.CtxSize = 0,
    threads: options.Threads = 0,
    n_gpu_layers: options.NGpuLayers = None,
    device: options.Device = "auto",
    vram: options.Vram = None,
    ablate: options.Ablate = [],  # noqa: B006 (typer copies it)
    utility_cap: options.UtilityCap = 4,
    forgetting: options.Forgetting = 0.1,
    prefill_path: options.PrefillPath = "auto",
    no_calibrate: options.NoCalibrate = False,
    verbose: bench_options.Verbose = False,
) -> None:
    """Measure speed, acceptance and equality of the output: one row per test and mode.

    Answers are greedy. The modes take turns at every prompt, so that a drift of the machine falls on all alike; ratios
    to stock-ar are medians over pairs of neighbours. --policy and --cache-ratio measure several expert caches side by
    side, beside stock modes that have none. Exit code 1 when a mode's answers differ from stock-ar's by more
    than a near-tie.
    """
    with cli_errors():
        sweeps = policy is not None or cache_ratio is not None
        _prepare_process(device, model, sweeps=sweeps)
        sweep = _parse_sweep(policy, cache_ratio, plot)
        check_device(device)
        pair = resolve_pair(model, model_draft)
        base = pair.engine_config(
            ctx_size=ctx_size,
            threads=threads,
            draft_max=draft_max,
            n_gpu_layers=n_gpu_layers,
            device=device,
            emulate=sweeps,
            placement=placement_config(
                vram=vram,
                ablate=ablate,
                utility_cap=utility_cap,
                forgetting=forgetting,
                prefill_path=prefill_path,
                no_calibrate=no_calibrate,
            ),
        )
        _check_room(base, sweep, cache_ratio)
        default = _default_dataset(bundled=pair.bundled, sweeps=sweeps and n_prompt is None, score=score)
        prompts = _prompts(dataset, default, offline_sample=offline_sample)
        plan, notes = make_plan(
            base,
            modes,
            prompts,
            limit=limit,
            n_prompt=n_prompt,
            n_predict=n_predict,
            repetitions=repetitions,
            ignore_eos=ignore_eos,
            score=score,
            run_code=run_code,
            warm_up=not no_warmup,
            sweep=sweep,
        )
        raise typer.Exit(_measure(plan, notes, output.value, verbose=verbose, plot=plot, trace_out=trace_out))


def _prepare_process(device: str, model: Path | None, *, sweeps: bool) -> None:
    """What has to be settled before llama.cpp and Rich are loaded."""
    limit_openmp_spin(device, may_emulate=sweeps and (model is None or paths.is_bundled(model)))
    from moeedge.cli.prompt_input import accept_any_text

    accept_any_text()


def _default_dataset(*, bundled: bool, sweeps: bool, score: bool) -> str | None:
    """What is asked where no dataset is named; None for synthetic tests."""
    if bundled and (sweeps or score):
        return "toy"
    return "sample" if sweeps else None


def _prompts(dataset: str | None, default: str | None, *, offline_sample: bool) -> Dataset | None:
    """The prompt set that the options name, or else the default; None for synthetic tests."""
    from moeedge.data import load_dataset

    name = dataset if dataset is not None else "sample" if offline_sample else default
    return None if name is None else load_dataset(name, offline_sample=offline_sample)


def make_plan(
    base: EngineConfig,
    modes: str,
    dataset: Dataset | None,
    *,
    limit: int | None,
    n_prompt: int | None,
    n_predict: int | None,
    repetitions: int | None,
    ignore_eos: bool,
    score: bool = False,
    run_code: bool = False,
    warm_up: bool = True,
    sweep: Sweep | None = None,
) -> tuple[BenchPlan, list[str]]:
    """What the options mean together, and a sentence for each mode that was left out.

    -p and -n are llama-bench's sizes without a dataset; with one, -n is the length of an answer. Scores need whole
    answers, but no repetition: greedy answers are the same every time.
    """
    from moeedge.bench.config import DEFAULT_REPETITIONS, BenchPlan, applicable_modes, parse_modes

    kept, notes = applicable_modes(parse_modes(modes), has_draft=base.draft is not None and base.gamma > 0)
    with_data = dataset is not None
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, not {limit}")
    length = n_predict
    if length is None:
        length = dataset.answer_tokens if dataset is not None and score else _SYNTHETIC_ANSWER
    plan = BenchPlan(
        base=base,
        modes=kept if sweep is None else sweep.modes(kept),
        dataset=dataset.limited(limit) if dataset is not None else None,
        limit=limit,
        n_predict=length if with_data else _SYNTHETIC_ANSWER,
        n_prompt=n_prompt if n_prompt is not None else 0 if with_data else _SYNTHETIC_PROMPT,
        n_gen=0 if with_data else length,
        repetitions=repetitions if repetitions is not None else 1 if score else DEFAULT_REPETITIONS,
        ignore_eos=ignore_eos,
        score=score,
        run_code=run_code,
        warm_up=warm_up,
    )
    return plan, notes


def _parse_sweep(policy: str | None, cache_ratio: str | None, plot: Path | None) -> Sweep:
    """What --policy, --cache-ratio and --plot ask for, checked before anything is loaded."""
    from moeedge.bench.config import Sweep, parse_policies, parse_ratios
    from moeedge.policies.registry import POLICIES

    sweep = Sweep(parse_policies(policy, POLICIES), parse_ratios(cache_ratio))
    if plot is not None:
        from moeedge.ui.console import check_picture

        check_picture(plot)
        if not sweep.asked:
            raise InputError("--plot draws what --policy and --cache-ratio compare.", "Give at least one of them.")
    return sweep


def _check_room(base: EngineConfig, sweep: Sweep, cache_ratio: str | None) -> None:
    """Raises InputError where a sweep would find no cache to measure, or two sizes for it."""
    from moeedge.engine.loading import resolve_device

    if not sweep.asked:
        return
    if cache_ratio is not None and base.placement.vram_bytes is not None:
        raise InputError("--vram and --cache-ratio exclude each other.", "Leave out one of them.")
    if resolve_device(base).kind == "none":
        raise InputError(
            "--policy and --cache-ratio measure what a device holds, and there is none.",
            "-dev emulated stands in for one; moeedge devices lists what there is.",
        )


def _traced_mode(path: Path, plan: BenchPlan) -> BenchMode:
    """The mode whose routing goes to `path`; raises InputError, before hours of measuring, where there is none."""
    from moeedge.bench.harness import recorded_mode
    from moeedge.ui.console import check_output

    if plan.dataset is None:
        raise InputError("--trace-out records answers, and synthetic tests have none.", "Name prompts with --dataset.")
    check_output(path)
    return recorded_mode(plan.modes)


def _measure(
    plan: BenchPlan, notes: list[str], form: str, *, verbose: bool, plot: Path | None, trace_out: Path | None = None
) -> int:
    """Runs the plan, prints the rows, draws and records what is asked for, returns the exit code."""
    from moeedge.bench.harness import record_answers
    from moeedge.bench.runner import Bench
    from moeedge.ui.bench_views import difference_lines, render
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.plots import draw_sweep
    from moeedge.ui.progress import BenchProgress

    traced = None if trace_out is None else _traced_mode(trace_out, plan)
    if verbose:
        show_log()
    progress = BenchProgress(bar=not verbose)
    for note in notes:
        progress.note(note)
    with Bench(plan, progress) as run, Interrupt() as interrupt:
        interrupt.arm()
        with progress:
            finished = run.run(cancel=interrupt)
        interrupt.disarm()
        rows = run.rows()
        for line in difference_lines(rows):
            progress.note(line)
        typer.echo(render(rows, form), nl=False)
        if finished and traced is not None and trace_out is not None:  # the rows are out, whatever happens now
            progress.note(f"Recording the routing of {traced.label}.")
            with run.arm(traced) as lane:
                record_answers(lane, run.prompts, plan).save(trace_out)
    if plot is not None and not draw_sweep(rows, plot):
        progress.note("No mode had an expert cache: there is nothing to draw.")
    if not finished:
        progress.note("Interrupted: the rows hold what every mode had done.")
        return interrupt.exit_code
    return _judge(rows)


def _judge(rows: list[BenchRow]) -> int:
    wrong = [row for row in rows if row.output is not None and not row.output.passed]
    if not wrong:
        return 0
    names = ", ".join(dict.fromkeys(row.label for row in wrong))
    n = sum(len(row.output.different) for row in wrong if row.output is not None)
    places = "1 place that is no near-tie" if n == 1 else f"{n} places that are no near-ties"
    print_error(f"The output of {names} differs from stock-ar's in {places}.")
    return EXIT_FAILURE
