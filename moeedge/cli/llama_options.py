"""Options of llama.cpp that act on how a model is loaded and what its context is made of, named as there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

from moeedge.cli.declare import option
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

CacheTypeK = Annotated[
    str,
    option(
        LLAMA,
        "-ctk, --cache-type-k TYPE",
        f"Type of the keys in the KV cache: {_TYPES}. q8_0 takes about half the memory of f16, q4_0 a quarter; other "
        "types than f16 change answers slightly.",
        env="LLAMA_ARG_CACHE_TYPE_K",
    ),
]
CacheTypeV = Annotated[
    str,
    option(
        LLAMA,
        "-ctv, --cache-type-v TYPE",
        "Type of the values in the KV cache, as -ctk; a quantized one (q8_0 and below) needs flash attention.",
        env="LLAMA_ARG_CACHE_TYPE_V",
    ),
]
CacheTypeKDraft = Annotated[
    str,
    option(
        LLAMA,
        "-ctkd, --cache-type-k-draft TYPE",
        "Type of the keys in the draft's KV cache.",
        also="--spec-draft-type-k",
        env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
    ),
]
CacheTypeVDraft = Annotated[
    str,
    option(
        LLAMA,
        "-ctvd, --cache-type-v-draft TYPE",
        "Type of the values in the draft's KV cache.",
        also="--spec-draft-type-v",
        env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
    ),
]
FlashAttn = Annotated[
    str,
    option(
        LLAMA,
        "-fa, --flash-attn on|off|auto",
        "Flash attention; auto: where the device computes it.",
        env="LLAMA_ARG_FLASH_ATTN",
    ),
]
BatchSize = Annotated[
    int,
    option(
        LLAMA,
        "-b, --batch-size N",
        "Most tokens per call of llama.cpp; a larger -ub is lowered to it.",
        env="LLAMA_ARG_BATCH",
    ),
]
UbatchSize = Annotated[
    int,
    option(
        LLAMA,
        "-ub, --ubatch-size N",
        "Tokens of a prompt that are computed at once: more are faster and take more memory.",
        env="LLAMA_ARG_UBATCH",
    ),
]
ThreadsBatch = Annotated[
    int,
    option(
        LLAMA,
        "-tb, --threads-batch N",
        "CPU threads for prompts and for the verification of drafts; 0: as -t.",
        env="LLAMA_ARG_THREADS_BATCH",
    ),
]
Mlock = Annotated[
    bool,
    option(
        LLAMA,
        "--mlock",
        "Lock the model in memory, so that the system does not page it out; a line says what is not locked.",
        env="LLAMA_ARG_MLOCK",
    ),
]
Mmap = Annotated[
    bool | None,
    option(
        LLAMA,
        "--mmap/--no-mmap",
        "Map the file, or read it into memory of the program. Default: map it.",
        env="LLAMA_ARG_MMAP",
    ),
]
LoadMode = Annotated[
    str | None,
    option(
        LLAMA,
        "-lm, --load-mode auto|none|mmap|mlock|mmap+mlock|dio",
        "How the file is loaded, in one option: as --mmap and --mlock say, or past the system's file cache (dio).",
        env="LLAMA_ARG_LOAD_MODE",
    ),
]
OverrideTensor = Annotated[
    list[str],
    option(
        LLAMA,
        "-ot, --override-tensor PATTERN=BUFFER,...",
        "Keep the tensors whose names match a regular expression in this memory: CPU, or a GPU's such as CUDA0. Comes "
        "before -ncmoe and --cpu-moe; the expert cache serves the experts that stay in host memory.",
        env="LLAMA_ARG_OVERRIDE_TENSOR",
        show_default=False,
    ),
]
Lora = Annotated[
    list[str],
    option(
        LLAMA,
        "--lora FILE,...",
        "LoRA adapter in GGUF format, or several. An adapter of experts switches the expert cache off.",
        show_default=False,
    ),
]
LoraScaled = Annotated[
    list[str],
    option(
        LLAMA, "--lora-scaled FILE:SCALE,...", "LoRA adapter and how strongly it acts, or several.", show_default=False
    ),
]
RopeScalingOption = Annotated[
    str | None,
    option(
        LLAMA,
        "--rope-scaling none|linear|yarn",
        "How positions are scaled for contexts beyond the trained one. Default: as the file says.",
        env="LLAMA_ARG_ROPE_SCALING_TYPE",
    ),
]
RopeScale = Annotated[
    float | None,
    option(
        LLAMA,
        "--rope-scale N",
        "Expands the context by this factor: 1 / --rope-freq-scale.",
        env="LLAMA_ARG_ROPE_SCALE",
    ),
]
RopeFreqBase = Annotated[
    float | None,
    option(LLAMA, "--rope-freq-base N", "Base frequency of RoPE. Default: the file's.", env="LLAMA_ARG_ROPE_FREQ_BASE"),
]
RopeFreqScale = Annotated[
    float | None,
    option(
        LLAMA,
        "--rope-freq-scale N",
        "Scale of RoPE's frequencies. Default: the file's.",
        env="LLAMA_ARG_ROPE_FREQ_SCALE",
    ),
]
YarnOrigCtx = Annotated[
    int | None,
    option(
        LLAMA,
        "--yarn-orig-ctx N",
        "YaRN: context that the model was trained with, in tokens.",
        env="LLAMA_ARG_YARN_ORIG_CTX",
    ),
]
YarnExtFactor = Annotated[
    float | None,
    option(
        LLAMA,
        "--yarn-ext-factor X",
        "YaRN: mix of extrapolation, 0: interpolation only.",
        env="LLAMA_ARG_YARN_EXT_FACTOR",
    ),
]
YarnAttnFactor = Annotated[
    float | None,
    option(LLAMA, "--yarn-attn-factor X", "YaRN: scale of attention's magnitude.", env="LLAMA_ARG_YARN_ATTN_FACTOR"),
]
YarnBetaSlow = Annotated[
    float | None,
    option(LLAMA, "--yarn-beta-slow X", "YaRN: high correction dimension.", env="LLAMA_ARG_YARN_BETA_SLOW"),
]
YarnBetaFast = Annotated[
    float | None, option(LLAMA, "--yarn-beta-fast X", "YaRN: low correction dimension.", env="LLAMA_ARG_YARN_BETA_FAST")
]


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """How llama.cpp loads the model, and what its context is made of."""

    cache_type_k: CacheTypeK = DEFAULT_KV_TYPE
    cache_type_v: CacheTypeV = DEFAULT_KV_TYPE
    cache_type_k_draft: CacheTypeKDraft = DEFAULT_KV_TYPE
    cache_type_v_draft: CacheTypeVDraft = DEFAULT_KV_TYPE
    flash_attn: FlashAttn = "auto"
    batch_size: BatchSize = 2048
    ubatch_size: UbatchSize = DEFAULT_N_UBATCH
    threads_batch: ThreadsBatch = 0
    mlock: Mlock = False
    mmap: Mmap = None
    load_mode: LoadMode = None
    override_tensor: OverrideTensor = field(default_factory=list)
    lora: Lora = field(default_factory=list)
    lora_scaled: LoraScaled = field(default_factory=list)
    rope_scaling: RopeScalingOption = None
    rope_scale: RopeScale = None
    rope_freq_base: RopeFreqBase = None
    rope_freq_scale: RopeFreqScale = None
    yarn_orig_ctx: YarnOrigCtx = None
    yarn_ext_factor: YarnExtFactor = None
    yarn_attn_factor: YarnAttnFactor = None
    yarn_beta_slow: YarnBetaSlow = None
    yarn_beta_fast: YarnBetaFast = None

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
                flash_attn=_FLASH_ATTENTION.get(self.flash_attn.lower(), self.flash_attn),  # type: ignore[arg-type]
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
        given = {
            "scaling": self.rope_scaling,
            "freq_base": self.rope_freq_base,
            "freq_scale": scale,
            "yarn_orig_ctx": self.yarn_orig_ctx,
            "yarn_ext_factor": self.yarn_ext_factor,
            "yarn_attn_factor": self.yarn_attn_factor,
            "yarn_beta_fast": self.yarn_beta_fast,
            "yarn_beta_slow": self.yarn_beta_slow,
        }
        return RopeSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


# llama.cpp's other words for on and off
_FLASH_ATTENTION = {
    **dict.fromkeys(("on", "enabled", "true", "1"), "on"),
    **dict.fromkeys(("off", "disabled", "false", "0"), "off"),
    **dict.fromkeys(("auto", "-1"), "auto"),
}
