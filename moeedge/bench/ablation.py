"""SP-MoE taken apart in the engine, as in its Figures 12 and 14: prefetch, worker, batched transfers, cutoff layer.

All variants run the same target with the same draft, load what is missing when its layer comes, and keep the same least
recently used cache; they differ in what is prefetched while the draft works, and how. They take turns at every prompt,
and every answer is compared with stock llama.cpp's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from moeedge.bench.output_check import ReferenceGap, compare
from moeedge.engine.generation import Generation
from moeedge.engine.loading import load_draft, load_target, resolve_device
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import InputError
from moeedge.notifications import Notify, ignore
from moeedge.policies.sp_moe import cutoff_layer
from moeedge.scheduler.config import ExecutionConfig
from moeedge.scheduler.stats import PlacementStats

POLICY = "sp-moe"
_GREEDY = SamplingConfig(temperature=0.0)
_REST_S = 0.5
_WHOLE_LAYER = 1 << 16  # experts in a transfer: more than any layer has
_WITHIN = ("needed", "loaded", "late", "stops", "waited_s", "uncached")  # sums of WithinStep
_DRAFTING = ("plans", "planned_s", "stops", "waited_s")  # and of Drafting


@dataclass(frozen=True)
class Variant:
    """One bar of Figure 12, or one point of Figure 14."""

    name: str
    about: str
    execution: ExecutionConfig


def figure_12(cutoff: int) -> list[Variant]:
    """Baseline, vanilla prefetch, worker, worker with batched transfers; each adds to the one before."""
    load = ExecutionConfig(misses="load", cutoff_layer=cutoff, batch=1)
    return [
        Variant("baseline", "loads on demand, no prefetch", replace(load, drafting="off")),
        Variant("vanilla", "prefetch, each draft layer waits for its experts", replace(load, drafting="vanilla")),
        Variant("worker", "prefetch by a worker that nobody waits for", replace(load, drafting="worker")),
        Variant(
            "batched",
            "the same, a layer's experts in one transfer",
            replace(load, drafting="worker", batch=_WHOLE_LAYER),
        ),
    ]


def figure_14(cutoffs: Sequence[int]) -> list[Variant]:
    """The whole system at each cutoff layer."""
    whole = figure_12(0)[-1]
    return [
        replace(whole, name="batched", about=f"cutoff layer {n}", execution=replace(whole.execution, cutoff_layer=n))
        for n in cutoffs
    ]


@dataclass(frozen=True)
class AblationRow:
    """What a variant did; sums over all prompts and repetitions, the time per token as the median of answers."""

    variant: str
    cutoff_layer: int
    tpot_s: float
    tg_ts: float
    speedup: float  # of the first row
    acceptance_rate: float | None
    # of the target's layers in verifications; an expert counts once per layer and step
    hit_rate: float | None  # share of the experts that were there when their layer came
    loaded_per_step: float  # experts that were absent: their layer brought them and waited
    late_per_step: float  # experts that were on their way: their layer waited
    stops_per_step: float  # layers that waited
    waited_s: float  # by them, per step
    uncached_per_step: float  # experts that found no room: on the CPU
    # of the link
    ahead_per_step: float  # experts that came before their layer asked for them
    uploads_per_step: float
    bytes_per_step: float
    transfers_per_step: float
    # of drafting
    plans_per_step: float  # how often experts were foretold and planned for
    planned_s: float  # the time of that, per step
    draft_stops_per_step: float  # layers of the draft that waited
    draft_waited_s: float  # by them, per step
    foretold_right: float | None  # share of the predictions that came true
    draft_s: float  # per step, all of drafting
    verify_s: float  # per step
    equal: int  # answers that are stock's, near-ties included
    answers: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _AblationArm:
    """One variant's session and what it has done."""

    def __init__(self, variant: Variant, session: Session) -> None:
        self.variant = variant
        self.session = session
        self.tpots_s: list[float] = []
        self.drafted = self.accepted = self.steps = self.equal = self.answers = 0
        self.draft_s = self.verify_s = 0.0
        self.start: PlacementStats | None = None
        self.sums: dict[str, float] = {}  # when it began

    def answer(self, prompt: Sequence[int], n_predict: int) -> list[int]:
        """Greedy, from empty KV caches."""
        generation = _answer(self.session, prompt, n_predict)
        if self.session.placement is not None:
            self.session.placement.rest(_REST_S)
        stats = generation.stats
        if stats.generated_tokens > 1:
            self.tpots_s.append(stats.decode_s / (stats.generated_tokens - 1))
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.steps += stats.steps
        self.draft_s += stats.draft_s
        self.verify_s += stats.verify_s
        return generation.tokens

    def forget(self) -> None:
        """What the warm-up counted."""
        self.tpots_s.clear()
        self.drafted = self.accepted = self.steps = 0
        self.draft_s = self.verify_s = 0.0
        self.start = self.session.placement_stats()
        self.sums = self._sums()

    def _sums(self) -> dict[str, float]:
        """What is counted between the layers of target and draft, since the session began."""
        placement = self.session.placement
        assert placement is not None and placement.within is not None
        sums = {name: float(getattr(placement.within, name)) for name in _WITHIN}
        drafting = placement.drafting
        return sums | {f"draft_{name}": float(getattr(drafting, name)) if drafting else 0.0 for name in _DRAFTING}

    def row(self, first_tpot_s: float | None) -> AblationRow:
        """`first_tpot_s`: of the first row, None in that row."""
        placement, now = self.session.placement, self.session.placement_stats()
        assert placement is not None and now is not None and self.start is not None
        counted = now - self.start
        steps = max(self.steps, 1)
        per_step = {name: (value - self.sums[name]) / steps for name, value in self._sums().items()}
        waited_for = per_step["loaded"] + per_step["late"]
        tpot_s = median(self.tpots_s)
        return AblationRow(
            variant=self.variant.name,
            cutoff_layer=self.variant.execution.cutoff_layer or 0,
            tpot_s=tpot_s,
            tg_ts=1.0 / tpot_s,
            speedup=(first_tpot_s or tpot_s) / tpot_s,
            acceptance_rate=self.accepted / self.drafted if self.drafted else None,
            hit_rate=1.0 - waited_for / per_step["needed"] if per_step["needed"] else None,
            loaded_per_step=per_step["loaded"],
            late_per_step=per_step["late"],
            stops_per_step=per_step["stops"],
            waited_s=per_step["waited_s"],
            uncached_per_step=per_step["uncached"],
            ahead_per_step=max(counted.uploads / steps - per_step["loaded"], 0.0),
            uploads_per_step=counted.uploads / steps,
            bytes_per_step=counted.bytes_moved / steps,
            transfers_per_step=counted.transfers / steps,
            plans_per_step=per_step["draft_plans"],
            planned_s=per_step["draft_planned_s"],
            draft_stops_per_step=per_step["draft_stops"],
            draft_waited_s=per_step["draft_waited_s"],
            foretold_right=placement.foretold_share,
            draft_s=self.draft_s / steps,
            verify_s=self.verify_s / steps,
            equal=self.equal,
            answers=self.answers,
        )


