"""Chooses where a session's models go: the device for experts, the layers on a GPU, the draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from moeedge import paths
from moeedge.engine.drafts import ContextDraft, DraftSource, ModelDraft, NgramDraft
from moeedge.engine.head_draft import head_draft
from moeedge.engine.probe import probe
from moeedge.engine.types import EngineConfig
from moeedge.hardware.devices import ResolvedDevice, Storage, resolve
from moeedge.hardware.host import fits
from moeedge.hardware.spec import DeviceSpec
from moeedge.llama import gguf_file, library
from moeedge.llama.context import Context
from moeedge.llama.dense_weights import SplitWeights
from moeedge.llama.draft_heads import HeadContext, HeadKind, check_compatible, head_file, missing_head, own_head
from moeedge.llama.model import Model
from moeedge.llama.model_memory import ModelMemory, fit_whole
from moeedge.run import Notification, Run
from moeedge.scheduler.governor import GAMMA_MAX
from moeedge.trace.steps import RecordedRouting, read_routing

_ALL_LAYERS = -1  # of n_gpu_layers in llama.cpp's parameters
_MAX_SNAPSHOTS = 8  # recurrent states: tens of MB each


def find_device(config: EngineConfig) -> ResolvedDevice:
    """The device that -dev names for this model; raises DeviceError where there is none of that name."""
    library.start()  # llama.cpp logs while it lists devices
    bundled = config.emulate_bundled and paths.is_bundled(config.model)
    return resolve(DeviceSpec.parse(config.device), bundled=bundled)


def resolve_device(config: EngineConfig, model: Model | None = None) -> ResolvedDevice:
    """As `find_device`, with the place of the weights: that of a loaded target `model`, or by `weight_storage`.

    Files that are not loaded yet are probed first. Raises what `find_device` and `probe` raise.
    """
    device = find_device(config)
    if model is None:
        for file in files_of(config):
            probe(file)
    storage = weight_storage(config, device) if model is None else model.storage
    if storage != "on demand" or not _may_load_on_demand(config):
        is_placed = storage != "on demand" or device.kind != "none"
        return replace(device, storage=storage if is_placed else "mapped")
    # without a GPU auto may stand for the emulated device
    if device.kind == "none" or (device.kind == "emulated" and config.device == "auto"):
        notes = [note for note in device.notes if device.kind == "none" and not isinstance(note, Notification)]
        return ResolvedDevice("none", llama_device=device.llama_device, storage=storage, notes=notes)
    return replace(device, storage=storage)


def weight_storage(
    config: EngineConfig,
    device: ResolvedDevice,
    free_bytes: int | None = None,
    total_bytes: int | None = None,
    *,
    whole_fits: bool | None = None,
) -> Storage:
    """The place of the target's weights in host memory: decided here alone, for commands that load and for plans.

    They are loaded if they fit with those of the draft (`host.fits`). Otherwise a cache in RAM loads experts on
    demand, unless the options rule it out. free_bytes, total_bytes: of host memory before anything is loaded, measured
    by default. whole_fits: the result of `whole_model_fits`, if it is known.
    """
    on_demand = _may_load_on_demand(config)
    is_wanted = config.ram == "on" or (on_demand and isinstance(config.ram, int))
    if not is_wanted and fits(host_bytes(config, device), free_bytes, total_bytes):
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
    """Bytes of the models' weights in host memory; next to a GPU with all layers, those of experts and embeddings."""
    if device.kind != "gpu" or config.n_gpu_layers is not None:
        files = files_of(config) if device.kind != "gpu" else [config.model]
        return sum(gguf_file.read_summary(file).size_bytes for file in files)
    weights = SplitWeights.read(config.model)
    n_host = config.n_cpu_moe
    on_host = [tensor for tensor in weights.dense if tensor.is_on_host(0)]
    on_host += [tensor for tensor in weights.experts if n_host is None or tensor.is_on_host(n_host)]
    return sum(tensor.size_bytes for tensor in on_host)


def files_of(config: EngineConfig) -> list[Path]:
    return [config.model, config.draft] if isinstance(config.draft, Path) and config.gamma > 0 else [config.model]


def load_target(
    config: EngineConfig, device: ResolvedDevice | None, *, whole_fits: bool | None = None, header_only: bool = False
) -> Model:
    """The target model, with as many layers on the GPU as -ngl and as many experts in host memory as -ncmoe give.

    With a GPU for experts, all layers are on it unless -ngl gives fewer; the experts stay in host memory, from where
    placement moves them, unless the GPU can hold the entire model or -ncmoe keeps them with their layers. A dense
    model that does not fit stays on the CPU. whole_fits: the result of `whole_model_fits`, if it is known.
    """
    device = device or resolve_device(config)
    probe(config.model)
    n_gpu_layers = _ALL_LAYERS if config.n_gpu_layers is None else config.n_gpu_layers
    is_split = config.n_cpu_moe is not None
    experts_on_cpu = False
    if device.ram_alone:
        n_gpu_layers = 0
    elif device.kind != "gpu":
        n_gpu_layers, experts_on_cpu = config.n_gpu_layers or 0, is_split
    elif not (whole_model_fits(config, device) if whole_fits is None else whole_fits):
        if config.n_gpu_layers is None and not gguf_file.read_summary(config.model).expert_layers:
            n_gpu_layers = 0
        else:  # with the cache switched off, llama.cpp takes the requested layers with their experts
            whole_layers = config.placement.cache_ratio == 0 and config.n_gpu_layers is not None and not is_split
            experts_on_cpu = not whole_layers
    return Model.load(
        config.model,
        n_gpu_layers=n_gpu_layers,
        experts_on_cpu=experts_on_cpu,
        n_cpu_moe=config.n_cpu_moe,
        device=device.llama_device,
        header_only=header_only,
        storage=device.storage,
        n_expert_used=config.n_expert_used,
        head=config.draft == "mtp",
        settings=config.load,
    )


