"""What goes into the engine and what comes out: frozen configurations and plain records, no behaviour beyond checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.scheduler.ablations import ABLATIONS

StopReason = Literal["eos", "length", "context", "interrupted"]
# how prompts are computed: measured choice, as without a cache, resident experts on the device, all streamed through it
PrefillPath = Literal["auto", "cpu", "resident", "stream"]
# moeedge: our backend attached; stock: the same process and loop, our backend claims nothing
Mode = Literal["moeedge", "stock"]
# Tokens. llama.cpp keeps a record per token beside the KV cache, and counts them in 32 bits: a slip of the keyboard
# would take all memory, or become a small context. The largest context that models are trained for is 10 million.
MAX_N_CTX = 2**24
MAX_N_THREADS = 512  # ggml's GGML_MAX_N_THREADS, beyond which it crashes


class Phase(IntEnum):
    """What a decode call is for; the values are those of the native library (native/include/moeedge.h)."""

    AUTO = 0  # not told: more than one token counts as prefill, one as decode
    PREFILL = 1
    DECODE = 2  # plain decoding, one token
    DRAFT = 3
    VERIFY = 4


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is drawn, named and ordered as in llama.cpp; temperature 0 is greedy."""

    temperature: float = 0.8
    top_k: int = 40  # 0: all
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0  # 1: none
    repeat_last_n: int = 64  # tokens of history that the penalty looks at
    seed: int | None = None  # None: a fresh one, reported in the stats

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # a NaN, too
            raise ValueError(f"temperature must be >= 0, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], not {self.min_p}")
        if not 0 < self.repeat_penalty < math.inf:
            raise ValueError(f"repeat_penalty must be > 0 and finite, not {self.repeat_penalty}")


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How plans are carried out: the defaults are ours, the rest is what published systems do, for comparisons."""

    misses: Literal["cpu", "load"] = "cpu"  # the CPU computes what is missing, or it is loaded when its layer comes
    # what the draft's hidden states foretell is moved by a worker, or waited for layer by layer, or not moved
    drafting: Literal["worker", "vanilla", "off"] = "worker"
    batch: int | None = None  # experts in one transfer at most; 0: as the device likes it; None: as the policy does
    cutoff_layer: int | None = None  # sp-moe: layers that are prefetched for; None: worked out

    def __post_init__(self) -> None:
        if self.misses not in ("cpu", "load"):
            raise ValueError(f"misses must be cpu or load, not {self.misses}")
        if self.drafting not in ("worker", "vanilla", "off"):
            raise ValueError(f"drafting must be worker, vanilla or off, not {self.drafting}")
        if self.batch is not None and self.batch < 0:
            raise ValueError(f"a transfer cannot have {self.batch} experts")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which experts a device may hold, and who decides; the defaults are those of MoE-SpAc section 4.1."""

    vram_bytes: int | None = None  # for slots; None: measured
    cache_ratio: float | None = None  # share of all expert bytes; None: what vram_bytes or the device allows
    policy: str = "spac"
    ablations: frozenset[str] = frozenset()
    utility_cap: int = 4  # K
    forgetting: float = 0.1  # lambda
    prefill: PrefillPath = "auto"
    calibrate: bool = True  # measure on first use; False: take what was measured before, or nothing
    measure_anew: bool = False  # whatever was measured before
    execution: ExecutionConfig = ExecutionConfig()

    def __post_init__(self) -> None:
        if self.vram_bytes is not None and self.vram_bytes < 0:
            raise ValueError(f"vram_bytes (--vram) must be >= 0, not {self.vram_bytes}")
        # written so that NaN is refused, too
        if self.cache_ratio is not None and not 0 <= self.cache_ratio <= 1:
            raise ValueError(f"the cache ratio must be in [0, 1], not {self.cache_ratio}")
        if self.vram_bytes is not None and self.cache_ratio is not None:
            raise ValueError("--vram and --cache-ratio exclude each other")
        unknown = sorted(self.ablations - ABLATIONS.keys())
        if unknown:
            raise ValueError(f'there is no ablation "{unknown[0]}"; known are {", ".join(sorted(ABLATIONS))}')
        if not 1 <= self.utility_cap <= 64:
            raise ValueError(f"the utility cap must be in 1..64, not {self.utility_cap}")
        if not 0 <= self.forgetting <= 1:
            raise ValueError(f"the forgetting factor must be in [0, 1], not {self.forgetting}")
        if self.prefill not in ("auto", "cpu", "resident", "stream"):
            raise ValueError(f"the prefill path must be auto, cpu, resident or stream, not {self.prefill}")

    @property
    def asked(self) -> bool:
        """Whether the user gave the cache a size, so that it stays on even where it does not pay."""
        return self.vram_bytes is not None or self.cache_ratio is not None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that a session needs to load; paths are resolved by the caller."""

    model: Path
    draft: Path | Literal["ngram"] | None = None
    n_ctx: int = 0  # tokens; 0: what the model was trained with
    n_threads: int = 0  # 0: the physical cores
    gamma: int = 4  # draft length, llama.cpp's --draft-max; 0 switches speculation off
    n_gpu_layers: int | None = None  # None: all of them where experts are placed on a GPU, otherwise 0
    device: str = "auto"  # that may hold experts; the value of -dev
    emulate_bundled: bool = False  # auto without a GPU: the bundled model runs on the emulated device
    placement: PlacementConfig = PlacementConfig()
    mode: Mode = "moeedge"
    n_batch: int = 2048  # tokens per llama_decode call
    n_ubatch: int = 512  # tokens per graph
    context_shift: bool = False  # drop the oldest half instead of stopping when the context is full

    def __post_init__(self) -> None:
        if self.gamma < 0 or self.gamma > 64:
            raise ValueError(f"gamma (--draft-max) must be in 0..64, not {self.gamma}")
        if not 0 <= self.n_ctx <= MAX_N_CTX:
            raise ValueError(f"the context (-c) must be in 0..{MAX_N_CTX:,} tokens, not {self.n_ctx:,}")
        if not 0 <= self.n_threads <= MAX_N_THREADS:
            raise ValueError(f"n_threads (-t) must be in 0..{MAX_N_THREADS}, not {self.n_threads}")


@dataclass(frozen=True)
class StepRecord:
    """One step of the loop: draft -> verify -> observe -> schedule -> prefetch.

    `tokens` are those emitted in this step (accepted drafts and the one token that the target adds), already cut at a
    stop token. `experts_unique` is the mean over the MoE layers of the number of distinct experts that verification
    touched (0 for a dense model or in stock mode).
    """

    tokens: list[int]
    n_drafted: int
    n_accepted: int
    n_verified: int  # tokens in the verification batch
    experts_unique: float
    draft_s: float
    verify_s: float
    observe_s: float  # sensing and scheduling
    drafts: list[int] = field(default_factory=list)  # the drafted tokens, refused ones included
    # float32 [n_states, n_embd], the draft's hidden states of the batch's first tokens; None where they are not kept
    states: NDArray[np.float32] | None = None


@dataclass
class GenerationStats:
    """Sums over one answer; rates are computed from these, never stored."""

    prompt_tokens: int = 0  # tokens of the whole prompt
    prefill_tokens: int = 0  # of these, decoded now (the rest was still in the KV cache)
    generated_tokens: int = 0
    prefill_s: float = 0.0  # of both models; the draft's part comes after the first token
    decode_s: float = 0.0
    ttft_s: float = 0.0  # from the call to the first token
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    experts_sum: float = 0.0  # of StepRecord.experts_unique
    observe_s: float = 0.0
    sense_s: float = 0.0  # part of verify_s: what the native sensor took
    draft_s: float = 0.0
    verify_s: float = 0.0
    seed: int | None = None

    @property
    def pp_ts(self) -> float:
        """Prefill speed in tokens/s."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def tg_ts(self) -> float:
        """Decode speed in tokens/s; the first token belongs to prefill."""
        return max(self.generated_tokens - 1, 0) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per verification step."""
        return max(self.generated_tokens - 1, 0) / self.steps if self.steps else 0.0

    @property
    def overhead_share(self) -> float | None:
        """Share of decoding that sensing and scheduling took."""
        return (self.observe_s + self.sense_s) / self.decode_s if self.decode_s > 0 else None

    @property
    def experts_per_verification(self) -> float | None:
        """Distinct experts per MoE layer and verification step; None where nothing was sensed."""
        return self.experts_sum / self.steps if self.steps and self.experts_sum else None


@dataclass(frozen=True)
class EngineInfo:
    """What was loaded and where it runs; all of it is shown at default verbosity."""

    model: str  # file name
    architecture: str
    n_layers: int
    n_expert_layers: int  # layers with experts
    n_experts: int  # 0: dense
    n_experts_used: int
    n_ctx: int
    n_threads: int
    gamma: int  # 0 when speculation is off
    draft: str  # file name, "ngram" or "none"
    device: str  # the label of the device that holds experts, or "none"
    policy: str  # "none" without placement
    hit_rate: float | None = None
    notes: list[str] = field(default_factory=list)  # one sentence each: why something is off
    cache_ratio: float = 0.0  # share of all experts that have a slot
    cache_slots: int = 0
    pool_bytes: int = 0  # of the slots on the device
    vram_bytes: int | None = None  # used on the whole device after loading, as its driver says; None: unknown


@dataclass(frozen=True)
class PlacementStats:
    """Counters of expert placement since the session began; `newer - older` gives those between.

    Figures that are no counters (slots_used, tau, memory, medians, lost) are those of the newer one.
    """

    device: str  # label
    policy: str
    cache_ratio: float
    slots_used: int
    slots_total: int
    pool_bytes: int
    vram_used_bytes: int | None  # of the whole device, as its driver says; None: unknown
    vram_total_bytes: int | None
    steps: int = 0  # verifications and plain decodes
    pairs: int = 0  # (token, expert) pairs computed, prefill included
    pairs_hit: int = 0  # of these on the device
    unique: int = 0  # distinct experts per block, of batches of at most 64 tokens
    unique_hit: int = 0
    uploads: int = 0
    evictions: int = 0
    cancelled: int = 0  # uploads that a newer plan dropped before they began
    bytes_moved: int = 0
    transfers: int = 0  # of one expert or of several
    transfer_s: float = 0.0  # the mover's, beside everything else
    cpu_s: float = 0.0  # of computing blocks
    device_s: float = 0.0
    wait_s: float = 0.0  # for the device, after the CPU's part was done
    partition_s: float = 0.0  # splitting, gathering, scattering, submitting
    schedule_s: float = 0.0  # policy and plan
    draft_s: float = 0.0
    decode_s: float = 0.0  # whole steps
    blocks: int = 0
    blocks_unknown: int = 0  # chains that were not understood: on the CPU
    tau: tuple[float, ...] = ()  # per expert layer, the newest
    lost: bool = False
    partition_us_median_1: float | None = None  # per block of 1 token; None: no such block yet
    partition_us_median_9: float | None = None  # per block of 9 tokens

    @property
    def hit_rate_pairs(self) -> float | None:
        """Share of the pairs that the device computed; None before the first."""
        return self.pairs_hit / self.pairs if self.pairs else None

    @property
    def hit_rate_unique(self) -> float | None:
        """Share of the distinct experts per block that were resident; None before the first."""
        return self.unique_hit / self.unique if self.unique else None

    @property
    def uploads_per_step(self) -> float | None:
        """Experts uploaded per step; None before the first."""
        return self.uploads / self.steps if self.steps else None

    @property
    def evictions_per_step(self) -> float | None:
        """Experts evicted per step; None before the first."""
        return self.evictions / self.steps if self.steps else None

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes per second while something was being transferred; None before the first transfer."""
        return self.bytes_moved / self.transfer_s if self.transfer_s > 0 else None

    def __sub__(self, older: PlacementStats) -> PlacementStats:
        counted = {name: getattr(self, name) - getattr(older, name) for name in _COUNTERS}
        return replace(self, **counted)

    def to_dict(self) -> dict[str, Any]:
        """All fields and rates, as a JSON record holds them."""
        rates = ("hit_rate_pairs", "hit_rate_unique", "uploads_per_step", "evictions_per_step", "link_bytes_per_s")
        record: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        record["tau"] = list(self.tau)
        return record | {name: getattr(self, name) for name in rates}


_COUNTERS = (
    "steps",
    "pairs",
    "pairs_hit",
    "unique",
    "unique_hit",
    "uploads",
    "evictions",
    "cancelled",
    "bytes_moved",
    "transfers",
    "transfer_s",
    "cpu_s",
    "device_s",
    "wait_s",
    "partition_s",
    "schedule_s",
    "draft_s",
    "decode_s",
    "blocks",
    "blocks_unknown",
)
