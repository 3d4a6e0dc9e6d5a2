"""Opens the placement of a session's experts: budget, cache, calibration, policy, manager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from moeedge.errors import EngineError, InputError, ModelFileError
from moeedge.hardware import devices, rpc
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_tensors
from moeedge.native import CAPTURED_TOKENS, ActivationCapture, CaptureFlags
from moeedge.native.abi import Phase, PrefillPath
from moeedge.native.cache import CacheConfig, ExpertCache
from moeedge.notifications import Level, Notification, Notify, ignore
from moeedge.policies.base import CacheShape, CutoffPolicy, Policy, PolicyConfig
from moeedge.policies.registry import POLICIES, ignored_ablations, make_policy
from moeedge.scheduler import ram_tier
from moeedge.scheduler.cache_governor import CacheGovernor
from moeedge.scheduler.cache_store import cache_shape
from moeedge.scheduler.calibration import Calibration
from moeedge.scheduler.config import ExecutionConfig, PlacementConfig
from moeedge.scheduler.kept_activations import KeptActivations
from moeedge.scheduler.manager import PlacementManager
from moeedge.scheduler.memory_watch import MemoryWatch
from moeedge.scheduler.microbench import CONTEXT_MIN, calibrate
from moeedge.scheduler.prediction import DraftRouterPredictor, NextGatePredictor, open_draft_predictor
from moeedge.scheduler.ram_tier import RamTier
from moeedge.scheduler.sizing import cache_budget, emulated_threads, in_host_memory, n_staging_slots, reserve_bytes
from moeedge.scheduler.slot_memory import SlotMemory
from moeedge.units import format_bytes

_TIER_READERS = 3  # threads that fill the staging memory from RAM or from the disk
_PREFILL_TOKENS_MIN = 65  # smaller batches are split as verifications are
_TRANSFER_EXPERTS = 64  # experts in one transfer of a policy that moves in batches: all of a layer that a step brings


def check_policy(config: PlacementConfig) -> None:
    """Raises InputError for a policy that the engine does not know, before anything is loaded."""
    if config.policy not in POLICIES:
        raise InputError(f"Unknown policy '{config.policy}'.", f"Choose from: {', '.join(POLICIES)}.")


def open_placement(
    config: PlacementConfig,
    device: ResolvedDevice,
    target: Context,
    draft: Context | None,
    *,
    gamma: int,
    keep: bool,
    notify: Notify,
    notes: list[str],
    in_ram: PlacementConfig | None = None,
    has_draft_states: bool = False,
) -> tuple[PlacementManager | None, Calibration | None]:
    """The placement of `target`'s experts on `device`, and what was measured for it.

    draft: its speed is measured; None without a draft model. has_draft_states: drafts come with hidden states all the
    same, since a head of the target makes them. gamma: the draft length, 0 without speculation. keep: the
    cache stays on where it does not pay. notify: called before the device is measured. notes: get a sentence for each
    choice, and for why there is no placement. in_ram: of the experts in RAM where device.loads_misses; its vram_bytes
    are those of RAM. The caller closes the manager before it frees the contexts.
    """
    notes.extend(device.notes)
    if device.kind == "none":
        notes.extend(_ignored_options(config))
        return None, None
    with ExitStack() as stack:
        tier_notes: list[str] = []
        tier = None if in_ram is None else _open_tier(in_ram, target, gamma, tier_notes)
        if tier is not None:
            stack.callback(tier.close)
            if config.prefill is PrefillPath.AUTO:  # what is on the device needs no slot in RAM
                config = replace(config, prefill=PrefillPath.RESIDENT)
        cache = _open_cache(config, device, target, draft, gamma, notes)
        if cache is not None:
            stack.enter_context(cache)
        if cache is None or not _has_room_for_every_layer(cache, device, target, notes):
            if in_ram is None or tier is None:
                notes.extend(tier_notes)
                return None, None
            stack.close()
            return _place_in_ram(in_ram, target, draft, gamma, notes, has_draft_states), None
        notes.extend(tier_notes)
        policy_config = config.policy_config(gamma=gamma)
        if device.kind == "ram":
            notes.extend(ram_tier.describe(cache, target, config.policy))
            ram_tier.use_measured_readers(cache, target, notes)
            kept = ram_tier.warm_start(cache, target, notes) if config.warm_start else None
            make = partial(make_policy, config.policy, config=policy_config)
            memory = _slot_memory(cache, device, target)
            stack.callback(memory.close)
            manager = _make_manager(
                cache,
                make,
                config,
                device,
                target,
                draft,
                gamma,
                notes,
                kept,
                memory=memory,
                has_draft_states=has_draft_states,
            )
            stack.pop_all()
            return manager, None
        calibration = None
        postpones = config.calibrate and config.calibrate_later
        if tier is None:
            allowed = replace(config, calibrate=False) if postpones else config
            calibration = calibrate(target, draft, cache, allowed, policy_config, device, notify=notify)
        else:
            cache.set_readers(_TIER_READERS)
        postpones = postpones and calibration is None and target.n_ctx >= CONTEXT_MIN
        notes.extend(_describe_placement(config, device, target, cache))
        if config.device_path is not None:
            cache.set_device_path(config.device_path)
        if calibration is None:
            prefill = PrefillPath.CPU if config.prefill is PrefillPath.AUTO else config.prefill
            cache.set_prefill(prefill, _PREFILL_TOKENS_MIN)
        if tier is not None:
            notes.append(Notification("Experts are not timed: they come from the disk, whose speed decides."))
        elif postpones:
            notes.append(
                Notification(
                    "Expert times are measured after the first answer; until then CPU and device share work untuned."
                )
            )
        elif calibration is None:
            notes.append(_describe_unmeasured(target))
        else:
            notes.append(_apply(calibration, config, device, cache))
            policy_config = replace(policy_config, cost_model=calibration.units)
            is_on = keep or _pays(calibration, device)
            if not calibration.pays:
                notes.append(_describe_loss(calibration, device, is_on=is_on))
            if not is_on:
                return None, calibration
        make = partial(make_policy, config.policy, config=policy_config)
        manager = _make_manager(
            cache, make, config, device, target, draft, gamma, notes, ram=tier, has_draft_states=has_draft_states
        )
        if postpones:
            manager.postponed = partial(_measure_now, manager, target, draft, config, policy_config, device, keep)
        stack.pop_all()
        return manager, calibration


def _apply(
    calibration: Calibration, config: PlacementConfig, device: ResolvedDevice, cache: ExpertCache
) -> Notification:
    """Sets what was measured to be the fastest; returns the line that says so."""
    prefill = calibration.prefill_path if config.prefill is PrefillPath.AUTO else config.prefill
    cache.set_prefill(prefill, _PREFILL_TOKENS_MIN)
    cache.set_readers(calibration.n_readers)
    cache.set_device_path(calibration.device_path)
    sentence = calibration.sentence(emulated=device.kind == "emulated", prefill=prefill)
    return Notification(sentence, Level.INFO if calibration.kept else Level.WARNING)


def _pays(calibration: Calibration, device: ResolvedDevice) -> bool:
    """Whether a cache stays that was not asked for; emulation is for trying, not for speed."""
    return calibration.pays or device.kind not in ("gpu", "rpc")


def _describe_loss(calibration: Calibration, device: ResolvedDevice, *, is_on: bool) -> str:
    if is_on and device.kind == "emulated":
        return f"The emulated GPU costs speed: {calibration.speed:.2f} times that of the CPU alone (-dev none)."
    if is_on:
        return f"The expert cache on {device.label} does not pay: {calibration.speed:.2f} times the speed without it."
    return (
        f"The expert cache is off, because steps are slower with it ({calibration.speed:.2f} times the speed). "
        "--cache-ratio R or --vram SIZE keeps it on, moeedge calibrate measures again."
    )


def _measure_now(
    manager: PlacementManager,
    target: Context,
    draft: Context | None,
    config: PlacementConfig,
    policy_config: PolicyConfig,
    device: ResolvedDevice,
    keep: bool,
    *,
    notify: Notify,
    cancel: Callable[[], bool],
) -> tuple[Calibration, list[str], bool]:
    """Measures with an open placement, and goes on with a policy that knows the result; KV caches and slots are empty.

    Returns the result, what to say about it, and whether the cache stays. Raises Cancelled once `cancel` returns True;
    the placement then goes on as it was, with empty slots.
    """
    with manager.measuring():
        calibration = calibrate(
            target, draft, manager.cache, config, policy_config, device, notify=notify, cancel=cancel
        )
    assert calibration is not None  # the context has room, and measuring is allowed
    notes: list[str] = [_apply(calibration, config, device, manager.cache)]
    is_on = keep or _pays(calibration, device)
    if not calibration.pays:
        notes.append(_describe_loss(calibration, device, is_on=is_on))
    if is_on:
        measured = replace(policy_config, cost_model=calibration.units)
        manager.use(partial(make_policy, config.policy, config=measured))
    return calibration, notes, is_on


def _open_tier(config: PlacementConfig, target: Context, gamma: int, notes: list[str]) -> RamTier | None:
    """The cache in RAM for experts that are not on the device, attached to the target; None where it has no room."""
    device = devices.ram(ResolvedDevice("none"))
    cache = _open_cache(config, device, target, None, gamma, notes)
    if cache is None:
        return None
    with ExitStack() as stack:
        stack.enter_context(cache)
        if not _has_room_for_every_layer(cache, device, target, notes):
            return None
        policy = ram_tier.policy_in_ram(config.policy)
        notes.extend(ram_tier.describe(cache, target, policy))
        ram_tier.use_measured_readers(cache, target, notes)
        tier = RamTier(
            cache,
            make_policy(policy, cache_shape(cache), config=config.policy_config(gamma=gamma)),
            _slot_memory(cache, device, target),
            ram_tier.warm_start(cache, target, notes) if config.warm_start else None,
        )
        assert target.sensor is not None  # the caller checks it
        tier.attach(target.sensor)
        stack.pop_all()
    return tier


def _slot_memory(cache: ExpertCache, device: ResolvedDevice, target: Context) -> SlotMemory:
    """Watches the memory of the slots from now on."""
    watch = MemoryWatch(device, reserve_bytes(device, device.total_bytes))
    return SlotMemory(cache, target.model.path, len(target.model.host_expert_layers), watch)


def _place_in_ram(
    config: PlacementConfig,
    target: Context,
    draft: Context | None,
    gamma: int,
    notes: list[str],
    has_draft_states: bool,
) -> PlacementManager | None:
    """The placement in RAM alone, where the device has no room for experts."""
    config = replace(config, policy=ram_tier.policy_in_ram(config.policy))
    manager, _ = open_placement(
        config,
        devices.ram(ResolvedDevice("none")),
        target,
        draft,
        gamma=gamma,
        keep=True,
        notify=ignore,
        notes=notes,
        has_draft_states=has_draft_states,
    )
    return manager


def _open_cache(
    config: PlacementConfig,
    device: ResolvedDevice,
    target: Context,
    draft: Context | None,
    gamma: int,
    notes: list[str],
) -> ExpertCache | None:
    """The cache on the device; None where it has no room or is not needed."""
    info = target.model.info
    tensors, files = expert_tensors(target.model.path, n_layers=info.n_layers)
    if device.kind == "gpu" and target.model.host_expert_layers:
        warm_up_gpu(target, draft, gamma)
    reading = devices.read_memory(device) if device.kind in ("gpu", "ram") else None
    free_bytes = reading.free_bytes if reading is not None else device.free_bytes
    if device.kind == "ram":
        assert target.model.dense is not None  # loaded for this
        free_bytes = ram_tier.free_for_slots(free_bytes, target.model.dense)
    budget = cache_budget(
        config,
        device,
        tensors,
        target.model,
        free_bytes=free_bytes,
        total_bytes=reading.total_bytes if reading is not None else device.total_bytes,
        n_ubatch=target.n_ubatch,
    )
    notes.extend(budget.notes)
    if budget.n_slots == 0:
        if not budget.notes:
            notes.append("The expert cache is off, as asked: every expert stays on the CPU.")
        return None
    try:
        cache = ExpertCache.open(
            CacheConfig(
                device=device.ggml_name,
                files=files,
                tensors=in_host_memory(tensors, target.model),
                n_layers=info.n_layers,
                n_experts=info.n_experts,
                ratio=budget.ratio,
                n_stage=n_staging_slots(config, device.kind, info.n_experts),
                emulated_threads=emulated_threads(device) or 1,
                link_bytes_per_s=float(device.link_bytes_per_s),
                link_latency_s=device.latency_us * 1e-6,
                pool_bytes_max=ram_tier.pool_bytes_max(tensors) if device.kind == "ram" else 0,
                disk_bytes_per_s=config.disk_bytes_per_s,
            )
        )
    except EngineError as error:  # no memory for a single slot
        notes.append(f"{error.message} The expert cache is off.")
        return None
    try:
        if target.model.dense is not None:
            target.model.dense.check_files()  # the cache reads where the header said
    except BaseException:
        cache.close()
        raise
    return cache


def warm_up_gpu(target: Context, draft: Context | None, gamma: int) -> None:
    """Lets a GPU load its kernels and allocate their scratch memory, so that free memory stays free afterwards.

    Compute buffers exist since the contexts were made; the rest comes with the first batches of each size. Leaves the
    KV caches empty.
    """
    for context in (target, draft):
        if context is None:
            continue
        text = context.model.tokenize("A few words, so that there is something to compute.")
        for n in (_PREFILL_TOKENS_MIN, context.n_parallel * (gamma + 1), 1):
            n = max(1, min(n, context.n_ctx // 4, context.n_ubatch))
            context.clear()
            context.decode((text * n)[:n], phase=Phase.PREFILL, logits="last")
        context.clear()
        if context.sensor is not None:
            context.sensor.read_counts()


def _has_room_for_every_layer(cache: ExpertCache, device: ResolvedDevice, target: Context, notes: list[str]) -> bool:
    """Whether the slots suffice for an expert of every layer: a device may give less memory than it promised."""
    info = cache.info
    if device.kind == "rpc":
        rpc.limit_waits(device.endpoint)
    if info.n_slots < len(target.model.host_expert_layers):
        notes.append(
            f"{device.label} has memory for {info.n_slots} experts, less than one per layer: the expert cache is off."
        )
        return False
    if info.n_slots < info.slots_wanted:
        notes.append(
            f"The expert cache holds {info.n_slots:,} experts instead of {info.slots_wanted:,}: {device.label} has no "
            "memory for more."
        )
    if info.unpinned:
        notes.append(
            "Uploads of experts are slower than usual: the GPU's driver gives no pinned (page-locked) memory for them."
        )
    return True


def _make_manager(
    cache: ExpertCache,
    make: Callable[[CacheShape], Policy],
    config: PlacementConfig,
    device: ResolvedDevice,
    target: Context,
    draft: Context | None,
    gamma: int,
    notes: list[str],
    kept_activations: KeptActivations | None = None,
    ram: RamTier | None = None,
    memory: SlotMemory | None = None,
    has_draft_states: bool = False,
) -> PlacementManager:
    """The manager, with everything that the policy reads."""
    policy = make(cache_shape(cache))
    execution = config.execution
    router_scores: ActivationCapture | None = None
    if "router-scores" in policy.required_inputs:
        router_scores = _capture(target)
        router_scores.enable(CaptureFlags.PROBS)
    batch = execution.batch
    cache.set_batch((_TRANSFER_EXPERTS if policy.execution_model.batched_io else 0) if batch is None else batch)
    watched = device.kind == "gpu" and not config.has_size  # the user's own size stays
    # the CPU can compute all experts as well, and no other system is imitated
    governed = config.governed and device.kind != "ram" and ram is None and execution == ExecutionConfig()
    manager = PlacementManager(
        cache,
        policy,
        device,
        target,
        execution=execution,
        gate_predictor=_gate_predictor(policy, target, notes, reads_ahead=execution.reads_ahead),
        draft_predictor=_draft_predictor(policy, config, target, draft, notes),
        router_scores=router_scores,
        keeps_hidden_states=_keeps_hidden_states(policy, draft, gamma, notes, has_draft_states),
        watch=MemoryWatch(device, reserve_bytes(device, device.total_bytes)) if watched else None,
        remake_policy=make,
        kept_activations=kept_activations,
        ram=ram,
        memory=memory,
        governor=CacheGovernor() if governed else None,
    )
    if target.n_parallel > 1 and manager.reads_draft:
        notes.append(f"For several texts in a batch the policy {policy.name} plans without what the draft computes.")
    if manager.layer_hook is not None:
        if target.n_parallel * (gamma + 1) > CAPTURED_TOKENS:
            notes.append(
                f"In verifications of more than {CAPTURED_TOKENS} tokens no expert is predicted or loaded between the "
                "layers."
            )
        _capture(target).set_hook(manager.layer_hook)
    if manager.draft_prefetch is not None and execution.drafting == "vanilla" and draft is not None:
        _capture(draft).set_hook(manager.draft_prefetch.before_draft_layer)
    return manager


def _capture(context: Context) -> ActivationCapture:
    """The capture of a target with a sensor, or of a draft that a predictor reads."""
    capture = context.capture_activations()
    assert capture is not None
    return capture


def _gate_predictor(
    policy: Policy, target: Context, notes: list[str], *, reads_ahead: bool
) -> NextGatePredictor | None:
    """The predictor of the next layers, for a policy that plans by what routers read; otherwise None.

    reads_ahead: the next layer's experts are read ahead, whatever the policy.
    """
    if "block-inputs" not in policy.required_inputs and not reads_ahead:
        return None
    try:
        predictor = NextGatePredictor(target.model, 1) if reads_ahead else NextGatePredictor(target.model)
    except ModelFileError as error:
        notes.append(_describe_no_prediction(policy, str(error)))
        return None
    notes.append(Notification(f"The policy {policy.name} predicts the next layers' experts from what routers read."))
    return predictor


def _draft_predictor(
    policy: Policy, config: PlacementConfig, target: Context, draft: Context | None, notes: list[str]
) -> DraftRouterPredictor | None:
    """The predictor of the next batch, for a policy that plans by what the draft's layers read; otherwise None."""
    if "draft-inputs" not in policy.required_inputs or config.execution.drafting == "off":
        return None
    info = target.model.info
    n_layers = len(target.model.host_expert_layers)
    if isinstance(policy, CutoffPolicy):
        n_layers = policy.cutoff(info.n_expert_used)
    predictor, reason = open_draft_predictor(target, draft, n_layers)
    if predictor is None:
        notes.append(_describe_no_prediction(policy, reason))
    else:
        sentence = (
            f"The policy {policy.name} predicts the experts of the first {n_layers} of {info.n_expert_layers} layers "
            "from what the draft's layers read."
        )
        notes.append(Notification(sentence))
    return predictor


