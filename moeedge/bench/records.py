"""Rows of a benchmark's result: the figures, what they depend on (options, versions, commit, CPU), and raw samples."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import moeedge
from moeedge.bench.config import MODES, BenchMode, BenchPlan, SyntheticTest
from moeedge.bench.figures import (
    BudgetFigures,
    ParallelFigures,
    StockRatio,
    figures_record,
    parallel_record,
    stock_record,
)
from moeedge.bench.harness import BenchArm
from moeedge.bench.output_check import OutputCheck
from moeedge.bench.roofline import Roofline
from moeedge.bench.samples import (
    CacheFigures,
    Disturbance,
    Sample,
    Spread,
    cache_figures,
    disturbance,
    named,
    paired_ratio,
    quotient,
    speed,
)
from moeedge.bench.scores import Scores
from moeedge.bench.whole_layers import DeviceUse, session_use
from moeedge.engine.budgets import budget_record
from moeedge.engine.types import EngineInfo
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.processor import cpu_name
from moeedge.llama.settings import RopeSettings
from moeedge.native import devices
from moeedge.policies.base import LookaheadStatus

SCHEMA = "moeedge-bench-4"  # changes when a key changes its meaning
_RATIO_ROUNDING = 0.01  # the cache has an integer number of slots
_GIT_TIMEOUT_S = 10


@dataclass(frozen=True)
class Environment:
    """What a figure depends on besides the options; recorded in every row."""

    version: str  # of moeedge
    commit: str | None  # of the checkout that contains the package; None for an installed wheel
    dirty: bool | None  # whether tracked files differ from that commit
    llama_cpp_version: str  # of the llama-cpp-python package
    cpu: str
    os: str
    python: str
    time: str  # UTC, ISO 8601


def read_environment() -> Environment:
    """Reads the versions and the machine of this process."""
    commit, dirty = _git_state(Path(moeedge.__file__).resolve().parent)
    try:
        llama_cpp_version = version("llama-cpp-python")
    except PackageNotFoundError:
        llama_cpp_version = "unknown"
    return Environment(
        version=moeedge.__version__,
        commit=commit,
        dirty=dirty,
        llama_cpp_version=llama_cpp_version,
        cpu=cpu_name(),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def backend_name() -> str:
    """Returns the ggml backend that computes, as llama-bench names it: of the GPUs ("CUDA"), else "CPU"."""
    found = dict.fromkeys(device.registry for device in devices() if device.kind in ("GPU", "IGPU", "RPC"))
    return ",".join(found) or "CPU"


def _git_state(package: Path) -> tuple[str | None, bool | None]:
    """Returns commit and dirty flag of the checkout with `package` in its root; (None, None) elsewhere.

    A package inside another project's checkout (a virtual environment, for instance) has no commit of ours.
    """
    root = package.parent
    if not (root / ".git").exists():
        return None, None
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, None
    lines = done.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    return commit, any(not line.startswith("#") for line in lines)


@dataclass(frozen=True)
class BenchRow:
    """The result of a mode in a test: figures, the set-up that they depend on, and the raw samples."""

    mode: str
    test: str
    policy: str  # of the expert cache; "none" without one
    cache_ratio: float | None  # None without an expert cache
    pp: Spread | None  # tokens/s
    tg: Spread | None  # tokens/s
    tg_drained_ts: float | None  # all tokens over decoding and the drains after the answers
    drain_s: float | None  # mean over turns and repetitions
    ttft_s: float | None  # mean over turns and repetitions
    acceptance_rate: float | None
    tokens_per_step: float | None
    experts_per_verification: float | None
    cache: CacheFigures
    output: OutputCheck | None
    scores: Scores
    ratio: float | None  # decoding speed over stock-ar's, median of pairs
    ratio_pp: float | None  # prefill speed over stock-ar's, median of pairs
    ratio_drained: float | None  # `ratio` with the drain after this mode's answers in its time
    ratio_cpu: float | None  # stock-ar's CPU time over this mode's, median of pairs; robust against other programs
    setup: dict[str, Any]
    samples: tuple[Sample, ...]
    read_bytes_per_token: float | None = None  # by this process from disks while decoding; None: not counted
    asked_ratio: float | None = None  # the cache ratio that was asked for, which modes with the same memory share
    figures: BudgetFigures | None = None  # where expert budgets, draft lengths or perplexities are compared
    parallel: ParallelFigures | None = None  # where several texts were decoded together
    ratio_ncmoe: float | None = None  # `ratio` over that of the fastest mode with whole layers in the same memory
    ratio_pp_ncmoe: float | None = None  # the same of `ratio_pp`
    best_stock: tuple[StockRatio, ...] = ()  # over the fastest stock mode; of rows with our backend
    total: Spread | None = None  # tokens/s of prompt and decoding together, where a synthetic test has both
    ratio_total: float | None = None  # of `total` over stock-ar's, median of pairs
    n_planned: int | None = None  # samples of a complete run; None: as many as there are
    disturbed: Disturbance | None = None  # why the ratios are not to be trusted

    @property
    def is_partial(self) -> bool:
        """Whether the run ended before all samples were measured."""
        return self.n_planned is not None and len(self.samples) < self.n_planned

    @property
    def scatter(self) -> float | None:
        """How much the fastest repetition is faster than the slowest; None for a single one."""
        measured = self.total or self.tg or self.pp
        return None if measured is None else measured.scatter

    @property
    def limit_share(self) -> float | None:
        """Decoding speed over the memory's limit without drafts; drafts that win more than they cost exceed 1."""
        limit_ts = self.setup.get("limit_ts")
        return self.tg.median / limit_ts if self.tg is not None and limit_ts else None

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
            gamma = self.setup["gamma"]
            speculation = f"{f'gamma {gamma} ' if gamma else ''}parallel {self.parallel.n_parallel}"
        return f"{self.mode}{cache}{' ' if speculation else ''}{speculation}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the record: flat except for the lists, keys in the order of the documentation."""
        output = self.output
        return {
            **named(self, "mode", "test"),
            **_spread_keys("pp_ts", self.pp),
            **_spread_keys("tg_ts", self.tg),
            **_spread_keys("total_ts", self.total),
            **named(self, "scatter", "disturbed"),
            "n_samples": len(self.samples),
            "n_samples_planned": len(self.samples) if self.n_planned is None else self.n_planned,
            **named(self, "tg_drained_ts", "drain_s", "ttft_s", "acceptance_rate", "tokens_per_step"),
            "experts_per_verification": self.experts_per_verification,
            **asdict(self.cache),
            **named(self, "read_bytes_per_token", "limit_share"),
            "output_check": None if output is None else str(output),
            **named(output, "equal", "compared", prefix="output_"),
            "agreement": None if output is None else output.agreement,
            "near_ties": [] if output is None else [asdict(difference) for difference in output.near_ties],
            "different": [] if output is None else [asdict(difference) for difference in output.different],
            **named(self.scores, "score", "n_scored", "n_answers", "n_cut", "scorer"),
            "score_by_category": [asdict(category) for category in self.scores.by_category],
            "unscored": [{"reason": reason, "n": n} for reason, n in self.scores.unscored],
            **named(self, "ratio", "ratio_pp", "ratio_total", "ratio_drained", "ratio_cpu"),
            **named(self, "ratio_ncmoe", "ratio_pp_ncmoe"),
            **stock_record(self.best_stock),
            **figures_record(self.figures),
            **parallel_record(self.parallel),
            "warm": all(sample.warm for sample in self.samples),
            **self.setup,
            "samples": [sample.as_dict() for sample in self.samples],
        }


