"""Settings of llama.cpp's contexts and models, as its own options name them. Nothing here loads llama.cpp."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from moeedge.errors import require
from moeedge.hardware.spec import MAX_N_THREADS

FlashAttention = Literal["auto", "on", "off"]
RopeScaling = Literal["none", "linear", "yarn"]
LoadMode = Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"]
MAX_N_BATCH = 2**20  # tokens; llama.cpp allocates a record for each


class KvType(NamedTuple):
    ggml_type: int  # enum ggml_type
    block_bytes: int
    block_values: int  # those that share a scale

    @property
    def bytes_per_value(self) -> float:
        return self.block_bytes / self.block_values


# those that llama.cpp's programs take for -ctk and -ctv
KV_TYPES = {
    "f32": KvType(0, 4, 1),
    "f16": KvType(1, 2, 1),
    "bf16": KvType(30, 2, 1),
    "q8_0": KvType(8, 34, 32),
    "q4_0": KvType(2, 18, 32),
    "q4_1": KvType(3, 20, 32),
    "iq4_nl": KvType(20, 18, 32),
    "q5_0": KvType(6, 22, 32),
    "q5_1": KvType(7, 24, 32),
}
DEFAULT_KV_TYPE = "f16"
YARN_FACTORS = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")


@dataclass(frozen=True)
class RopeSettings:
    """Position encoding other than the file's; the defaults mean the file's own. Fields as of llama_context_params."""

    scaling: RopeScaling | None = None
    freq_base: float = 0.0
    freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0

    def __post_init__(self) -> None:
        kinds = get_args(RopeScaling)
        require(
            self.scaling in (None, *kinds), f"unknown --rope-scaling {self.scaling!r}: choose from {', '.join(kinds)}"
        )
        is_finite = 0 <= self.freq_base < math.inf and 0 <= self.freq_scale < math.inf
        require(is_finite, "--rope-freq-base, --rope-freq-scale and --rope-scale must be > 0 and finite")
        require(self.yarn_orig_ctx >= 0, f"--yarn-orig-ctx must be >= 0, not {self.yarn_orig_ctx}")


@dataclass(frozen=True)
class LoraAdapter:
    """A LoRA adapter in GGUF format, and how strongly it acts."""

    path: Path
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """Of a context. n_threads_batch: for batches of several tokens, 0: as for one token."""

    type_k: str = DEFAULT_KV_TYPE
    type_v: str = DEFAULT_KV_TYPE
    flash_attn: FlashAttention = "auto"
    n_threads_batch: int = 0
    rope: RopeSettings = field(default_factory=RopeSettings)
    adapters: tuple[LoraAdapter, ...] = ()

    def __post_init__(self) -> None:
        require(self.flash_attn in get_args(FlashAttention), f"-fa takes on, off or auto, not {self.flash_attn!r}")
        for name, option in ((self.type_k, "-ctk"), (self.type_v, "-ctv")):
            if name not in KV_TYPES:
                raise ValueError(f"unknown type {name!r} of a KV cache ({option}): choose from {', '.join(KV_TYPES)}")
        if KV_TYPES[self.type_v].block_values > 1 and self.flash_attn == "off":
            raise ValueError(f"a V cache of type {self.type_v} (-ctv) needs flash attention: leave out -fa off")
        n, most = self.n_threads_batch, MAX_N_THREADS
        require(0 <= n <= most, f"the threads for batches (-tb) must be from 0 to {most}, not {n}")

    @property
    def kv_label(self) -> str:
        """ "q8_0", or "K q8_0, V f16" where they differ."""
        return self.type_k if self.type_k == self.type_v else f"K {self.type_k}, V {self.type_v}"


class TensorOverride(NamedTuple):
    """Tensors whose name matches `pattern` (a regular expression) are kept in memory of the type `buffer_type`."""

    pattern: str
    buffer_type: str  # ggml's name: CPU, CUDA0, ...

    @classmethod
    def parse(cls, text: str) -> tuple[TensorOverride, ...]:
        """Reads -ot: "pattern=buffer type", several separated by commas. Raises ValueError."""
        overrides = []
        for item in text.split(","):
            pattern, equals, buffer_type = item.partition("=")
            if not (equals and pattern and buffer_type):
                raise ValueError(f"-ot takes PATTERN=BUFFER, such as exps=CPU, not {item!r}")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"-ot: {pattern!r} is not a regular expression: {error}") from None
            overrides.append(cls(pattern, buffer_type))
        return tuple(overrides)


@dataclass(frozen=True)
class LoadSettings:
    mode: LoadMode = "auto"
    overrides: tuple[TensorOverride, ...] = ()  # the first that matches counts

    def __post_init__(self) -> None:
        modes = get_args(LoadMode)
        require(self.mode in modes, f"unknown load mode {self.mode!r}: choose from {', '.join(modes)}")

    @property
    def is_locked(self) -> bool:
        return "mlock" in self.mode

    @property
    def is_mapped(self) -> bool:
        return self.mode in ("auto", "mmap", "mmap+mlock")
