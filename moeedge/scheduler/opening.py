"""Opens the placement of a session's experts: budget, cache, calibration, policy, manager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from moeedge.errors import EngineError, InputError, ModelFileError
from moeedge.hardware import devices, rpc
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_tensors
from moeedge.native import CAPTURED_TOKENS, ActivationCapture, CaptureFlags
from moeedge.native.abi import Phase, PrefillPath
from moeedge.native.cache import CacheConfig, ExpertCache
from moeedge.notifications import Level, Notification, Notify
from moeedge.policies.base import CacheShape, CutoffPolicy, Policy, PolicyConfig
from moeedge.policies.registry import POLICIES, ignored_ablations, make_policy
from moeedge.scheduler import ram_tier
from moeedge.scheduler.cache_governor import CacheGovernor
from moeedge.scheduler.cache_store import cache_shape
from moeedge.scheduler.calibration import Calibration
from moeedge.scheduler.config import ExecutionConfig, PlacementConfig
from moeedge.scheduler.kept_activations import KeptActivations
from moeedge.scheduler.manager import PlacementManager
from moeedge.scheduler.microbench import CONTEXT_MIN, calibrate
from moeedge.scheduler.prediction import DraftRouterPredictor, NextGatePredictor, open_draft_predictor
from moeedge.scheduler.ram_tier import RamTier
from moeedge.scheduler.sizing import cache_budget, emulated_threads, in_host_memory, n_staging_slots, reserve_bytes
from moeedge.scheduler.slot_memory import MemoryWatch, SlotMemory
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
    opening = _Opening(config, device, target, draft, gamma, keep, notes, has_draft_states)
    if device.kind == "ram":
        return opening.open_in_ram(), None
    tier: RamTier | None = None
    with ExitStack() as stack:
        if in_ram is not None:
            in_ram = replace(in_ram, policy=ram_tier.policy_in_ram(in_ram.policy))
            ram = replace(opening, config=in_ram, device=devices.ram(ResolvedDevice("none")), notes=[])
            tier = ram.open_tier()
            if tier is not None:
                stack.callback(tier.close)
                if config.prefill is PrefillPath.AUTO:  # what is on the device needs no slot in RAM
                    opening = replace(opening, config=replace(config, prefill=PrefillPath.RESIDENT))
            tier_notes = ram.notes
        cache = opening.open_cache()
        if cache is None and tier is not None:
            stack.close()
            return replace(ram, notes=notes).open_in_ram(), None
        if in_ram is not None:
            notes.extend(tier_notes)
        if cache is None:
            return None, None
        stack.enter_context(cache)
        manager, calibration = opening.open_on_device(cache, tier, notify)
        if manager is not None:
            stack.pop_all()
        return manager, calibration


@dataclass(frozen=True)
class _Opening:
    """The arguments of `open_placement`; config and device: of the memory that is opened."""

    config: PlacementConfig
    device: ResolvedDevice
    target: Context
    draft: Context | None
    gamma: int
    keep: bool
    notes: list[str]
    has_draft_states: bool

    def open_in_ram(self) -> PlacementManager | None:
        """Experts that are loaded into RAM as needed; no device holds any."""
        cache = self.open_cache()
        if cache is None:
            return None
        with ExitStack() as stack:
            stack.enter_context(cache)
            memory, kept = self._fill_slots(cache)
            stack.callback(memory.close)
            manager = self._make_manager(cache, self._policy_maker(None), kept_activations=kept, memory=memory)
            stack.pop_all()
        return manager

    def open_tier(self) -> RamTier | None:
        """The experts in RAM that are not on the device, attached to the target; None where there is no room."""
        cache = self.open_cache()
        if cache is None:
            return None
        with ExitStack() as stack:
            stack.enter_context(cache)
            policy = self._policy_maker(None)(cache_shape(cache))
            info = self.target.model.info
            tier = RamTier(cache, policy, *self._fill_slots(cache), n_all=info.n_expert_layers * info.n_experts)
            assert self.target.sensor is not None  # the caller checks it
            tier.attach(self.target.sensor)
            stack.pop_all()
        return tier

    def _fill_slots(self, cache: ExpertCache) -> tuple[SlotMemory, KeptActivations | None]:
        """Watches the memory of slots in RAM from now on, and loads the experts first that earlier runs used most."""
        self.notes.extend(ram_tier.describe(cache, self.target, self.config.policy))
        ram_tier.use_measured_readers(cache, self.target, self.notes)
        kept = ram_tier.warm_start(cache, self.target, self.notes) if self.config.warm_start else None
        watch = MemoryWatch(self.device, reserve_bytes(self.device, self.device.total_bytes))
        model = self.target.model
        return SlotMemory(cache, model.path, len(model.host_expert_layers), watch), kept

    def open_on_device(
        self, cache: ExpertCache, tier: RamTier | None, notify: Notify
    ) -> tuple[PlacementManager | None, Calibration | None]:
        """The placement in the open cache, and what was measured for it; None where the cache does not pay."""
        config, calibration = self.config, None
        postpones = config.calibrate and config.calibrate_later
        if tier is None:
            allowed = replace(config, calibrate=False) if postpones else config
            calibration = calibrate(
                self.target, self.draft, cache, allowed, self._policy_config, self.device, notify=notify
            )
        else:
            cache.set_readers(_TIER_READERS)
        postpones = postpones and calibration is None and self.target.n_ctx >= CONTEXT_MIN
        self.notes.extend(_describe_placement(config, self.device, self.target, cache))
        if config.device_path is not None:
            cache.set_device_path(config.device_path)
        if calibration is None:
            prefill = PrefillPath.CPU if config.prefill is PrefillPath.AUTO else config.prefill
            cache.set_prefill(prefill, _PREFILL_TOKENS_MIN)
            self.notes.append(_describe_unmeasured(self.target, has_tier=tier is not None, postpones=postpones))
        elif not self._use(calibration, cache):
            return None, calibration
        manager = self._make_manager(cache, self._policy_maker(calibration), ram=tier)
        if postpones:
            manager.postponed = partial(self._measure_now, manager)
        return manager, calibration

    def _measure_now(
        self, manager: PlacementManager, *, notify: Notify, cancel: Callable[[], bool]
    ) -> tuple[Calibration, list[str], bool]:
        """Measures with an open placement and empty KV caches, and goes on with a policy that knows the result.

        Returns the result, what to say about it, and whether the cache stays. Raises Cancelled once `cancel` returns
        True; the placement then goes on as it was, with empty slots.
        """
        with manager.measuring():
            calibration = calibrate(
                self.target,
                self.draft,
                manager.cache,
                self.config,
                self._policy_config,
                self.device,
                notify=notify,
                cancel=cancel,
            )
        assert calibration is not None  # the context has room, and measuring is allowed
        later = replace(self, notes=[])
        is_on = later._use(calibration, manager.cache)
        if is_on:
            manager.use(self._policy_maker(calibration))
        return calibration, later.notes, is_on

    @property
    def _policy_config(self) -> PolicyConfig:
        return self.config.policy_config(gamma=self.gamma)

    def _policy_maker(self, calibration: Calibration | None) -> Callable[[CacheShape], Policy]:
        """Makes the policy for slots, with the times that were measured."""
        units = None if calibration is None else calibration.units
        return partial(make_policy, self.config.policy, config=replace(self._policy_config, cost_model=units))

    def _use(self, calibration: Calibration, cache: ExpertCache) -> bool:
        """Sets what was measured to be the fastest, and says so; whether the cache stays.

        One that was not asked for stays only if it pays; emulation is for trying, not for speed.
        """
        config, device = self.config, self.device
        prefill = calibration.prefill_path if config.prefill is PrefillPath.AUTO else config.prefill
        cache.set_prefill(prefill, _PREFILL_TOKENS_MIN)
        cache.set_readers(calibration.n_readers)
        cache.set_device_path(calibration.device_path)
        sentence = calibration.sentence(emulated=device.kind == "emulated", prefill=prefill)
        self.notes.append(Notification(sentence, Level.INFO if calibration.kept else Level.WARNING))
        if calibration.pays:
            return True
        is_on = self.keep or device.kind not in ("gpu", "rpc")
        speed = f"{calibration.speed:.2f} times"
        if is_on and device.kind == "emulated":
            self.notes.append(f"The emulated GPU costs speed: {speed} that of the CPU alone (-dev none).")
        elif is_on:
            self.notes.append(f"The expert cache on {device.label} does not pay: {speed} the speed without it.")
        else:
            self.notes.append(
                f"The expert cache is off, because steps are slower with it ({speed} the speed). "
                "--cache-ratio R or --vram SIZE keeps it on, moeedge calibrate measures again."
            )
        return is_on

    def open_cache(self) -> ExpertCache | None:
        """The cache on the device; None, with a note, where it has no room for an expert of every layer."""
        config, device, target, model = self.config, self.device, self.target, self.target.model
        info = model.info
        tensors, files = expert_tensors(model.path, n_layers=info.n_layers)
        if device.kind == "gpu" and model.host_expert_layers:
            warm_up_gpu(target, self.draft, self.gamma)
        reading = devices.read_memory(device) if device.kind in ("gpu", "ram") else None
        free_bytes = reading.free_bytes if reading is not None else device.free_bytes
        if device.kind == "ram":
            assert model.dense is not None  # loaded for this
            free_bytes = ram_tier.free_for_slots(free_bytes, model.dense)
        budget = cache_budget(
            config,
            device,
            tensors,
            model,
            free_bytes=free_bytes,
            total_bytes=reading.total_bytes if reading is not None else device.total_bytes,
            n_ubatch=target.n_ubatch,
        )
        self.notes.extend(budget.notes)
        if budget.n_slots == 0:
            if not budget.notes:
                self.notes.append("The expert cache is off, as asked: every expert stays on the CPU.")
            return None
        try:
            cache = ExpertCache(
                CacheConfig(
                    device=device.ggml_name,
                    files=files,
                    tensors=in_host_memory(tensors, model),
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
            self.notes.append(f"{error.message} The expert cache is off.")
            return None
        with ExitStack() as stack:
            stack.enter_context(cache)
            if model.dense is not None:
                model.dense.check_files()  # the cache reads where the header said
            if not self._has_room_for_every_layer(cache):
                return None
            stack.pop_all()
        return cache

    def _has_room_for_every_layer(self, cache: ExpertCache) -> bool:
        """Whether the slots suffice for an expert of every layer: a device may give less memory than it promised."""
        info, label = cache.info, self.device.label
        if self.device.kind == "rpc":
            rpc.limit_waits(self.device.endpoint)
        if info.n_slots < len(self.target.model.host_expert_layers):
            self.notes.append(
                f"{label} has memory for {info.n_slots} experts, less than one per layer: the expert cache is off."
            )
            return False
        if info.n_slots < info.slots_wanted:
            self.notes.append(
                f"The expert cache holds {info.n_slots:,} experts instead of {info.slots_wanted:,}: {label} has no "
                "memory for more."
            )
        if info.unpinned:
            self.notes.append(
                "Uploads of experts are slower than usual: the GPU's driver gives no pinned (page-locked) memory for "
                "them."
            )
        return True

    def _make_manager(
        self,
        cache: ExpertCache,
        make: Callable[[CacheShape], Policy],
        *,
        kept_activations: KeptActivations | None = None,
        ram: RamTier | None = None,
        memory: SlotMemory | None = None,
    ) -> PlacementManager:
        """The manager, with everything that the policy reads."""
        config, device, target, draft = self.config, self.device, self.target, self.draft
        policy, execution = make(cache_shape(cache)), config.execution
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
            gate_predictor=self._gate_predictor(policy),
            draft_predictor=self._draft_predictor(policy),
            router_scores=router_scores,
            keeps_hidden_states=self._keeps_hidden_states(policy),
            watch=MemoryWatch(device, reserve_bytes(device, device.total_bytes)) if watched else None,
            remake_policy=make,
            kept_activations=kept_activations,
            ram=ram,
            memory=memory,
            governor=CacheGovernor() if governed else None,
        )
        if target.n_parallel > 1 and manager.reads_draft:
            self.notes.append(
                f"For several texts in a batch the policy {policy.name} plans without what the draft computes."
            )
        if manager.layer_hook is not None:
            if target.n_parallel * (self.gamma + 1) > CAPTURED_TOKENS:
                self.notes.append(
                    f"In verifications of more than {CAPTURED_TOKENS} tokens no expert is predicted or loaded between "
                    "the layers."
                )
            _capture(target).set_hook(manager.layer_hook)
        if manager.draft_prefetch is not None and execution.drafting == "vanilla" and draft is not None:
            _capture(draft).set_hook(manager.draft_prefetch.before_draft_layer)
        return manager

    def _gate_predictor(self, policy: Policy) -> NextGatePredictor | None:
        """The predictor of the next layers, for a policy that plans by what routers read; otherwise None."""
        if "block-inputs" not in policy.required_inputs:
            return None
        try:
            predictor = NextGatePredictor(self.target.model)
        except ModelFileError as error:
            self.notes.append(_describe_no_prediction(policy, str(error)))
            return None
        self._say(f"The policy {policy.name} predicts the next layers' experts from what routers read.")
        return predictor

    def _draft_predictor(self, policy: Policy) -> DraftRouterPredictor | None:
        """The predictor of the next batch, for a policy that plans by what the draft's layers read; otherwise None."""
        if "draft-inputs" not in policy.required_inputs or self.config.execution.drafting == "off":
            return None
        info = self.target.model.info
        n_layers = len(self.target.model.host_expert_layers)
        if isinstance(policy, CutoffPolicy):
            n_layers = policy.cutoff(info.n_expert_used)
        predictor, reason = open_draft_predictor(self.target, self.draft, n_layers)
        if predictor is None:
            self.notes.append(_describe_no_prediction(policy, reason))
        else:
            self._say(
                f"The policy {policy.name} predicts the experts of the first {n_layers} of {info.n_expert_layers} "
                "layers from what the draft's layers read."
            )
        return predictor

    def _keeps_hidden_states(self, policy: Policy) -> bool:
        """Whether the draft's hidden states are kept for the policy."""
        if "draft-states" not in policy.required_inputs or self.gamma == 0:
            return False
        has_states = self.has_draft_states or (self.draft is not None and self.draft.has_hidden_states)
        source = "hidden states" if has_states else "tokens alone, without its hidden states"
        self._say(f"The policy {policy.name} predicts experts from the draft's {source}.")
        return has_states

    def _say(self, text: str) -> None:
        self.notes.append(Notification(text))


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


def _capture(context: Context) -> ActivationCapture:
    """The capture of a target with a sensor, or of a draft that a predictor reads."""
    capture = context.capture_activations()
    assert capture is not None
    return capture


def _describe_no_prediction(policy: Policy, reason: str) -> str:
    return f"The policy {policy.name} predicts no experts here: {reason}."


def _describe_unmeasured(target: Context, *, has_tier: bool, postpones: bool) -> str:
    effect = "CPU and device share work untuned."
    if has_tier:
        return Notification("Experts are not timed: they come from the disk, whose speed decides.")
    if postpones:
        return Notification(f"Expert times are measured after the first answer; until then {effect}")
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