def make_row(
    mode: BenchMode,
    test: str,
    samples: Sequence[Sample],
    reference: Sequence[Sample],
    *,
    output: OutputCheck | None,
    scores: Scores,
    setup: dict[str, Any],
    figures: BudgetFigures | None = None,
    parallel: ParallelFigures | None = None,
    best_stock: tuple[StockRatio, ...] = (),
    n_planned: int | None = None,
) -> BenchRow:
    """Returns the row of `samples`, all of one mode and test.

    reference: stock-ar's samples, empty if it did not run. setup: from `describe_setup`. figures: where
    expert budgets are compared. parallel: where texts were decoded together. best_stock: of a mode with our backend.
    n_planned: samples of a complete run.
    """
    steps = sum(sample.steps for sample in samples)
    experts_sum = sum(sample.experts_sum for sample in samples)
    has_both = bool(setup["n_prompt"] and setup["n_gen"])  # a synthetic test ppN+tgM
    answered = [sample.ttft_s for sample in samples if sample.ttft_s > 0]
    return BenchRow(
        mode=mode.name,
        test=test,
        policy=setup["policy"],
        cache_ratio=setup["cache_ratio"],
        pp=speed(samples, "prefill"),
        tg=speed(samples, "decode"),
        tg_drained_ts=quotient(sum(s.decode_tokens for s in samples), sum(s.decode_s + s.drain_s for s in samples)),
        drain_s=quotient(sum(s.drain_s for s in samples), len(samples)),
        ttft_s=quotient(sum(answered), len(answered)),
        acceptance_rate=quotient(sum(s.accepted for s in samples), sum(s.drafted for s in samples)),
        tokens_per_step=quotient(sum(s.decode_tokens for s in samples), steps),
        experts_per_verification=quotient(experts_sum, steps) if experts_sum else None,
        cache=cache_figures((sample.placement for sample in samples), setup["n_expert_layers"] - setup["whole_layers"]),
        output=output,
        scores=scores,
        ratio=paired_ratio(samples, reference, lambda s: s.tg_ts),
        ratio_pp=paired_ratio(samples, reference, lambda s: s.pp_ts),
        ratio_drained=paired_ratio(samples, reference, lambda s: s.tg_drained_ts),
        ratio_cpu=paired_ratio(samples, reference, lambda s: 1 / s.cpu_s if s.cpu_s > 0 else None),
        setup=setup,
        samples=tuple(samples),
        read_bytes_per_token=_read_per_token(samples),
        asked_ratio=mode.cache_ratio,
        figures=figures,
        parallel=parallel,
        best_stock=best_stock,
        total=speed(samples, "prefill", "decode") if has_both else None,
        ratio_total=paired_ratio(samples, reference, lambda s: s.total_ts) if has_both else None,
        n_planned=n_planned,
        disturbed=disturbance(samples, reference, setup["threads"]),
    )


