"""Chooses where a session's models go: the device for experts, the layers on a GPU, the draft model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moeedge import paths
from moeedge.engine.drafts import DraftSource, ModelDraft
from moeedge.engine.head_draft import HeadDraft
from moeedge.engine.types import EngineConfig
from moeedge.hardware.devices import ResolvedDevice, Storage, ram, resolve
from moeedge.hardware.memory import fits
from moeedge.hardware.spec import DeviceSpec
from moeedge.llama import gguf_file, library
from moeedge.llama.context import Context
from moeedge.llama.context_size import kv_bytes_per_token
from moeedge.llama.dense_weights import SplitWeights
from moeedge.llama.draft_heads import HeadContext, HeadKind, head_file, missing_head, own_head
from moeedge.llama.draft_model import check_compatible
from moeedge.llama.model import Model
from moeedge.scheduler.governor import GAMMA_MAX

_ALL_LAYERS = -1  # of n_gpu_layers in llama.cpp's parameters
# a model that fits with a context of this size is kept on the GPU entirely, with a smaller context
_CONTEXT_TOKENS = 8192
_MAX_SNAPSHOTS = 8  # recurrent states: tens of MB each


def find_device(config: EngineConfig) -> ResolvedDevice:
    """The device that -dev names for this model; raises DeviceError where there is none of that name."""
    library.start()  # llama.cpp logs while it lists devices
    bundled = config.emulate_bundled and paths.is_bundled(config.model)
    return resolve(DeviceSpec.parse(config.device), bundled=bundled)


def resolve_device(config: EngineConfig, model: Model | None = None) -> ResolvedDevice:
    """As `find_device`, with the place of the weights in host memory: by `weight_storage`, or where `model` has them.

    model: the target, if it is loaded already; its weights stay where they are, whatever is free now.
    """
    device = find_device(config)
    storage = weight_storage(config, device) if model is None else model.storage
    if storage != "on demand" or not _may_load_on_demand(config):
        return replace(device, storage=storage)
    # without a GPU auto may stand for the emulated device
    if device.kind == "none" or (device.kind == "emulated" and config.device == "auto"):
        return ram(device)
    return replace(device, storage=storage)


def weight_storage(
    config: EngineConfig,
    device: ResolvedDevice,
    free_bytes: int | None = None,
    total_bytes: int | None = None,
    *,
    whole_fits: bool | None = None,
) -> Storage:
    """Where the target's weights in host memory go: decided here alone, for commands that load and for plans.

    They are loaded if they fit with those of the draft (`memory.fits`). Otherwise a cache in RAM loads experts on
    demand, unless the options rule it out. free_bytes, total_bytes: of host memory before anything is loaded, measured
    by default. whole_fits: the result of `whole_model_fits`, if it is known.
    """
    on_demand = _may_load_on_demand(config)
    is_asked = config.ram == "on" or (on_demand and isinstance(config.ram, int))
    if not is_asked and fits(host_bytes(config, device), free_bytes, total_bytes):
        return "loaded"
    if device.kind == "gpu" and (whole_model_fits(config, device) if whole_fits is None else whole_fits):
        return "loaded"
    return "on demand" if on_demand else "mapped"


def _may_load_on_demand(config: EngineConfig) -> bool:
    """Whether the options and the model allow a cache in RAM that loads experts from the file."""
    if config.ram == "off" or config.mode == "stock":
        return False
    if config.load.overrides or gguf_file.adapts_experts(config.context.adapters):
        return False
    return bool(gguf_file.read_summary(config.model).expert_layers)


def host_bytes(config: EngineConfig, device: ResolvedDevice) -> int:
    """Bytes of the models' weights in host memory: next to a GPU that takes all layers, the experts and embeddings.

    Those of the draft are on the GPU then.
    """
    if device.kind != "gpu" or config.n_gpu_layers is not None:
        files = [config.model]
        if isinstance(config.draft, Path) and config.gamma > 0 and device.kind != "gpu":
            files.append(config.draft)
        return sum(gguf_file.read_summary(file).size_bytes for file in files)
    weights = SplitWeights.read(config.model)
    n_host = config.n_cpu_moe
    on_host = [tensor for tensor in weights.dense if tensor.is_on_host(0)]
    on_host += [tensor for tensor in weights.experts if n_host is None or tensor.is_on_host(n_host)]
    return sum(tensor.size_bytes for tensor in on_host)


def load_target(
    config: EngineConfig,
    device: ResolvedDevice | None = None,
    *,
    whole_fits: bool | None = None,
    header_only: bool = False,
) -> Model:
    """The target model, with as many layers on the GPU as -ngl and as many experts in host memory as -ncmoe give.

    whole_fits: the result of `whole_model_fits`, if it is known. header_only: of `Model.load`.

    With a GPU for experts, all layers are on it unless -ngl gives fewer; the experts stay in host memory, from where
    placement moves them, unless the GPU can hold the entire model or -ncmoe keeps them with their layers. A dense
    model that does not fit stays on the CPU.
    """
    device = device or resolve_device(config)
    load = partial(
        Model.load,
        config.model,
        device=device.llama_device,
        header_only=header_only,
        storage=device.storage,
        n_expert_used=config.n_expert_used,
        head=config.draft == "mtp",
        settings=config.load,
    )
    if device.kind == "ram":
        return load()
    is_split = config.n_cpu_moe is not None
    if is_split:
        load = partial(load, n_cpu_moe=config.n_cpu_moe)
    if device.kind != "gpu":
        return load(n_gpu_layers=config.n_gpu_layers or 0, experts_on_cpu=is_split)
    if whole_model_fits(config, device) if whole_fits is None else whole_fits:
        return load(n_gpu_layers=_ALL_LAYERS)
    if config.n_gpu_layers is None and not gguf_file.read_summary(config.model).expert_layers:
        return load(n_gpu_layers=0)
    # with the cache switched off, llama.cpp takes the requested layers with their experts
    whole_layers = config.placement.cache_ratio == 0 and config.n_gpu_layers is not None and not is_split
    n_gpu_layers = _ALL_LAYERS if config.n_gpu_layers is None else config.n_gpu_layers
    return load(n_gpu_layers=n_gpu_layers, experts_on_cpu=not whole_layers)


def load_draft(
    config: EngineConfig,
    device: ResolvedDevice | None = None,
    *,
    header_only: bool = False,
    free_bytes: int | None = None,
    total_bytes: int | None = None,
) -> Model:
    """The draft model; it is entirely on the GPU for experts, unless -ngl gives fewer layers.

    free_bytes, total_bytes: of host memory after the target is loaded, measured by default.
    """
    device = device or resolve_device(config)
    path = _draft_path(config)
    n_bytes = gguf_file.read_summary(path).size_bytes
    n_gpu_layers = config.n_gpu_layers
    if n_gpu_layers is None:
        n_gpu_layers = _ALL_LAYERS if device.kind == "gpu" else 0
    return Model.load(
        path,
        n_gpu_layers=n_gpu_layers,
        device=device.llama_device,
        header_only=header_only,
        storage="loaded" if fits(n_bytes, free_bytes, total_bytes) else "mapped",
        settings=replace(config.load, overrides=()),
    )


def make_context(
    config: EngineConfig, model: Model, n_ctx: int, *, has_budget: bool = False, is_draft: bool = False
) -> Context:
    """A context for decoding, of the target or of the draft; has_budget: verifications can keep to an expert budget."""
    return Context(
        model,
        n_ctx=n_ctx,
        n_threads=config.n_threads,
        n_batch=config.n_batch,
        n_ubatch=config.n_ubatch,
        n_outputs=config.n_outputs,
        n_parallel=config.n_parallel,
        # of experts that are loaded on demand, it would read the mapped file
        op_offload=model.info.n_experts == 0 or (config.op_offload and model.dense is None),
        has_budget=has_budget,
        n_snapshots=n_snapshots(config, model),
        mode=config.mode,
        settings=config.draft_context if is_draft else config.context,
    )


def n_snapshots(config: EngineConfig, model: Model) -> int:
    """States that a recurrent target keeps, so that so many drafts can be taken back."""
    if not model.keeps_snapshots or config.draft is None:
        return 0
    return min(GAMMA_MAX if config.auto_gamma and config.gamma else config.gamma, _most_snapshots(config))


def _most_snapshots(config: EngineConfig) -> int:
    """llama.cpp ends the process where a graph of -ub tokens cannot hold all drafts, the token before and one more."""
    return max(0, min(_MAX_SNAPSHOTS, min(config.n_batch, config.n_ubatch) - 2))


def make_head_context(config: EngineConfig, model: Model, kind: HeadKind, target: Context) -> HeadContext:
    """The context of a draft head. model: the target's, if the head is its own."""
    return HeadContext(
        model,
        kind,
        target,
        n_threads=config.n_threads,
        n_ubatch=max(config.n_ubatch, config.n_outputs),  # all drafts of a step may be one batch, whatever -ub says
        n_outputs=config.n_outputs,
        op_offload=config.op_offload and model.dense is None,
        settings=config.draft_context,
    )


