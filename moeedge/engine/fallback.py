"""Goes on with an answer on the CPU when a GPU fails on which llama.cpp computes: lost, or out of memory.

An expert cache alone needs none of this: its backend computes the failed device's share again on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from moeedge.engine.drafts import DraftSource, ModelDraft
from moeedge.engine.head_draft import HeadDraft
from moeedge.engine.loading import make_context, make_head_context
from moeedge.engine.types import EngineConfig
from moeedge.hardware.memory import fits
from moeedge.llama.context import Context
from moeedge.llama.context_size import kv_bytes_per_token
from moeedge.llama.model import Model


@dataclass(frozen=True)
class CpuContexts:
    """Target and draft without a GPU; `draft_context` is None unless the draft is a model of its own."""

    target: Context
    draft_context: Context | None
    draft: DraftSource


def reopen_on_cpu(
    config: EngineConfig,
    target: Context,
    draft: DraftSource,
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
    old = [target, draft.context] if isinstance(draft, ModelDraft | HeadDraft) else [target]
    models = list(dict.fromkeys(context.model for context in old))  # a head's may be the target's
    n_bytes = sum(map(_weights_in_ram, models)) + sum(_kv_bytes(config, context) for context in old)
    is_abandoned = any(context.is_closed for context in old)
    for context in old:
        context.abandon() if is_abandoned else context.close()
    for model in models:
        model.abandon() if is_abandoned else model.close()
    if make_room is not None:
        make_room(n_bytes)
    again = {model: resources.enter_context(_load(model)) for model in models}
    new_target = _reopen(config, again[target.model], target, resources)
    if isinstance(draft, ModelDraft):
        draft_context = _reopen(config, again[draft.context.model], draft.context, resources, is_draft=True)
        return CpuContexts(new_target, draft_context, draft.on(draft_context))
    if isinstance(draft, HeadDraft):
        kind = draft.head.context.kind
        context = make_head_context(config, again[draft.context.model], kind, new_target)
        draft.head.replace(new_target, resources.enter_context(context))
    return CpuContexts(new_target, None, draft)


def _weights_in_ram(model: Model) -> int:
    """Bytes of a model on the CPU, without experts that are loaded on demand."""
    return model.info.size_bytes if model.dense is None else model.dense.n_bytes


def _kv_bytes(config: EngineConfig, context: Context) -> int:
    return round(config.n_parallel * context.n_ctx * kv_bytes_per_token(context.model, context.settings))


def _load(model: Model) -> Model:
    storage = model.storage  # on demand: the cache in RAM, which loads the experts, serves the new context
    if storage != "on demand":
        storage = "loaded" if fits(model.info.size_bytes) else "mapped"
    settings = replace(model.settings, overrides=())  # they may name the GPU's memory
    return Model.load(model.path, device="none", storage=storage, head=model.has_head, settings=settings)


def _reopen(
    config: EngineConfig, model: Model, context: Context, resources: ExitStack, *, is_draft: bool = False
) -> Context:
    budget = context.budget
    reopened = resources.enter_context(
        make_context(config, model, context.n_ctx, has_budget=budget is not None, is_draft=is_draft)
    )
    if budget is not None:
        reopened.set_budget(budget.budget)
    return reopened
