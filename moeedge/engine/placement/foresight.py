"""Which experts the tokens to come will use, foretold from hidden states: the hints of scheduler/policy.py.

"draft-router"  (SP-MoE) what the draft's layers read while it drafts, put through the target's routers. Where draft and
                target have different depths, each target layer goes with the draft layer at the same relative depth.
"next-gate"     (Mixtral-Offloading, AdapMoE, Fate, HybriMoE) what this layer's router reads, put through those of the
                next layers, before this layer's experts are computed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.context import Context
from moeedge.engine.model import Model
from moeedge.engine.routers import Routers, read_norms
from moeedge.errors import ModelFileError
from moeedge.native import Block, Capture, Kept
from moeedge.scheduler.policy import Hints

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


class DraftForesight:
    """Of the next batch, token by token while the draft model works; `hints` is what is known so far."""

    def __init__(self, target: Model, draft: Context, capture: Capture) -> None:
        self._routers = Routers.read(target)
        self._capture = capture
        self._n_used = target.info.n_experts_used
        n_layers, n_draft = target.info.n_layers, draft.model.info.n_layers
        self.layer_of = ((np.arange(n_layers) + 0.5) * n_draft / n_layers).astype(np.intp)  # of the draft
        self._expert_layers = np.zeros(n_layers, dtype=np.bool_)
        self._expert_layers[list(target.info.expert_layers)] = True
        norms = read_norms(draft.model)
        self._ratio = self._routers.ratio(np.arange(n_layers), None if norms is None else norms[self.layer_of])
        self._ids = np.full((n_layers, _TOKENS, self._n_used), -1, dtype=np.int32)
        self._n_known = 0
        self._serial = 0  # of what was looked at last
        self.accuracy = Accuracy()

    def begin(self) -> None:
        """A new batch, of which nothing is known."""
        self._n_known = 0
        self._serial = self._capture.kept(Kept.INPUTS).serial

    @property
    def hints(self) -> Hints | None:
        """Of the batch; None before its first token."""
        known = self._ids[:, : self._n_known].copy()
        return Hints(layer_ids=known, source="draft-router") if self._n_known else None

    def look(self) -> bool:
        """Takes in the token that the draft decoded last, all layers; False where there is none, or nothing known."""
        captured = self._capture.kept(Kept.INPUTS)
        if captured.serial == self._serial:
            return False
        self._serial = captured.serial
        rows = captured.layer_tokens - 1
        if self._n_known >= self._ids.shape[1] or rows.min() < 0:
            return False
        inputs = captured.rows[np.arange(rows.size), rows][self.layer_of]
        self._ids[:, self._n_known] = self._route(slice(None), inputs)
        self._ids[~self._expert_layers, self._n_known] = -1
        self._n_known += 1
        return True

    def look_at(self, layer: int, inputs: FloatArray) -> Hints | None:
        """What one draft layer of the token at hand foretells for its target layers alone, `inputs` [n_embd]."""
        if self._n_known >= self._ids.shape[1]:
            return None
        first, last = np.searchsorted(self.layer_of, (layer, layer + 1))
        ids = np.full((len(self._ids), 1, self._n_used), -1, dtype=np.int32)
        if first < last:
            layers = slice(int(first), int(last))
            ids[layers, 0] = self._route(layers, np.broadcast_to(inputs, (last - first, inputs.size)))
            ids[~self._expert_layers] = -1
        return Hints(layer_ids=ids, source="draft-router")

    def judge(self, ids: NDArray[np.int32]) -> None:
        """What the batch used [n_layers, n_tokens, k]."""
        if self._n_known:
            self.accuracy.judge(self._ids[:, : self._n_known], ids)

    def _route(self, layers: slice, inputs: FloatArray) -> NDArray[np.int32]:
        """[n, k] from what was read, [n, n_embd]."""
        scaled = inputs if self._ratio is None else inputs * self._ratio[layers]
        scores = self._routers.scores(layers, scaled[:, None])
        return self._routers.best(layers, scores, self._n_used)[:, 0]


class GateForesight:
    """Of the layers behind the one that is computed next."""

    def __init__(self, target: Model) -> None:
        self._routers = Routers.read(target)
        self._n_used = target.info.n_experts_used
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

    def look(self, block: Block) -> Hints | None:
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
        return Hints(layer_ids=ids, source="next-gate")

    def _remember(self, layer: int, ids: NDArray[np.int32]) -> None:
        if self._foretold is None or self._foretold.shape != ids.shape:
            self._foretold = np.full(ids.shape, -1, dtype=np.int32)
        self._foretold[layer] = ids[layer]

    def judge(self, ids: NDArray[np.int32]) -> None:
        """What the batch used [n_layers, n_tokens, k]."""
        if self._foretold is not None and self._foretold.shape[1] == ids.shape[1]:
            self.accuracy.judge(self._foretold, ids)
        self._foretold = None


def open_draft_foresight(target: Context, draft: Context | None) -> tuple[DraftForesight | None, str]:
    """From a draft model's hidden states; or None, and why."""
    if draft is None:
        return None, "there is no draft model"
    n_embd, n_draft = target.model.info.n_embd, draft.model.info.n_embd
    if n_embd != n_draft:
        return None, f"the draft's hidden states have {n_draft} values and the target's routers read {n_embd}"
    capture = draft.watch()
    if capture is None:
        return None, "llama.cpp computes the draft on a GPU"
    try:
        foresight = DraftForesight(target.model, draft, capture)
    except ModelFileError as error:
        return None, str(error)
    capture.keep(Kept.INPUTS)
    return foresight, ""


def open_gate_foresight(target: Context) -> tuple[GateForesight | None, str]:
    """From the target's own hidden states; or None, and why."""
    try:
        return GateForesight(target.model), ""
    except ModelFileError as error:
        return None, str(error)