@dataclass(frozen=True)
class ChosenDraft:
    """Where drafts come from: `model`, `head` (of `model`, or the target's own without one), n-grams, or nowhere."""

    model: Model | None = None
    n_common: int = 0  # token ids that draft and target have
    head: HeadKind | None = None
    use_ngram: bool = False

    @property
    def name(self) -> str:
        """File name, "mtp", "ngram" or "none"."""
        if self.model is not None:
            return self.model.path.name
        return "mtp" if self.head is not None else "ngram" if self.use_ngram else "none"


def choose_draft(
    config: EngineConfig,
    device: ResolvedDevice,
    model: Model,
    shared: Model | None,
    notes: list[str],
    stack: ExitStack,
) -> ChosenDraft:
    """The source of drafts. model: the target.

    shared: a draft model that is loaded already. notes: get the reason where there are no drafts. Raises InputError
    where the draft does not suit the target.
    """
    if config.draft is None or config.gamma == 0:
        if config.draft is not None:
            notes.append("Speculation is off: the draft length is 0 (--draft-max).")
        return ChosenDraft()
    if not model.can_reject_drafts:
        notes.append(f"Speculation is off: {model.info.architecture} models cannot take rejected tokens back.")
        return ChosenDraft()
    if model.keeps_snapshots:
        most = _most_snapshots(config)
        if most == 0:
            notes.append("Speculation is off: this model takes tokens back in batches (-b, -ub) of 3 or more.")
            return ChosenDraft()
        if most < _MAX_SNAPSHOTS and config.gamma > most:
            notes.append(f"Drafts are limited to {most} tokens: longer ones need larger batches (-b, -ub).")
        elif not config.auto_gamma and config.gamma > most:
            notes.append(f"Drafts are limited to {most} tokens: the model needs a copy of its state for each.")
    if config.draft == "ngram":
        return ChosenDraft(use_ngram=True)
    if config.draft == "mtp":
        head = own_head(model)
        _note_length(config, head, notes, "because the model has a head for each")
        return ChosenDraft(head=head, n_common=model.info.n_vocab)
    draft = shared or stack.enter_context(load_draft(config, device))
    in_file = head_file(model, draft)
    if in_file is not None:
        _note_length(config, in_file, notes, f"because {draft.path.name} was trained for so many")
        return ChosenDraft(draft, draft.info.n_vocab, head=in_file)
    n_common = check_compatible(model, draft)
    if not draft.can_roll_back:
        draft.close()
        notes.append(f"Speculation is off: {draft.info.architecture} drafts cannot take rejected tokens back.")
        return ChosenDraft()
    return ChosenDraft(draft, n_common)


