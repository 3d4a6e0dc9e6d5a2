"""Room for a run: the context that its prompts need, and which expert caches are measured side by side.

All modes are measured in one pass if their expert caches and whole layers fit the device at once. Otherwise the first
pass has the stock modes and one cache, and every later pass has one more cache, or a mode with whole layers, and the
reference once more: ratios stay those of neighbours in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moeedge.bench.config import REFERENCE, BenchMode
from moeedge.bench.harness import BenchArm
from moeedge.bench.output_check import OutputCheck
from moeedge.bench.perplexity import Perplexity
from moeedge.bench.samples import Sample
from moeedge.bench.whole_layers import DeviceUse
from moeedge.data import Prompt
from moeedge.engine.types import EngineConfig
from moeedge.errors import ContextTooSmallError
from moeedge.hardware.devices import ResolvedDevice, read_memory
from moeedge.hardware.memory import available_memory
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.policies.base import LookaheadStatus

# llama.cpp pads contexts to multiples of this many tokens
_CONTEXT_STEP = 256
# tokens that a template puts around an answer; the exact number is not known before the answer is
_TOKENS_AROUND_ANSWER = 16
# share of the free memory; the rest is for compute buffers and other programs
_USABLE = 0.8


def needed_context(model: Model, prompt: Prompt, n_predict: int) -> int:
    """Returns the tokens that the conversation can grow to, with all answers at full length."""
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
    """Returns `base` with the context that the run needs, and the prompts that fit it.

    Without -c the context is that of the longest conversation, limited to the model's training context, or of the
    largest synthetic test (n_synthetic tokens), which is not limited: its tokens have no meaning to lose.
    Raises ContextTooSmallError if no prompt fits.
    """
    needs = [needed_context(model, prompt, n_predict) for prompt in prompts]
    limit = base.n_ctx or model.info.n_ctx_train
    kept = tuple(prompt for prompt, need in zip(prompts, needs, strict=True) if need <= limit)
    if prompts and not kept:
        raise ContextTooSmallError(
            f"No prompt fits: the shortest needs {min(needs):,} tokens with its answer, but the context has {limit:,}.",
            "Use a larger -c or a smaller -n.",
        )
    if base.n_ctx:
        return base, kept
    longest = max([n_synthetic, *(need for need in needs if need <= limit)])
    padded = -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP
    return replace(base, n_ctx=min(padded, max(limit, n_synthetic))), kept


@dataclass
class Pass:
    """Modes that take turns, and their samples. `repeated` is the reference of an earlier pass: it gets no row."""

    modes: tuple[BenchMode, ...]
    repeated: str | None = None  # label of a mode
    arms: list[BenchArm] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by test
    vram_bytes: dict[str, int] = field(default_factory=dict)  # used on the device at the end, by label
    lookahead: dict[str, LookaheadStatus] = field(default_factory=dict)  # as judged last, by label
    device_use: dict[str, DeviceUse] = field(default_factory=dict)  # at the end, by label
    perplexity: dict[str, Perplexity] = field(default_factory=dict)  # of modes with our backend and drafts, by label
    checks: dict[str, OutputCheck] = field(default_factory=dict)  # of modes with their own target, by label


def split_passes(modes: Sequence[BenchMode], *, together: bool, apart: Sequence[BenchMode] = ()) -> list[Pass]:
    """Returns one pass, or one per swept mode where their caches do not fit the device together; none without modes.

    apart: further modes, each of which needs a pass of its own.
    """
    swept = [mode for mode in modes if mode.is_swept]
    later = list(apart)
    first = tuple(modes)
    if not together and len(swept) > 1:
        first = (*(mode for mode in modes if not mode.is_swept), swept[0])
        later = [*swept[1:], *apart]
    reference = tuple(mode for mode in modes if mode.name == REFERENCE)
    repeated = REFERENCE if reference else None
    passes = [Pass(first), *(Pass((*reference, mode), repeated) for mode in later)]
    return [current for current in passes if current.modes]


def largest_cache(modes: Sequence[BenchMode]) -> BenchMode:
    """Returns the swept mode with the largest cache; a size that the engine chooses counts as the largest."""
    return max(modes, key=lambda mode: 2.0 if mode.cache_ratio is None else mode.cache_ratio)


def layers_fit(uses: Sequence[DeviceUse], device: ResolvedDevice) -> bool:
    """Returns whether the GPU has room for modes with targets of their own, next to all that is open.

    A GPU whose driver reports no memory counts as full.
    """
    reading = read_memory(device)
    return reading is not None and sum(use.total_bytes for use in uses) <= _USABLE * reading.free_bytes


def caches_fit(probe: BenchArm, others: Sequence[BenchMode]) -> bool:
    """Returns whether the device has room for the caches of `others` next to that of `probe`, which is open.

    The emulated device is memory of this machine. A device whose driver reports no memory counts as full.
    """
    stats = probe.session.placement_stats()
    if stats is None:
        return True
    total = expert_bytes(expert_tensors(probe.session.model.path)[0])
    needed = sum(stats.pool_bytes if mode.cache_ratio is None else mode.cache_ratio * total for mode in others)
    if stats.device.startswith("emulated"):
        free_bytes = available_memory()
    elif stats.vram_used_bytes is not None and stats.vram_total_bytes is not None:
        free_bytes = stats.vram_total_bytes - stats.vram_used_bytes
    else:
        return False
    return needed <= _USABLE * free_bytes
