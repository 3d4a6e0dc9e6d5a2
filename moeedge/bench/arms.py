"""A lane per mode: its session, with models that all lanes share.

Which modes are measured side by side: all of them where their expert caches fit the device at once, else one by one.

A pass is a set of modes that take turns. The first has the stock modes and as many caches as fit. Every later pass has
one more cache and the reference beside it, once more: ratios stay those of neighbours in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from moeedge.bench.config import REFERENCE, BenchMode, is_swept, mode_config
from moeedge.bench.samples import Sample
from moeedge.data import Prompt
from moeedge.engine.loading import load_draft, load_target
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import ContextTooSmallError
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.notifications import Notify, ignore

# contexts are asked for in steps of what llama.cpp pads to
_CONTEXT_STEP = 256
# a template puts a few tokens around an answer, which are not known before the answer is
_TOKENS_AROUND_ANSWER = 16


@dataclass(frozen=True)
class BenchArm:
    """One mode and where it runs."""

    mode: BenchMode
    session: Session


def load_models(base: EngineConfig, modes: Sequence[BenchMode], stack: ExitStack) -> tuple[Model, Model | None]:
    """The target, and the draft model if one is named and a mode uses it; closed with `stack`."""
    target = stack.enter_context(load_target(base))
    if not isinstance(base.draft, Path) or base.gamma == 0 or not any(mode.drafts for mode in modes):
        return target, None
    return target, stack.enter_context(load_draft(base))


def open_arms(
    base: EngineConfig,
    modes: Sequence[BenchMode],
    models: tuple[Model, Model | None],
    stack: ExitStack,
    *,
    notify: Notify = ignore,
) -> list[BenchArm]:
    """A session per mode; the contexts are separate, the weights are not. `notify`: as for Session.open."""
    target, draft = models
    return [
        BenchArm(
            mode,
            stack.enter_context(Session.open(mode_config(base, mode), model=target, draft_model=draft, notify=notify)),
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


# of what is free; the rest is for compute buffers and for others
_USABLE = 0.8


@dataclass
class Pass:
    """Modes that take turns, and what they measured. `repeated` is the reference of another pass: it gets no row."""

    modes: tuple[BenchMode, ...]
    repeated: str | None = None  # label of a mode
    arms: list[BenchArm] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by test
    vram_bytes: dict[str, int] = field(default_factory=dict)  # in use on the device at the end, by label


def split_passes(modes: Sequence[BenchMode], *, together: bool) -> list[Pass]:
    """One pass, or one per swept mode where their caches do not fit the device together."""
    swept = [mode for mode in modes if is_swept(mode)]
    if together or len(swept) < 2:
        return [Pass(tuple(modes))]
    stock = tuple(mode for mode in modes if not is_swept(mode))
    reference = tuple(mode for mode in stock if mode.name == REFERENCE)
    repeated = REFERENCE if reference else None
    return [Pass((*stock, swept[0])), *(Pass((*reference, mode), repeated) for mode in swept[1:])]


def largest_cache(modes: Sequence[BenchMode]) -> BenchMode:
    """The swept mode that asks for the largest cache; a size that the engine chooses counts as the largest."""
    return max(modes, key=lambda mode: 2.0 if mode.cache_ratio is None else mode.cache_ratio)


def caches_fit(probe: BenchArm, others: Sequence[BenchMode]) -> bool:
    """Whether the device has room for the caches of `others` beside that of `probe`, which is open.

    The emulated device is memory of this machine. What no driver tells is taken as no room.
    """
    stats = probe.session.placement_stats()
    if stats is None:
        return True
    total = expert_bytes(expert_tensors(probe.session.model.path)[0])
    needed = sum(stats.pool_bytes if mode.cache_ratio is None else mode.cache_ratio * total for mode in others)
    if stats.device.startswith("emulated"):
        free_bytes = psutil.virtual_memory().available
    elif stats.vram_used_bytes is not None and stats.vram_total_bytes is not None:
        free_bytes = stats.vram_total_bytes - stats.vram_used_bytes
    else:
        return False
    return needed <= _USABLE * free_bytes
