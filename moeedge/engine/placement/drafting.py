"""While the draft model works: what its hidden states foretell is planned for and moved at once.

As a worker (SP-MoE, section 3.3) the mover goes on by itself: after each draft token the plan is made anew, and
drafting never waits. Vanilla, as AdapMoE does it, is what SP-MoE compares that with: each draft layer's experts are
asked for when the layer is computed, and the next layer waits until they have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeedge.engine.placement.foresight import DraftForesight
from moeedge.engine.types import Phase
from moeedge.native import Block
from moeedge.scheduler.policy import Hints

Replan = Callable[[Sequence[int], Hints | None], None]  # plans for those tokens and starts the transfers
_PATIENCE_S = 10.0


class Drafting:
    """Between two verifications.

    replan: plans and pushes; wait: until what was pushed has come, for at most so many seconds.
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

    def begin(self) -> None:
        """A new batch is to be drafted."""
        self.foresight.begin()
        self._tokens = []

    def token(self, tokens: Sequence[int]) -> None:
        """The draft has decoded the next of `tokens`, the one emitted last and the drafts so far."""
        if not self.on:
            return
        self._tokens = list(tokens)
        if self.foresight.look() and not self._vanilla:
            self._replan(tokens, self.foresight.hints)

    def end(self) -> Hints | None:
        """Drafting is over: what is known of the batch."""
        self.foresight.look()
        if self._has_asked:
            self._wait(_PATIENCE_S)
            self._has_asked = False
        return self.foresight.hints

    def block(self, block: Block) -> None:
        """A layer of the draft is computed next."""
        if not self.on or not self._vanilla or block.phase != Phase.DRAFT or block.inputs is None:
            return
        if self._has_asked:
            self._wait(_PATIENCE_S)
        hints = self.foresight.look_at(block.layer, block.inputs[-1])
        if hints is not None:
            self._replan(self._tokens, hints)
            self._has_asked = True
