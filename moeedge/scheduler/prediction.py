"""Predicts from hidden states which experts the coming tokens will use.

DraftRouterPredictor  (SP-MoE) puts what the draft's layers read through the routers of the target's layers at the same
                      relative depths.
NextGatePredictor     (Mixtral-Offloading, AdapMoE, Fate, HybriMoE) puts what a layer's router reads through the
                      routers of the next layers, before the layer's own experts are computed.
DraftPrefetch         moves the predicted experts while the draft model works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import ModelFileError
from moeedge.experts import FloatArray
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.routers import Routers, read_norms
from moeedge.native import ActivationCapture, Block, CaptureFlags
from moeedge.native.abi import Phase
from moeedge.native.cache import ExpertCache
from moeedge.policies.base import ExpertPrediction
from moeedge.scheduler.driver import StepDriver

_MAX_TOKENS = 65  # of a batch (EngineConfig.gamma)
_N_LAYERS_AHEAD = 3  # that the next-gate predictor looks at
_TIMEOUT_S = 10.0


@dataclass
class PredictionAccuracy:
    """Counts how many of the predicted (token, layer, place) triples name an expert that the token used."""

    n_predicted: int = 0
    n_correct: int = 0

    @property
    def share(self) -> float | None:
        """Share of correct predictions; None before the first."""
        return self.n_correct / self.n_predicted if self.n_predicted else None

    def add(self, predicted: NDArray[np.int32], used: NDArray[np.int32]) -> None:
        """Both int32 [n_layers, n_tokens, k], -1 where unknown; the tokens of a batch in order."""
        n = min(predicted.shape[1], used.shape[1])
        predicted, used = predicted[:, :n], used[:, :n]
        valid = (predicted >= 0) & (used[..., :1] >= 0)
        self.n_predicted += int(np.count_nonzero(valid))
        self.n_correct += int(np.count_nonzero(valid & (predicted[..., :, None] == used[..., None, :]).any(axis=-1)))


def matching_layers(n_layers: int, n_draft_layers: int) -> NDArray[np.intp]:
    """The draft layer at the relative depth of each target layer, [n_layers]: what it is predicted from."""
    return ((np.arange(n_layers) + 0.5) * n_draft_layers / n_layers).astype(np.intp)


class DraftRouterPredictor:
    """Predicts the next batch token by token while the draft works, in the first layers with experts in RAM."""

    def __init__(self, target: Model, draft: Context, capture: ActivationCapture, n_predicted_layers: int) -> None:
        self._routers = Routers.read(target)
        self._capture = capture
        self._n_used = target.info.n_expert_used
        n_layers, n_draft_layers = target.info.n_layers, draft.model.info.n_layers
        self.draft_layer_of = matching_layers(n_layers, n_draft_layers)
        predicted = list(target.host_expert_layers)[:n_predicted_layers]
        self._n_layers = max(predicted, default=-1) + 1  # no prediction after them
        self._unpredicted = np.setdiff1d(np.arange(self._n_layers), predicted)  # layers without experts
        norms = read_norms(draft.model)
        self._ratio = self._routers.ratio(np.arange(n_layers), None if norms is None else norms[self.draft_layer_of])
        self._ids = np.full((n_layers, _MAX_TOKENS, self._n_used), -1, dtype=np.int32)
        self._n_tokens = 0  # predicted in full
        self._has_partial_token = False  # some layers of the next token are predicted
        self._last_serial = 0  # of the activations that were read last
        self.accuracy = PredictionAccuracy()

    def begin_batch(self) -> None:
        """Forgets the last batch."""
        self._n_tokens, self._has_partial_token = 0, False
        self._ids.fill(-1)
        self._last_serial = self._capture.read(CaptureFlags.INPUTS).serial

    @property
    def prediction(self) -> ExpertPrediction | None:
        """The prediction for the tokens of the batch so far; None before its first token."""
        n = self._n_tokens + self._has_partial_token
        return ExpertPrediction(layer_ids=self._ids[:, :n].copy()) if n else None

    def read_token(self) -> bool:
        """Predicts from all layers of the token that the draft decoded last; False where no new token is known."""
        activations = self._capture.read(CaptureFlags.INPUTS)
        if activations.serial == self._last_serial:
            return False
        self._last_serial = activations.serial
        last_row = activations.layer_tokens - 1
        draft_layers = self.draft_layer_of[: self._n_layers]
        if self._n_tokens >= self._ids.shape[1] or last_row[draft_layers].min(initial=0) < 0:
            return False
        self._predict(slice(0, self._n_layers), activations.rows[draft_layers, last_row[draft_layers]])
        return self.end_token()

    def read_layer(self, draft_layer: int, inputs: FloatArray) -> slice | None:
        """Predicts from what one draft layer reads of the current token, [n_embd]; the target layers predicted."""
        first, last = np.searchsorted(self.draft_layer_of[: self._n_layers], (draft_layer, draft_layer + 1))
        if first == last or self._n_tokens >= self._ids.shape[1]:
            return None
        layers = slice(int(first), int(last))
        self._predict(layers, np.broadcast_to(inputs, (last - first, inputs.size)))
        return layers

    def end_token(self) -> bool:
        """Ends the current token; False where no layer of it was predicted."""
        has_token, self._has_partial_token = self._has_partial_token, False
        self._n_tokens += has_token
        return has_token

    def compare(self, used: NDArray[np.int32]) -> None:
        """Adds the batch to `accuracy`; `used` [n_layers, n_tokens, k] are the experts that it used."""
        if self._n_tokens:
            self.accuracy.add(self._ids[:, : self._n_tokens], used)

    def _predict(self, layers: slice, inputs: FloatArray) -> None:
        """Experts of the current token in `layers` [n] from `inputs` [n, n_embd]."""
        if layers.start == layers.stop:
            return
        scaled = inputs if self._ratio is None else inputs * self._ratio[layers]
        scores = self._routers.scores(layers, scaled[:, None])
        self._ids[layers, self._n_tokens] = self._routers.best(layers, scores, self._n_used)[:, 0]
        self._ids[self._unpredicted, self._n_tokens] = -1
        self._has_partial_token = True


class NextGatePredictor:
    """Predicts the three layers after the one computed next. Raises ModelFileError for routers it cannot read."""

    def __init__(self, target: Model) -> None:
        self._routers = Routers.read(target)
        self._n_used = target.info.used_per_layer
        # of the current batch, each layer as predicted from the one before: [n_layers, n_tokens, k]
        self._predicted: NDArray[np.int32] | None = None
        layers, norm = target.host_expert_layers, self._routers.norm
        # for each layer with experts in host memory the next such layers, and what brings its values to their scale
        self._next = {
            layer: [
                (later, None if norm is None else self._routers.ratio(np.array([later]), norm[[layer]]))
                for later in layers[place + 1 : place + 1 + _N_LAYERS_AHEAD]
            ]
            for place, layer in enumerate(layers)
        }
        self.accuracy = PredictionAccuracy()

    def predict(self, block: Block) -> ExpertPrediction | None:
        """The next layers' experts; None where the router's input is not known."""
        n_layers, _, n_embd = self._routers.weight.shape
        if block.inputs is None or block.inputs.shape[1] != n_embd:
            return None
        ids = np.full((n_layers, len(block.inputs), max(self._n_used)), -1, dtype=np.int32)
        for place, (layer, ratio) in enumerate(self._next.get(block.layer, [])):
            inputs = block.inputs if ratio is None else block.inputs * ratio
            here, n_used = slice(layer, layer + 1), self._n_used[layer]
            ids[here, :, :n_used] = self._routers.best(here, self._routers.scores(here, inputs[None]), n_used)
            if place == 0:  # kept for `compare`
                if self._predicted is None or self._predicted.shape != ids.shape:
                    self._predicted = np.full(ids.shape, -1, dtype=np.int32)
                self._predicted[layer] = ids[layer]
        return ExpertPrediction(layer_ids=ids)

    def compare(self, used: NDArray[np.int32]) -> None:
        if self._predicted is not None and self._predicted.shape[1] == used.shape[1]:
            self.accuracy.add(self._predicted, used)
        self._predicted = None


@dataclass(eq=False)
class DraftPrefetch:
    """Plans and moves experts between two verifications.

    In SP-MoE's way (section 3.3) the plan is made anew after each draft token, and drafting never waits. vanilla: in
    AdapMoE's way, SP-MoE's baseline, each draft layer's experts are requested when the layer is computed, and the next
    layer waits until they have arrived in the cache. is_on: whether that can be used. stops: how often drafting waited
    since the session began.
    """

    predictor: DraftRouterPredictor
    driver: StepDriver
    cache: ExpertCache
    is_on: Callable[[], object]
    vanilla: bool
    stops: int = field(default=0, init=False)
    _tokens: Sequence[int] = field(default=(), init=False)
    _has_pushed: bool = field(default=False, init=False)

    def begin_batch(self) -> None:
        self.predictor.begin_batch()
        self._tokens = ()

    def on_token(self, tokens: Sequence[int]) -> None:
        """The draft has decoded the last of `tokens`: the token emitted last and the drafts so far."""
        self._tokens = tuple(tokens)
        if self.vanilla:
            self.predictor.end_token()
        elif self.predictor.read_token():
            self._plan(self._tokens, None)

    def end_batch(self, tokens: Sequence[int]) -> None:
        """Drafting is over, and `tokens` are verified next."""
        if self.vanilla:
            self.predictor.end_token()
            self._wait_for_transfers()
        else:
            self.predictor.read_token()
            self._plan(tokens, None)

    def before_draft_layer(self, block: Block) -> None:
        """A layer of the draft is computed next; used in vanilla mode only."""
        if not self.vanilla or not self.is_on() or block.phase != Phase.DRAFT or block.inputs is None:
            return
        self._wait_for_transfers()
        layers = self.predictor.read_layer(block.layer, block.inputs[-1])
        if layers is not None:
            self._has_pushed = self._plan(self._tokens, layers) > 0

    def _plan(self, tokens: Sequence[int], layers: slice | None) -> int:
        plan = self.driver.plan_draft(tokens, self.predictor.prediction, layers=layers)
        self.driver.push()
        return len(plan.uploads)

    def _wait_for_transfers(self) -> None:
        if self._has_pushed:
            self._has_pushed = False
            self.cache.drain(_TIMEOUT_S)
            self.stops += 1


def open_draft_predictor(target: Context, draft: Context | None, n_predicted_layers: int) -> DraftRouterPredictor:
    """A predictor for the first `n_predicted_layers` layers with experts. Raises ModelFileError without one."""
    if draft is None:
        raise ModelFileError("there is no draft model")
    n_embd, n_draft_embd = target.model.info.n_embd, draft.model.info.n_embd
    if n_embd != n_draft_embd:
        states = f"the draft's hidden states have {n_draft_embd} values"
        raise ModelFileError(f"{states} and the target's routers read {n_embd}")
    capture = draft.capture_activations()
    if capture is None:
        raise ModelFileError("llama.cpp computes the draft on a GPU")
    predictor = DraftRouterPredictor(target.model, draft, capture, n_predicted_layers)
    capture.enable(CaptureFlags.INPUTS)
    return predictor


@dataclass(kw_only=True)
class PolicyInputs:
    """What a policy reads beside activations; None, and False, where it does not ask for it or cannot get it."""

    gate_predictor: NextGatePredictor | None = None  # within a verification
    draft_predictor: DraftRouterPredictor | None = None  # while the draft model works
    router_scores: ActivationCapture | None = None  # which captures them
    hidden_states: bool = False  # the draft's
