"""Goes on with an answer on the CPU when a GPU fails on which llama.cpp computes: lost, or out of memory.

An expert cache alone needs none of this: its backend computes the failed device's share again on the CPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from moeedge.engine.drafts import DraftSource, ModelDraft
from moeedge.engine.loading import make_context
from moeedge.engine.types import EngineConfig
from moeedge.llama.context import Context
from moeedge.llama.model import Model


@dataclass(frozen=True)
class CpuContexts:
    """Target and draft without a GPU; `draft` is None unless the draft is a model."""

    target: Context
    draft_context: Context | None
    draft: DraftSource | None


def reopen_on_cpu(config: EngineConfig, target: Context, draft: ModelDraft | None, resources: ExitStack) -> CpuContexts:
    """Loads the models again, for the CPU alone, with contexts of the same size and empty KV caches.

    The old ones are freed first, since memory for both may not be there. Where the driver threw an exception they are
    abandoned instead: freeing them would call a driver that is in an unknown state. Raises MoeedgeError if the models
    cannot be loaded; the session cannot be used any more then.
    """
    old = [target] if draft is None else [target, draft.context]
    is_abandoned = any(context.is_closed for context in old)
    for context in old:
        context.abandon() if is_abandoned else context.close()
        context.model.abandon() if is_abandoned else context.model.close()
    reopened = [_reopen(config, context, resources) for context in old]
    if draft is None:
        return CpuContexts(reopened[0], None, None)
    return CpuContexts(reopened[0], reopened[1], draft.on(reopened[1]))


def _reopen(config: EngineConfig, context: Context, resources: ExitStack) -> Context:
    is_lazy = context.model.dense is not None  # the cache in RAM, which loads its experts, serves the new context
    model = resources.enter_context(Model.load(context.model.path, device="none", experts_from_file=is_lazy))
    budget = context.budget
    reopened = resources.enter_context(make_context(config, model, context.n_ctx, has_budget=budget is not None))
    if budget is not None:
        reopened.set_budget(budget.budget)
    return reopened
