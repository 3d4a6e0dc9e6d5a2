"""The ablation of SP-MoE in the engine, as in its Figures 12 and 14: prefetch, worker, batched transfers, cutoff layer.

All variants run the same target with the same draft, load a missing expert when its layer needs it, and keep the same
LRU cache. They differ in the experts that are prefetched while the draft works, and in how. They take turns at every
prompt, and every answer is compared with stock llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

from moeedge.bench.config import MODES, REFERENCE, BenchMode
from moeedge.bench.harness import BenchArm, load_models, open_arms, run_conversations, warm_up
from moeedge.bench.output_check import ReferenceGap, compare_answers
from moeedge.bench.samples import Sample, quotient
from moeedge.data import Prompt
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.lab.policies.layer_lru import critical_experts, cutoff_layer
from moeedge.notifications import Notification, Notify, ignore
from moeedge.scheduler.config import ExecutionConfig
from moeedge.scheduler.stats import PlacementStats

POLICY = "sp-moe"
_ENTIRE_LAYER = 1 << 16  # experts per transfer: more than any layer has
_ON_DEMAND = ("needed", "loaded", "late")  # counters of OnDemandLoader
_DRAFTING = ("plans", "stops")  # counters of DraftPrefetch


def figure_12(cutoff: int) -> list[BenchMode]:
    """Returns baseline, vanilla prefetch, worker, worker with batched transfers; each adds one part."""
    baseline = ExecutionConfig(misses="load", cutoff_layer=cutoff, batch=1, drafting="off")  # no prefetch
    worker = replace(baseline, drafting="worker")  # drafting does not wait
    return [
        _variant("baseline", baseline),
        _variant("vanilla", replace(baseline, drafting="vanilla")),  # each draft layer waits for its experts
        _variant("worker", worker),
        _variant("batched", replace(worker, batch=_ENTIRE_LAYER)),  # the experts of a layer in one transfer
    ]


def figure_14(cutoffs: Sequence[int]) -> list[BenchMode]:
    """Returns the complete system at each cutoff layer."""
    return [figure_12(cutoff)[-1] for cutoff in dict.fromkeys(cutoffs)]


def _variant(name: str, execution: ExecutionConfig) -> BenchMode:
    return BenchMode(name, "moeedge", drafts=True, execution=execution)


@dataclass(frozen=True)
class AblationRow:
    """Figures of a variant: sums over all prompts and repetitions; the time per token is the median over answers."""

    variant: str
    cutoff_layer: int
    tpot_s: float
    tg_ts: float
    speedup: float  # over the first row
    acceptance_rate: float | None
    # the target's layers in verifications; an expert counts once per layer and step
    hit_rate_experts: float | None  # share of the experts that were resident when their layer needed them
    loaded_per_step: float  # absent experts: their layer loaded them and waited
    late_per_step: float  # experts in flight: their layer waited
    # the link
    ahead_per_step: float  # experts that arrived before their layer needed them
    uploads_per_step: float
    bytes_per_step: float
    transfers_per_step: float
    # drafting
    plans_per_step: float  # predictions that were planned for
    draft_stops_per_step: float  # layers of the draft that waited
    predicted_right: float | None  # share of the predicted experts that were used
    draft_s: float  # per step, all of drafting
    verify_s: float  # per step
    equal: int  # answers equal to stock's, near-ties included
    answers: int


def solved_cutoff(config: EngineConfig, notify: Notify = ignore) -> tuple[int, str]:
    """Returns SP-MoE's cutoff layer from the calibrated cost model, and a sentence that explains it.

    Section 3.2: the experts of all layers before it fit the slots and arrive while the draft works.
    """
    with Session.open(replace(config, placement=replace(config.placement, policy=POLICY)), notify=notify) as session:
        info, calibration = session.info, session.calibration
        if session.placement is None:
            raise InputError("No device holds experts: there is no system to take apart.", "Use -dev emulated.")
        cost_model = calibration.units if calibration is not None else None
        drafting_s = info.gamma * cost_model.draft_token_s if cost_model is not None else 0.0
        transfer_s = cost_model.transfer_expert_s if cost_model is not None else 0.0
        n_reserved = -(-info.cache_slots // max(info.n_expert_layers, 1))
        n_critical = critical_experts(info.n_expert_used, max(info.gamma, 1), info.n_experts, n_reserved)
        n = cutoff_layer(info.n_expert_layers, n_critical, info.cache_slots, drafting_s, transfer_s)
        return n, (
            f"Cutoff layer {n} of {info.n_expert_layers}: drafting takes {drafting_s * 1e3:.2f} ms, an expert "
            f"{transfer_s * 1e6:.1f} us, {n_critical:.1f} per layer; {info.cache_slots:,} slots."
        )


def run_ablation(
    config: EngineConfig,
    variants: Sequence[BenchMode],
    prompts: Sequence[Prompt],
    *,
    n_predict: int,
    repetitions: int,
    notify: Notify = ignore,
) -> list[AblationRow]:
    """Measures the variants side by side on the first turns of `prompts`, and compares every answer with stock's.

    config: with policy sp-moe. notify: receives the sessions' notes and a line per answer.
    """
    first_turns = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    with ExitStack() as stack:
        models = load_models(config, variants, stack)
        stock = open_arms(config, [MODES[REFERENCE]], models, stack)
        arms = open_arms(config, variants, models, stack)
        placement = arms[-1].session.placement
        if placement is None or placement.draft_prefetch is None:
            reasons = [note for note in arms[-1].session.info.notes if "predicts no experts here" in note]
            raise InputError(
                reasons[0] if reasons else "No device holds experts.",
                "Give a draft of the target's hidden size, or leave out -md; without a device, use -dev emulated.",
            )
        for note in dict.fromkeys(note for arm in arms for note in arm.session.info.notes):
            notify(Notification(note))
        expected = {
            sample.prompt: sample
            for sample in run_conversations(stock, first_turns, repetitions=1, n_predict=n_predict, ignore_eos=True)
        }
        warm_up(arms, first_turns[0], n_predict=n_predict, ignore_eos=True)
        results = {arm.mode.label: _Result(arm) for arm in arms}
        for sample in run_conversations(
            arms, first_turns, repetitions=repetitions, n_predict=n_predict, ignore_eos=True
        ):
            base = expected[sample.prompt]
            gap = ReferenceGap(stock[0].session.target, base.prompt_ids, base.tokens, sample.tokens)
            agreement = compare_answers(base.tokens, sample.tokens, gap)
            results[sample.mode].add(sample, equal=agreement.equal or agreement.near_tie)
            seconds = sample.ttft_s + sample.decode_s
            notify(Notification(f"{sample.mode}, prompt {sample.prompt}: {seconds:.1f} s"))
        first, *others = results.values()
        baseline = first.row(None)
        return [baseline, *(result.row(baseline.tpot_s) for result in others)]


class _Result:
    """The samples of one variant, and its counters before the first sample."""

    def __init__(self, arm: BenchArm) -> None:
        self._mode = arm.mode
        self._session = arm.session
        self._samples: list[Sample] = []
        self._equal = 0
        self._start_stats, self._start_counters = self._stats(), self._counters()

    def add(self, sample: Sample, *, equal: bool) -> None:
        """Adds an answer."""
        self._samples.append(sample)
        self._equal += equal

    def row(self, first_tpot_s: float | None) -> AblationRow:
        """Returns the figures so far; first_tpot_s: of the first row, None for that row itself."""
        placement, samples = self._session.placement, self._samples
        assert placement is not None
        steps = max(sum(sample.steps for sample in samples), 1)
        moved = self._stats() - self._start_stats
        uploads = moved.uploads / steps
        per_step = {name: (value - self._start_counters[name]) / steps for name, value in self._counters().items()}
        waited_for = per_step["loaded"] + per_step["late"]
        tpot_s = median(1.0 / sample.tg_ts for sample in samples if sample.tg_ts)
        execution = self._mode.execution
        return AblationRow(
            variant=self._mode.name,
            cutoff_layer=(execution.cutoff_layer or 0) if execution is not None else 0,
            tpot_s=tpot_s,
            tg_ts=1.0 / tpot_s,
            speedup=(first_tpot_s or tpot_s) / tpot_s,
            acceptance_rate=quotient(sum(s.accepted for s in samples), sum(s.drafted for s in samples)),
            hit_rate_experts=1.0 - waited_for / per_step["needed"] if per_step["needed"] else None,
            loaded_per_step=per_step["loaded"],
            late_per_step=per_step["late"],
            ahead_per_step=max(uploads - per_step["loaded"], 0.0),
            uploads_per_step=uploads,
            bytes_per_step=moved.bytes_moved / steps,
            transfers_per_step=moved.transfers / steps,
            plans_per_step=per_step["draft_plans"],
            draft_stops_per_step=per_step["draft_stops"],
            predicted_right=placement.predicted_share,
            draft_s=sum(sample.draft_s for sample in samples) / steps,
            verify_s=sum(sample.verify_s for sample in samples) / steps,
            equal=self._equal,
            answers=len(samples),
        )

    def _stats(self) -> PlacementStats:
        stats = self._session.placement_stats()
        assert stats is not None
        return stats

    def _counters(self) -> dict[str, float]:
        """Returns what was counted between the layers of target and draft, since the session began."""
        placement = self._session.placement
        assert placement is not None and placement.on_demand is not None
        counters = {name: float(getattr(placement.on_demand, name)) for name in _ON_DEMAND}
        drafting = placement.draft_prefetch
        return counters | {f"draft_{name}": float(getattr(drafting, name, 0)) for name in _DRAFTING}
