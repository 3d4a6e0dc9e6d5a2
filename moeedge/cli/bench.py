"""`moeedge bench`: stock llama.cpp, the same with drafts, and moeedge, side by side in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.bench_options import (
    SYNTHETIC_ANSWER,
    BatchSizes,
    BudgetSweepOptions,
    DraftMaxima,
    NPredict,
    Parallel,
    SyntheticOptions,
    Threads,
    UbatchSizes,
    contexts,
    parallel_counts,
    parse_gammas,
    single,
)
from moeedge.cli.bench_run import measure, measure_parallel
from moeedge.cli.common import accept_any_text
from moeedge.cli.declare import Output, derive, flatten, list_of, option, output_option
from moeedge.cli.engine_options import EngineOptions, PlacementOptions, layer_notes, parse_ram
from moeedge.cli.llama_options import LlamaOptions
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.bench.config import BenchPlan, Sweep
    from moeedge.data.prompts import Dataset
    from moeedge.engine.types import EngineConfig

Datasets = Annotated[
    str | None,
    derive(
        options.Dataset,
        metavar="LIST",
        help="Answer prompts: mtbench, humaneval, gsm8k, mmlu-pro, alpaca, cnndm, qa, sample (some of each), toy (for "
        'the bundled pair), or a file of objects with "prompt", "turns" or "messages", one per line. Looked for in '
        "$MOEEDGE_DATA, the cache and the hub. Several, separated by commas, are measured one after the other. "
        "Default: none (llama-bench's tests); where caches, budgets or texts together are compared, toy or sample.",
    ),
]
Limit = Annotated[int, derive(options.Limit, help="At most N prompts of each dataset, spread evenly; 0: all.")]
Repetitions = Annotated[
    int | None, derive(options.Repetitions, help="How often everything is measured. Default: 3; with --score 1.")
]
Score = Annotated[
    bool,
    option(
        options.WORK,
        "--score",
        "Compare the answers with the dataset's references (docs/datasets.md): a column with the mean.",
    ),
]
RunCode = Annotated[
    bool,
    option(
        options.WORK,
        "--run-code",
        "With --score: run the programs that the model writes against their tests, each in a process without "
        "network and with limits on time and memory. Without it they are not scored.",
    ),
]
Modes = Annotated[
    str | None,
    option(
        options.WORK,
        "--modes LIST",
        "Modes to compare, separated by commas: stock-ar (llama.cpp, one token at a time; the reference of the "
        "output check), stock-sd (the same with the draft), moeedge, moeedge-ar (moeedge without the draft); with a "
        "GPU stock-ncmoe and stock-ncmoe-sd (llama.cpp with whole layers in the same GPU memory, --n-cpu-moe). "
        "Without a draft stock modes with drafts are left out and moeedge decodes one "
        "token at a time. A mode with drafts may name its draft length, or several: stock-sd:1-8, moeedge:auto. "
        "Default: stock-ar,stock-sd,moeedge, with a GPU also stock-ncmoe,stock-ncmoe-sd.",
    ),
]
IgnoreEos = Annotated[bool, option(options.WORK, "--ignore-eos", "Continue answers after stop tokens, to -n tokens.")]
NoWarmup = Annotated[
    bool,
    option(
        options.WORK,
        "--no-warmup",
        "Do not run every mode once before the first sample: the first repetition starts with an empty cache.",
    ),
]
Policies = Annotated[str | None, list_of(options.Policy)]
CacheRatios = Annotated[str | None, list_of(options.CacheRatio)]
OutputFormat = Annotated[
    Output,
    output_option(
        Output.MD,
        Output.TEXT,
        Output.CSV,
        Output.JSON,
        Output.JSONL,
        Output.SQL,
        help="Format of the rows on standard output.",
    ),
]
Resume = Annotated[
    str | None,
    option(
        options.WORK,
        "--resume [FILE]",
        "Go on with an interrupted bench: the same command with --resume, and the file that it named unless it is the "
        "newest. What it finished is not measured again.",
    ),
]


@flatten
def bench(
    dataset: Datasets = None,
    offline_sample: options.OfflineSample = False,
    limit: Limit = 0,
    n_predict: NPredict = None,
    repetitions: Repetitions = None,
    score: Score = False,
    run_code: RunCode = False,
    modes: Modes = None,
    ignore_eos: IgnoreEos = False,
    no_warmup: NoWarmup = False,
    resume: Resume = None,
    *,
    synthetic: SyntheticOptions,
    parallel: Parallel = None,
    engine: EngineOptions,
    llama: LlamaOptions,
    threads: Threads = None,
    batch_size: BatchSizes = None,
    ubatch_size: UbatchSizes = None,
    draft_max: DraftMaxima = None,
    budgets: BudgetSweepOptions,
    policy: Policies = None,
    cache_ratio: CacheRatios = None,
    vram: options.Vram = None,
    ram: options.Ram = "auto",
    ablate: options.Ablate = [],  # noqa: B006 (typer copies it)
    utility_cap: options.UtilityCap = 4,
    forgetting: options.Forgetting = 0.1,
    prefill_path: options.PrefillPath = "auto",
    no_calibrate: options.NoCalibrate = False,
    plot: options.Plot = None,
    output: OutputFormat = Output.MD,
    verbose: options.Verbose = False,
) -> None:
    """Measure speed next to stock llama.cpp, and check that the answers are the same.

    Without --dataset the tests are llama-bench's: pp512 (a prompt of 512 random tokens) and tg128 (128 tokens, one by
    one). With it, prompts are answered. Modes by default: stock-ar (llama.cpp, one token at a time), stock-sd (the
    same with drafts) and moeedge. They take turns, so that a slow moment of the machine affects all alike. A ratio
    is a mode's speed over that of the stock-ar run next to it; the median is shown.

    --policy and --cache-ratio compare expert caches, --expert-budget and --draft-max speed with quality, --parallel
    several texts at once. Ctrl-C prints what is measured; --resume goes on. Exit code 1: an answer differs from
    stock-ar's where the scores of the two tokens are not almost equal.
    """
    from moeedge.bench.config import DEFAULT_MODES, GPU_MODES, Sweep, parse_policies, parse_ratios

    sweeps = policy is not None or cache_ratio is not None
    engine.limit_openmp_spin(emulate_bundled=sweeps)  # before llama.cpp is loaded
    from moeedge.data.datasets import load_datasets
    from moeedge.engine.loading import resolve_device
    from moeedge.policies.registry import POLICIES
    from moeedge.ui.console import check_picture

    accept_any_text()
    if limit < 0:
        raise InputError(f"--limit must be at least 0, not {limit}.", "0: all prompts.")
    gammas, counts = parse_gammas(draft_max), parallel_counts(parallel)
    if counts:
        refused = {
            "--score": score,
            "-p": synthetic.is_asked,
            "--resume": resume is not None,
            "--draft-p-min": engine.draft_p_min > 0,
            "--expert-budget": budgets.expert_budget is not None,
            "--perplexity": budgets.perplexity is not None,
        }
        for name in (name for name, is_given in refused.items() if is_given):
            raise InputError(f"--parallel and {name} cannot be used together.", "Measure them in two runs.")
    if gammas:
        fixed = [gamma for gamma in gammas if gamma != "auto"]
        engine = replace(engine, draft_max="auto" if len(fixed) < len(gammas) else str(max(fixed)))
    sweep = Sweep(parse_policies(policy, POLICIES), parse_ratios(cache_ratio), gammas=gammas, counts=counts)
    placement = PlacementOptions(
        vram=vram,
        ablate=ablate,
        utility_cap=utility_cap,
        forgetting=forgetting,
        prefill_path=prefill_path,
        no_calibrate=no_calibrate,
    )
    # comparisons of caches and budgets, and texts decoded together have drafts of one length
    auto = not (sweeps or counts or budgets.expert_budget or budgets.perplexity)
    base = engine.config(
        placement.config(),
        emulate_bundled=sweeps,
        default_draft=None if counts else "auto",
        auto_gamma=True if auto else None,
    )
    base = replace(llama.apply(base), ram=parse_ram(ram))
    if counts:  # several texts share sessions that are open at once, so the file is mapped
        if isinstance(base.ram, int):
            raise InputError("--parallel does not measure experts in RAM.", "Leave out --ram: llama.cpp maps the file.")
        base = replace(base, ram="off")
    sweep = replace(sweep, budgets=budgets.parse())
    if plot is not None:
        check_picture(plot)
        if not sweep.asked:
            raise InputError(
                "--plot draws what --policy, --cache-ratio, --expert-budget, --draft-max and --parallel compare.",
                "Give at least one of them.",
            )
    if cache_ratio is not None and base.placement.vram_bytes is not None:
        raise InputError("--vram and --cache-ratio cannot be used together.", "Leave out one of them.")
    if sweep.has_caches and resolve_device(base).kind == "none":
        raise InputError(
            "--policy and --cache-ratio compare expert caches, and there is no device for one.",
            "Use -dev emulated; moeedge devices lists what this machine has.",
        )
    if dataset is None:
        compares = sweep.asked and not synthetic.is_asked
        toy = (compares or score) and paths.is_bundled(base.model)
        dataset = "sample" if offline_sample else "toy" if toy else "sample" if compares else None
    prompts = None if dataset is None else load_datasets(dataset, offline_sample=offline_sample)
    if modes is None:
        has_layers = not counts and resolve_device(base).kind == "gpu"
        modes = f"{DEFAULT_MODES},{GPU_MODES}" if has_layers else DEFAULT_MODES
    plan, notes = make_bench_plan(
        base,
        modes,
        prompts,
        limit=limit or None,
        tests=synthetic.tests(n_predict, has_dataset=prompts is not None),
        n_predict=None if prompts is None else single(n_predict, "-n"),
        repetitions=repetitions,
        ignore_eos=ignore_eos,
        score=score,
        run_code=run_code,
        delay_s=synthetic.delay,
        warm_up=not no_warmup,
        sweep=sweep,
        text=None if counts else budgets.text(base.model),
    )
    notes += layer_notes(base)
    plans = [replace(plan, base=each) for each in contexts(plan.base, threads, batch_size, ubatch_size)]
    if len(plans) > 1 and (counts or plot is not None):
        option = "--parallel" if counts else "--plot"
        raise InputError(f"{option} goes with one value of -t, -b and -ub.", "Name one of each.")
    if counts:
        raise typer.Exit(measure_parallel(plans[0], notes, output, verbose=verbose, plot=plot))
    raise typer.Exit(measure(plans, notes, output, verbose=verbose, plot=plot, resume=resume))


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
    """The work that the options ask for together, and a sentence for each mode that was left out.

    n_predict: tokens of an answer at most. Scores need complete answers, but no repetition: greedy answers are the
    same every time. others: further fields of the plan.
    """
    from moeedge.bench.config import DEFAULT_REPETITIONS, BenchPlan, Sweep, applicable_modes, parse_modes

    kept, notes = applicable_modes(parse_modes(modes), has_draft=base.draft is not None and base.gamma > 0)
    if not kept:
        raise InputError("No mode is left to measure.", " ".join(notes))
    if n_predict is None:
        n_predict = dataset.answer_tokens if dataset is not None and score else SYNTHETIC_ANSWER
    plan = BenchPlan(
        base=base,
        modes=(sweep or Sweep()).modes(kept),
        dataset=None if dataset is None else dataset.limited(limit),
        limit=limit,
        n_predict=n_predict,
        repetitions=repetitions if repetitions is not None else 1 if score else DEFAULT_REPETITIONS,
        score=score,
        **others,
    )
    return plan, notes
