"""Options of llama.cpp that act on how a model is loaded and what its context is made of, named as there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

from moeedge.cli.declare import OPTIONS, declare
from moeedge.cli.foreign import SWITCH
from moeedge.engine.types import DEFAULT_N_UBATCH, EngineConfig
from moeedge.llama.settings import (
    DEFAULT_KV_TYPE,
    KV_TYPES,
    ContextSettings,
    LoadSettings,
    LoraAdapter,
    RopeSettings,
    TensorOverride,
)

LLAMA = "Context and loading (llama.cpp)"

_TYPES = ", ".join(KV_TYPES)

declare(
    LLAMA,
    f"""
    -ctk, --cache-type-k TYPE  Type of the keys in the KV cache: {_TYPES}. q8_0 takes about half the memory of f16,
        q4_0 a quarter; other types than f16 change answers slightly.
        also: LLAMA_ARG_CACHE_TYPE_K
    -ctv, --cache-type-v TYPE  Type of the values in the KV cache, as -ctk; a quantized one (q8_0 and below) needs
        flash attention.
        also: LLAMA_ARG_CACHE_TYPE_V
    -ctkd, --cache-type-k-draft TYPE  Type of the keys in the draft's KV cache.
        also: --spec-draft-type-k LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K
    -ctvd, --cache-type-v-draft TYPE  Type of the values in the draft's KV cache.
        also: --spec-draft-type-v LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V
    -fa, --flash-attn on|off|auto  Flash attention; auto: where the device computes it.
        also: LLAMA_ARG_FLASH_ATTN
    -b, --batch-size N  Most tokens per call of llama.cpp; a larger -ub is lowered to it.
        also: LLAMA_ARG_BATCH
    -ub, --ubatch-size N  Tokens of a prompt that are computed at once: more are faster and take more memory.
        also: LLAMA_ARG_UBATCH
    -tb, --threads-batch N  CPU threads for prompts and for the verification of drafts; 0: as -t.
        also: LLAMA_ARG_THREADS_BATCH
    --mlock  Lock the model in memory, so that the system does not page it out; a line says what is not locked.
        also: LLAMA_ARG_MLOCK
    --mmap/--no-mmap  Map the file, or read it into memory of the program. Default: map it.
        also: LLAMA_ARG_MMAP
    -lm, --load-mode auto|none|mmap|mlock|mmap+mlock|dio  How the file is loaded, in one option: as --mmap and --mlock
        say, or past the system's file cache (dio).
        also: LLAMA_ARG_LOAD_MODE
    -ot, --override-tensor PATTERN=BUFFER,...  Keep the tensors whose names match a regular expression in this memory:
        CPU, or a GPU's such as CUDA0. Comes before -ncmoe and --cpu-moe; the expert cache serves the experts that
        stay in host memory.
        also: LLAMA_ARG_OVERRIDE_TENSOR
    --lora FILE,...  LoRA adapter in GGUF format, or several. An adapter of experts switches the expert cache off.
    --lora-scaled FILE:SCALE,...  LoRA adapter and how strongly it acts, or several.
    --rope-scaling none|linear|yarn  How positions are scaled for contexts beyond the trained one. Default: as the
        file says.
        also: LLAMA_ARG_ROPE_SCALING_TYPE
    --rope-scale N  Expands the context by this factor: 1 / --rope-freq-scale.
        also: LLAMA_ARG_ROPE_SCALE
    --rope-freq-base N  Base frequency of RoPE. Default: the file's.
        also: LLAMA_ARG_ROPE_FREQ_BASE
    --rope-freq-scale N  Scale of RoPE's frequencies. Default: the file's.
        also: LLAMA_ARG_ROPE_FREQ_SCALE
    --yarn-orig-ctx N  YaRN: context that the model was trained with, in tokens.
        also: LLAMA_ARG_YARN_ORIG_CTX
    --yarn-ext-factor X  YaRN: mix of extrapolation, 0: interpolation only.
        also: LLAMA_ARG_YARN_EXT_FACTOR
    --yarn-attn-factor X  YaRN: scale of attention's magnitude.
        also: LLAMA_ARG_YARN_ATTN_FACTOR
    --yarn-beta-slow X  YaRN: high correction dimension.
        also: LLAMA_ARG_YARN_BETA_SLOW
    --yarn-beta-fast X  YaRN: low correction dimension.
        also: LLAMA_ARG_YARN_BETA_FAST
    """,
)

BatchSize = Annotated[int, OPTIONS["batch_size"]]
UbatchSize = Annotated[int, OPTIONS["ubatch_size"]]


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """How llama.cpp loads the model, and what its context is made of."""

    cache_type_k: str = DEFAULT_KV_TYPE
    cache_type_v: str = DEFAULT_KV_TYPE
    cache_type_k_draft: str = DEFAULT_KV_TYPE
    cache_type_v_draft: str = DEFAULT_KV_TYPE
    flash_attn: str = "auto"
    batch_size: int = 2048
    ubatch_size: int = DEFAULT_N_UBATCH
    threads_batch: int = 0
    mlock: bool = False
    mmap: bool | None = None
    load_mode: str | None = None
    override_tensor: list[str] = field(default_factory=list)
    lora: list[str] = field(default_factory=list)
    lora_scaled: list[str] = field(default_factory=list)
    rope_scaling: str | None = None
    rope_scale: float | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_slow: float | None = None
    yarn_beta_fast: float | None = None

    @property
    def given(self) -> list[str]:
        """The options that are not at their default."""
        usual = LlamaOptions()
        names = (item.name for item in fields(self) if getattr(self, item.name) != getattr(usual, item.name))
        return [f"--{name.replace('_', '-')}" for name in names]

    def apply(self, config: EngineConfig) -> EngineConfig:
        """The configuration with these settings. Raises ValueError for values that they cannot have."""
        return replace(
            config,
            n_batch=self.batch_size,
            n_ubatch=self.ubatch_size,
            context=ContextSettings(
                type_k=self.cache_type_k.lower(),
                type_v=self.cache_type_v.lower(),
                flash_attn=SWITCH.get(self.flash_attn.lower(), self.flash_attn),  # type: ignore[arg-type]
                n_threads_batch=self.threads_batch,
                rope=self._rope(),
                adapters=self._adapters(),
            ),
            draft_type_k=self.cache_type_k_draft.lower(),
            draft_type_v=self.cache_type_v_draft.lower(),
            load=LoadSettings(
                self._load_mode(),  # type: ignore[arg-type]
                tuple(found for text in self.override_tensor for found in TensorOverride.parse(text)),
            ),
        )

    def _load_mode(self) -> str:
        if self.load_mode is not None:
            if self.mlock or self.mmap is not None:
                raise ValueError("-lm says what --mlock and --mmap say: give one of them")
            return self.load_mode
        if self.mlock:
            return "mlock" if self.mmap is False else "mmap+mlock"
        return {None: "auto", True: "mmap", False: "none"}[self.mmap]

    def _adapters(self) -> tuple[LoraAdapter, ...]:
        plain = [LoraAdapter(Path(name)) for text in self.lora for name in text.split(",")]
        scaled = []
        for item in (item for text in self.lora_scaled for item in text.split(",")):
            name, _, scale = item.rpartition(":")
            try:
                scaled.append(LoraAdapter(Path(name), float(scale)))
            except ValueError:
                raise ValueError(f"--lora-scaled takes FILE:SCALE, such as adapter.gguf:0.5, not {item!r}") from None
        return (*plain, *scaled)

    def _rope(self) -> RopeSettings:
        if self.rope_scale is not None and not 0 < self.rope_scale < math.inf:
            raise ValueError(f"--rope-scale must be > 0 and finite, not {self.rope_scale}")
        scale = 1 / self.rope_scale if self.rope_scale is not None else self.rope_freq_scale
        given = {"scaling": self.rope_scaling, "freq_base": self.rope_freq_base, "freq_scale": scale}
        given |= {name: value for name, value in vars(self).items() if name.startswith("yarn_")}
        return RopeSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
