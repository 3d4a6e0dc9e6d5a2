"""Scripted acceptance: answers whose text and accepted drafts are given, for measurements without a trained draft.

Target and draft compute what they would for a real answer; only the tokens that they draw are replaced. The draft at a
position is accepted or not in every step and mode, so that all compare on the same text and the same acceptance.
llama.cpp has the same as --spec-synth-rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.drafts import DraftRequest, DraftSource, Proposal, n_kept
from moeedge.engine.sampling import Candidates, FloatRow, Sampler
from moeedge.engine.types import SamplingConfig
from moeedge.errors import require
from moeedge.llama.model import Model

ConfidenceModel = Literal["calibrated", "constant"]
_CONCENTRATION = 2.0  # of the Beta distribution of calibrated confidences, whose mean is the acceptance

Tokens = NDArray[np.int32]


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Script:
    """A text and the drafts of each position, [n]; confidences: what the draft says of its token there."""

    text: Tokens
    drafts: Tokens
    confidences: NDArray[np.float64]

    @classmethod
    def draw(cls, model: Model, n: int, acceptance: float, confidences: ConfidenceModel, seed: int) -> Script:
        """A random text of `n` tokens, whose drafts are accepted independently of each other.

        calibrated: a token of confidence c is accepted with probability c, and c varies around `acceptance`. constant:
        every token has the confidence `acceptance`, which tells nothing. Of one seed, text and chances are the same
        for every acceptance.
        """
        require(0 <= acceptance <= 1, f"an acceptance must be from 0 to 1, not {acceptance:g}")
        rng = np.random.default_rng(seed)
        usable = np.setdiff1d(np.arange(model.info.n_vocab, dtype=np.int32), model.eog_tokens)
        places = rng.integers(0, len(usable), n)
        text, other = usable[places], usable[(places + 1) % len(usable)]
        chances, own = rng.random(n), np.full(n, acceptance)
        if confidences == "calibrated" and 0 < acceptance < 1:
            own = rng.beta(_CONCENTRATION * acceptance, _CONCENTRATION * (1 - acceptance), n)
        return cls(text, np.where(chances < own, text, other), own)


class ScriptedSampler(Sampler):
    """Computes the greedy choice as `Sampler` does, and draws the script's token in its place."""

    def __init__(self, config: SamplingConfig, n_vocab: int, script: Script) -> None:
        super().__init__(config, n_vocab)
        self._script = script

    def recent(self, history: Sequence[int]) -> list[int]:
        """The entire history, whose length is the position of the next token."""
        return list(history)

    def candidates(self, logits: FloatRow, history: Sequence[int]) -> Candidates:
        """The draft of the script."""
        self.argmax(logits, history)
        return Candidates.certain(int(self._script.drafts[len(history)]))

    def confidence(self, logits: FloatRow, history: Sequence[int]) -> float:
        """That of the script."""
        super().confidence(logits, history)
        return float(self._script.confidences[len(history)])

    def accept(
        self, logits: FloatRow, drafts: Sequence[int], proposals: Sequence[Candidates], history: Sequence[int]
    ) -> tuple[int, int]:
        """The drafts that are the text's, and its next token."""
        text, n = self._script.text, len(history)
        for i, token in enumerate([*drafts, -1]):
            self.argmax(logits[i], history)
            if token != text[n + i]:
                break
        return i, int(text[n + i])


class ScriptedDraft(DraftSource):
    """Drafts of a script at no cost, as n-grams have."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def _propose(self, request: DraftRequest) -> Proposal:
        position, stop = len(request.history), request.stop
        confidences = self._script.confidences[position : position + request.gamma].tolist()
        n = len(confidences) if stop is None else n_kept(stop, confidences)
        tokens = self._script.drafts[position : position + n].tolist()
        return Proposal(tokens, [Candidates.certain(token) for token in tokens], confidences[: n + 1])