def _read_per_token(samples: Sequence[Sample]) -> float | None:
    """Bytes read from disks per decoded token; None where they are not counted, or no token was decoded."""
    counted = [sample for sample in samples if sample.decode_read_bytes is not None]
    n_bytes = sum(sample.decode_read_bytes or 0 for sample in counted)
    return quotient(n_bytes, sum(sample.decode_tokens for sample in counted))


def compare_with_whole_layers(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Returns the rows with their speeds over those of the fastest stock mode with whole layers in the same memory.

    Both were measured next to stock-ar, not always next to each other: the quotient is that of the ratios to stock-ar.
    """

    def best(row: BenchRow, values: Sequence[tuple[BenchRow, float | None]]) -> float | None:
        equal = [value for other, value in values if other.test == row.test and other.asked_ratio == row.asked_ratio]
        return max((value for value in equal if value), default=None)

    layered = [row for row in rows if MODES[row.mode].method == "ncmoe"]
    decoding = [(row, row.ratio) for row in layered]
    prefill = [(row, row.ratio_pp) for row in layered]
    return [
        replace(
            row,
            ratio_ncmoe=quotient(row.ratio or 0.0, best(row, decoding) or 0.0) if row.ratio else None,
            ratio_pp_ncmoe=quotient(row.ratio_pp or 0.0, best(row, prefill) or 0.0) if row.ratio_pp else None,
        )
        for row in rows
    ]


@dataclass(frozen=True)
class ArmEnd:
    """What an arm tells at the end of its measurement."""

    device_use: DeviceUse = field(default_factory=DeviceUse)  # of this mode alone
    vram_bytes: int | None = None  # in use on the entire device; None: the driver reports nothing
    lookahead: LookaheadStatus | None = None  # as the policy judges it then


def read_end(arm: BenchArm, device: ResolvedDevice) -> ArmEnd:
    """Reads what the session says now."""
    stats = arm.session.placement_stats()
    use = session_use(arm.session, device)
    return ArmEnd(use) if stats is None else ArmEnd(use, stats.vram_used_bytes, stats.lookahead)


def describe_setup(
    plan: BenchPlan,
    environment: Environment,
    arm: BenchArm,
    end: ArmEnd,
    *,
    drafts: bool,
    prompts: int | None,
    prompts_left_out: int | None,
    roofline: Roofline | None = None,
    test: SyntheticTest | None = None,
    load: tuple[float | None, float | None] = (None, None),
) -> dict[str, Any]:
    """Returns what a figure depends on: versions, machine, models, parameters. The same keys in every row.

    drafts: whether this test uses the mode's drafts. prompts and prompts_left_out: None in a synthetic test. roofline:
    None where several texts are decoded together, or unknown. test: None for answers. load: processors that other
    programs used before the run, and while it measured.
    """
    mode, model, info, base = arm.mode, arm.session.model.info, arm.session.info, plan.base
    settings, dataset = info.settings, plan.dataset
    has_cache = info.cache_slots > 0
    requested = base.placement
    return {
        "schema": SCHEMA,
        **asdict(environment),
        "model": info.model,
        "model_description": model.description,
        "model_bytes": model.size_bytes,
        "model_n_params": model.n_params,
        **named(model, "architecture", "n_layers", "n_expert_layers", "n_experts"),
        "n_experts_used": model.n_expert_used,
        "draft": info.draft if drafts else "none",
        "gamma": info.gamma if drafts else 0,
        "auto_gamma": drafts and info.auto_gamma,
        "draft_p_min": base.draft_p_min if drafts else 0.0,
        **budget_record(mode.budget if drafts else None, gamma=info.gamma),
        "device": info.device,
        "policy": info.policy if has_cache or mode.policy is None else mode.policy,
        "cache_ratio": _ratio(mode, info) if has_cache else mode.cache_ratio,
        **named(end.lookahead, "used", "gain", "reason", prefix="lookahead_"),
        "cache_slots": info.cache_slots if has_cache or mode.is_swept else None,
        "pool_bytes": info.pool_bytes if has_cache else None,
        "vram_bytes": end.vram_bytes,
        "whole_layers": arm.session.model.n_whole_layers,
        "device_bytes": end.device_use.total_bytes or None,
        **{f"device_{kind}": n_bytes or None for kind, n_bytes in asdict(end.device_use).items()},
        "backend": backend_name(),
        "threads": info.n_threads,
        "other_load_before": load[0],
        "other_load": load[1],
        **named(roofline, "read_bytes_per_s", "bytes_per_token", "limit_ts"),
        "n_ctx": info.n_ctx,
        **named(base, "n_batch", "n_ubatch"),
        "threads_batch": settings.n_threads_batch or info.n_threads,
        **named(settings, "type_k", "type_v"),
        "type_k_draft": base.draft_type_k,
        "type_v_draft": base.draft_type_v,
        "flash_attn": settings.flash_attn,
        "load_mode": base.load.mode,
        "tensor_buft_overrides": ",".join(f"{each.pattern}={each.buffer_type}" for each in base.load.overrides),
        "lora": ",".join(f"{each.path.name}:{each.scale:g}" for each in settings.adapters),
        "rope": None if settings.rope == RopeSettings() else asdict(settings.rope),
        "n_gpu_layers": base.n_gpu_layers if mode.method == "shared" else -1,
        "temperature": 0.0,
        "n_predict": plan.n_predict if dataset is not None else None,
        **named(plan, "ignore_eos", "run_code"),
        "n_prompt": 0 if test is None else test.n_prompt,
        "n_gen": 0 if test is None else test.n_gen,
        "n_depth": 0 if test is None else test.depth,
        "repetitions": plan.repetitions,
        "ablations": ",".join(sorted(requested.ablations)),
        **named(requested, "utility_cap", "forgetting"),
        "prefill_path": requested.prefill,
        "modes": ",".join(mode.label for mode in plan.modes),
        "dataset": None if dataset is None else dataset.name,
        **named(dataset, "variant", "place", "sha256", prefix="dataset_"),
        "dataset_file": None if dataset is None else dataset.path.name,
        "limit": plan.limit,
        "prompts": prompts,
        "prompts_left_out": prompts_left_out,
    }


def _ratio(mode: BenchMode, info: EngineInfo) -> float:
    """Returns the requested cache ratio, or the actual one if the cache became smaller for lack of memory."""
    ratio = mode.cache_ratio
    return ratio if ratio is not None and abs(ratio - info.cache_ratio) <= _RATIO_ROUNDING else info.cache_ratio


def _spread_keys(name: str, spread: Spread | None) -> dict[str, Any]:
    return {
        name: None if spread is None else spread.mean,
        **named(spread, "stddev", "median", prefix=f"{name}_"),
        f"{name}_samples": [] if spread is None else list(spread.values),
    }