def load_draft(
    config: EngineConfig,
    device: ResolvedDevice | None,
    *,
    header_only: bool = False,
    free_bytes: int | None = None,
    total_bytes: int | None = None,
) -> Model:
    """The draft model, on the GPU unless -ngl gives fewer layers. free_bytes, total_bytes: of host memory, if known."""
    device = device or resolve_device(config)
    if not isinstance(config.draft, Path):
        raise ValueError("there is no draft model")
    probe(config.draft)
    default = _ALL_LAYERS if device.kind == "gpu" else 0
    return Model.load(
        config.draft,
        n_gpu_layers=default if config.n_gpu_layers is None else config.n_gpu_layers,
        device=device.llama_device,
        header_only=header_only,
        storage=_storage(gguf_file.read_summary(config.draft).size_bytes, free_bytes, total_bytes),
        settings=replace(config.load, overrides=()),
    )


def _storage(n_bytes: int, free_bytes: int | None = None, total_bytes: int | None = None) -> Storage:
    return "loaded" if fits(n_bytes, free_bytes, total_bytes) else "mapped"


def make_context(
    config: EngineConfig, model: Model, n_ctx: int, *, has_budget: bool = False, is_draft: bool = False
) -> Context:
    """A context for decoding, of the target or of the draft; has_budget: as of `Context`. Raises InputError."""
    routing, info = None if is_draft else config.routing, model.info
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
        routing=None if routing is None else _read_routing(routing, info.n_layers, info.n_experts, info.used_per_layer),
        n_snapshots=n_snapshots(config, model),
        n_checkpoints=config.n_checkpoints,
        mode=config.mode,
        settings=config.draft_context if is_draft else config.context,
    )


@cache
def _read_routing(path: Path, n_layers: int, n_experts: int, used: tuple[int, ...]) -> RecordedRouting:
    """Several sessions have the same."""
    return read_routing(path, n_layers=n_layers, n_experts=n_experts, used_per_layer=used)


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
    """Where drafts come from: `model`, `head` (of `model`, or the target's own without one), n-grams, or none."""

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
    config: EngineConfig, device: ResolvedDevice, model: Model, shared: Model | None, run: Run, stack: ExitStack
) -> ChosenDraft:
    """The source of drafts for the target `model`. shared: a loaded draft. Raises InputError for an unsuitable one."""
    if config.draft is None:
        return ChosenDraft()
    most = _most_snapshots(config) if model.keeps_snapshots else None
    reasons = (
        (config.gamma == 0, "the draft length is 0 (--draft-max)"),
        (not model.can_reject_drafts, f"{model.info.architecture} models cannot take rejected tokens back"),
        (most == 0, "this model takes tokens back in batches (-b, -ub) of 3 or more"),
    )
    if reason := next((reason for applies, reason in reasons if applies), ""):
        run.warn(f"Speculation is off: {reason}.")
        return ChosenDraft()
    if most is not None and config.gamma > most:
        if most < _MAX_SNAPSHOTS:
            run.warn(f"Drafts are limited to {most} tokens: longer ones need larger batches (-b, -ub).")
        elif not config.auto_gamma:
            run.warn(f"Drafts are limited to {most} tokens: the model needs a copy of its state for each.")
    if config.draft == "ngram":
        return ChosenDraft(use_ngram=True)
    if config.draft == "mtp":
        head = own_head(model)
        _warn_of_length(config, head, run, "because the model has a head for each")
        return ChosenDraft(head=head, n_common=model.info.n_vocab)
    draft = shared or stack.enter_context(load_draft(config, device))
    in_file = head_file(model, draft)
    if in_file is not None:
        _warn_of_length(config, in_file, run, f"because {draft.path.name} was trained for so many")
        return ChosenDraft(draft, draft.info.n_vocab, head=in_file)
    n_common = check_compatible(model, draft)
    if not draft.can_roll_back:
        if shared is None:
            draft.close()
        run.warn(f"Speculation is off: {draft.info.architecture} drafts cannot take rejected tokens back.")
        return ChosenDraft()
    return ChosenDraft(draft, n_common)


