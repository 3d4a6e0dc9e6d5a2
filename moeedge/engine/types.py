"""Configurations of the engine, validated once, where they are made, and the records that it returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moeedge.errors import require
from moeedge.hardware.spec import MAX_N_THREADS
from moeedge.llama.settings import DEFAULT_KV_TYPE, MAX_N_BATCH, ContextSettings, LoadSettings
from moeedge.records import counter, derived, figure, quotient
from moeedge.speculation import acceptance_rate, check_gamma

if TYPE_CHECKING:  # this module is imported for --help, which must not load llama.cpp, and not wait for NumPy
    from moeedge.llama.model import Mode
    from moeedge.policies.expert_budget import ExpertBudget
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.scheduler.governor import DraftChoice
    from moeedge.scheduler.ram_tier import EarlierRuns
    from moeedge.scheduler.stats import StepRecord

# Tokens; models are trained with up to 10 million. llama.cpp allocates a record per token and counts in 32 bits: a
# mistyped size would take all memory or wrap around.
MAX_N_CTX = 2**24
DEFAULT_N_UBATCH = 512
MAX_GAMMA = 64
DEFAULT_GAMMA = 4
MAX_N_PARALLEL = 64
ALL_ON_CPU = 1 << 30  # of n_cpu_moe: the experts of every layer, as with --cpu-moe
DraftWord = Literal["mtp", "ngram"]  # the model's own head; n-grams of the text
StopReason = Literal["eos", "stop", "length", "context", "interrupted"]
# by their names in --samplers, with the letters of --sampling-seq
SAMPLERS = {
    **{"penalties": "e", "dry": "d", "top_n_sigma": "s", "top_k": "k", "typ_p": "y", "top_p": "p", "min_p": "m"},
    **{"xtc": "x", "temperature": "t", "infill": "i"},
}
DEFAULT_SAMPLERS = tuple(name for name in SAMPLERS if name != "infill")
# fields of SamplingConfig; at other values than the default a sampler acts that sampling.py does not have
_BEYOND_DEFAULT = (
    *("presence_penalty", "frequency_penalty", "typical_p", "top_n_sigma", "xtc_probability", "dry_multiplier"),
    *("dynatemp_range", "samplers", "logit_bias", "ignore_eos"),
)
# fields of SamplingConfig, what their values must be, and that in words; written so that NaN fails too
_RULES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (("temperature", "dynatemp_range"), lambda value: 0 <= value < math.inf, "0 or more"),
    (("top_k",), lambda value: value >= 0, "0 (all tokens) or more"),
    (("top_p", "typical_p"), lambda value: 0 < value <= 1, "above 0 and at most 1"),
    (("min_p", "xtc_probability", "xtc_threshold"), lambda value: 0 <= value <= 1, "from 0 to 1"),
    (("repeat_penalty",), lambda value: 0 < value < math.inf, "above 0 (1 switches it off)"),
    (("dry_base",), lambda value: value >= 1, "1 or more"),
    (
        ("presence_penalty", "frequency_penalty", "top_n_sigma", "dry_multiplier", "dynatemp_exponent", "dry_base"),
        math.isfinite,
        "a finite number",
    ),
)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is drawn, named and ordered as in llama.cpp; temperature 0 is greedy."""

    temperature: float = figure("Sampling temperature; 0: greedy", default=0.8)
    top_k: int = figure("Only so many of the most likely tokens; 0: all", default=40)
    top_p: float = figure("Only the most likely tokens with this probability together", default=0.95, most=1)
    min_p: float = figure("Only tokens with this share of the most likely one's probability", default=0.05, most=1)
    repeat_penalty: float = figure("Divides the logits of repeated tokens; 1: off", default=1.0)
    repeat_last_n: int = figure("Last tokens that the penalties consider; -1: all", default=64, least=-1)
    seed: int | None = None  # None: a random one, reported in the stats
    presence_penalty: float = figure("Subtracted from the logits of tokens that have occurred", default=0.0, least=None)
    frequency_penalty: float = figure("The same, once per occurrence", default=0.0, least=None)
    typical_p: float = figure("Locally typical sampling; 1: off", default=1.0)
    top_n_sigma: float = figure(
        "Within so many standard deviations of the largest logit; -1: all", default=-1.0, least=None
    )
    xtc_probability: float = figure("Chance that the most likely tokens are left out (XTC)", default=0.0, most=1)
    xtc_threshold: float = figure("Least probability of those", default=0.1)
    dry_multiplier: float = figure("Strength of the penalty of repeated sequences (DRY); 0: off", default=0.0)
    dry_base: float = figure("Its base", default=1.75)
    dry_allowed_length: int = figure("Length of repetitions that DRY does not penalize, in tokens", default=2)
    dry_penalty_last_n: int = figure("Last tokens that DRY considers", default=64)
    dry_sequence_breakers: tuple[str, ...] = figure(
        "Texts at which a repeated sequence ends", default=("\n", ":", '"', "*")
    )
    dynatemp_range: float = figure("The temperature varies by so much with the entropy; 0: fixed", default=0.0)
    dynatemp_exponent: float = figure("How it varies", default=1.0, least=None)
    samplers: tuple[str, ...] = figure("The samplers in their order", default=DEFAULT_SAMPLERS)
    logit_bias: tuple[tuple[int, float], ...] = figure(
        "Tokens and what is added to their logits", default=(), kind=tuple[tuple[Any, ...], ...]
    )
    ignore_eos: bool = figure("Whether the answer goes on after a token that ends one", default=False)
    grammar: str = figure("The GBNF grammar that the answer follows; empty: none", default="")
    stop: tuple[str, ...] = figure("Texts that end an answer and are no part of it", default=())

    def __post_init__(self) -> None:
        for name in ("dry_sequence_breakers", "samplers", "stop"):  # lists, where they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", tuple((int(token), float(bias)) for token, bias in self.logit_bias))
        for names, is_valid, rule in _RULES:
            for name in names:
                value, option = getattr(self, name), " (--temp)" if name == "temperature" else ""
                require(is_valid(value), f"{name}{option} must be {rule}, not {value:g}")
        if self.dry_penalty_last_n < 0 or self.dry_allowed_length < 0:
            raise ValueError("dry_penalty_last_n and dry_allowed_length must be 0 or more")
        for name in self.samplers:
            require(name in SAMPLERS, f"unknown sampler {name!r}; choose from {', '.join(SAMPLERS)}")
        require(all(self.stop), "a stop text must not be empty")

    @property
    def needs_chain(self) -> bool:
        """Whether llama.cpp's own samplers are needed: more than its default chain without what is off by default."""
        usual = SamplingConfig()
        return any(getattr(self, name) != getattr(usual, name) for name in _BEYOND_DEFAULT)

    @property
    def is_random(self) -> bool:
        is_warm = max(self.temperature, self.dynatemp_range) > 0
        return is_warm or "temperature" not in self.samplers or self.xtc_probability > 0


