"""`moeedge bench`: stock llama.cpp, the same with drafts, and moeedge, side by side in one process.

Its options are lists of sizes, depths and threads as llama-bench has them, and comparisons.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from moeedge import paths
from moeedge.cli.common import accept_any_text, names
from moeedge.cli.engine_options import LlamaOptions, PlacementOptions, expect_no_companions, make_budget
from moeedge.cli.foreign import SWITCH
from moeedge.cli.options import Output, declare, flatten, gpu_layers, parse_number
from moeedge.errors import InputError
from moeedge.llama.settings import KV_TYPES

if TYPE_CHECKING:
    from moeedge.bench.config import DraftLength, ScriptedTest, SyntheticTest
    from moeedge.data.prompts import EvaluationText
    from moeedge.engine.types import EngineConfig
    from moeedge.policies.expert_budget import ExpertBudget

_MAX_VALUES = 1000  # of a range


def sizes(
    text: str,
    option: str,
    takes: str = "numbers of at least 0",
    example: str = "64,128 or as a range: 64-512*2, 0-1024+256",
) -> list[int]:
    """Reads "64,128", also with llama-bench's ranges: "1-4", "0-1024+256", "64-512*2". Raises InputError."""
    values: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", part.strip(), re.ASCII)
        if match is None:
            raise InputError(f"{option} takes {takes}, not '{part.strip()}'.", f"Write them as {example}.")
        first, last, sign, step = int(match[1]), int(match[2] or match[1]), match[3], int(match[4] or 1)
        if last < first or step < 1 or (sign == "*" and (step < 2 or first < 1)):
            raise InputError(f"{option}: a range has no end.", "Write it as first-last+step or first-last*factor.")
        n_values = (last - first) // step + 1 if sign != "*" else 1
        if n_values > _MAX_VALUES:
            message = f"{option}: a range of {n_values:,} values."
            raise InputError(message, f"At most {_MAX_VALUES:,} are measured in one run.")
        while first <= last:
            values.append(first)
            first = first * step if sign == "*" else first + step
    return list(dict.fromkeys(values))


def _pair(text: str) -> tuple[int, int]:
    prompt, _, answer = text.partition(",")
    if not (prompt.isdecimal() and answer.isdecimal() and int(prompt) and int(answer)):
        raise InputError(f"-pg takes two numbers of tokens, not '{text}'.", "Write for instance -pg 512,128.")
    return int(prompt), int(answer)


def _gpu_layers(text: str, option: str) -> list[int | None]:
    values: list[int | None] = []
    for word in names(text, option):
        is_word = word in ("auto", "-1", "all")
        values += [gpu_layers(word)] if is_word else sizes(word, option, "numbers of layers, auto or all", "0,12,all")
    return list(dict.fromkeys(values))


def _kv_types(text: str, option: str) -> list[str]:
    return names(text.lower(), option, f"Choose from {', '.join(KV_TYPES)}.")


def _rates(text: str, option: str) -> tuple[float, ...]:
    from moeedge.bench.config import parse_ratios

    return parse_ratios(text, option)


def _draft_lengths(text: str, option: str) -> tuple[DraftLength, ...]:
    words = names(text, option)
    numbers = ",".join(word for word in words if word != "auto")
    takes, example = "numbers of tokens, or auto", "1,4,8,auto or as a range: 1-8"
    lengths: list[DraftLength] = [*(sizes(numbers, option, takes, example) if numbers else [])]
    lengths += ["auto"] if "auto" in words else []
    if len(lengths) > 1 and 0 in lengths:
        raise InputError("A draft length of 0 is plain decoding.", "Compare with the mode moeedge-ar instead.")
    return tuple(lengths)


