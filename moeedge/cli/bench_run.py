"""`moeedge bench` once its options are read: measures, and shows the rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from moeedge import paths
from moeedge.bench.config import (
    DEFAULT_MODES,
    DEFAULT_REPETITIONS,
    GPU_MODES,
    SYNTHETIC_ANSWER,
    SYNTHETIC_PROMPT,
    BenchPlan,
    ScriptedTest,
    Sweep,
    SyntheticTest,
    applicable_modes,
    parse_modes,
    parse_policies,
    parse_ratios,
)
from moeedge.bench.journal import Journal, folder, settings_of
from moeedge.bench.records import BenchRow
from moeedge.bench.runner import Bench
from moeedge.cli.bench_options import BenchOptions
from moeedge.cli.common import EXIT_FAILURE, accept_any_text, print_error
from moeedge.cli.engine_options import expect_no_companions, layer_notes, make_budget
from moeedge.cli.options import Output, parse_number
from moeedge.data.datasets import TOY, load_datasets, load_text
from moeedge.data.prompts import Dataset
from moeedge.engine.loading import resolve_device
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError, MoeedgeError
from moeedge.hardware.provenance import read_provenance
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.run import Run
from moeedge.ui.bench_plots import draw
from moeedge.ui.bench_views import difference_lines, quiet_lines, render
from moeedge.ui.chat.interrupt import Interrupt
from moeedge.ui.console import Bar, check_picture, stderr_console, supports_panel

_OF_CONTEXT = ("flash_attn", "type_k", "type_v")  # fields of a configuration's context


def run_bench(options: BenchOptions) -> int:
    """Measures what the options name, shows the rows and draws. Returns the exit code. Raises InputError."""
    accept_any_text()
    engine, parallel, budgets = options.engine, options.parallel, options.expert_budget
    if parallel:
        _check_parallel(options)
    if gammas := options.draft_max:
        fixed = [gamma for gamma in gammas if gamma != "auto"]
        engine = replace(engine, draft_max="auto" if len(fixed) < len(gammas) else max(fixed))
    policies, ratios = parse_policies(options.policy), parse_ratios(options.cache_ratio)
    sweep = Sweep(policies, ratios, gammas=gammas or (), counts=parallel or ())
    # comparisons of caches and budgets have drafts of one length
    auto = not (options.compares_caches or budgets or options.perplexity)
    if engine.cpu_moe and options.n_cpu_moe:
        raise InputError("--cpu-moe and --n-cpu-moe cannot be used together.", "Leave out one of them.")
    base = engine.config(
        options.placement.config(),
        emulate_bundled=options.compares_caches,
        default_draft=None if parallel else "auto",
        auto_gamma=auto or None,
    )
    base = replace(base, ram=options.ram, routing=options.routing)
    if parallel:  # several texts share sessions that are open at once, so the file is mapped
        if isinstance(base.ram, int):
            raise InputError("--parallel does not measure experts in RAM.", "Leave out --ram: llama.cpp maps the file.")
        base = replace(base, ram="off")
        for count in parallel:
            replace(base, n_parallel=count)  # raises ValueError out of its range
    lists = {
        name: getattr(options, name) for name in ("n_batch", "n_ubatch", "n_gpu_layers", "n_cpu_moe", *_OF_CONTEXT)
    }
    if base.device == "none":
        lists["n_gpu_layers"] = None
    bases = _arms(base, n_threads=options.threads, **lists)
    base = bases[0]
    sweep = replace(sweep, budgets=_budgets(options))
    if options.plot is not None:
        check_picture(options.plot)
    if options.cache_ratio is not None and base.placement.vram_bytes is not None:
        raise InputError("--vram and --cache-ratio cannot be used together.", "Leave out one of them.")
    device = resolve_device(base) if sweep.has_caches or (options.modes is None and not parallel) else None
    if sweep.has_caches and device is not None and not device.has_tiers:
        what = "--policy and --cache-ratio compare expert caches, and there is no device for one."
        raise InputError(what, "Use -dev emulated; moeedge devices lists what this machine has.")
    dataset, is_bundled = options.dataset, paths.is_bundled(base.model)
    if dataset is None:
        compares = sweep.is_set and not (options.has_synthetic or options.accept or options.routing)
        toy = (compares or options.score) and is_bundled
        dataset = "sample" if options.offline_sample else "toy" if toy else "sample" if compares else None
    prompts = None if dataset is None else load_datasets(dataset, offline_sample=options.offline_sample)
    has_layers = not parallel and device is not None and device.kind == "gpu"
    text = options.perplexity
    if text is None and budgets is not None and is_bundled:
        text = TOY
    n_predict = options.n_predict
    if prompts is not None and n_predict is not None and len(n_predict) > 1:
        what = f"With --dataset -n takes one number, not '{','.join(map(str, n_predict))}'."
        raise InputError(what, "Leave out --dataset, or choose.")
    plan, notes = make_bench_plan(
        base,
        (f"{DEFAULT_MODES},{GPU_MODES}" if has_layers else DEFAULT_MODES) if options.modes is None else options.modes,
        prompts,
        limit=options.limit or None,
        tests=_tests(options, has_dataset=prompts is not None or options.accept is not None),
        scripted=_scripted(options),
        n_predict=n_predict[0] if prompts is not None and n_predict else None,
        repetitions=options.repetitions,
        ignore_eos=options.ignore_eos,
        score=options.score,
        run_code=options.run_code,
        delay_s=options.delay,
        warm_up=not options.no_warmup,
        sweep=sweep,
        text=None if parallel or text in (None, "none") else load_text(text),
    )
    if options.n_gpu_layers and base.device == "none":
        notes.append("-ngl has no effect with -dev none.")
    notes += dict.fromkeys(note for each in bases for note in layer_notes(each))
    plans = [replace(plan, base=each) for each in bases]
    _check_lists(options, plans, sweep)
    return measure(plans, notes, options.output, verbose=options.verbose, plot=options.plot, resume=options.resume)


def _check_parallel(options: BenchOptions) -> None:
    """Raises InputError for what does not go with --parallel."""
    refused = {
        "--score": options.score,
        "-p": options.has_synthetic,
        "--accept": options.accept is not None,
        "--routing": options.routing is not None,
        "--draft-p-min": options.engine.draft_p_min > 0,
        "--expert-budget": options.expert_budget is not None,
        "--perplexity": options.perplexity is not None,
    }
    for name in (name for name, is_given in refused.items() if is_given):
        raise InputError(f"--parallel and {name} cannot be used together.", "Measure them in two runs.")


def _check_lists(options: BenchOptions, plans: Sequence[BenchPlan], sweep: Sweep) -> None:
    """Raises InputError for lists that have nothing to draw, or that do not go with what else is compared."""
    if options.plot is not None and not sweep.is_set and not _has_axis(plans):
        swept = "--policy, --cache-ratio, --expert-budget, --draft-max, --parallel, or lists of -p, -d, -t, -b and -ub"
        raise InputError(f"--plot draws what {swept} compare.", "Give at least one of them.")
    if options.plot is not None and sweep.is_set and len(plans) > 1:
        what = "--plot of policies, caches, budgets and draft lengths goes with one value of -t and other lists."
        raise InputError(what, "Name one of each.")
    if len(plans) > 1 and options.parallel:
        what = "--parallel goes with one value of -t, -b and -ub, and of the options of layers and of the KV cache."
        raise InputError(what, "Name one of each.")


def _arms(base: EngineConfig, **lists: Sequence[Any] | None) -> list[EngineConfig]:
    """The configuration once per combination of the listed fields, its own or its context's. Raises ValueError."""
    names = [name for name, values in lists.items() if values]
    configs = []
    for values in itertools.product(*(lists[name] or () for name in names)):
        own = dict(zip(names, values, strict=True))
        context = {name: own.pop(name) for name in names if name in _OF_CONTEXT}
        configs.append(replace(base, **own, context=replace(base.context, **context)))
    return configs


