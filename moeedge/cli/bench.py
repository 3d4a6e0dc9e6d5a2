"""`moeedge bench`: stock llama.cpp, the same with drafts, and moeedge, side by side in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import typer

from moeedge import paths
from moeedge.cli.bench_options import BudgetSweepOptions, SyntheticOptions, arms, single
from moeedge.cli.common import accept_any_text
from moeedge.cli.engine_options import LlamaOptions, PlacementOptions
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError

declare(
    """
    * --dataset LIST  Answer prompts: mtbench, humaneval, gsm8k, mmlu-pro, alpaca, cnndm, qa, sample (some of each), toy
        (for the bundled pair), or a file of objects with "prompt", "turns" or "messages", one per line. Looked for in
        $MOEEDGE_DATA, the cache and the hub. Several, separated by commas, are measured one after the other. Default:
        none (llama-bench's tests); where caches, budgets or texts together are compared, toy or sample.
    * --limit N  At most N prompts of each dataset, spread evenly; 0: all.
    * --repetitions N  How often everything is measured. Default: 3; with --score 1.
    * --policy LIST  ... Several, separated by commas, are compared.
    * --cache-ratio LIST  ... Several, separated by commas, are compared.
    * --output md|text|csv|json|jsonl|sql  Format of the rows on standard output.
    [Workload]
    --ignore-eos  Continue answers after stop tokens, to -n tokens.
    * --score  Compare the answers with the dataset's references (docs/datasets.md): a column with the mean.
    --run-code  With --score: run the programs that the model writes against their tests, each in a process without
        network and with limits on time and memory. Without it they are not scored.
    * --modes LIST  Modes to compare, separated by commas: stock-ar (llama.cpp, one token at a time; the reference of
        the output check), stock-sd (the same with the draft), stock-ngram (the same with the text's n-grams as drafts),
        moeedge, moeedge-ar (moeedge without the draft); with a GPU stock-ncmoe and stock-ncmoe-sd (llama.cpp with whole
        layers in the same GPU memory, --n-cpu-moe). Without a draft stock-sd and stock-ncmoe-sd are left out and
        moeedge decodes one token at a time. A mode with drafts may name its draft length, or several, and the
        probability below which drafts of a model end: stock-sd:1-8, moeedge:auto, stock-sd:8/p0.75. Default:
        stock-ar,stock-sd,moeedge, with a GPU also stock-ncmoe,stock-ncmoe-sd.
    --no-warmup  Do not run every mode once before the first sample: the first repetition starts with an empty cache.
    * --resume [FILE]  Go on with an interrupted bench: the same command with --resume, and the file that it named
        unless it is the newest. What it finished is not measured again.
    """,
    "bench",
)


@flatten
def bench(
    dataset: str | None = None,
    offline_sample: bool = False,
    limit: int = 0,
    n_predict: list[int] | None = None,
    repetitions: int | None = None,
    score: bool = False,
    run_code: bool = False,
    modes: str | None = None,
    ignore_eos: bool = False,
    no_warmup: bool = False,
    resume: str | None = None,
    *,
    synthetic: SyntheticOptions,
    parallel: tuple[int, ...] | None = None,
    engine: LlamaOptions,
    threads: list[int] | None = None,
    n_batch: list[int] | None = None,
    n_ubatch: list[int] | None = None,
    n_gpu_layers: list[int | None] | None = None,
    n_cpu_moe: list[int] | None = None,
    flash_attn: list[str] | None = None,
    type_k: list[str] | None = None,
    type_v: list[str] | None = None,
    draft_max: tuple[int | Literal["auto"], ...] | None = None,
    budgets: BudgetSweepOptions,
    policy: str | None = None,
    cache_ratio: str | None = None,
    placement: PlacementOptions,
    ram: int | Literal["auto", "off"] = "auto",
    plot: Path | None = None,
    output: Output = Output.MD,
    verbose: bool = False,
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
    sweeps = policy is not None or cache_ratio is not None
    engine.limit_openmp_spin(emulate_bundled=sweeps)
    from moeedge.cli import bench_run as run  # from here on llama.cpp is loaded

    accept_any_text()
    if parallel:
        refused = {
            "--score": score,
            "-p": synthetic.is_asked,
            "--accept": synthetic.accept is not None,
            "--routing": synthetic.routing is not None,
            "--draft-p-min": engine.draft_p_min > 0,
            "--expert-budget": budgets.expert_budget is not None,
            "--perplexity": budgets.perplexity is not None,
        }
        for name in (name for name, is_given in refused.items() if is_given):
            raise InputError(f"--parallel and {name} cannot be used together.", "Measure them in two runs.")
    if draft_max:
        fixed = [gamma for gamma in draft_max if gamma != "auto"]
        engine = replace(engine, draft_max="auto" if len(fixed) < len(draft_max) else max(fixed))
    sweep = run.make_sweep(policy, cache_ratio, draft_max or (), parallel or ())
    # comparisons of caches and budgets, and texts decoded together have drafts of one length
    auto = not (sweeps or parallel or budgets.expert_budget or budgets.perplexity)
    if engine.cpu_moe and n_cpu_moe:
        raise InputError("--cpu-moe and --n-cpu-moe cannot be used together.", "Leave out one of them.")
    default_draft: Literal["auto"] | None = None if parallel else "auto"
    base = engine.config(
        placement.config(), emulate_bundled=sweeps, default_draft=default_draft, auto_gamma=auto or None
    )
    base = replace(base, ram=ram, routing=synthetic.routing)
    if parallel:  # several texts share sessions that are open at once, so the file is mapped
        if isinstance(base.ram, int):
            raise InputError("--parallel does not measure experts in RAM.", "Leave out --ram: llama.cpp maps the file.")
        base = replace(base, ram="off")
        for count in parallel:
            replace(base, n_parallel=count)  # raises ValueError out of its range
    layers = None if base.device == "none" else n_gpu_layers
    bases = arms(
        base,
        n_threads=threads,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_gpu_layers=layers,
        n_cpu_moe=n_cpu_moe,
        flash_attn=flash_attn,
        type_k=type_k,
        type_v=type_v,
    )
    base = bases[0]
    sweep = replace(sweep, budgets=budgets.parse())
    if plot is not None:
        run.check_picture(plot)
    if cache_ratio is not None and base.placement.vram_bytes is not None:
        raise InputError("--vram and --cache-ratio cannot be used together.", "Leave out one of them.")
    if sweep.has_caches and run.resolve_device(base).kind == "none":
        what = "--policy and --cache-ratio compare expert caches, and there is no device for one."
        raise InputError(what, "Use -dev emulated; moeedge devices lists what this machine has.")
    if dataset is None:
        compares = sweep.is_set and not (synthetic.is_asked or synthetic.accept or synthetic.routing)
        toy = (compares or score) and paths.is_bundled(base.model)
        dataset = "sample" if offline_sample else "toy" if toy else "sample" if compares else None
    prompts = None if dataset is None else run.load_datasets(dataset, offline_sample=offline_sample)
    plan, notes = run.make_bench_plan(
        base,
        run.default_modes(base, together=bool(parallel)) if modes is None else modes,
        prompts,
        limit=limit or None,
        tests=synthetic.tests(n_predict, has_dataset=prompts is not None),
        scripted=synthetic.scripted(n_predict),
        n_predict=None if prompts is None else single(n_predict, "-n"),
        repetitions=repetitions,
        ignore_eos=ignore_eos,
        score=score,
        run_code=run_code,
        delay_s=synthetic.delay,
        warm_up=not no_warmup,
        sweep=sweep,
        text=None if parallel else budgets.text(base.model),
    )
    if n_gpu_layers and base.device == "none":
        notes.append("-ngl has no effect with -dev none.")
    notes += dict.fromkeys(note for each in bases for note in run.layer_notes(each))
    plans = [replace(plan, base=each) for each in bases]
    if plot is not None and not sweep.is_set and not run.has_axis(plans):
        options = (
            "--policy, --cache-ratio, --expert-budget, --draft-max, --parallel, or lists of -p, -d, -t, -b and -ub"
        )
        raise InputError(f"--plot draws what {options} compare.", "Give at least one of them.")
    if plot is not None and sweep.is_set and len(plans) > 1:
        what = "--plot of policies, caches, budgets and draft lengths goes with one value of -t and other lists."
        raise InputError(what, "Name one of each.")
    if len(plans) > 1 and parallel:
        what = "--parallel goes with one value of -t, -b and -ub, and of the options of layers and of the KV cache."
        raise InputError(what, "Name one of each.")
    raise typer.Exit(run.measure(plans, notes, output, verbose=verbose, plot=plot, resume=resume))