def seed_or_random(value: int) -> int | None:
    """None for -1, which draws a new seed for every answer as in llama.cpp. Raises ValueError below -1."""
    require(value >= -1, f"seed must be -1 (random) or at least 0, not {value}")
    return None if value == -1 else value


def _default_placement() -> PlacementConfig:
    from moeedge.scheduler.config import PlacementConfig

    return PlacementConfig()


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that a session needs to load; the caller resolves paths."""

    model: Path
    draft: Path | DraftWord | None = None
    n_ctx: int = 0  # tokens of each text; 0: the length that the model was trained with
    n_parallel: int = 1  # texts that are decoded together, llama.cpp's --parallel
    n_threads: int = 0  # 0: one per physical core, next to a GPU's cache `cores_next_to_gpu`
    gamma: int = DEFAULT_GAMMA  # draft length, llama.cpp's --draft-max; 0 switches speculation off
    auto_gamma: bool = False  # each step's draft length, at most GAMMA_MAX, follows what steps cost, and not `gamma`
    draft_p_min: float = 0.0  # a draft model's drafts end before a token that it gives less, of one text
    n_gpu_layers: int | None = None  # None: all where experts are placed on a GPU, otherwise 0
    n_cpu_moe: int | None = None  # experts of so many first layers stay in host memory; None: chosen by measuring
    layers_measured: bool = False  # n_cpu_moe and the cache were chosen together: both stay, whatever else is measured
    n_expert_used: int | None = None  # experts per token of the target instead of the file's number, for measuring
    device: str = "auto"  # for experts, as -dev names it
    # bytes of RAM for experts that are loaded from the file on demand; "auto": all that is free, if the models do not
    # fit there; "on": all that is free, because they are known not to fit
    ram: int | Literal["auto", "on", "off"] = "off"
    emulate_bundled: bool = False  # auto without a GPU: the bundled model runs on the emulated device
    placement: PlacementConfig = field(default_factory=_default_placement)
    mode: Mode = "moeedge"
    n_batch: int = 2048  # tokens per llama_decode call
    n_ubatch: int = DEFAULT_N_UBATCH  # tokens per graph
    context: ContextSettings = field(default_factory=ContextSettings)  # of the target
    draft_type_k: str = DEFAULT_KV_TYPE  # of the draft's KV cache
    draft_type_v: str = DEFAULT_KV_TYPE
    load: LoadSettings = field(default_factory=LoadSettings)  # overrides: of the target alone
    cpu_fallback: bool = False  # go on without a GPU that fails in mid-answer; not with shared models
    op_offload: bool = True  # llama.cpp's, of large batches; needless where experts are streamed through the cache
    n_checkpoints: int = 0  # of a text's prompts, to return to where memory is recurrent or has sliding windows
    context_shift: bool = False  # drop the oldest half instead of stopping when the context is full
    routing: Path | None = None  # a trace whose experts replace those that the target's routers select, for measuring
    expert_budget: ExpertBudget | None = None  # of verifications (MoE-Spec); None: answers are the model's own

    def __post_init__(self) -> None:
        check_gamma(self.gamma, most=MAX_GAMMA)
        p_min, n_all = self.draft_p_min, self.n_ctx * self.n_parallel
        require(0 <= p_min <= 1, f"draft_p_min (--draft-p-min) must be from 0 to 1, not {p_min:g}")
        if self.routing is not None:
            require(self.expert_budget is None, "--routing and --expert-budget cannot be used together")
            require(self.n_parallel == 1, "--routing is for one text at a time")
        require((self.n_cpu_moe or 0) >= 0, f"n_cpu_moe (-ncmoe) must be 0 or more, not {self.n_cpu_moe}")
        if not 0 <= self.n_ctx <= MAX_N_CTX:
            raise ValueError(f"the context (-c) must be from 0 (automatic) to {MAX_N_CTX:,} tokens, not {self.n_ctx:,}")
        for n, option in ((self.n_batch, "-b"), (self.n_ubatch, "-ub")):
            require(1 <= n <= MAX_N_BATCH, f"a batch ({option}) must be from 1 to {MAX_N_BATCH:,} tokens, not {n:,}")
        _ = self.draft_context  # whose types are checked
        if self.load.overrides and isinstance(self.ram, int):
            raise ValueError("-ot and --ram cannot be used together: experts in RAM are loaded from the file as needed")
        if not 1 <= self.n_parallel <= MAX_N_PARALLEL:
            raise ValueError(f"n_parallel (--parallel) must be from 1 to {MAX_N_PARALLEL}, not {self.n_parallel}")
        texts = f"the contexts of {self.n_parallel} texts (-c) must be at most {MAX_N_CTX:,} tokens together"
        require(n_all <= MAX_N_CTX, f"{texts}, not {n_all:,}")
        require(isinstance(self.ram, str) or self.ram > 0, f"ram (--ram) must be more than 0, not {self.ram}")
        threads = f"n_threads (-t) must be from 0 (one per physical core) to {MAX_N_THREADS}"
        require(0 <= self.n_threads <= MAX_N_THREADS, f"{threads}, not {self.n_threads}")

    @property
    def draft_context(self) -> ContextSettings:
        return replace(self.context, type_k=self.draft_type_k, type_v=self.draft_type_v, adapters=())

    @property
    def n_outputs(self) -> int:
        """Tokens of a graph whose logits a session reads; a larger verification is computed in parts."""
        return max(MAX_GAMMA + 1, min(self.n_parallel * (self.gamma + 1), self.n_ubatch))


@dataclass(kw_only=True)
class AnswerSums:
    """Sums over one answer, or over several (`records.combine`), and the rates that are computed from them."""

    prompt_tokens: int = counter("tokens of the entire prompt or conversation")
    prefill_tokens: int = counter("of these, tokens that were decoded now; the KV cache held the others")
    generated_tokens: int = counter("tokens of the answer")
    prefill_s: float = counter("time of reading the prompt, the draft's included", "s")
    decode_s: float = counter("decoding time", "s")
    ttft_s: float = counter("time to the first token", "s")
    steps: int = counter("verifications and plain decodes; of texts decoded together those of each text")
    drafted: int = counter("drafted tokens")
    accepted: int = counter("drafted tokens that became text")
    experts_sum: float = counter("distinct experts per layer and verification, summed over steps")
    experts_natural_sum: float = counter("the same before an expert budget")
    experts_max: int = figure("Most distinct experts of a layer in a verification under a budget", default=0, of="max")
    kept_probability_sum: float = counter(
        "share of the natural experts' routing probability that stays, summed over budgeted steps"
    )
    budgeted_steps: int = counter("verifications under an expert budget")
    draft_s: float = counter("part of decode_s in which drafts were made", "s")
    verify_s: float = counter("part of decode_s in which the model computed", "s")
    observe_s: float = counter("part of decode_s that observing and scheduling took", "s")

    acceptance_rate = acceptance_rate
    drafts_per_step = quotient("drafted", "steps", "Drafted tokens per step")
    tokens_per_step = quotient("decode_tokens", "steps", "Tokens of text per step, without the first; of one text")
    kept_probability = quotient(
        "kept_probability_sum", "budgeted_steps", "Share of the natural experts' routing probability that stays", most=1
    )

    @derived("Distinct experts per layer and verification; null where our backend takes no operations")
    def experts_per_verification(self) -> float | None:
        return self.experts_sum / self.steps if self.steps and self.experts_sum else None


@dataclass(kw_only=True)
class GenerationStats(AnswerSums):
    """Figures of one answer while it is generated."""

    pp_ts = quotient("prefill_tokens", "prefill_s", "Speed of reading the prompt; 0: none was read", "t/s", empty=0.0)
    tg_ts = quotient("decode_tokens", "decode_s", "Decoding speed without the first token", "t/s", empty=0.0)
    cached_tokens: int = counter("tokens of the prompt that the KV cache still held")
    sense_s: float = counter("part of verify_s that counting experts took", "s")
    ngram_steps: int = counter("steps in which n-grams drafted in place of a draft model or head")
    context_shifts: int = counter("how often the context was full and its older half was dropped")
    dropped_tokens: int = counter("tokens dropped in all of these")
    seed: int | None = figure("Seed of the random numbers, also where it was drawn", default=None)
    choice: DraftChoice | None = None  # the last, of the draft length; None where it is fixed
    prefill_generated: int = 1  # of the generated tokens, those that belong to prefill

    def add_step(self, record: StepRecord, *, decode_s: float, sense_s: float) -> None:
        """Adds one verification or plain decode, its generated tokens excepted."""
        self.steps += 1
        self.drafted += record.n_drafted
        self.accepted += record.n_accepted
        self.experts_sum += record.experts_unique
        self.experts_natural_sum += record.experts_unique if record.kept_probability is None else record.experts_natural
        if record.kept_probability is not None:
            self.budgeted_steps += 1
            self.experts_max = max(self.experts_max, record.experts_max)
            self.kept_probability_sum += record.kept_probability
        self.observe_s += record.observe_s
        self.draft_s += record.draft_s
        self.verify_s += record.verify_s
        self.decode_s += decode_s
        self.choice = record.choice
        self.ngram_steps += record.choice is not None and record.choice.source == "ngram"
        self.sense_s += sense_s

    @property
    def decode_tokens(self) -> int:
        """Generated tokens that decode_s is the time of."""
        return max(self.generated_tokens - self.prefill_generated, 0)

    @derived("(observe_s + sense_s) / decode_s; null before the first step")
    def overhead_share(self) -> float | None:
        return (self.observe_s + self.sense_s) / self.decode_s if self.decode_s > 0 else None

    @derived("Distinct experts per layer and verification that the router chose; null without an expert budget")
    def experts_natural(self) -> float | None:
        return self.experts_natural_sum / self.steps if self.budgeted_steps else None


@dataclass(frozen=True)
class EngineInfo:
    """The models of a session and where they run; all of it is shown at default verbosity."""

    model: str = figure("File name of the model")
    architecture: str = figure("Architecture of the model, as llama.cpp names it")
    n_layers: int = figure("Layers of the model", key="layers")
    n_expert_layers: int = figure("Layers with experts", key="expert_layers")
    n_experts: int = figure("Experts per layer; 0 for a model without experts", key="experts")
    n_expert_used: int = figure("Experts per token", key="experts_used")
    n_ctx: int = figure("Size of the context, in tokens")
    n_threads: int = figure("Threads of the CPU", key="threads")
    gamma: int = figure("Tokens per draft; the most where auto_gamma; 0 without speculation")
    draft: str = figure("File name of the draft model, or mtp, ngram, none")
    device: str = figure("Label of the device that holds experts, or none")
    policy: str = figure("Policy of expert placement, or none")
    notes: list[str] = figure("What was chosen, and what is off or slower, in sentences", default_factory=list)
    n_whole_layers: int = figure("Of the layers with experts, those on a GPU entirely", default=0, key="whole_layers")
    cache_ratio: float = figure("Share of all experts that have a slot", default=0.0, most=1)
    cache_slots: int = figure("Slots for experts", default=0)
    pool_bytes: int = figure("Memory of the slots", "bytes", default=0)
    vram_bytes: int | None = figure(
        "Memory in use on the entire device after loading, as its driver says; null: unknown", "bytes", default=None
    )
    expert_budget: ExpertBudget | None = None  # None: the model's own answers, or a model without experts
    is_device: bool = True  # False: the slots are in RAM alone
    place: str = ""  # of the slots, as "on CUDA0" or "in RAM"
    earlier_runs: EarlierRuns | None = None  # experts in RAM: what these have left for a warm start
    auto_gamma: bool = figure("Whether each step's draft length follows what steps cost", default=False)
    settings: ContextSettings = field(default_factory=ContextSettings)  # of the target's context