def _budgets(options: BenchOptions) -> tuple[ExpertBudget, ...]:
    """Every budget with each ranking and policy; "off" is none of them, and always measured. Raises InputError."""
    numbers = [number for number in map(parse_number, options.expert_budget or ()) if number is not None]
    if not numbers:
        expect_no_companions(options, "LIST")
    rankings, policies = options.budget_ranking or (None,), options.budget_policy or (None,)
    combined = itertools.product(rankings, policies, numbers)
    return tuple(make_budget(number, ranking=ranking, policy=policy) for ranking, policy, number in combined)


def _tests(options: BenchOptions, *, has_dataset: bool) -> tuple[SyntheticTest, ...]:
    """The tests as llama-bench orders them: prompts, decoding and pairs of each depth. Raises InputError.

    With a dataset or scripted acceptance, only those that are asked for.
    """
    prompts = [0 if has_dataset else SYNTHETIC_PROMPT] if options.n_prompt is None else options.n_prompt
    answers = [] if has_dataset else [SYNTHETIC_ANSWER] if options.n_predict is None else options.n_predict
    tests = synthetic_tests(prompts, answers, options.pairs, [0] if options.n_depth is None else options.n_depth)
    if options.n_depth is not None and not tests:
        raise InputError("-d is the depth of synthetic tests, and there are none.", "Add -p 512.")
    return tests


def synthetic_tests(
    prompts: Sequence[int], answers: Sequence[int], pairs: Sequence[tuple[int, int]] = (), depths: Sequence[int] = (0,)
) -> tuple[SyntheticTest, ...]:
    """Tests of these sizes, each once; sizes of 0 are none."""
    sizes = [*((n, 0) for n in prompts if n), *((0, n) for n in answers if n), *pairs]
    return tuple(dict.fromkeys(SyntheticTest(*size, depth) for depth in depths for size in sizes))


