"""The options of `moeedge bench`: lists of sizes, depths and threads as llama-bench has them, and comparisons."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moeedge.cli.common import names
from moeedge.cli.engine_options import LlamaOptions, PlacementOptions
from moeedge.cli.foreign import SWITCH
from moeedge.cli.options import Output, declare, gpu_layers
from moeedge.errors import InputError
from moeedge.llama.settings import KV_TYPES

if TYPE_CHECKING:
    from moeedge.bench.config import DraftLength

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
        Several, separated by commas, are compared. Default: auto for the mode moeedge, unless caches or budgets are
        compared or perplexity is measured; otherwise the catalog's value for the model, or 4.
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


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """All options of bench; those of groups that may have several values are lists of the command's own."""

    dataset: str | None = None
    offline_sample: bool = False
    limit: int = 0
    n_predict: list[int] | None = None
    repetitions: int | None = None
    score: bool = False
    run_code: bool = False
    modes: str | None = None
    ignore_eos: bool = False
    no_warmup: bool = False
    resume: str | None = None
    n_prompt: list[int] | None = None
    pairs: list[tuple[int, int]] = field(default_factory=list)
    n_depth: list[int] | None = None
    delay: float = 0.0
    routing: Path | None = None
    accept: tuple[float, ...] | None = None
    accept_confidence: Literal["calibrated", "constant"] | None = None
    parallel: tuple[int, ...] | None = None
    engine: LlamaOptions
    threads: list[int] | None = None
    n_batch: list[int] | None = None
    n_ubatch: list[int] | None = None
    n_gpu_layers: list[int | None] | None = None
    n_cpu_moe: list[int] | None = None
    flash_attn: list[str] | None = None
    type_k: list[str] | None = None
    type_v: list[str] | None = None
    draft_max: tuple[int | Literal["auto"], ...] | None = None
    expert_budget: list[str] | None = None
    budget_ranking: list[str] | None = None
    budget_policy: list[str] | None = None
    perplexity: str | None = None
    policy: str | None = None
    cache_ratio: str | None = None
    placement: PlacementOptions
    ram: int | Literal["auto", "off"] = "auto"
    plot: Path | None = None
    output: Output = Output.MD
    verbose: bool = False

    @property
    def compares_caches(self) -> bool:
        """Whether policies or ratios of the expert cache are compared."""
        return self.policy is not None or self.cache_ratio is not None

    @property
    def has_synthetic(self) -> bool:
        return self.n_prompt is not None or bool(self.pairs)
