"""Rows of a benchmark's result: the figures, what they depend on (options, versions, commit, CPU), and raw samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from moeedge.bench.config import MODES, BenchMode, BenchPlan, DraftLength, ScriptedTest, SyntheticTest
from moeedge.bench.experiment import BenchArm
from moeedge.bench.figures import BudgetFigures, ParallelFigures, StockRatio
from moeedge.bench.quality import OutputCheck, Scores
from moeedge.bench.roofline import Roofline
from moeedge.bench.samples import (
    CacheFigures,
    Disturbance,
    Sample,
    Samples,
    Spread,
    cache_figures,
    disturbance,
    paired_ratio,
    quotient,
    speed,
)
from moeedge.bench.whole_layers import session_use
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.provenance import Provenance
from moeedge.llama.settings import FlashAttention, LoadMode, RopeSettings
from moeedge.native import devices
from moeedge.policies.base import LookaheadStatus
from moeedge.policies.expert_budget import BudgetFacts, budget_record
from moeedge.records import combine, derived, figure, filled, stored

SCHEMA: Literal["moeedge-bench-4"] = "moeedge-bench-4"  # changes when a key changes its meaning
_RATIO_ROUNDING = 0.01  # the cache has an integer number of slots


@dataclass(frozen=True, kw_only=True)
class Setup(BudgetFacts, Provenance):
    """Versions, machine, models and parameters that the figures of a row depend on; every row has all keys."""

    schema: Literal["moeedge-bench-4"] = figure("Name of this schema; a changed meaning changes it", default=SCHEMA)
    model: str = figure("File of the target")
    model_description: str = figure("llama.cpp's description of the target")
    model_bytes: int = figure("Weights of the target", "bytes")
    model_n_params: int = figure("Number of parameters of the target")
    architecture: str = figure("llama.cpp's name of the architecture")
    n_layers: int = figure("Layers")
    n_expert_layers: int = figure("Layers with experts")
    n_experts: int = figure("Experts of a layer")
    n_experts_used: int = figure("Experts that a token uses in a layer")
    draft: str = figure('Source of drafts; "none" without')
    gamma: int = figure("Most drafts of a step, in tokens")
    auto_gamma: bool = figure("Whether each step drafted as many as paid (--draft-max auto)", default=False)
    draft_p_min: float = figure("Probability below which a draft model's drafts end (--draft-p-min); 0: none", most=1)
    device: str = figure('The device that holds experts; "none" without')
    is_device: bool = True  # False: RAM
    policy: str = figure('Policy of the expert cache; "none" without')
    cache_ratio: float | None = figure("Share of all experts that have a slot", most=1)
    lookahead_used: bool | None = figure("Whether the policy predicts experts from the draft", default=None)
    lookahead_gain: float | None = stored(LookaheadStatus, "gain")
    lookahead_reason: str | None = stored(LookaheadStatus, "reason")
    cache_slots: int | None = figure("Slots of the expert cache")
    pool_bytes: int | None = figure("The slots", "bytes")
    vram_bytes: int | None = figure("Memory in use on the entire device at the end", "bytes")
    whole_layers: int = figure("Layers whose experts are all on a GPU", axis="name")
    device_bytes: int | None = figure("Memory of this mode on GPUs", "bytes", default=None)
    device_weights_bytes: int | None = figure("Weights in it", "bytes", default=None)
    device_kv_bytes: int | None = figure("KV caches in it", "bytes", default=None)
    device_compute_bytes: int | None = figure("Compute buffers in it", "bytes", default=None)
    device_cache_bytes: int | None = figure("The expert cache in it", "bytes", default=None)
    backend: str = figure("ggml backend that computes: of the GPUs, else CPU")
    threads: int = figure("Threads of the contexts", least=1, axis="x")
    other_load_before: float | None = figure("Processors that other programs used before the run", default=None)
    other_load: float | None = figure("The same on average while the run measured", default=None)
    read_bytes_per_s: float | None = figure("Speed at which these threads read memory", "bytes/s", default=None)
    bytes_per_token: int | None = figure("Weights that a token needs", "bytes", default=None)
    limit_ts: float | None = figure("Their quotient, the limit of decoding without drafts", "t/s", default=None)
    products_per_s: float | None = figure("Products of bytes that these threads compute, in 1/s", default=None)
    prompt_limit_ts: float | None = figure(
        "Limit of this test's prompt by both speeds; experts as if each token chose on its own", "t/s", default=None
    )
    n_ctx: int = figure("Context size, in tokens")
    n_batch: int = figure("Logical batch, in tokens", axis="x")
    n_ubatch: int = figure("Physical batch, in tokens", axis="x")
    threads_batch: int = figure("CPU threads of batches of several tokens (-tb)", least=1)
    type_k: str = figure("Type of the target's K cache (-ctk)", axis="name")
    type_v: str = figure("Type of the target's V cache (-ctv)", axis="name")
    type_k_draft: str = figure("Type of the draft's K cache (-ctkd)")
    type_v_draft: str = figure("Type of the draft's V cache (-ctvd)")
    flash_attn: FlashAttention = figure("Flash attention as asked for (-fa)", axis="name")
    load_mode: LoadMode = figure("How the file is loaded (-lm, --mmap, --mlock)")
    tensor_buft_overrides: str = figure("Value of -ot; empty: none")
    lora: str = figure("LoRA adapters as FILE:SCALE, separated by commas; empty: none")
    rope: dict[str, Any] | None = figure("Position encoding as asked for (--rope-..., --yarn-...); null: the file's")
    n_gpu_layers: int | None = figure("Value of -ngl; -1: all; null: chosen by moeedge", least=None, axis="name")
    temperature: float = figure("Of sampling; 0: greedy", default=0.0)
    n_predict: int | None = figure("Most tokens of an answer; null in a run without a dataset", least=None)
    ignore_eos: bool = figure("Whether answers continued after stop tokens")
    run_code: bool = figure("Whether programs that the model wrote ran for their score")
    n_prompt: int = figure("Prompt of this synthetic test, in tokens; 0: none", default=0, axis="x")
    n_gen: int = figure("Tokens decoded by this synthetic test; 0: none", default=0, axis="name")
    n_depth: int = figure("Tokens in the context before the synthetic test", default=0, axis="x")
    acceptance: float | None = figure("Rate at which scripted drafts are accepted (--accept)", default=None, most=1)
    confidences: str | None = figure("What scripted drafts tell of their chance (--accept-confidence)", default=None)
    routing: str | None = figure("Trace whose experts replaced those of the routers (--routing)", default=None)
    routing_scaling: str | None = figure("How it was fitted to the model; empty: it has its shape", default=None)
    routing_boundaries: list[list[int]] | None = figure(
        "Positions at which another recorded sequence begins, of each repetition", default=None
    )
    routing_cost: float | None = figure(
        "Share of a token's decoding time that the hook takes", default=None, least=None
    )
    repetitions: int = figure("Repetitions that were asked for", least=1)
    ablations: str = figure("--ablate, separated by commas")
    utility_cap: int = figure("--utility-cap")
    forgetting: float = figure("--forgetting")
    prefill_path: str = figure("--prefill-path")
    modes: str = figure("All modes of the run, separated by commas")
    dataset: str | None = figure("Name of the dataset", default=None)
    dataset_variant: str | None = figure("What the prompts are", default=None)
    dataset_place: str | None = figure("Where they were found", default=None)
    dataset_file: str | None = figure("Name of their file", default=None)
    dataset_sha256: str | None = figure("SHA-256 of the file, hexadecimal", default=None)
    limit: int | None = figure("--limit; null: all prompts")
    prompts: int | None = figure("Prompts that ran; null in a synthetic test", default=None)
    prompts_left_out: int | None = figure("Prompts that did not fit the context", default=None)

    @property
    def draft_length(self) -> DraftLength:
        """As --draft-max gives it; 0 without drafts."""
        return "auto" if self.auto_gamma else self.gamma


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """The result of a mode in a test: figures, the set-up that they depend on, and the raw samples.

    policy and cache_ratio: "none" and None without an expert cache. asked_ratio: the cache ratio that was asked for,
    which modes with the same memory share. figures: where expert budgets, draft lengths or perplexities are compared.
    parallel: where several texts were decoded together. best_stock: of rows with our backend. n_planned: samples of a
    complete run; None: as many as there are.
    """

    mode: str = figure("The mode: stock-ar, stock-sd, stock-ngram, moeedge, moeedge-ar, stock-ncmoe, stock-ncmoe-sd")
    test: str = figure('The dataset, or the synthetic test: pp512, tg128, pp512+tg128, or one of these "@ d4096"')
    policy: str
    cache_ratio: float | None
    pp: Spread | None = figure("Prefill speed", "t/s", prefix="pp_ts")
    tg: Spread | None = figure("Decoding speed", "t/s", prefix="tg_ts")
    total: Spread | None = figure(
        "In tests ppN+tgM: tokens of both over the time of both", "t/s", prefix="total_ts", default=None
    )
    disturbed: Disturbance | None = figure(
        "Why the table withholds the ratios: load (other programs took cores while the row or stock-ar was measured), "
        "scatter (ratios of repetitions differ by more than 50 %); null: they were measured undisturbed",
        default=None,
    )
    tg_drained_ts: float | None = figure("Decoding speed with the drains after the answers in its time", "t/s")
    drain_s: float | None = figure("A drain, mean over turns and repetitions", "s")
    ttft_s: float | None = figure(
        "Time to the first token, mean over turns and repetitions", "s", title="TTFT ms", form=".1f", scale=1e3
    )
    acceptance_rate: float | None = stored(Sample, "acceptance_rate", title="accepted", form=".2f")
    tokens_per_step: float | None = stored(Sample, "tokens_per_step", title="tokens/step", form=".2f")
    experts_per_verification: float | None = stored(
        Sample, "experts_per_verification", title="experts/step", form=".1f"
    )
    cache: CacheFigures = figure("", prefix="")
    read_bytes_per_token: float | None = stored(
        Sample, "read_bytes_per_token", title="MB/token", form=".1f", scale=1e-6
    )
    output: OutputCheck | None = figure("", prefix="", default=None)
    scores: Scores = figure("", prefix="", default=Scores())
    ratio: float | None = figure("Decoding speed over stock-ar's, median of pairs. A ratio", axis="y")
    ratio_pp: float | None = figure("Prefill speed over stock-ar's, median of pairs. A ratio", axis="y")
    ratio_total: float | None = figure("total_ts over stock-ar's, median of pairs. A ratio", default=None)
    ratio_drained: float | None = figure("ratio with the drains of this mode in its time. A ratio")
    ratio_cpu: float | None = figure("stock-ar's processor time over this mode's, median of pairs. A ratio")
    ratio_ncmoe: float | None = figure(
        "ratio over that of the fastest stock mode with whole layers in the same GPU memory. A ratio", default=None
    )
    ratio_pp_ncmoe: float | None = figure("ratio_pp over that of the fastest such mode. A ratio", default=None)
    best_stock: tuple[StockRatio, ...] = ()
    figures: BudgetFigures | None = figure("", prefix="", default=None)
    parallel: ParallelFigures | None = figure("", prefix="", default=None)
    setup: Setup = figure("", prefix="")
    asked_ratio: float | None = None
    n_planned: int | None = None
    samples: tuple[Sample, ...] = figure("The raw samples")

    @derived("Number of samples that the figures are from")
    def n_samples(self) -> int:
        return len(self.samples)

    @derived("Number of samples of a complete run; more than n_samples: the run was interrupted")
    def n_samples_planned(self) -> int:
        return len(self.samples) if self.n_planned is None else self.n_planned

    @derived("Whether the mode had run before each of these samples")
    def warm(self) -> bool:
        return all(sample.warm for sample in self.samples)

    @derived("How much the fastest repetition is faster than the slowest (0.1: a tenth); null for a single one")
    def scatter(self) -> float | None:
        measured = self.total or self.tg or self.pp
        return None if measured is None else measured.scatter

    @derived(
        "tg_ts_median over limit_ts; drafts that win more than they cost exceed 1. Of a prompt alone pp_ts_median over "
        "prompt_limit_ts",
        title="of limit",
        form=".2f",
    )
    def limit_share(self) -> float | None:
        if self.tg is None and self.pp is not None and self.setup.prompt_limit_ts:
            return self.pp.median / self.setup.prompt_limit_ts
        return self.tg.median / self.setup.limit_ts if self.tg is not None and self.setup.limit_ts else None

    @derived("Decoding speed over that of the fastest stock mode, chosen in hindsight. A ratio")
    def ratio_best_stock(self) -> float | None:
        return self.best_stock[0].ratio if self.best_stock else None

    @derived("", prefix="ratio_best_stock_", without=("category", "ratio", "fastest", "n_turns"))
    def total_stock(self) -> StockRatio | None:
        return self.best_stock[0] if self.best_stock else None

    @derived("The fastest stock mode", key="best_stock")
    def fastest_stock(self) -> str | None:
        return self.best_stock[0].fastest if self.best_stock else None

    @derived("The same for each category, and their mean")
    def best_stock_by_category(self) -> tuple[StockRatio, ...]:
        return self.best_stock[1:]

    @property
    def is_partial(self) -> bool:
        """Whether the run ended before all samples were measured."""
        return self.n_planned is not None and len(self.samples) < self.n_planned

    @property
    def is_lossy(self) -> bool:
        """Whether an expert budget changed the answers by design."""
        return self.figures is not None and self.figures.mode.budget is not None

    @property
    def label(self) -> str:
        """The mode, and the choices that distinguish it from the other rows of a sweep."""
        policy = "" if self.policy == "none" else f" {self.policy}"
        cache = "" if self.cache_ratio is None else f"{policy} {self.cache_ratio:g}"
        speculation = "" if self.figures is None else self.figures.mode.speculation
        if self.parallel is not None:
            gamma = self.setup.draft_length
            speculation = f"{f'gamma {gamma} ' if gamma else ''}parallel {self.parallel.n_parallel}"
        return f"{self.mode}{cache}{' ' if speculation else ''}{speculation}"


def make_row(
    mode: BenchMode, test: str, samples: Samples, reference: Samples, *, setup: Setup, **others: Any
) -> BenchRow:
    """Returns the row of `samples`, all of one mode and test.

    reference: stock-ar's samples, empty if it did not run. setup: from `describe_setup`. others: further fields.
    """
    sums = combine(samples)
    has_both = bool(setup.n_prompt and setup.n_gen)  # a synthetic test ppN+tgM
    answered = [sample.ttft_s for sample in samples if sample.ttft_s > 0]
    return filled(
        BenchRow,
        sums,
        setup,
        mode=mode.name,
        test=test,
        pp=speed(samples, "prefill"),
        tg=speed(samples, "decode"),
        total=speed(samples, "prefill", "decode") if has_both else None,
        tg_drained_ts=quotient(sums.decode_tokens, sums.decode_s + sums.drain_s),
        drain_s=quotient(sums.drain_s, len(samples)),
        ttft_s=quotient(sum(answered), len(answered)),
        cache=cache_figures(sums.placement, setup.n_expert_layers - setup.whole_layers),
        ratio=paired_ratio(samples, reference),
        ratio_pp=paired_ratio(samples, reference, lambda s: s.pp_ts),
        ratio_total=paired_ratio(samples, reference, lambda s: s.rate_ts("prefill", "decode")) if has_both else None,
        ratio_drained=paired_ratio(samples, reference, lambda s: s.rate_ts("decode", drained=True)),
        ratio_cpu=paired_ratio(samples, reference, lambda s: 1 / s.cpu_s if s.cpu_s > 0 else None),
        disturbed=disturbance(samples, reference, setup.threads),
        setup=setup,
        samples=tuple(samples),
        asked_ratio=mode.cache_ratio,
        **others,
    )


def compare_with_whole_layers(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Returns the rows with their speeds over those of the fastest stock mode with whole layers in the same memory.

    Both were measured next to stock-ar, not always next to each other: the quotient is that of the ratios to stock-ar.
    """
    layered = [row for row in rows if MODES[row.mode].method == "ncmoe"]

    def over_best(row: BenchRow, name: str) -> float | None:
        equal = [each for each in layered if (each.test, each.asked_ratio) == (row.test, row.asked_ratio)]
        best, value = max((getattr(each, name) or 0.0 for each in equal), default=0.0), getattr(row, name)
        return quotient(value, best) if value else None

    return [
        replace(row, ratio_ncmoe=over_best(row, "ratio"), ratio_pp_ncmoe=over_best(row, "ratio_pp")) for row in rows
    ]