def _warn_of_length(config: EngineConfig, head: HeadKind, run: Run, reason: str) -> None:
    """Warns where the draft length of the options is more than the head drafts."""
    most = head.n_drafts_max
    if most is not None and not config.auto_gamma and config.gamma > most:
        run.warn(f"Drafts are limited to {most} tokens, {reason}.")


def drafts_for_itself(path: Path) -> bool:
    """Whether the model at `path` has a head of its own that can draft. Raises ModelFileError."""
    if not gguf_file.read_summary(path).head_layers:
        return False
    probe(path)
    with Model.load(path, header_only=True) as model:
        return model.can_reject_drafts and missing_head(model) is None


def kv_on_gpu(config: EngineConfig, device: ResolvedDevice, model: Model) -> bool:
    """Whether the KV caches are on a GPU, with the layers that they belong to."""
    if device.ram_alone:  # `load_target` puts no layer on a GPU
        return False
    all_layers = device.kind == "gpu" and config.n_gpu_layers is None
    return model.uses_gpu and (all_layers or config.n_gpu_layers not in (0, None))


def whole_model_fits(config: EngineConfig, device: ResolvedDevice, headers: Sequence[Model] | None = None) -> bool:
    """Whether target, draft and KV caches fit the GPU; False with options for a cache or layers. headers: of both."""
    has_split = config.n_gpu_layers is not None or config.n_cpu_moe is not None or bool(config.load.overrides)
    if config.placement.has_size or has_split or device.free_bytes == 0:
        return False
    with ExitStack() as stack:
        if headers is None:
            load = partial(Model.load, device=device.llama_device, header_only=True)
            headers = [stack.enter_context(load(path)) for path in files_of(config)]
        sizes = memory_of(config, headers)
        return fit_whole(sizes, device.free_bytes, device.total_bytes, n_ctx=config.n_ctx, n_parallel=config.n_parallel)


def memory_of(config: EngineConfig, models: Sequence[Model]) -> list[ModelMemory]:
    """Memory of the target and, if there is one, of the draft, with the contexts that the configuration gives them."""
    settings = (config.context, config.draft_context)
    return [ModelMemory.of(model, each) for model, each in zip(models, settings, strict=False)]


def open_draft(config: EngineConfig, chosen: ChosenDraft, target: Context, resources: ExitStack) -> DraftSource:
    """The source of drafts for the first text, with a context of its own where it is a model or a head."""
    if chosen.head is not None:
        head = make_head_context(config, chosen.model or target.model, chosen.head, target)
        return head_draft(target, resources.enter_context(head), n_vocab=chosen.n_common)
    if chosen.model is not None:
        context = resources.enter_context(make_context(config, chosen.model, target.n_ctx, is_draft=True))
        return ModelDraft(context, n_vocab=chosen.n_common, is_eog=chosen.model.is_eog)
    return NgramDraft() if chosen.use_ngram else DraftSource()


def reopen_on_cpu(
    config: EngineConfig,
    target: Context,
    chosen: ChosenDraft,
    draft: DraftSource,
    resources: ExitStack,
    make_room: Callable[[int], None] | None,
) -> tuple[Context, ChosenDraft, DraftSource]:
    """Loads the models of an answer again, for the CPU alone, where a GPU fails on which llama.cpp computes.

    Returns the target's context, the choice with the new draft model, and the source of drafts. The contexts have the
    same size and empty KV caches. The old ones are freed first, since memory for both may not be there. Where the
    driver threw an exception they are abandoned instead: its state is unknown. make_room: called in between with the
    bytes that the new ones need. Raises MoeedgeError if the models cannot be loaded; the session is unusable then.
    """
    old = [target, draft.context] if isinstance(draft, ContextDraft) else [target]
    models = list(dict.fromkeys(context.model for context in old))  # a head's may be the target's
    # without experts that are loaded on demand
    n_bytes = sum(model.info.size_bytes if model.dense is None else model.dense.n_bytes for model in models)
    for context in old:
        n_bytes += ModelMemory.of(context.model, context.settings).kv_bytes(context.n_ctx, config.n_parallel)
    is_abandoned = any(context.is_closed for context in old)
    freed: list[Context | Model] = [*old, *models]
    for each in freed:
        each.abandon() if is_abandoned else each.close()
    if make_room is not None:
        make_room(n_bytes)
    again = {model: resources.enter_context(_load(model)) for model in models}
    budget = target.budget
    context = make_context(config, again[target.model], target.n_ctx, has_budget=budget is not None)
    resources.enter_context(context)
    if budget is not None:
        context.set_budget(budget.budget)
    chosen = replace(chosen, model=again[chosen.model]) if chosen.model is not None else chosen
    return context, chosen, open_draft(config, chosen, context, resources)


def _load(model: Model) -> Model:
    # on demand: the cache in RAM, which loads the experts, serves the new context
    storage = model.storage if model.storage == "on demand" else _storage(model.info.size_bytes)
    settings = replace(model.settings, overrides=())  # they may name the GPU's memory
    return Model.load(model.path, device="none", storage=storage, head=model.has_head, settings=settings)