def _note_length(config: EngineConfig, head: HeadKind, notes: list[str], reason: str) -> None:
    """A note where the draft length asked for is more than the head drafts."""
    most = head.n_drafts_max
    if most is not None and not config.auto_gamma and config.gamma > most:
        notes.append(f"Drafts are limited to {most} tokens, {reason}.")


def drafts_for_itself(path: Path) -> bool:
    """Whether the model at `path` has a head of its own that can draft. Raises ModelFileError."""
    if not gguf_file.read_summary(path).head_layers:
        return False
    with Model.load(path, header_only=True) as model:
        return model.can_reject_drafts and missing_head(model) is None


def kv_on_gpu(config: EngineConfig, device: ResolvedDevice, model: Model) -> bool:
    """Whether the KV caches are on a GPU, with the layers that they belong to."""
    all_layers = device.kind == "gpu" and config.n_gpu_layers is None
    return model.uses_gpu and (all_layers or config.n_gpu_layers not in (0, None))


def _draft_path(config: EngineConfig) -> Path:
    if not isinstance(config.draft, Path):
        raise ValueError("there is no draft model")
    return config.draft


def whole_model_fits(config: EngineConfig, device: ResolvedDevice, headers: Sequence[Model] | None = None) -> bool:
    """Whether target, draft and their KV caches fit the GPU, so that no expert needs to be moved.

    False where the options ask for an expert cache or for a number of layers.

    headers: target and draft, if they are loaded already.
    """
    has_split = config.n_gpu_layers is not None or config.n_cpu_moe is not None or bool(config.load.overrides)
    if config.placement.has_size or has_split or device.free_bytes == 0:
        return False
    with ExitStack() as stack:
        if headers is None:
            has_draft = isinstance(config.draft, Path) and config.gamma > 0
            files = [config.model, _draft_path(config)] if has_draft else [config.model]
            load = partial(Model.load, device=device.llama_device, header_only=True)
            headers = [stack.enter_context(load(path)) for path in files]
        n_ctx = [config.n_ctx or min(header.info.n_ctx_train, _CONTEXT_TOKENS) for header in headers]
        settings = (config.context, config.draft_context)
        n_bytes = sum(header.info.size_bytes for header in headers)
        n_bytes += sum(
            math.ceil(config.n_parallel * n * kv_bytes_per_token(header, each))
            for n, header, each in zip(n_ctx, headers, settings, strict=False)
        )
        return fits(n_bytes, device.free_bytes, device.total_bytes)


