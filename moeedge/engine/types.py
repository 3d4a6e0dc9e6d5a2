"""What goes into the engine and what comes out: frozen configurations and plain records, no behaviour beyond checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal

StopReason = Literal["eos", "length", "context", "interrupted"]
# moeedge: our backend attached; stock: the same process and loop, our backend claims nothing
Mode = Literal["moeedge", "stock"]


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
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], not {self.min_p}")
        if self.repeat_penalty <= 0:
            raise ValueError(f"repeat_penalty must be > 0, not {self.repeat_penalty}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that a session needs to load; paths are resolved by the caller."""

    model: Path
    draft: Path | Literal["ngram"] | None = None
    n_ctx: int = 0  # tokens; 0: what the model was trained with
    n_threads: int = 0  # 0: the physical cores
    gamma: int = 4  # draft length, llama.cpp's --draft-max; 0 switches speculation off
    n_gpu_layers: int = 0
    device: str = "auto"
    mode: Mode = "moeedge"
    n_batch: int = 2048  # tokens per llama_decode call
    n_ubatch: int = 512  # tokens per graph
    context_shift: bool = False  # drop the oldest half instead of stopping when the context is full

    def __post_init__(self) -> None:
        if self.gamma < 0 or self.gamma > 64:
            raise ValueError(f"gamma (--draft-max) must be in 0..64, not {self.gamma}")
        if self.n_ctx < 0:
            raise ValueError(f"n_ctx must be >= 0, not {self.n_ctx}")
        if self.n_threads < 0:
            raise ValueError(f"n_threads must be >= 0, not {self.n_threads}")


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
    device: str  # "none" until placement has a device
    policy: str  # "none" until placement has one
    hit_rate: float | None = None
    notes: list[str] = field(default_factory=list)  # one sentence each: why something is off
