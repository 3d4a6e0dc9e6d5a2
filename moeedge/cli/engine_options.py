"""Groups of options that become the engine's configurations; `flatten` shows their fields to Typer as options.

Nothing here loads llama.cpp before `EngineOptions.config` is called, so that limit_openmp_spin can come first; the
checks of devices load it. The prompts that a command answers are here, too.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from moeedge import paths
from moeedge.cli.common import names, text_of
from moeedge.cli.options import declare
from moeedge.engine.types import (
    ALL_ON_CPU,
    DEFAULT_GAMMA,
    DEFAULT_N_UBATCH,
    DraftWord,
    EngineConfig,
    SamplingConfig,
    seed_or_random,
)
from moeedge.errors import EmptyPromptError, InputError, MoeedgeError
from moeedge.hardware.spec import EMULATED, RPC_SCHEME, DeviceSpec
from moeedge.llama.settings import DEFAULT_KV_TYPE, ContextSettings, LoadSettings, LoraAdapter
from moeedge.policies.registry import POLICIES, where_simulated
from moeedge.records import filled
from moeedge.run import Run

if TYPE_CHECKING:  # what needs NumPy is imported where it is used: --help does not wait for it
    from _typeshed import DataclassInstance

    from moeedge.cli.model_files import ModelFiles
    from moeedge.data.prompts import Prompt
    from moeedge.policies.expert_budget import Coverage, ExpertBudget
    from moeedge.scheduler.config import PlacementConfig

_SPIN_COUNT = "1000"
AUTO: Literal["auto"] = "auto"
_EXPERTS_OF_TEMPLATE = 1 << 20  # of --expert-budget auto, replaced by what it finds

declare(
    "--dataset LIST  ... Several, separated by commas, are compared.", "profile budget pair", read={names: "dataset"}
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The models and the hardware they run on."""

    model: Path | None = None
    model_draft: str | None = None
    draft_max: int | Literal["auto"] | None = None
    draft_p_min: float = 0.0
    ctx_size: int = 0
    threads: int = 0
    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    cpu_moe: bool = False
    device: str = "auto"
    backend: list[str] | None = None  # loaded by native.attach
    hf_token: str | None = None  # in the environment from here on, and so is the next
    offline: bool = False

    def limit_openmp_spin(self, *, emulate_bundled: bool = False, ram: int | str = "off") -> None:
        """As the function of that name, where other threads work at the same time.

        These are the emulated device, of auto with emulate_bundled, too; a worker, which may run here; and with --ram
        threads that read experts from the file.
        """
        bundled = self.model is None or paths.is_bundled(self.model)
        may_emulate = self.device == "auto" and emulate_bundled and bundled
        reads_experts = ram not in ("auto", "off") or (ram == "auto" and not bundled and self._exceeds_memory())
        if may_emulate or reads_experts or self.device.startswith((EMULATED, RPC_SCHEME)):
            limit_openmp_spin()

    def _exceeds_memory(self) -> bool:
        """Whether the model's file does not fit what is free."""
        from moeedge.hardware.host import fits
        from moeedge.hub.catalog import all_parts
        from moeedge.hub.local import locate

        try:
            path = locate(str(self.model)).path
            return not fits(sum(path.with_name(part).stat().st_size for part in all_parts(path.name)))
        except (MoeedgeError, OSError, ValueError):  # `config` says what is wrong
            return False

    def config(
        self,
        placement: PlacementConfig | None = None,
        *,
        emulate_bundled: bool = False,
        context_shift: bool = False,
        files: ModelFiles | None = None,
        default_draft: Literal["auto"] | None = None,
        auto_gamma: bool | None = None,
    ) -> EngineConfig:
        """The engine's configuration, its device and models checked.

        files: where -m and -md are resolved already. default_draft: the value of -md where it is not given. auto_gamma:
        whether drafts are as long as pays, unless --draft-max is given; None: those of heads and n-grams without -md.
        """
        from moeedge.cli.model_files import fetch_model, notify, resolve_models

        check_device(self.device)
        files = files or resolve_models(self.model, self.model_draft or default_draft, fetch=fetch_model)
        if self.cpu_moe and self.n_cpu_moe is not None:
            raise InputError("--cpu-moe and --n-cpu-moe cannot be used together.", "Leave out one of them.")
        gamma = self.draft_max
        if auto_gamma is None:
            auto_gamma = self.model_draft is None and files.draft in get_args(DraftWord)
        if gamma is None and auto_gamma and files.draft_max > 0:
            gamma = "auto"
        elif gamma is None and files.draft_max != DEFAULT_GAMMA:
            notify(f"The catalog suggests {files.draft_max} tokens per draft for it; --draft-max overrides this.")
        return filled(
            EngineConfig,
            self,
            model=files.target,
            draft=files.draft,
            n_ctx=self.ctx_size,
            n_threads=self.threads,
            gamma=files.draft_max if gamma is None else max(files.draft_max, 1) if gamma == "auto" else gamma,
            auto_gamma=gamma == "auto",
            n_gpu_layers=0 if self.device == "none" else self.n_gpu_layers,
            n_cpu_moe=ALL_ON_CPU if self.cpu_moe else self.n_cpu_moe,
            emulate_bundled=emulate_bundled,
            placement=placement or PlacementOptions().config(),
            context_shift=context_shift,
            **self.settings(),
        )

    def settings(self) -> dict[str, Any]:
        """Fields of the configuration that are not options by themselves."""
        return {}


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How many experts the device holds, and which: fields of PlacementConfig, which needs NumPy."""

    vram_bytes: int | None = None
    cache_ratio: float | None = None
    policy: str = "spac"
    utility_cap: int = 4

    def config(self, **others: Any) -> PlacementConfig:
        """The scheduler's configuration. Raises InputError and ValueError for values that it cannot have."""
        from moeedge.scheduler.config import PlacementConfig

        if self.policy not in POLICIES:
            hint = f"Choose from: {', '.join(POLICIES)}.{where_simulated(self.policy)}"
            raise InputError(f"Unknown policy {self.policy!r}.", hint)
        return PlacementConfig(**vars(self), **others)


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(CacheOptions):
    """In addition how the policy works, and what is measured and kept."""

    ablations: frozenset[str] = frozenset()
    forgetting: float = 0.1
    prefill: str = "auto"
    calibrate: bool = True
    warm_start: bool = True
    pins_files: bool = True


