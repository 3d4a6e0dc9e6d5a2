"""Which experts the tokens to come will use, foretold from hidden states: the hints of scheduler/policy.py.

"draft-router"  (SP-MoE) what the draft's layers read while it drafts, put through the target's routers. Where draft and
                target have different depths, each target layer goes with the draft layer at the same relative depth.
"next-gate"     (Mixtral-Offloading, AdapMoE, Fate, HybriMoE) what this layer's router reads, put through those of the
                next layers, before this layer's experts are computed.

While the draft model works: what its hidden states foretell is planned for and moved at once.

As a worker (SP-MoE, section 3.3) the mover goes on by itself: after each draft token the plan is made anew, and
drafting never waits. Vanilla, as AdapMoE does it, is what SP-MoE compares that with: each draft layer's experts are
asked for when the layer is computed, and the next layer waits until they have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import ModelFileError
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.routers import Routers, read_norms
from moeedge.native import ActivationCapture, Block, CaptureFlags
from moeedge.native.abi import Phase
from moeedge.policies.base import ExpertPrediction

FloatArray = NDArray[np.float32]
_TOKENS = 65  # of a batch, at most (EngineConfig.gamma)
_AHEAD = 3  # layers that the next-gate looks at


class Accuracy:
    """How much of what was foretold came true: shares of (token, layer, place) whose expert the token used."""

    def __init__(self) -> None:
        self.told = 0
        self.right = 0

    @property
    def share(self) -> float | None:
        """None before the first."""
        return self.right / self.told if self.told else None

    def judge(self, foretold: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Both [n_layers, n_tokens, k], -1 where nothing is known; the tokens of a batch in order."""
        n = min(foretold.shape[1], ids.shape[1])
        told, used = foretold[:, :n], ids[:, :n]
        known = (told >= 0) & (used[..., :1] >= 0)
        self.told += int(np.count_nonzero(known))
        self.right += int(np.count_nonzero(known & (told[..., :, None] == used[..., None, :]).any(axis=-1)))


def foretold_cells(hints: ExpertPrediction | None, n_layers: int, n_experts: int) -> NDArray[np.bool_]:
    """Which experts some token will use, [n_layers, n_experts]; none without hints."""
    cells = np.zeros((n_layers, n_experts + 1), dtype=np.bool_)  # the last column takes the -1
    if hints is not None:
        np.put_along_axis(cells, hints.layer_ids.reshape(n_layers, -1).astype(np.intp) % (n_experts + 1), True, axis=1)
    return cells[:, :-1]


