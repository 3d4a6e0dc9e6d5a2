"""Configurations of the engine, validated once, where they are made, and the records that it returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moeedge.hardware.spec import MAX_N_THREADS
from moeedge.llama.settings import DEFAULT_KV_TYPE, MAX_N_BATCH, ContextSettings, LoadSettings

if TYPE_CHECKING:  # this module is imported for --help, which must not load llama.cpp, and not wait for NumPy
    from moeedge.llama.model import Mode
    from moeedge.policies.expert_budget import ExpertBudget
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.scheduler.governor import DraftChoice
    from moeedge.scheduler.kept_activations import EarlierRuns
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

    temperature: float = 0.8
    top_k: int = 40  # 0: all
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0  # 1: none
    repeat_last_n: int = 64  # tokens of history that the penalty covers; -1: all
    seed: int | None = None  # None: a random one, reported in the stats
    presence_penalty: float = 0.0  # 0: none
    frequency_penalty: float = 0.0  # 0: none
    typical_p: float = 1.0  # 1: none
    top_n_sigma: float = -1.0  # -1: none
    xtc_probability: float = 0.0  # 0: none
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0  # 0: none
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # tokens
    dry_penalty_last_n: int = 64  # tokens
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    dynatemp_range: float = 0.0  # 0: none
    dynatemp_exponent: float = 1.0
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens and what is added to their logits
    ignore_eos: bool = False  # tokens that end an answer are never drawn
    grammar: str = ""  # GBNF that answers follow; empty: none
    stop: tuple[str, ...] = ()  # texts that end an answer and are no part of it

    def __post_init__(self) -> None:
        for name in ("dry_sequence_breakers", "samplers", "stop"):  # lists, where they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", tuple((int(token), float(bias)) for token, bias in self.logit_bias))
        for names, is_valid, rule in _RULES:
            for name in names:
                value = getattr(self, name)
                if not is_valid(value):
                    option = " (--temp)" if name == "temperature" else ""
                    raise ValueError(f"{name}{option} must be {rule}, not {value:g}")
        if self.dry_penalty_last_n < 0 or self.dry_allowed_length < 0:
            raise ValueError("dry_penalty_last_n and dry_allowed_length must be 0 or more")
        for name in self.samplers:
            if name not in SAMPLERS:
                raise ValueError(f"unknown sampler {name!r}; choose from {', '.join(SAMPLERS)}")
        if any(not text for text in self.stop):
            raise ValueError("a stop text must not be empty")

    @property
    def needs_chain(self) -> bool:
        """Whether llama.cpp's own samplers are needed: more than its default chain without what is off by default."""
        usual = SamplingConfig()
        return any(getattr(self, name) != getattr(usual, name) for name in _BEYOND_DEFAULT)

    @property
    def is_random(self) -> bool:
        """Whether answers depend on random numbers."""
        return self.temperature > 0 or "temperature" not in self.samplers or self.xtc_probability > 0


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
    n_threads: int = 0  # 0: one per physical core
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
    context_shift: bool = False  # drop the oldest half instead of stopping when the context is full
    expert_budget: ExpertBudget | None = None  # of verifications (MoE-Spec); None: answers are the model's own

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= MAX_GAMMA:
            raise ValueError(f"gamma (--draft-max) must be from 0 to {MAX_GAMMA}, not {self.gamma}")
        if not 0 <= self.draft_p_min <= 1:
            raise ValueError(f"draft_p_min (--draft-p-min) must be from 0 to 1, not {self.draft_p_min:g}")
        if self.auto_gamma and self.n_parallel > 1:
            raise ValueError("the draft length auto (--draft-max) is for one text at a time, not for --parallel")
        if self.n_cpu_moe is not None and self.n_cpu_moe < 0:
            raise ValueError(f"n_cpu_moe (-ncmoe) must be 0 or more, not {self.n_cpu_moe}")
        if not 0 <= self.n_ctx <= MAX_N_CTX:
            raise ValueError(f"the context (-c) must be from 0 (automatic) to {MAX_N_CTX:,} tokens, not {self.n_ctx:,}")
        for n_tokens, option in ((self.n_batch, "-b"), (self.n_ubatch, "-ub")):
            if not 1 <= n_tokens <= MAX_N_BATCH:
                raise ValueError(f"a batch ({option}) must be from 1 to {MAX_N_BATCH:,} tokens, not {n_tokens:,}")
        self.context.with_types(self.draft_type_k, self.draft_type_v)
        if self.load.overrides and isinstance(self.ram, int):
            raise ValueError("-ot and --ram cannot be used together: experts in RAM are loaded from the file as needed")
        if not 1 <= self.n_parallel <= MAX_N_PARALLEL:
            raise ValueError(f"n_parallel (--parallel) must be from 1 to {MAX_N_PARALLEL}, not {self.n_parallel}")
        if self.n_ctx * self.n_parallel > MAX_N_CTX:
            raise ValueError(
                f"the contexts of {self.n_parallel} texts (-c) must be at most {MAX_N_CTX:,} tokens together, "
                f"not {self.n_ctx * self.n_parallel:,}"
            )
        if isinstance(self.ram, int) and self.ram <= 0:
            raise ValueError(f"ram (--ram) must be more than 0, not {self.ram}")
        if not 0 <= self.n_threads <= MAX_N_THREADS:
            raise ValueError(
                f"n_threads (-t) must be from 0 (one per physical core) to {MAX_N_THREADS}, not {self.n_threads}"
            )

    @property
    def draft_context(self) -> ContextSettings:
        """The settings of the draft's context."""
        return self.context.with_types(self.draft_type_k, self.draft_type_v)

    @property
    def n_outputs(self) -> int:
        """Tokens of a graph whose logits a session reads: those of a verification.

        A session may change its draft length; a larger verification of several texts is computed in parts.
        """
        return max(MAX_GAMMA + 1, min(self.n_parallel * (self.gamma + 1), self.n_ubatch))