@dataclass(frozen=True, kw_only=True)
class LlamaOptions(EngineOptions):
    """In addition how llama.cpp loads the model, and what its context is made of."""

    context: ContextSettings = field(default_factory=ContextSettings)
    draft_type_k: str = DEFAULT_KV_TYPE
    draft_type_v: str = DEFAULT_KV_TYPE
    n_batch: int = 2048
    n_ubatch: int = DEFAULT_N_UBATCH
    load: LoadSettings = field(default_factory=LoadSettings)
    mlock: bool = False
    mmap: bool | None = None
    lora: tuple[LoraAdapter, ...] = ()
    lora_scaled: tuple[LoraAdapter, ...] = ()
    rope_scale: float | None = None

    def settings(self) -> dict[str, Any]:
        """Of the context and of loading. Raises ValueError for values that they cannot have."""
        rope = self.context.rope
        if self.rope_scale is not None:
            if not 0 < self.rope_scale < math.inf:
                raise ValueError(f"--rope-scale must be > 0 and finite, not {self.rope_scale}")
            rope = replace(rope, freq_scale=1 / self.rope_scale)
        context = replace(self.context, rope=rope, adapters=self.lora + self.lora_scaled)
        return {"context": context, "load": self._load()}

    def _load(self) -> LoadSettings:
        if not self.mlock and self.mmap is None:
            return self.load
        if self.load.mode != "auto":
            raise ValueError("-lm says what --mlock and --mmap say: give one of them")
        if self.mlock:
            return replace(self.load, mode="mlock" if self.mmap is False else "mmap+mlock")
        return replace(self.load, mode="mmap" if self.mmap else "none")


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """How many experts a verification may use per layer, and which."""

    expert_budget: int | Literal["auto"] | None = None
    budget_ranking: str | None = None
    budget_policy: str | None = None

    def config(self, base: EngineConfig) -> EngineConfig:
        """`base` with the budget of the options, for auto without its number of experts yet. Raises InputError."""
        if self.expert_budget is None:
            expect_no_companions(self, "B")
            return base
        # a truncated expert is not computed, which gains more than the smaller number of experts (docs/log.md)
        policy = self.budget_policy or ("truncation" if self.expert_budget == AUTO else None)
        n_experts = _EXPERTS_OF_TEMPLATE if self.expert_budget == AUTO else self.expert_budget
        return replace(base, expert_budget=make_budget(n_experts, ranking=self.budget_ranking, policy=policy))

    def measured(self, config: EngineConfig, run: Run) -> EngineConfig:
        """`config` with the number of experts of auto, measured where no earlier run did."""
        if config.expert_budget is None or self.expert_budget != AUTO:
            return config
        from moeedge.bench.budget_choice import find_budget

        return replace(config, expert_budget=find_budget(config, config.expert_budget, run))


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The prompts to answer, and the length and the sampling of the answers."""

    prompt: str | None = None
    file: Path | None = None
    dataset: list[str] | None = None
    limit: int = 8
    offline_sample: bool = False
    n_predict: int = 128
    raw: bool = False
    temp: float = 0.0
    seed: int = -1

    def load(self, *, bundled: bool) -> tuple[list[Prompt], dict[str, Any]]:
        """The prompts (by default of the bundled model's kind for it), and the report's fields about their source."""
        from moeedge.data.datasets import SAMPLE, TOY, load_dataset
        from moeedge.data.prompts import Prompt, user_turns

        if self.n_predict == 0 or self.n_predict < -1:
            raise ValueError(f"-n must be -1 (until the model stops) or at least 1, not {self.n_predict}")
        text = text_of(self.prompt, self.file, "-p", "-f")
        if text is not None:
            if self.dataset is not None:
                raise InputError("-p and --dataset cannot be used together.", "Give one of them.")
            if not text.strip():
                raise EmptyPromptError("The prompt is empty: -p is blank.", "Give some text to answer.")
            return [Prompt("prompt", "", user_turns(text))], {"dataset": "prompt", "prompts": 1}
        names = self.dataset or [TOY if bundled else SAMPLE]
        sets = [load_dataset(name, offline_sample=self.offline_sample).limited(self.limit or None) for name in names]
        for dataset in sets:
            if not dataset.prompts:
                raise InputError(f'The prompt set "{dataset.name}" is empty.')
        prompts = [replace(prompt, dataset=dataset.name) for dataset in sets for prompt in dataset.prompts]
        return prompts, {
            "dataset": ",".join(dataset.name for dataset in sets),
            "prompts": len(prompts),
            "dataset_sha256": ",".join(dataset.sha256 for dataset in sets),
        }

    def answers(self) -> dict[str, Any]:
        """Length and sampling of the answers, as what records them takes them.

        A drawn seed serves all answers, so that the report and the trace can name it.
        """
        import secrets  # loads hashlib, which --help does not wait for

        seed = seed_or_random(self.seed)
        if seed is None and self.temp > 0:
            seed = secrets.randbits(32)
        sampling = SamplingConfig(temperature=self.temp, seed=seed)
        return {"n_predict": self.n_predict, "sampling": sampling, "raw": self.raw}


def expect_no_companions(options: DataclassInstance, value: str) -> None:
    """Raises InputError where one of the options --budget-... has a value; value: that of --expert-budget, for help."""
    names = [
        "--" + field.name.replace("_", "-")
        for field in fields(options)
        if field.name.startswith("budget_") and getattr(options, field.name) is not None
    ]
    if names:
        verb = "needs" if len(names) == 1 else "need"
        raise InputError(f"{' and '.join(names)} {verb} an expert budget.", f"Add --expert-budget {value}.")


def make_budget(n_experts: int, *, ranking: str | None, policy: str | None) -> ExpertBudget:
    """A budget of `n_experts` per layer; None: the default of that choice. Raises InputError."""
    from moeedge.policies.expert_budget import ExpertBudget

    return ExpertBudget(
        budget=n_experts,
        ranking=ranking or ExpertBudget.ranking,
        coverage=cast("Coverage", policy or ExpertBudget.coverage),
    )


def check_device(text: str) -> None:
    """Raises DeviceError for a malformed device, or one that this machine does not have; the hint names the known."""
    from moeedge.hardware.devices import resolve
    from moeedge.llama import library

    spec = DeviceSpec.parse(text)
    if spec.kind != "name":
        return
    library.start()
    resolve(spec)


def layer_notes(config: EngineConfig) -> list[str]:
    """A sentence where -ngl, -ncmoe or --cpu-moe has no effect."""
    options = ["-ngl"] if config.n_gpu_layers else []
    if config.n_cpu_moe is not None:
        options.append("--cpu-moe" if config.n_cpu_moe == ALL_ON_CPU else "-ncmoe")
    if not options:
        return []
    from moeedge import native
    from moeedge.llama import library

    library.start()  # llama.cpp logs while it lists devices
    if any(device.kind in ("GPU", "IGPU") for device in native.devices()):
        return []
    verb = "has" if len(options) == 1 else "have"
    return [f"llama.cpp lists no GPU here: {' and '.join(options)} {verb} no effect."]


def limit_openmp_spin() -> None:
    """Makes idle OpenMP threads yield their core soon; GOMP_SPINCOUNT is read when llama_cpp is loaded."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