class DraftRouterPredictor:
    """Of the next batch, token by token while the draft model works; `hints` is what is known so far.

    n_ahead: for how many of the target's layers with experts, from the first on.
    """

    def __init__(self, target: Model, draft: Context, capture: ActivationCapture, n_ahead: int) -> None:
        self._routers = Routers.read(target)
        self._capture = capture
        self._n_used = target.info.n_expert_used
        n_layers, n_draft = target.info.n_layers, draft.model.info.n_layers
        self.layer_of = ((np.arange(n_layers) + 0.5) * n_draft / n_layers).astype(np.intp)  # of the draft
        ahead = list(target.info.expert_layers)[:n_ahead]
        self._n_layers = max(ahead, default=-1) + 1  # behind them nothing is foretold
        self._silent = np.setdiff1d(np.arange(self._n_layers), ahead)  # no experts
        norms = read_norms(draft.model)
        self._ratio = self._routers.ratio(np.arange(n_layers), None if norms is None else norms[self.layer_of])
        self._ids = np.full((n_layers, _TOKENS, self._n_used), -1, dtype=np.int32)
        self._n_known = 0  # tokens
        self._has_more = False  # of the next token, layer by layer
        self._serial = 0  # of what was looked at last
        self.accuracy = Accuracy()

    def begin(self) -> None:
        """A new batch, of which nothing is known."""
        self._n_known = 0
        self._has_more = False
        self._ids.fill(-1)
        self._serial = self._capture.read(CaptureFlags.INPUTS).serial

    @property
    def hints(self) -> ExpertPrediction | None:
        """Of the batch; None before its first token."""
        n = self._n_known + self._has_more
        return ExpertPrediction(layer_ids=self._ids[:, :n].copy(), source="draft-router") if n else None

    def look(self) -> bool:
        """Takes in the token that the draft decoded last, all layers; False where there is none, or nothing known."""
        captured = self._capture.read(CaptureFlags.INPUTS)
        if captured.serial == self._serial:
            return False
        self._serial = captured.serial
        rows = captured.layer_tokens - 1
        read_by = self.layer_of[: self._n_layers]
        if self._n_known >= self._ids.shape[1] or rows[read_by].min(initial=0) < 0:
            return False
        self._take(slice(0, self._n_layers), captured.rows[read_by, rows[read_by]])
        return self.end_token()

    def look_at(self, layer: int, inputs: FloatArray) -> slice | None:
        """Takes in what one draft layer reads of the token at hand, [n_embd]: the target layers it tells of."""
        first, last = np.searchsorted(self.layer_of[: self._n_layers], (layer, layer + 1))
        if first == last or self._n_known >= self._ids.shape[1]:
            return None
        layers = slice(int(first), int(last))
        self._take(layers, np.broadcast_to(inputs, (last - first, inputs.size)))
        return layers

    def end_token(self) -> bool:
        """The token at hand is done; False where nothing was foretold of it."""
        has_more, self._has_more = self._has_more, False
        self._n_known += has_more
        return has_more

    def _take(self, layers: slice, inputs: FloatArray) -> None:
        """What `layers` [n] will use of the token at hand, from `inputs` [n, n_embd]."""
        if layers.start == layers.stop:
            return
        self._ids[layers, self._n_known] = self._route(layers, inputs)
        self._ids[self._silent, self._n_known] = -1
        self._has_more = True

    def judge(self, ids: NDArray[np.int32]) -> None:
        """What the batch used [n_layers, n_tokens, k]."""
        if self._n_known:
            self.accuracy.judge(self._ids[:, : self._n_known], ids)

    def _route(self, layers: slice, inputs: FloatArray) -> NDArray[np.int32]:
        """[n, k] from what was read, [n, n_embd]."""
        scaled = inputs if self._ratio is None else inputs * self._ratio[layers]
        scores = self._routers.scores(layers, scaled[:, None])
        return self._routers.best(layers, scores, self._n_used)[:, 0]


class NextGatePredictor:
    """Of the layers behind the one that is computed next."""

    def __init__(self, target: Model) -> None:
        self._routers = Routers.read(target)
        self._n_used = target.info.n_expert_used
        # of the batch at hand, each layer as foretold by the one before: [n_layers, n_tokens, k]
        self._foretold: NDArray[np.int32] | None = None
        layers, norm = target.info.expert_layers, self._routers.norm
        # behind each layer with experts the next ones that have some, and what brings values there to their scale
        self._next = {
            layer: [
                (behind, None if norm is None else self._routers.ratio(np.array([behind]), norm[[layer]]))
                for behind in layers[place + 1 : place + 1 + _AHEAD]
            ]
            for place, layer in enumerate(layers)
        }
        self.accuracy = Accuracy()

    def look(self, block: Block) -> ExpertPrediction | None:
        """Foretells the next layers with experts; None where nobody knows what the router reads."""
        n_layers, _, n_embd = self._routers.shape
        if block.inputs is None or block.inputs.shape[1] != n_embd:
            return None
        ids = np.full((n_layers, len(block.inputs), self._n_used), -1, dtype=np.int32)
        for place, (layer, ratio) in enumerate(self._next.get(block.layer, [])):
            inputs = block.inputs if ratio is None else block.inputs * ratio
            here = slice(layer, layer + 1)
            ids[here] = self._routers.best(here, self._routers.scores(here, inputs[None]), self._n_used)
            if place == 0:
                self._remember(layer, ids)
        return ExpertPrediction(layer_ids=ids, source="next-gate")

    def _remember(self, layer: int, ids: NDArray[np.int32]) -> None:
        if self._foretold is None or self._foretold.shape != ids.shape:
            self._foretold = np.full(ids.shape, -1, dtype=np.int32)
        self._foretold[layer] = ids[layer]

    def judge(self, ids: NDArray[np.int32]) -> None:
        """What the batch used [n_layers, n_tokens, k]."""
        if self._foretold is not None and self._foretold.shape[1] == ids.shape[1]:
            self.accuracy.judge(self._foretold, ids)
        self._foretold = None