declare(
    """
    * --n-predict LIST  Tokens to decode: without --dataset N random ones, a row tgN for each N, 0: none; with
        --dataset at most N per answer. Default: 128; with --score what answers to the dataset need.
    * --threads LIST  CPU threads; 0: one per physical core, fewer next to a GPU. Several are measured one by one.
    --batch-size LIST  ... Several, separated by commas, are compared.
    --ubatch-size LIST  ... Several, separated by commas, are compared.
    * --n-gpu-layers LIST  ... Several, separated by commas, are compared.
    * --n-cpu-moe LIST  ... Several, separated by commas, are compared.
    --flash-attn LIST  ... Several, separated by commas, are compared.
    --cache-type-k LIST  ... Several, separated by commas, are compared.
    --cache-type-v LIST  ... Several, separated by commas, are compared.
    * --expert-budget LIST  Verify drafts with at most B experts per layer (MoE-Spec), for instance 16,24,32:
        moeedge once per budget next to moeedge without. Lossy: rows say so, and the output check gives a figure of
        quality.
    --budget-ranking LIST  ... Several, separated by commas, are compared.
    --budget-policy LIST  ... Several, separated by commas, are compared.
    * --draft-max LIST  Tokens per draft (gamma); 0: no speculation; auto: as many as pay by what steps have cost.
        Several, separated by commas, are compared. Default: auto for the mode moeedge, unless caches, budgets or texts
        together are compared or perplexity is measured; otherwise the catalog's value for the model, or 4.
    [Workload]
    * -p, --n-prompt LIST  Prompts of N random tokens: a row ppN for each N of the list (64,128 or 64-256*2); 0: none.
        Default: 512 without --dataset, none with it.
    -pg PP,TG  In addition: a prompt of PP random tokens, then TG tokens decoded, as one row ppPP+tgTG. Several times:
        several rows.
        also: pairs
    -d, --n-depth LIST  Tokens in the context before each synthetic test, not timed: rows "pp512 @ d4096".
    --routing TRACE  Replace the experts that the model's routers select by those of a recorded trace, in every mode, to
        measure speed under another model's routing. Answers have no meaning then.
    --accept LIST  Decode random texts of -n tokens whose drafts are accepted at these rates, for instance .5,.7,.9, to
        measure speculation without a trained draft: the draft model computes, and its tokens are replaced.
    --accept-confidence calibrated|constant  With --accept, what drafts tell of their chance: calibrated (a token of
        confidence c is accepted with probability c) or constant (nothing). Default: calibrated.
    --delay S  Wait S seconds before each repetition of a synthetic test.
    * --parallel LIST  Decode N prompts of the dataset together, each with its own drafts, once per N: throughput, and
        what speculation gains over plain decoding with the same N. First turns only.
        also: -np
    [Expert budget (lossy)]
    --perplexity FILE|toy|none  A text on which the modes of our backend with drafts are compared by perplexity, decoded
        in batches of gamma + 1 tokens. Default: toy, the bundled pair's, for that with --expert-budget, otherwise none.
    """,
    "bench",
    read={
        sizes: "n_prompt n_predict n_depth threads batch_size ubatch_size n_cpu_moe",
        names: "expert_budget budget_ranking budget_policy",
        _kv_types: "cache_type_k cache_type_v",
        _gpu_layers: "n_gpu_layers",
        lambda text, option: [SWITCH.get(word.lower(), word) for word in names(text, option)]: "flash_attn",
        _draft_lengths: "draft_max",
        _rates: "accept",
        lambda text, option: tuple(sorted(sizes(text, option, example="1,2,4 or as a range: 1-4"))): "parallel",
    },
    routing={"exists": True, "dir_okay": False},
    pairs={"kind": list[str], "convert": lambda texts: [_pair(text) for text in texts]},
)


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """Sizes of the tests with random tokens."""

    n_prompt: list[int] | None = None
    pairs: list[tuple[int, int]] = field(default_factory=list)
    n_depth: list[int] | None = None
    delay: float = 0.0
    routing: Path | None = None
    accept: tuple[float, ...] | None = None
    accept_confidence: Literal["calibrated", "constant"] | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a synthetic test was asked for."""
        return self.n_prompt is not None or bool(self.pairs)

    def tests(self, n_predict: list[int] | None, *, has_dataset: bool) -> tuple[SyntheticTest, ...]:
        """The tests as llama-bench orders them: prompts, decoding and pairs of each depth. Raises InputError.

        With scripted acceptance, only those that are asked for.
        """
        from moeedge.bench.config import SYNTHETIC_ANSWER, SYNTHETIC_PROMPT

        has_dataset = has_dataset or self.accept is not None
        prompts = [0 if has_dataset else SYNTHETIC_PROMPT] if self.n_prompt is None else self.n_prompt
        answers = [] if has_dataset else [SYNTHETIC_ANSWER] if n_predict is None else n_predict
        tests = synthetic_tests(prompts, answers, self.pairs, [0] if self.n_depth is None else self.n_depth)
        if self.n_depth is not None and not tests:
            raise InputError("-d is the depth of synthetic tests, and there are none.", "Add -p 512.")
        return tests

    def scripted(self, n_predict: list[int] | None) -> tuple[ScriptedTest, ...]:
        """The tests with scripted acceptance, one for each length and rate. Raises InputError."""
        from moeedge.bench.config import SYNTHETIC_ANSWER, ScriptedTest

        if self.accept is None:
            if self.accept_confidence is not None:
                raise InputError("--accept-confidence describes scripted drafts.", "Add --accept .7.")
            return ()
        how = self.accept_confidence or "calibrated"
        lengths = n_predict or [SYNTHETIC_ANSWER]
        return tuple(ScriptedTest(n, acceptance, how) for n in lengths for acceptance in self.accept)


def synthetic_tests(
    prompts: Sequence[int], answers: Sequence[int], pairs: Sequence[tuple[int, int]] = (), depths: Sequence[int] = (0,)
) -> tuple[SyntheticTest, ...]:
    """Tests of these sizes, each once; sizes of 0 are none."""
    from moeedge.bench.config import SyntheticTest

    tests = []
    for depth in depths:
        tests += [SyntheticTest(n, 0, depth) for n in prompts if n]
        tests += [SyntheticTest(0, n, depth) for n in answers if n]
        tests += [SyntheticTest(prompt, answer, depth) for prompt, answer in pairs]
    return tuple(dict.fromkeys(tests))


def arms(base: EngineConfig, **lists: Sequence[Any] | None) -> list[EngineConfig]:
    """The configuration once per combination of the listed fields, its own or its context's. Raises ValueError."""
    names = [name for name, values in lists.items() if values]
    configs = []
    for values in itertools.product(*(lists[name] or () for name in names)):
        context = dict(zip(names, values, strict=True))
        own = {name: context.pop(name) for name in names if hasattr(base, name)}
        configs.append(replace(base, **own, context=replace(base.context, **context)))
    return configs


