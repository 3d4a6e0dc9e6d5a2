"""The size of a session's contexts, and what the user should know about llama.cpp's own settings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moeedge.engine.loading import kv_on_gpu
from moeedge.engine.types import EngineConfig
from moeedge.hardware import devices
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.processor import concurrent_threads
from moeedge.llama import gguf_file
from moeedge.llama.context import Context
from moeedge.llama.context_size import choose_n_ctx, choose_ram_tier_n_ctx
from moeedge.llama.gguf_file import adapts_experts
from moeedge.llama.model import Model
from moeedge.llama.settings import DEFAULT_KV_TYPE, RopeSettings
from moeedge.native.devices import PLAIN_BUFFERS
from moeedge.notifications import Level, Notification
from moeedge.scheduler.sizing import whole_expert_bytes
from moeedge.units import format_bytes


def context_size(config: EngineConfig, device: ResolvedDevice, models: Sequence[Model], notes: list[str]) -> int:
    """Tokens; raises InputError where the KV caches of that many do not fit the memory."""
    n_trained = models[0].info.n_ctx_train
    notes.extend(beyond_training(config, n_trained))
    free_bytes = None  # of this machine
    in_memory = device.kind == "ram" or (device.loads_misses and not kv_on_gpu(config, device, models[0]))
    if in_memory and not config.n_ctx:
        n_ctx, note = choose_ram_tier_n_ctx(models[0], n_parallel=config.n_parallel)
        notes.extend([note] if note else [])
        return n_ctx
    if kv_on_gpu(config, device, models[0]):
        reading = devices.read_memory(device)
        if reading is None:  # llama.cpp uses another GPU than the experts: it reports what does not fit
            return config.n_ctx or n_trained
        free_bytes = reading.free_bytes
        if config.layers_measured:  # the context is the same with any number of whole layers
            free_bytes += whole_expert_bytes(models[0])
    n_ctx, note = choose_n_ctx(
        models,
        config.n_ctx,
        free_bytes,
        n_parallel=config.n_parallel,
        settings=(config.context, config.draft_context),
    )
    notes.extend([note] if note else [])
    return n_ctx


def beyond_training(config: EngineConfig, n_trained: int) -> list[str]:
    """A warning where -c asks for more tokens than the model was trained with and nothing stretches its positions."""
    if config.n_ctx <= n_trained or config.context.rope != RopeSettings():
        return []
    return [
        f"The context of {config.n_ctx:,} tokens is longer than the {n_trained:,} that the model was trained with: "
        "beyond these its answers are likely to be wrong."
    ]


def setting_notes(config: EngineConfig, target: Context) -> list[str]:
    """A sentence for each setting of llama.cpp that changes answers, has no effect, or takes something away."""
    return [
        *_answer_notes(config),
        *thread_notes(target.n_threads, target.settings.n_threads_batch),
        *_loading_notes(config, target),
        *_override_notes(config, target.model),
    ]


def thread_notes(n_threads: int, n_threads_batch: int = 0) -> list[str]:
    """A warning where more threads were asked for than can run at once; 0 threads: as many as fit."""
    most = concurrent_threads()
    given = [f"{option} {n}" for option, n in (("-t", n_threads), ("-tb", n_threads_batch)) if n > most]
    if not given:
        return []
    cores = f"{most} core{'s'[: most > 1]}"
    return [
        f"{' and '.join(given)}: this process may use {cores}. Threads that wait for a core stop all others, and steps "
        f"take several times longer. Choose at most {most}."
    ]


def _answer_notes(config: EngineConfig) -> list[str]:
    settings, notes = config.context, []
    if {settings.type_k, settings.type_v} != {DEFAULT_KV_TYPE}:
        notes.append(
            f"The KV cache is kept as {settings.kv_label}: answers may differ from those with {DEFAULT_KV_TYPE}."
        )
    if settings.rope != RopeSettings():
        notes.append("Positions are encoded as --rope-... and --yarn-... say: answers differ from the model's own.")
    for adapter in settings.adapters:
        notes.append(f"LoRA adapter: {adapter.path.name}, scale {adapter.scale:g}.")
    found: list[str] = [Notification(note, Level.NOTICE) for note in notes]
    if adapts_experts(settings.adapters):
        has_no_effect = " --ram has no effect." if isinstance(config.ram, int) else ""
        found.append(
            f"The adapter changes experts: the expert cache, which has those of the file, is off.{has_no_effect}"
        )
    return found


def _loading_notes(config: EngineConfig, target: Context) -> list[str]:
    model = target.model
    if model.dense is not None and config.load.mode != "auto":
        return ["Experts are loaded from the file as they are needed (--ram): --mlock and --no-mmap have no effect."]
    if model.warning:
        return ["The model could not be locked in memory (--mlock). The system's limit is shown by: ulimit -l"]
    if not config.load.is_locked:
        return []
    copies = [use for use in target.memory_uses() if not use.device and use.buffer_type not in PLAIN_BUFFERS]
    n_bytes = sum(use.weights_bytes for use in copies)
    if not n_bytes:
        return []
    unlocked = f"{format_bytes(n_bytes)} of weights are not locked in memory (--mlock)"
    return [Notification(f"{unlocked}: llama.cpp does not lock its copies for the CPU.", Level.NOTICE)]


def _override_notes(config: EngineConfig, model: Model) -> list[str]:
    if not config.load.overrides:
        return []
    names = [tensor.name for part in gguf_file.parts(model.path) for tensor in gguf_file.read_tensors(part)]
    notes = [
        f"-ot {pattern}={place} matches no tensor of the model."
        for pattern, place in config.load.overrides
        if not any(re.search(pattern, name) for name in names)
    ]
    if config.ram == "auto" and config.mode == "moeedge":
        notes.append(Notification("With -ot the file is mapped as llama.cpp does it, whatever --ram says."))
    if model.info.n_experts and not model.host_expert_layers and config.mode == "moeedge":
        notes.append("All experts are where -ot puts them: there is nothing left for the expert cache.")
    return notes