def reopen_on_cpu(
    config: EngineConfig,
    target: Context,
    draft: DraftSource,
    resources: ExitStack,
    *,
    make_room: Callable[[int], None] | None = None,
) -> tuple[Context, Context | None, DraftSource]:
    """Loads the models of an answer again, for the CPU alone, where a GPU fails on which llama.cpp computes.

    Returns the contexts of the target and of a draft that is a model of its own, or None, and the source of drafts.
    They have the same size and empty KV caches. An expert cache alone needs none of this: its backend
    computes the failed device's share again on the CPU.

    The old ones are freed first, since memory for both may not be there. Where the driver threw an exception they are
    abandoned instead: freeing them would call a driver that is in an unknown state. make_room: called in between with
    the bytes that the new ones need. Raises MoeedgeError if the models cannot be loaded; the session cannot be used any
    more then.
    """
    old = [target, draft.context] if isinstance(draft, ModelDraft | HeadDraft) else [target]
    models = list(dict.fromkeys(context.model for context in old))  # a head's may be the target's
    # without experts that are loaded on demand
    n_bytes = sum(model.info.size_bytes if model.dense is None else model.dense.n_bytes for model in models)
    for context in old:
        n_bytes += round(config.n_parallel * context.n_ctx * kv_bytes_per_token(context.model, context.settings))
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
        return new_target, draft_context, draft.on(draft_context)
    if isinstance(draft, HeadDraft):
        kind = draft.head.context.kind
        context = make_head_context(config, again[draft.context.model], kind, new_target)
        draft.head.replace(new_target, resources.enter_context(context))
    return new_target, None, draft


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
