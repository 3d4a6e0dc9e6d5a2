"""While the draft model works: what its hidden states foretell is planned for and moved at once.

As a worker (SP-MoE, section 3.3) the mover goes on by itself: after each draft token the plan is made anew, and
drafting never waits. Vanilla, as AdapMoE does it, is what SP-MoE compares that with: each draft layer's experts are
asked for when the layer is computed, and the next layer waits until they have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from moeedge.engine.placement.foresight import DraftForesight
from moeedge.engine.types import Phase
from moeedge.native import Block
from moeedge.scheduler.policy import Hints

# plans for those tokens by what is foretold, starts the transfers for those layers (None: all) and says how many
Replan = Callable[[Sequence[int], Hints | None, slice | None], int]
_PATIENCE_S = 10.0


class Drafting:
    """Between two verifications.

    replan: see above; wait: until what was pushed has come, for at most so many seconds.
    plans, planned_s: how often something was foretold and planned for, and the time of that; stops, waited_s: how often
    drafting waited for transfers, and how long. Sums since the beginning.
    """

    def __init__(
        self, foresight: DraftForesight, replan: Replan, wait: Callable[[float], object], *, vanilla: bool
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

    def _plan(self, hints: Hints | None, layers: slice | None, tokens: Sequence[int] | None = None) -> int:
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