@dataclass
class GenerationStats:
    """Sums over one answer; rates are computed from them, never stored."""

    prompt_tokens: int = 0  # of the entire prompt
    cached_tokens: int = 0  # of these, still in the KV cache
    prefill_tokens: int = 0  # of these, decoded now; fewer than the others where the answer was stopped before the end
    generated_tokens: int = 0
    prefill_s: float = 0.0  # of both models; the draft's part runs after the first token
    decode_s: float = 0.0
    ttft_s: float = 0.0  # from the call to the first token
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    experts_sum: float = 0.0  # of StepRecord.experts_unique
    experts_natural_sum: float = 0.0  # of what experts_unique were without an expert budget
    budgeted_steps: int = 0  # steps under an expert budget; the next two are theirs
    experts_max: int = 0  # the largest of StepRecord.experts_max
    kept_probability_sum: float = 0.0  # of StepRecord.kept_probability
    observe_s: float = 0.0
    sense_s: float = 0.0  # part of verify_s: the native sensor's
    draft_s: float = 0.0
    verify_s: float = 0.0
    seed: int | None = None
    choice: DraftChoice | None = None  # the last, of the draft length; None where it is fixed
    context_shifts: int = 0  # in the middle of the answer, because the context was full
    dropped_tokens: int = 0  # in all of them
    ngram_steps: int = 0  # where n-grams drafted in place of a model
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
    def pp_ts(self) -> float:
        """Prefill speed in tokens/s."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def tg_ts(self) -> float:
        """Decode speed in tokens/s."""
        return max(self.generated_tokens - self.prefill_generated, 0) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def drafts_per_step(self) -> float:
        """Mean draft length."""
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per verification step."""
        return max(self.generated_tokens - self.prefill_generated, 0) / self.steps if self.steps else 0.0

    @property
    def overhead_share(self) -> float | None:
        """Share of decoding that sensing and scheduling took."""
        return (self.observe_s + self.sense_s) / self.decode_s if self.decode_s > 0 else None

    @property
    def experts_per_verification(self) -> float | None:
        """Distinct experts per MoE layer and verification step; None without a sensor."""
        return self.experts_sum / self.steps if self.steps and self.experts_sum else None

    @property
    def experts_natural(self) -> float | None:
        """`experts_per_verification` as it were without the expert budget; None where no step had one."""
        return self.experts_natural_sum / self.steps if self.budgeted_steps else None

    @property
    def kept_probability(self) -> float | None:
        """Share of the selected experts' routing probability that the budget kept, mean of steps; None without one."""
        return self.kept_probability_sum / self.budgeted_steps if self.budgeted_steps else None


@dataclass(frozen=True)
class EngineInfo:
    """The models of a session and where they run; all of it is shown at default verbosity."""

    model: str  # file name
    architecture: str
    n_layers: int
    n_expert_layers: int  # layers with experts
    n_experts: int  # 0: dense
    n_expert_used: int
    n_ctx: int
    n_threads: int
    gamma: int  # 0 when speculation is off; the longest draft where auto_gamma chooses
    draft: str  # file name, "mtp", "ngram" or "none"
    device: str  # the label of the device that holds experts, or "none"
    policy: str  # "none" without placement
    hit_rate: float | None = None
    notes: list[str] = field(default_factory=list)  # sentences: the choices made, and why something is off
    n_whole_layers: int = 0  # of the layers with experts; on a GPU entirely
    layers: str = ""  # how a GPU was divided between them and the cache, and what that beat; empty: nothing to choose
    cache_ratio: float = 0.0  # share of all experts that have a slot
    cache_slots: int = 0
    pool_bytes: int = 0  # of the slots on the device
    vram_bytes: int | None = None  # used on the entire device after loading, as its driver says; None: unknown
    expert_budget: ExpertBudget | None = None  # None: the model's own answers, or a model without experts
    earlier_runs: EarlierRuns | None = None  # experts in RAM: what these have left for a warm start
    auto_gamma: bool = False  # each step's draft length follows what steps cost
    settings: ContextSettings = field(default_factory=ContextSettings)  # of the target's context
