"""Goes on with an answer on the CPU when a GPU fails on which llama.cpp computes: lost, or out of memory.

An expert cache alone needs none of this: its backend computes the failed device's share again on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from moeedge.engine.drafts import DraftSource, ModelDraft
from moeedge.engine.loading import make_context
from moeedge.engine.types import EngineConfig
from moeedge.llama.context import Context
from moeedge.llama.context_size import kv_bytes_per_token
from moeedge.llama.model import Model


@dataclass(frozen=True)
class CpuContexts:
    """Target and draft without a GPU; `draft` is None unless the draft is a model."""

    target: Context
    draft_context: Context | None
    draft: DraftSource | None


def reopen_on_cpu(
    config: EngineConfig,
    target: Context,
    draft: ModelDraft | None,
    resources: ExitStack,
    *,
    make_room: Callable[[int], None] | None = None,
) -> CpuContexts:
    """Loads the models again, for the CPU alone, with contexts of the same size and empty KV caches.

    The old ones are freed first, since memory for both may not be there. Where the driver threw an exception they are
    abandoned instead: freeing them would call a driver that is in an unknown state. make_room: called in between with
    the bytes that the new ones need. Raises MoeedgeError if the models cannot be loaded; the session cannot be used any
    more then.
    """
    old = [target] if draft is None else [target, draft.context]
    n_bytes = sum(_bytes_in_ram(config, context) for context in old)
    is_abandoned = any(context.is_closed for context in old)
    for context in old:
        context.abandon() if is_abandoned else context.close()
        context.model.abandon() if is_abandoned else context.model.close()
    if make_room is not None:
        make_room(n_bytes)
    reopened = [_reopen(config, context, resources) for context in old]
    if draft is None:
        return CpuContexts(reopened[0], None, None)
    return CpuContexts(reopened[0], reopened[1], draft.on(reopened[1]))


def _bytes_in_ram(config: EngineConfig, context: Context) -> int:
    """Weights and KV cache of a context on the CPU, without experts that are loaded on demand."""
    model = context.model
    weights_bytes = model.info.size_bytes if model.dense is None else model.dense.n_bytes
    return weights_bytes + config.n_parallel * context.n_ctx * kv_bytes_per_token(model)


def _reopen(config: EngineConfig, context: Context, resources: ExitStack) -> Context:
    is_lazy = context.model.dense is not None  # the cache in RAM, which loads its experts, serves the new context
    model = resources.enter_context(Model.load(context.model.path, device="none", experts_from_file=is_lazy))
    budget = context.budget
    reopened = resources.enter_context(make_context(config, model, context.n_ctx, has_budget=budget is not None))
    if budget is not None:
        reopened.set_budget(budget.budget)
    return reopened