def solved_cutoff(config: EngineConfig, notify: Notify = ignore) -> tuple[int, str]:
    """SP-MoE's cutoff layer from the calibrated unit times, and a sentence that says where it comes from.

    Section 3.2: the experts of all layers before it fit the slots and arrive while the draft works.
    """
    with Session.open(replace(config, placement=replace(config.placement, policy=POLICY)), notify=notify) as session:
        info, calibration, placement = session.info, session.calibration, session.placement
        if placement is None:
            raise InputError("No experts lie on a device: there is nothing to take apart.", "Try -dev emulated.")
        units = calibration.units if calibration is not None else None
        drafting_s = info.gamma * units.draft_token_s if units is not None else 0.0
        transfer_s = units.transfer_expert_s if units is not None else 0.0
        n = cutoff_layer(info.n_expert_layers, info.n_expert_used, info.cache_slots, drafting_s, transfer_s)
        said = (
            f"Cutoff layer {n} of {info.n_expert_layers}: drafting takes {drafting_s * 1e3:.2f} ms, an expert "
            f"{transfer_s * 1e6:.1f} us, {info.n_expert_used} per layer; {info.cache_slots:,} slots."
        )
        return n, said


def run_ablation(
    config: EngineConfig,
    variants: Sequence[Variant],
    prompts: Sequence[list[dict[str, str]]],
    *,
    n_predict: int,
    repetitions: int,
    progress: Callable[[str], None] = lambda _line: None,
) -> list[AblationRow]:
    """Measures the variants side by side, and compares every answer with stock's."""
    device = resolve_device(config)
    with ExitStack() as stack:
        model = stack.enter_context(load_target(config, device))
        draft = stack.enter_context(load_draft(config, device))
        stock_config = replace(config, mode="stock", draft=None, gamma=0)
        stock = stack.enter_context(Session.open(stock_config, model=model))
        arms = []
        for variant in variants:
            placement = replace(config.placement, policy=POLICY, execution=variant.execution)
            session = Session.open(replace(config, placement=placement), model=model, draft_model=draft)
            arms.append(_AblationArm(variant, stack.enter_context(session)))
        placed = arms[-1].session.placement
        if placed is None or placed.drafting is None:
            raise InputError(*_why_not(arms[-1].session))
        for note in dict.fromkeys(note for arm in arms for note in arm.session.info.notes):
            progress(note)
        tokens = [model.tokenize(model.render_chat(messages)) for messages in prompts]
        expected = [_answer(stock, prompt, n_predict).tokens for prompt in tokens]
        for arm in arms:
            arm.answer(tokens[0], n_predict)
            arm.forget()
        for repetition in range(repetitions):
            for number, prompt in enumerate(tokens):
                order = arms if (repetition + number) % 2 == 0 else arms[::-1]
                for arm in order:
                    begin_s = time.perf_counter()
                    answer = arm.answer(prompt, n_predict)
                    arm.answers += 1
                    arm.equal += _agrees(stock, prompt, expected[number], answer)
                    progress(f"{arm.variant.name}, prompt {number + 1}: {time.perf_counter() - begin_s:.1f} s")
        first = arms[0].row(None)
        return [first, *(arm.row(first.tpot_s) for arm in arms[1:])]


def _why_not(session: Session) -> tuple[str, str]:
    notes = [note for note in session.info.notes if "foretells nothing" in note] or ["No experts lie on a device."]
    return notes[0], "Give a draft of the target's hidden size, or leave -md out; -dev emulated stands in for a device."


def _answer(session: Session, prompt: Sequence[int], n_predict: int) -> Generation:
    """Greedy, from empty KV caches. Ctrl-C ends the measurement: a generation alone would only end its answer."""
    session.reset()
    generation = session.generate(prompt, n_predict=n_predict, sampling=_GREEDY, ignore_eos=True)
    for _ in generation:
        pass
    if generation.stop_reason == "interrupted":
        raise KeyboardInterrupt
    return generation


def _agrees(stock: Session, prompt: Sequence[int], expected: Sequence[int], answer: Sequence[int]) -> bool:
    verdict = compare(expected, answer, ReferenceGap(stock.target, prompt, expected, answer))
    return verdict.equal or verdict.near_tie