def open_draft_foresight(
    target: Context, draft: Context | None, n_ahead: int
) -> tuple[DraftRouterPredictor | None, str]:
    """From a draft model's hidden states, for the first `n_ahead` layers with experts; or None, and why."""
    if draft is None:
        return None, "there is no draft model"
    n_embd, n_draft = target.model.info.n_embd, draft.model.info.n_embd
    if n_embd != n_draft:
        return None, f"the draft's hidden states have {n_draft} values and the target's routers read {n_embd}"
    capture = draft.capture_activations()
    if capture is None:
        return None, "llama.cpp computes the draft on a GPU"
    try:
        foresight = DraftRouterPredictor(target.model, draft, capture, n_ahead)
    except ModelFileError as error:
        return None, str(error)
    capture.enable(CaptureFlags.INPUTS)
    return foresight, ""


def open_gate_foresight(target: Context) -> tuple[NextGatePredictor | None, str]:
    """From the target's own hidden states; or None, and why."""
    try:
        return NextGatePredictor(target.model), ""
    except ModelFileError as error:
        return None, str(error)


# plans for those tokens by what is foretold, starts the transfers for those layers (None: all) and says how many
Replan = Callable[[Sequence[int], ExpertPrediction | None, slice | None], int]
_PATIENCE_S = 10.0


class Drafting:
    """Between two verifications.

    replan: see above; wait: until what was pushed has come, for at most so many seconds.
    plans, planned_s: how often something was foretold and planned for, and the time of that; stops, waited_s: how often
    drafting waited for transfers, and how long. Sums since the beginning.
    """

    def __init__(
        self, foresight: DraftRouterPredictor, replan: Replan, wait: Callable[[float], object], *, vanilla: bool
    ) -> None:
        self.foresight = foresight
        self._replan = replan
        self._wait = wait
        self._vanilla = vanilla
        self._tokens: list[int] = []
        self._has_asked = False
        self.on = False
        self.plans = self.stops = 0
        self.planned_s = self.waited_s = 0.0

    def begin(self) -> None:
        """A new batch is to be drafted."""
        self.foresight.begin()
        self._tokens = []

    def token(self, tokens: Sequence[int]) -> None:
        """The draft has decoded the next of `tokens`, the one emitted last and the drafts so far."""
        if not self.on:
            return
        self._tokens = list(tokens)
        if self._look() and not self._vanilla:
            self._plan(self.foresight.hints, None)

    def end(self, tokens: Sequence[int]) -> None:
        """Drafting is over, and `tokens` are verified next."""
        self._look()
        if self._vanilla:
            self._stop()
        else:
            self._plan(self.foresight.hints, None, tokens)

    def block(self, block: Block) -> None:
        """A layer of the draft is computed next."""
        if not self.on or not self._vanilla or block.phase != Phase.DRAFT or block.inputs is None:
            return
        self._stop()
        layers = self.foresight.look_at(block.layer, block.inputs[-1])
        if layers is not None:
            self._has_asked = self._plan(self.foresight.hints, layers) > 0

    def _look(self) -> bool:
        """Whether more is foretold than before the token that was decoded last."""
        return self.foresight.end_token() if self._vanilla else self.foresight.look()

    def _plan(self, hints: ExpertPrediction | None, layers: slice | None, tokens: Sequence[int] | None = None) -> int:
        start_s = time.perf_counter()
        n_asked = self._replan(self._tokens if tokens is None else tokens, hints, layers)
        self.plans += 1
        self.planned_s += time.perf_counter() - start_s
        return n_asked

    def _stop(self) -> None:
        """Until what the layer before asked for has come."""
        if not self._has_asked:
            return
        self._has_asked = False
        start_s = time.perf_counter()
        self._wait(_PATIENCE_S)
        self.stops += 1
        self.waited_s += time.perf_counter() - start_s
