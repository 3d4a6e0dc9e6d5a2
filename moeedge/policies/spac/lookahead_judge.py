"""Decides whether predictions from the draft's tokens pay, by what they would have found (pure NumPy)."""

from __future__ import annotations

import numpy as np

from moeedge.policies.base import FloatArray, LookaheadStatus

_GAIN_MIN = 0.01  # of the activations that the best experts by decayed counts alone would have brought
_JUDGE_EVERY = 4  # steps
_N_JUDGED_MIN = 12  # before the first decision: the memories are empty at first
_KEPT = 0.95  # of the sums, per judged step: about 20 judged steps
_PAUSE_STEPS, _PAUSE_STEPS_MAX = 256, 4096  # without predictions, doubled each time that they do not pay


class LookaheadJudge:
    """Compares two rankings of the experts after each judged step; `on` says whether to use the predictions.

    Both rankings choose as many experts as there are slots. The activations that the step brought to either choice say
    what a perfectly fast link would have gained. Where the gain stays below 1 %, the predictions rest, and are neither
    made nor learned; after a pause they get another chance.
    """

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self.on = True
        self._hits = self._hits_without = 0.0
        self._n_judged = self._n_steps = self._n_paused = 0
        self._pause_steps = _PAUSE_STEPS

    @property
    def wants_judgement(self) -> bool:
        """Whether the step that comes is judged, if there are predictions for it."""
        return self.on and self._n_steps % _JUDGE_EVERY == 0

    @property
    def status(self) -> LookaheadStatus:
        """What is decided now, and the gain measured so far."""
        gain = self._gain if self._n_judged else None
        if not self.on:
            return LookaheadStatus(used=False, gain=gain, reason="it does not pay here", reads_drafts=False)
        return LookaheadStatus(used=self._n_judged > 0, gain=gain, reason="" if self._n_judged else "not judged yet")

    @property
    def _gain(self) -> float:
        return self._hits / max(self._hits_without, 1e-9) - 1.0

    def end_step(self) -> None:
        """A verification ended."""
        self._n_steps += 1
        if not self.on:
            self._n_paused += 1
            if self._n_paused >= self._pause_steps:
                self._pause_steps = min(2 * self._pause_steps, _PAUSE_STEPS_MAX)
                self.on = True
                self._hits = self._hits_without = 0.0
                self._n_judged = 0

    def judge(self, score: FloatArray, score_without: FloatArray, now: FloatArray) -> None:
        """Adds a step with the activations `now` [n]: the scores [n] with and without predictions."""
        if not 0 < self._n_slots < now.size:
            return
        at = now.size - self._n_slots
        self._hits = _KEPT * self._hits + float(now[np.argpartition(score, at)[at:]].sum())
        self._hits_without = _KEPT * self._hits_without + float(now[np.argpartition(score_without, at)[at:]].sum())
        self._n_judged += 1
        if self._n_judged >= _N_JUDGED_MIN and self._gain < _GAIN_MIN:
            self.on = False
            self._n_paused = 0
