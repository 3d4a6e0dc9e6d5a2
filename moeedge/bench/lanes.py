"""A lane per mode: its session, with models that all lanes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from moeedge.bench.modes import BenchMode, mode_config
from moeedge.data import Prompt
from moeedge.engine.llama import Model
from moeedge.engine.loading import load_draft, load_target
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import ContextTooSmallError

# contexts are asked for in steps of what llama.cpp pads to
_CONTEXT_STEP = 256
# a template puts a few tokens around an answer, which are not known before the answer is
_TOKENS_AROUND_ANSWER = 16


@dataclass(frozen=True)
class Lane:
    """One mode and where it runs."""

    mode: BenchMode
    session: Session


def load_models(base: EngineConfig, modes: Sequence[BenchMode], stack: ExitStack) -> tuple[Model, Model | None]:
    """The target, and the draft model if one is named and a mode uses it; closed with `stack`."""
    target = stack.enter_context(load_target(base))
    if not isinstance(base.draft, Path) or base.gamma == 0 or not any(mode.drafts for mode in modes):
        return target, None
    return target, stack.enter_context(load_draft(base))


def open_lanes(
    base: EngineConfig,
    modes: Sequence[BenchMode],
    models: tuple[Model, Model | None],
    stack: ExitStack,
    *,
    tell: Callable[[str], None] | None = None,
) -> list[Lane]:
    """A session per mode; the contexts are separate, the weights are not. `tell`: as for Session.open."""
    target, draft = models
    return [
        Lane(
            mode, stack.enter_context(Session.open(mode_config(base, mode), model=target, draft_model=draft, tell=tell))
        )
        for mode in modes
    ]


def needed_context(model: Model, prompt: Prompt, n_predict: int) -> int:
    """Tokens that the conversation can grow to, all answers at full length."""
    messages = []
    for index, turn in enumerate(prompt.turns):
        if index:
            messages.append({"role": "assistant", "content": "-"})
        messages += [message.as_dict() for message in turn]
    tokens = model.tokenize(model.render_chat(messages))
    return len(tokens) + len(prompt.turns) * (n_predict + _TOKENS_AROUND_ANSWER)


def fit_context(
    base: EngineConfig, model: Model, prompts: Sequence[Prompt], n_predict: int, n_synthetic: int
) -> tuple[EngineConfig, tuple[Prompt, ...]]:
    """`base` with the context that the run needs, and the prompts that fit it.

    Without -c that is the longest conversation, at most what the model was trained with. Raises ContextTooSmallError
    when no prompt fits, or the synthetic tests do not.
    """
    needs = [needed_context(model, prompt, n_predict) for prompt in prompts]
    room = base.n_ctx or model.info.n_ctx_train
    if n_synthetic > room:
        raise ContextTooSmallError(
            f"The synthetic tests need {n_synthetic:,} tokens, but the context has {room:,}.",
            "Use a smaller -p or -n, or a larger -c.",
        )
    kept = tuple(prompt for prompt, need in zip(prompts, needs, strict=True) if need <= room)
    if prompts and not kept:
        raise ContextTooSmallError(
            f"No prompt fits: the shortest needs {min(needs):,} tokens with its answer, but the context has {room:,}.",
            "Use a larger -c or a smaller -n.",
        )
    if base.n_ctx:
        return base, kept
    longest = max([n_synthetic, *(need for need in needs if need <= room)])
    padded = -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP
    return replace(base, n_ctx=min(padded, room)), kept