def _scripted(options: BenchOptions) -> tuple[ScriptedTest, ...]:
    """The tests with scripted acceptance, one for each length and rate. Raises InputError."""
    if options.accept is None and options.accept_confidence is not None:
        raise InputError("--accept-confidence describes scripted drafts.", "Add --accept .7.")
    pairs = itertools.product(options.n_predict or [SYNTHETIC_ANSWER], options.accept or ())
    return tuple(ScriptedTest(n, rate, options.accept_confidence or "calibrated") for n, rate in pairs)


def make_bench_plan(
    base: EngineConfig,
    modes: str,
    dataset: Dataset | None,
    *,
    limit: int | None = None,
    n_predict: int | None = None,
    repetitions: int | None = None,
    score: bool = False,
    sweep: Sweep | None = None,
    **others: Any,
) -> tuple[BenchPlan, list[str]]:
    """The plan of the options (others: fields of it as they are), and a sentence for each mode that was left out."""
    columns, notes = applicable_modes(parse_modes(modes), has_draft=base.draft is not None and base.gamma > 0)
    if not columns:
        raise InputError("No mode is left to measure.", " ".join(notes))
    if n_predict is None:  # scores need complete answers, but no repetition: greedy answers are always the same
        n_predict = dataset.answer_tokens if dataset is not None and score else SYNTHETIC_ANSWER
    plan = BenchPlan(
        base=base,
        modes=(sweep or Sweep()).modes(columns),
        dataset=None if dataset is None else dataset.limited(limit),
        limit=limit,
        n_predict=n_predict,
        repetitions=repetitions if repetitions is not None else 1 if score else DEFAULT_REPETITIONS,
        score=score,
        **others,
    )
    return plan, notes


def _has_axis(plans: Sequence[BenchPlan]) -> bool:
    """Whether there is something to draw over: threads, batches, or prompts and depths of one kind of test."""
    settings = {(plan.base.n_threads, plan.base.n_batch, plan.base.n_ubatch) for plan in plans}
    tests = plans[0].tests
    return len(settings) > 1 or len({(test.n_prompt, test.depth, test.n_gen) for test in tests}) > len(
        {test.n_gen for test in tests}
    )


def measure(
    plans: Sequence[BenchPlan],
    notes: list[str],
    output: Output,
    *,
    verbose: bool,
    plot: Path | None,
    resume: str | None,
) -> int:
    """Runs the plans, prints the rows and draws. Returns the exit code."""
    environment = read_provenance(plans[0].base.model, trace=plans[0].base.routing)
    settings = [settings_of(plan, environment) for plan in plans]
    journal = Journal.begin(settings) if resume is None else Journal.resume(resume, settings)
    console = stderr_console()
    progress = Bar(console, "samples", is_shown=not verbose and supports_panel(console))
    run = Run(progress.note, progress=progress)
    for note in notes:
        progress.note(note)
    if journal.path is None:
        progress.note(f"No file can be written to {folder()}, or its disk is full: this run cannot be resumed.")
    if resume is not None:
        progress.note(f"{journal.n_done} samples are from {journal.path}.")
        if plans[0].base.device != "none":
            progress.note("An expert cache begins anew: hits of the first prompts are lower than without the break.")
    rows: list[BenchRow] = []
    finished = True
    with journal, Interrupt() as interrupt:
        run.cancelled = interrupt
        try:
            for part, plan in enumerate(plans):
                with Bench(plan, run, journal, part) as bench:
                    try:
                        with interrupt.armed(), progress:
                            finished = bench.measure()
                    finally:
                        rows += bench.rows()
                if not finished:
                    break
        except MoeedgeError:
            if journal.has_samples and journal.path is not None:
                progress.note(f"An error ended the bench.{_going_on(journal)}")
            raise
        finally:  # the measured rows come out, whatever happens
            for line in difference_lines(rows):
                progress.note(line)
            typer.echo(render(rows, output.value), nl=False)
    if plot is not None and not draw(rows, plot):
        reason = "No two rows differ in what an axis shows"
        if any(mode.is_swept for mode in plans[0].modes):
            reason = "No mode had an expert cache"
        if plans[0].decodes_together:
            reason = "No mode with drafts was measured next to plain decoding"
        elif plans[0].compares_speculation:
            reason = "No mode was measured next to stock-ar"
        progress.note(f"{reason}: there is nothing to draw.")
    for line in quiet_lines(rows):
        progress.note(line)
    if not finished:
        progress.note(f"Interrupted: the rows hold what every mode had done.{_going_on(journal)}")
        return interrupt.exit_code
    journal.drop()
    return exit_code(rows)


def _going_on(journal: Journal) -> str:
    return "" if journal.path is None else f" Go on with the same command and --resume {journal.path}"


def exit_code(rows: Sequence[BenchRow]) -> int:
    """1, and a message on standard error, if a mode's output differs from the reference by more than a near-tie."""
    wrong = [(row.label, row.output) for row in rows if row.output is not None and not row.output.passed]
    if not wrong:
        return 0
    names = ", ".join(dict.fromkeys(label for label, _ in wrong))
    n = sum(len(output.different) for _, output in wrong)
    print_error(f"The output of {names} differs from stock-ar's at {n} position(s) by more than a near-tie.")
    return EXIT_FAILURE
