"""The size of a session's contexts, and what the user should know about llama.cpp's settings and expert budgets."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from moeedge.engine.loading import kv_on_gpu, memory_of
from moeedge.engine.types import EngineConfig
from moeedge.hardware import devices
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.host import concurrent_threads
from moeedge.llama import gguf_file
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import adapts_experts
from moeedge.llama.model import Model
from moeedge.llama.model_info import ModelInfo
from moeedge.llama.model_memory import choose_n_ctx
from moeedge.llama.settings import DEFAULT_KV_TYPE, RopeSettings
from moeedge.native.backends import PLAIN_BUFFERS
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.run import Level, Notification, Run
from moeedge.scheduler.sizing import whole_expert_bytes
from moeedge.scheduler.stats import StepRecord
from moeedge.units import format_bytes


def context_size(config: EngineConfig, device: ResolvedDevice, models: Sequence[Model], run: Run) -> int:
    """Tokens; raises InputError where the KV caches of that many do not fit the memory."""
    n_trained = models[0].info.n_ctx_train
    run.notes.extend(beyond_training(config, n_trained))
    free_bytes = None  # of this machine
    on_gpu = kv_on_gpu(config, device, models[0])
    if on_gpu:
        reading = devices.read_memory(device)
        if reading is None:  # llama.cpp uses another GPU than the experts: it reports what does not fit
            return config.n_ctx or n_trained
        free_bytes = reading.free_bytes
        if config.layers_measured:  # the context is the same with any number of whole layers
            free_bytes += whole_expert_bytes(models[0])
    n_ctx, note = choose_n_ctx(
        memory_of(config, models),
        config.n_ctx,
        free_bytes,
        n_parallel=config.n_parallel,
        loads_experts=device.loads_misses and not on_gpu,
    )
    run.notes.extend([note] if note else [])
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
    settings, load, model, is_ours = config.context, config.load, target.model, config.mode == "moeedge"
    kv_differs = {settings.type_k, settings.type_v} != {DEFAULT_KV_TYPE}
    kv_cache = f"The KV cache is kept as {settings.kv_label}: answers may differ from those with {DEFAULT_KV_TYPE}."
    rope = "Positions are encoded as --rope-... and --yarn-... say: answers differ from the model's own."
    chosen = [note for applies, note in ((kv_differs, kv_cache), (settings.rope != RopeSettings(), rope)) if applies]
    chosen += [f"LoRA adapter: {adapter.path.name}, scale {adapter.scale:g}." for adapter in settings.adapters]
    notes: list[str] = [Notification(note, Level.NOTICE) for note in chosen]
    if adapts_experts(settings.adapters):
        has_no_effect = " --ram has no effect." if isinstance(config.ram, int) else ""
        off = "the expert cache, which has those of the file, is off"
        notes.append(f"The adapter changes experts: {off}.{has_no_effect}")
    notes += thread_notes(target.n_threads, target.settings.n_threads_batch)
    if model.dense is not None and load.mode != "auto":
        notes.append(
            "Experts are loaded from the file as they are needed (--ram): --mlock and --no-mmap have no effect."
        )
    elif model.warning:
        notes.append("The model could not be locked in memory (--mlock). The system's limit is shown by: ulimit -l")
    elif load.is_locked:
        copies = [use for use in target.memory_uses() if not use.device and use.buffer_type not in PLAIN_BUFFERS]
        if n_bytes := sum(use.weights_bytes for use in copies):
            unlocked = f"{format_bytes(n_bytes)} of weights are not locked in memory (--mlock)"
            notes.append(Notification(f"{unlocked}: llama.cpp does not lock its copies for the CPU.", Level.NOTICE))
    if not load.overrides:
        return notes
    names = [tensor.name for tensor in gguf_file.read_all_tensors(model.path)]
    for pattern, place in load.overrides:
        if not any(re.search(pattern, name) for name in names):
            notes.append(f"-ot {pattern}={place} matches no tensor of the model.")
    if config.ram == "auto" and is_ours:
        notes.append(Notification("With -ot the file is mapped as llama.cpp does it, whatever --ram says."))
    if model.info.n_experts and not model.host_expert_layers and is_ours:
        notes.append("All experts are where -ot puts them: there is nothing left for the expert cache.")
    return notes


def thread_notes(n_threads: int, n_threads_batch: int = 0) -> list[str]:
    """A warning where more threads were asked for than can run at once; 0 threads: as many as fit."""
    most = concurrent_threads()
    options = [f"{option} {n}" for option, n in (("-t", n_threads), ("-tb", n_threads_batch)) if n > most]
    if not options:
        return []
    cores = f"{most} core{'s'[: most > 1]}"
    return [
        f"{' and '.join(options)}: this process may use {cores}. Threads that wait for a core stop all others, and "
        f"steps take several times longer. Choose at most {most}."
    ]


def usable_budget(
    budget: ExpertBudget | None, info: ModelInfo, *, gamma: int, draft: str, n_parallel: int = 1
) -> tuple[ExpertBudget | None, list[str]]:
    """The budget as it suits a model, None where it has no experts, and a warning where it does nothing.

    gamma: the draft length; draft: the source of drafts, "none" without. n_parallel: texts in a batch. Raises
    InputError for a budget below the experts per token.
    """
    if budget is None:
        return None, []
    if info.n_experts == 0:
        return None, ["The expert budget is off: the model is dense, so it has no experts to leave out."]
    layers = np.asarray(info.expert_layers, dtype=np.intp)
    used = np.asarray(info.used_per_layer)[layers]
    budgets = budget.per_layer(layers, info.n_layers, info.n_experts, info.used_per_layer)[layers]
    n_tokens = n_parallel * (gamma + 1)
    if budgets.min() >= info.n_experts:
        return budget, [f"The expert budget changes nothing: a layer has only {info.n_experts} experts."]
    if draft == "none" or gamma == 0:
        missing = "there is no draft (-md FILE or -md ngram)" if draft == "none" else "the draft length is 0"
        return budget, [f"The expert budget has no effect: it limits verifications of drafts, and {missing}."]
    if (budgets >= n_tokens * used).all():
        most = f"{n_tokens} tokens select at most {n_tokens * info.n_expert_used} experts per layer"
        return budget, [f"The expert budget changes nothing: {most}."]
    return budget, []


def unmet_budget(record: StepRecord) -> str:
    """A warning where a step's verification, which had a budget, did not keep to it as it was asked for; else empty."""
    if record.n_drafted == 0:
        return ""
    if record.kept_probability is None:
        return "The expert budget has no effect: moeedge does not recognise the routers of this model."
    if record.substituted_layers > 0:
        return "Experts are substituted, not truncated: moeedge does not recognise their weights in this model."
    return ""