def single(values: list[int] | None, option: str) -> int | None:
    """The value of an option that has a list without --dataset. Raises InputError."""
    if values is not None and len(values) > 1:
        text = ",".join(map(str, values))
        raise InputError(f"With --dataset {option} takes one number, not '{text}'.", "Leave out --dataset, or choose.")
    return values[0] if values else None


@dataclass(frozen=True, kw_only=True)
class BudgetSweepOptions:
    """Expert budgets to compare, and a text to compare them on."""

    expert_budget: list[str] | None = None
    budget_ranking: list[str] | None = None
    budget_policy: list[str] | None = None
    perplexity: str | None = None

    def parse(self) -> tuple[ExpertBudget, ...]:
        """Every budget with each ranking and policy; "off" is none of them, and always measured. Raises InputError."""
        numbers = [number for number in map(parse_number, self.expert_budget or ()) if number is not None]
        if not numbers:
            expect_no_companions(self, "LIST")
        return tuple(
            make_budget(number, ranking=ranking, policy=policy)
            for ranking in self.budget_ranking or (None,)
            for policy in self.budget_policy or (None,)
            for number in numbers
        )

    def text(self, model: Path) -> EvaluationText | None:
        """The text of --perplexity. Raises DatasetError."""
        from moeedge.data.datasets import TOY, load_text

        name = self.perplexity
        if name is None and self.expert_budget is not None and paths.is_bundled(model):
            name = TOY
        return None if name in (None, "none") else load_text(name)


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
    if sweep.has_caches and not run.resolve_device(base).has_tiers:
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