def _keeps_hidden_states(
    policy: Policy, draft: Context | None, gamma: int, notes: list[str], has_draft_states: bool
) -> bool:
    """Whether the draft's hidden states are kept for the policy."""
    if "draft-states" not in policy.required_inputs or gamma == 0:
        return False
    has_hidden_states = has_draft_states or (draft is not None and draft.has_hidden_states)
    source = "hidden states" if has_hidden_states else "tokens alone, without its hidden states"
    notes.append(Notification(f"The policy {policy.name} predicts experts from the draft's {source}."))
    return has_hidden_states


def _describe_no_prediction(policy: Policy, reason: str) -> str:
    return f"The policy {policy.name} predicts no experts here: {reason}."


def _describe_unmeasured(target: Context) -> str:
    effect = "CPU and device share work untuned."
    if target.n_ctx < CONTEXT_MIN:
        return f"Expert times were not measured, because a context of {target.n_ctx} tokens is too short: {effect}"
    return Notification(f"Expert times were not measured, as asked: {effect}")


def _describe_placement(
    config: PlacementConfig, device: ResolvedDevice, target: Context, cache: ExpertCache
) -> list[str]:
    info = target.model.info
    ignored = ignored_ablations(config.policy, config.ablations)
    ablated = "".join(f", {name}" for name in sorted(config.ablations - set(ignored)))
    n_all = info.n_expert_layers * info.n_experts
    sentence = (
        f"Experts are cached on {device.label}: {cache.info.n_slots:,} of {n_all:,} "
        f"({cache.info.n_slots / n_all:.1%}, {format_bytes(cache.info.pool_bytes)}), policy {config.policy}{ablated}."
    )
    notes: list[str] = [Notification(sentence)]
    if target.model.storage == "mapped":
        notes.append(
            "The model is larger than the free memory: its other experts stay as they are in the file, and the CPU "
            "computes those slower than repacked ones."
        )
    if ignored:
        notes.append(f"--ablate {', '.join(ignored)} changes nothing about the policy {config.policy}.")
    return notes


def _ignored_options(config: PlacementConfig) -> list[str]:
    """Sentences for the options that have no effect without a device."""
    notes = []
    if config.has_size:
        notes.append(
            "--vram and --cache-ratio have no effect: no device holds experts here (moeedge devices lists them)."
        )
    ignored = ignored_ablations("none", config.ablations)
    if ignored:
        notes.append(f"--ablate {', '.join(ignored)} has no effect: no device holds experts here.")
    return notes