def read_end(arm: BenchArm, device: ResolvedDevice) -> dict[str, Any]:
    """Returns the fields of Setup that the session tells at the end of its measurement: memory, lookahead."""
    stats, use = arm.session.placement_stats(), session_use(arm.session, device)
    fields: dict[str, Any] = {f"device_{kind}": n_bytes or None for kind, n_bytes in asdict(use).items()}
    fields["device_bytes"] = use.total_bytes or None
    if stats is not None:
        status = {} if stats.lookahead is None else asdict(stats.lookahead)
        fields |= {f"lookahead_{name}": status.get(name) for name in ("used", "gain", "reason")}
        fields["vram_bytes"] = stats.vram_used_bytes
    return fields


def describe_setup(
    plan: BenchPlan,
    environment: Provenance,
    arm: BenchArm,
    *,
    drafts: bool,
    roofline: Roofline | None = None,
    test: SyntheticTest | ScriptedTest | None = None,
    **others: Any,
) -> Setup:
    """Returns what a figure depends on.

    drafts: whether this test uses the mode's drafts. roofline: None where several texts are decoded together, or
    unknown. test: None for answers. others: further fields, as those of `read_end`.
    """
    mode, model, info, base = arm.mode, arm.session.model.info, arm.session.info, plan.base
    settings, dataset, requested = info.settings, plan.dataset, base.placement
    has_cache, ratio = info.cache_slots > 0, mode.cache_ratio
    n_prompt = min(test.n_prompt if isinstance(test, SyntheticTest) else 0, base.n_ubatch)  # of a batch
    if has_cache and (ratio is None or abs(ratio - info.cache_ratio) > _RATIO_ROUNDING):
        ratio = info.cache_ratio  # the cache became smaller for lack of memory
    # as llama-bench names them
    backends = dict.fromkeys(device.registry for device in devices() if device.kind in ("GPU", "IGPU", "RPC"))
    return filled(
        Setup,
        *(environment, info, model, roofline, settings, base, requested, plan, test),
        *(("model_", model), ("dataset_", dataset), ("n_", test)),
        **budget_record(mode.budget if drafts else None, gamma=info.gamma),
        model_bytes=model.size_bytes,
        n_experts_used=model.n_expert_used,
        draft=info.draft if drafts else "none",
        gamma=info.gamma if drafts else 0,
        auto_gamma=drafts and info.auto_gamma,
        draft_p_min=arm.session.config.draft_p_min if drafts else 0.0,
        policy=info.policy if has_cache or mode.policy is None else mode.policy,
        prompt_limit_ts=roofline.prompt_limit_ts(n_prompt) if roofline is not None and n_prompt else None,
        cache_ratio=ratio,
        cache_slots=info.cache_slots if has_cache or mode.is_swept else None,
        pool_bytes=info.pool_bytes if has_cache else None,
        whole_layers=arm.session.model.n_whole_layers,
        backend=",".join(backends) or "CPU",
        threads=info.n_threads,
        threads_batch=settings.n_threads_batch or info.n_threads,
        type_k_draft=base.draft_type_k,
        type_v_draft=base.draft_type_v,
        load_mode=base.load.mode,
        tensor_buft_overrides=",".join(f"{each.pattern}={each.buffer_type}" for each in base.load.overrides),
        lora=",".join(f"{each.path.name}:{each.scale:g}" for each in settings.adapters),
        rope=None if settings.rope == RopeSettings() else asdict(settings.rope),
        n_gpu_layers=base.n_gpu_layers if mode.method == "shared" else -1,
        n_predict=plan.n_predict if dataset is not None else None,
        ablations=",".join(sorted(requested.ablations)),
        prefill_path=requested.prefill,
        modes=",".join(mode.label for mode in plan.modes),
        dataset=None if dataset is None else dataset.name,
        dataset_file=None if dataset is None else dataset.path.name,
        **{"vram_bytes": None} | others,  # not that after loading
    )
