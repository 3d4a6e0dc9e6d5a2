"""How well a draft model's hidden states predict the target's experts, layer by layer.

SP-MoE, section 2.2 (Observation I, Figure 2(c)) and section 3.2 (Figure 7): both models read the same text, and the
draft's layers go with the target's at the same relative depth, as in `DraftRouterPredictor`.

  cosine similarity   of the inputs of a target layer's router and of its draft layer's FFN, the latter rescaled to the
                      norm before the router where both norms are known (Figure 7(a))
  top-n accuracy      share of the n experts that the target's router ranks first for the draft's input that the token
                      really uses (Figure 7(b) has n = 1)
  entropy             of the router's probabilities in bits, for the draft's input ("gating-based") and for the target's
                      own ("actual"); log2(N) is "random", and the popularity's entropy "coarse-grained" (Figure 2(c))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.session import Session
from moeedge.errors import ModelFileError
from moeedge.llama.context import Context
from moeedge.llama.routers import Routers, read_norms
from moeedge.native import ActivationCapture, CaptureFlags
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.scheduler.native_io import routing
from moeedge.scheduler.prediction import matching_layers

FloatArray = NDArray[np.float32]
MAX_TOKENS = 1024  # of all texts together: each costs a decode of both models in small batches
_BATCH = 16  # tokens; activations of larger batches than 32 are not captured


@dataclass(frozen=True)
class PairSimilarity:
    """Means over the tokens of each layer; lists are by `layers`, those with experts in host memory."""

    draft: str  # file name
    tokens: int
    layers: list[int]
    cosine: list[float]
    top_n: list[list[float]]  # [k] of each layer: n = 1..k
    entropy_draft_bits: list[float]
    entropy_target_bits: list[float]


def compare_pair(
    session: Session,
    texts: Sequence[Sequence[int]],
    run: Run | None = None,
) -> tuple[PairSimilarity | None, str]:
    """Both models read `texts` (token ids), MAX_TOKENS at most; the result, or None and the reason.

    The contexts' KV caches are empty afterwards. run: asked between batches whether to stop; the result covers the
    tokens until then. Its progress is in tokens.
    """
    run = run or Run()
    draft = session.draft_context
    if draft is None:
        return None, "there is no draft model"
    target = session.target
    widths = target.model.info.n_embd, draft.model.info.n_embd
    if widths[0] != widths[1]:
        return None, f"the draft's hidden states have {widths[1]} values and the target's {widths[0]}"
    captures = target.capture_activations(), draft.capture_activations()
    if captures[0] is None or captures[1] is None:
        return None, "llama.cpp computes the draft on a GPU"
    try:
        sums = _Sums(target, draft, captures[0], captures[1])
    except ModelFileError as error:
        return None, error.message
    n_ctx = min(target.n_ctx, draft.n_ctx)
    for text in texts:
        session.reset()
        read = text[:n_ctx]  # an answer may have gone on after a context shift
        for start in range(0, len(read), _BATCH):
            batch = list(read[start : start + min(_BATCH, MAX_TOKENS - sums.tokens)])
            if run.cancelled() or not batch:
                break
            sums.read(batch)
            run.progress.add(len(batch))
    session.reset()
    result = sums.result(draft.model.path.name)
    return result, "" if result else "no layer of the two was captured"


class _Sums:
    """Sums over the tokens read so far, per layer of the target. Raises ModelFileError for routers it cannot read."""

    def __init__(self, target: Context, draft: Context, own: ActivationCapture, drafted: ActivationCapture) -> None:
        info = target.model.info
        self._target, self._draft, self._own, self._drafted = target, draft, own, drafted
        self._routers = Routers.read(target.model)
        self._k = info.n_expert_used
        self._draft_layer_of = matching_layers(info.n_layers, draft.model.info.n_layers)
        norms = read_norms(draft.model)
        layers = np.arange(info.n_layers)
        self._ratio = self._routers.ratio(layers, None if norms is None else norms[self._draft_layer_of])
        own.enable(CaptureFlags.INPUTS)
        drafted.enable(CaptureFlags.INPUTS)
        self.tokens = 0
        self._seen = np.zeros(info.n_layers, dtype=np.int64)  # tokens
        self._cosine = np.zeros(info.n_layers)
        self._hits = np.zeros((info.n_layers, self._k), dtype=np.int64)  # of the n-th prediction
        self._entropy = np.zeros((2, info.n_layers))  # of draft and target

    def read(self, batch: list[int]) -> None:
        """Decodes the batch with both models and adds its tokens."""
        self._draft.decode(batch, phase=Phase.DRAFT, logits="all")
        self._target.decode(batch, phase=Phase.VERIFY, logits="all")  # the last layer computes tokens with logits only
        n = len(batch)
        self.tokens += n
        draft, target = self._drafted.read(CaptureFlags.INPUTS), self._own.read(CaptureFlags.INPUTS)
        sensor = self._target.sensor
        frames = [] if sensor is None else sensor.frames()
        if not frames or frames[-1].n_tokens != n:
            return
        used, _ = routing(frames[-1])  # [n_layers, n, k]
        captured = (target.layer_tokens == n) & (draft.layer_tokens[self._draft_layer_of] == n)
        for layer in np.flatnonzero(captured & (used[:, :, 0] >= 0).all(axis=1)):
            inputs = draft.rows[self._draft_layer_of[layer], :n]
            if self._ratio is not None:
                inputs = inputs * self._ratio[layer]
            self._add(int(layer), inputs, target.rows[layer, :n], used[layer])

    def _add(self, layer: int, drafted: FloatArray, own: FloatArray, used: NDArray[np.int32]) -> None:
        """One layer: inputs [n, n_embd] of both models and the experts [n, k] that the tokens use."""
        here = slice(layer, layer + 1)
        dots = np.einsum("te,te->t", drafted, own, dtype=np.float64)
        lengths = np.linalg.norm(drafted.astype(np.float64), axis=1) * np.linalg.norm(own.astype(np.float64), axis=1)
        self._cosine[layer] += float((dots / np.maximum(lengths, np.finfo(np.float64).tiny)).sum())
        scores = self._routers.scores(here, drafted[None])
        predicted = self._routers.best(here, scores, self._k)[0]  # [n, k]
        self._hits[layer] += (predicted[:, :, None] == used[:, None, :]).any(axis=2).sum(axis=0)
        for row, probabilities in enumerate((scores[0], self._routers.scores(here, own[None])[0])):
            self._entropy[row, layer] += float(entropy_bits(probabilities).sum())
        self._seen[layer] += len(used)

    def result(self, draft: str) -> PairSimilarity | None:
        """The means; None where no layer was captured."""
        layers = np.flatnonzero(self._seen)
        if not layers.size:
            return None
        seen = self._seen[layers]
        top_n = self._hits[layers].cumsum(axis=1) / (seen[:, None] * np.arange(1, self._k + 1))
        return PairSimilarity(
            draft=draft,
            tokens=int(seen.max()),
            layers=layers.tolist(),
            cosine=(self._cosine[layers] / seen).tolist(),
            top_n=top_n.tolist(),
            entropy_draft_bits=(self._entropy[0, layers] / seen).tolist(),
            entropy_target_bits=(self._entropy[1, layers] / seen).tolist(),
        )


def entropy_bits(probabilities: NDArray[np.floating]) -> NDArray[np.float64]:
    """Entropy of each row [..., N] in bits, after division by the row's sum, which is not 1 with sigmoid routers."""
    share = probabilities.astype(np.float64)
    share = share / np.maximum(share.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    return np.asarray(-(share * np.log2(np.where(share > 0, share, 1.0))).sum(axis=-1))
