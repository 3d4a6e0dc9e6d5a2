"""Runs a model on prompts and gathers what the analyses of expert budgets read (analysis/expert_budget.py).

Two passes over the same prompts. The first gathers the routing of every verification batch: probabilities, pairs, and
how often each prompt selects each expert. The second computes the outputs of all experts for some of the batches, and
from them reconstruction errors; a prompt's static order comes from the other prompts' selections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moeedge.data.prompts import Prompt
from moeedge.engine.recording import record_routing
from moeedge.engine.session import Session
from moeedge.engine.types import SamplingConfig
from moeedge.errors import BackendError, ContextTooSmallError, EngineError
from moeedge.experts import FloatArray, IntArray, count_ids
from moeedge.lab.analysis.expert_budget import (
    CoActivation,
    ProbabilityCurve,
    ReconstructionErrors,
    RoutedBatch,
    Router,
    analyse_pairs,
    co_activation,
    cumulative_probability,
    infer_router,
    layer_errors,
    selection_values,
)
from moeedge.lab.policies.expert_budget import (
    Ids,
    MixingWeights,
    by_expert,
    router_scores,
    routing_probabilities,
    static_order,
)
from moeedge.llama.model import Model
from moeedge.llama.routers import Routers
from moeedge.native import ActivationCapture, Block, CaptureFlags
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.scheduler.native_io import routing
from moeedge.scheduler.stats import StepRecord

ERROR_EVERY = 4  # verification batches: one of so many has its errors measured
_NEAR_TIE = 1e-4  # of selection values


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class BudgetAnalysis:
    """What an expert budget would cost this model on these prompts; the fields are keys of the JSON."""

    layers: tuple[int, ...]
    n_experts: int
    n_experts_used: int
    gamma: int
    budgets: tuple[int, ...]
    routing: list[ProbabilityCurve]  # all prompts first, then each group if there are several
    co_activation: list[CoActivation]  # by layer
    reconstruction_error: ReconstructionErrors | None
    no_reconstruction_error: str | None  # why the outputs of all experts are not available
    skipped: list[str]  # ids of prompts that do not fit the context


def analyse_budgets(
    session: Session,
    prompts: Sequence[Prompt],
    layers: Sequence[int],
    budgets: Sequence[int],
    *,
    n_predict: int,
    sampling: SamplingConfig,
    raw: bool,
    run: Run,
) -> BudgetAnalysis:
    """Answers the prompts twice and analyses their verification batches.

    budgets: ascending. run: cancelled between steps it ends the analysis with what there is; its progress is in
    prompts, of both passes. Raises EngineError where no batch had drafts, or for a router of unknown kind.
    """
    reader = BatchReader(session, layers)
    tally = _RoutingTally(reader, prompts)
    skipped: list[str] = []

    def answer(add: Callable[[int, RoutedBatch], None]) -> None:
        """add: called with the index of a prompt and each of its verification batches of two and more tokens."""
        for index, prompt in enumerate(prompts):
            if run.cancelled() or prompt.id in skipped:
                continue

            def observe(record: StepRecord, _session: Session, index: int = index) -> None:
                batch = reader.read(record.n_verified) if record.n_verified > 1 else None
                if batch is not None:
                    add(index, batch)

            session.observers.append(observe)
            try:
                record_routing(session, [prompt], n_predict=n_predict, sampling=sampling, raw=raw, run=run)
            except ContextTooSmallError:
                skipped.append(prompt.id)
            except EngineError:
                if not run.cancelled():  # stopped before the first token
                    raise
            finally:
                session.observers.remove(observe)

    answer(tally.add)
    if not tally.batches.any():
        raise EngineError("No verification batch was recorded.", "The analysis needs a draft: -md FILE, --draft-max N.")
    select, measured = _selection_of(reader.model, reader.layers), list[NDArray[np.float64]]()

    def measure(prompt: int, batch: RoutedBatch) -> None:
        if batch.outputs is not None:
            selection = select(batch.values)
            _check_selection(selection, batch.ids)
            measured.append(layer_errors(batch, selection, tally.router, budgets, tally.static_order(prompt)))

    reader.compute_outputs = True
    answer(measure)
    reader.close()
    return BudgetAnalysis(
        layers=reader.layers,
        n_experts=session.model.info.n_experts,
        n_experts_used=session.model.info.n_expert_used,
        gamma=session.gamma,
        budgets=tuple(budgets),
        routing=tally.curves(),
        co_activation=tally.pairs(),
        reconstruction_error=ReconstructionErrors.of(measured, budgets) if measured else None,
        no_reconstruction_error=reader.no_outputs or None,
        skipped=skipped,
    )


class BatchReader:
    """Reads a session's newest verification batch: its routing, the routers' values, the outputs of all experts."""

    def __init__(self, session: Session, layers: Sequence[int]) -> None:
        context = session.target
        capture = context.capture_activations()
        if capture is None or context.sensor is None or session.placement is not None:
            raise EngineError("The analysis of expert budgets runs on the CPU alone.", "Add -dev none.")
        self.layers = tuple(layers)
        self.model: Model = session.model
        self.compute_outputs = False
        self.no_outputs = ""  # why the outputs of all experts are not available
        self._capture: ActivationCapture = capture
        self._sensor = context.sensor
        self._serial = 0
        self._outputs: dict[int, FloatArray] = {}
        self._n_batches = 0
        capture.enable(CaptureFlags.PROBS)
        capture.set_hook(self._before_block)

    def _before_block(self, block: Block) -> None:
        if not self.compute_outputs or block.phase != Phase.VERIFY or self.no_outputs or block.ids is None:
            return
        if block.layer == self.layers[0]:
            self._n_batches += 1
        if (self._n_batches - 1) % ERROR_EVERY == 0 and block.layer in self.layers and len(block.ids) > 1:
            try:
                self._outputs[block.layer] = self._capture.expert_outputs(block)
            except BackendError as error:
                self.no_outputs = error.message

    def read(self, n_tokens: int) -> RoutedBatch | None:
        """The batch of `n_tokens` that was just verified; None where it was computed in several graphs."""
        outputs, self._outputs = self._outputs, {}
        frames = [each for each in self._sensor.frames_after(self._serial) if each.phase == Phase.VERIFY]
        if frames:
            self._serial = frames[-1].serial
        captured = self._capture.read(CaptureFlags.PROBS)
        rows = list(self.layers)
        if not frames or frames[-1].n_tokens != n_tokens or (captured.layer_tokens[rows] != n_tokens).any():
            return None
        ids, weights = routing(frames[-1])
        computed = [outputs[layer] for layer in rows] if len(outputs) == len(rows) else None
        return RoutedBatch(ids[rows], weights[rows], captured.rows[rows, :n_tokens], computed)

    def close(self) -> None:
        self._capture.close()


class _RoutingTally:
    """Sums over the batches of the first pass, by prompt."""

    def __init__(self, reader: BatchReader, prompts: Sequence[Prompt]) -> None:
        info = reader.model.info
        n, n_layers, n_experts = len(prompts), len(reader.layers), info.n_experts
        self._layers, self._n_used = reader.layers, info.n_expert_used
        self.router = Router("softmax", MixingWeights())  # known with the first batch
        self._selections = np.zeros((n, n_layers, n_experts), dtype=np.int64)
        by_dataset = len({prompt.dataset for prompt in prompts}) > 1
        self._groups = np.array([prompt.dataset if by_dataset else prompt.category for prompt in prompts])
        self.batches, self._tokens = np.zeros((2, n), dtype=np.int64)
        self._cumulative, self._weights = np.zeros((2, n, n_layers, n_experts))
        self._unique = np.zeros((n, n_layers))
        self._pairs = np.zeros((n_layers, n_experts, n_experts), dtype=np.int64)

    def add(self, prompt: int, batch: RoutedBatch) -> None:
        n_experts = batch.values.shape[-1]
        if not self.batches.any():
            self.router = infer_router(batch.values, batch.ids, batch.weights)
        counts = count_ids(batch.ids, n_experts)
        self._selections[prompt] += counts
        self.batches[prompt] += 1
        self._tokens[prompt] += batch.ids.shape[1]
        scores = router_scores(routing_probabilities(batch.values, self.router.kind))
        self._cumulative[prompt] += cumulative_probability(scores)
        weights = router_scores(by_expert(batch.ids, batch.weights, n_experts))
        self._weights[prompt] += cumulative_probability(weights)
        self._unique[prompt] += np.count_nonzero(counts, axis=1)
        for index, ids in enumerate(batch.ids):
            self._pairs[index] += co_activation(ids, n_experts)

    def static_order(self, prompt: int) -> Ids | None:
        """Of the experts by their use in all other prompts, [L, N]; None without any."""
        others = self._selections.sum(axis=0) - self._selections[prompt]
        return static_order(others) if others.any() else None

    def curves(self) -> list[ProbabilityCurve]:
        """Of all prompts, then of each group if there are several; those without a batch are left out."""
        names = list(dict.fromkeys(self._groups.tolist()))
        chosen = {"all": np.ones(len(self._groups), dtype=np.bool_)}
        chosen |= {name: self._groups == name for name in names} if len(names) > 1 else {}
        curves = []
        for name, rows in chosen.items():
            n_batches, n_tokens = int(self.batches[rows].sum()), int(self._tokens[rows].sum())
            if n_batches:
                sums = (each[rows].sum(axis=0) for each in (self._unique, self._cumulative, self._weights))
                unique, cumulative, weights = (each / n_batches for each in sums)
                means = cumulative.mean(axis=0), weights.mean(axis=0)
                curve = ProbabilityCurve(name, n_batches, n_tokens, float(unique.mean()), unique, *means, cumulative)
                curves.append(curve)
        return curves

    def pairs(self) -> list[CoActivation]:
        tokens = int(self._tokens.sum())
        return [
            analyse_pairs(layer, counts, tokens, self._n_used)
            for layer, counts in zip(self._layers, self._pairs, strict=True)
        ]


def _selection_of(model: Model, layers: Sequence[int]) -> Callable[[FloatArray], FloatArray]:
    """The function that makes the layers' selection values [L, T, N] of their routers' values [L, T, N]."""
    architecture = model.info.architecture
    n_groups = int(model.metadata(f"{architecture}.expert_group_count") or 1)
    n_groups_used = int(model.metadata(f"{architecture}.expert_group_used_count") or 1)
    bias = Routers.read(model).selection_bias
    own = None if bias is None else bias[list(layers), None]
    return partial(selection_values, bias=own, n_groups=n_groups, n_groups_used=n_groups_used)


def _check_selection(selection: FloatArray, ids: IntArray) -> None:
    """Raises EngineError where the natural picks [L, T, k] are not the highest values of selection [L, T, N]."""
    highest = -np.sort(-selection, axis=-1)[..., : ids.shape[-1]]
    picked = -np.sort(-np.take_along_axis(selection, ids, axis=-1), axis=-1)
    if not np.allclose(highest, picked, atol=_NEAR_TIE, rtol=_NEAR_TIE):
        raise EngineError("This model selects experts by a rule that the analysis does not know.")
