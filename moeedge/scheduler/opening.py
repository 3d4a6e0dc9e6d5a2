"""Opens the placement of a session's experts: budget, cache, calibration, policy, manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from moeedge.errors import EngineError, InputError, ModelFileError
from moeedge.hardware import devices, rpc
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.host import default_reserve, fits, total_memory
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_bytes, expert_tensors, mean_expert_bytes
from moeedge.native import CAPTURED_TOKENS, ActivationCapture, CaptureFlags
from moeedge.native.abi import Phase, PrefillPath
from moeedge.native.cache import IN_RAM, CacheConfig, ExpertCache, ExpertTensor
from moeedge.policies.base import Policy
from moeedge.policies.registry import POLICIES, ignored_ablations, make_policy, where_simulated
from moeedge.run import Level, Notification, Run
from moeedge.scheduler import ram_tier
from moeedge.scheduler.calibration import UNMEASURED, Calibration
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.manager import PlacementManager
from moeedge.scheduler.microbench import CONTEXT_MIN, calibrate
from moeedge.scheduler.prediction import DraftRouterPredictor, NextGatePredictor, PolicyInputs, open_draft_predictor
from moeedge.scheduler.sizing import CacheBudget, cache_budget, emulated_threads, in_host_memory, n_staging_slots
from moeedge.scheduler.slot_memory import MemoryWatch, SlotMemory
from moeedge.scheduler.tiers import MakePolicy, Tier
from moeedge.units import format_bytes

_Predictor = TypeVar("_Predictor", NextGatePredictor, DraftRouterPredictor)
POSTPONED = "Expert times are measured after the first answer; until then CPU and device share work untuned."
_TIER_READERS = 3  # threads that fill the staging memory from RAM or from the disk
_PREFILL_TOKENS_MIN = 65  # smaller batches are split as verifications are
_TRANSFER_EXPERTS = 64  # experts in one transfer of a policy that moves in batches: all of a layer that a step brings


def check_policy(config: PlacementConfig) -> None:
    """Raises InputError for a policy that the engine does not know, before anything is loaded."""
    if config.policy not in POLICIES:
        raise InputError(
            f"Unknown policy '{config.policy}'.", f"Choose from: {', '.join(POLICIES)}.{where_simulated(config.policy)}"
        )


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A placement to be opened: the tiers of the target's experts, with the policy of each."""

    config: PlacementConfig  # of the device
    device: ResolvedDevice
    in_ram: PlacementConfig | None  # of experts in RAM, whose size are its vram_bytes; None: none are loaded there
    target: Context
    draft: Context | None  # its speed is measured; None without a draft model
    gamma: int  # the usual draft length, 0 without speculation
    gamma_max: int  # the longest
    keep: bool  # the cache stays on where it does not pay
    run: Run  # shows that the device is measured; its notes get a sentence for each choice
    has_draft_states: bool  # drafts come with hidden states all the same, since a head of the target makes them

    def open(self) -> tuple[PlacementManager | None, Calibration | None]:
        """The placement of the target's experts, to be closed before the contexts, and what was measured for it."""
        self.run.notes.extend(self.device.notes)
        has_device = self.device.kind != "none"
        if not has_device and self.in_ram is None:
            reason, ignored = "no device holds experts here", ignored_ablations("none", self.config.ablations)
            if self.config.has_size:
                option = "--vram" if self.config.vram_bytes is not None else "--cache-ratio"
                self.run.warn(f"{option} has no effect: {reason} (moeedge devices lists them).")
            if ignored:
                self.run.warn(f"--ablate {', '.join(ignored)} has no effect: {reason}.")
            return None, None
        with ExitStack() as stack:
            tier, opening, aside = None, self, self
            if self.in_ram is not None:
                policy = self.in_ram.policy if self.in_ram.policy in ram_tier.POLICIES else "lfu"
                in_ram = replace(self.in_ram, policy=policy)
                aside = replace(self, config=in_ram, run=Run() if has_device else self.run)
                tier = aside._open_ram()
            if tier is not None:
                stack.callback(tier.close)
            if tier is not None and has_device:
                assert self.target.sensor is not None  # the caller checks it
                tier.attach(self.target.sensor)
                if self.config.prefill is PrefillPath.AUTO:  # what is on the device needs no slot in RAM
                    opening = replace(opening, config=replace(self.config, prefill=PrefillPath.RESIDENT))
            cache = opening._open_on_device() if has_device else None
            if self.in_ram is not None and has_device:
                self.run.notes.extend(aside.run.notes)
            manager, calibration = None, None
            if cache is not None:
                stack.enter_context(cache)
                manager, calibration = opening._use_device(cache, tier)
            elif tier is not None:
                manager = replace(aside, run=self.run)._make_manager([tier])
            if manager is not None:
                stack.pop_all()
            return manager, calibration

    def _open_ram(self) -> Tier | None:
        """Experts in RAM, those first that earlier runs used most; None where there is no room."""
        target, run, model, reading = self.target, self.run, self.target.model, devices.host_memory()
        assert model.dense is not None  # loaded for this
        tensors, files = expert_tensors(model.path, n_layers=model.info.n_layers)
        free_bytes, total_bytes = ram_tier.free_for_slots(reading.free_bytes, model.dense), reading.total_bytes
        pool_bytes_max = ram_tier.POOL_SLOTS * max((tensor.stride for tensor in tensors), default=0)
        sizes = {"free_bytes": free_bytes, "total_bytes": total_bytes, "n_ubatch": target.n_ubatch}
        budget = cache_budget(self.config, None, tensors, model, **sizes)
        cache = self._open_cache("RAM", budget, tensors, files, device=IN_RAM, pool_bytes_max=pool_bytes_max)
        if cache is None:
            return None
        with ExitStack() as stack:
            stack.enter_context(cache)
            ram_tier.describe(cache, target, self.config.policy, run)
            ram_tier.use_measured_readers(cache, target, run)
            kept = ram_tier.warm_start(cache, target, run) if self.config.warm_start else None
            watch = MemoryWatch(default_reserve(total_bytes), devices.host_memory)
            slots = SlotMemory(cache, model.path, len(model.host_expert_layers), watch)
            stack.callback(slots.close)  # its thread ends before the cache
            tier = Tier(cache, self._policy_maker(None), model, slots=slots, kept=kept)
            stack.pop_all()
        return tier

    def _use_device(self, cache: ExpertCache, ram: Tier | None) -> tuple[PlacementManager | None, Calibration | None]:
        """The placement in the open cache, None where it does not pay, and what was measured for it."""
        config, calibration = self.config, None
        postpones = config.calibrate and config.calibrate_later
        if ram is None:
            allowed = replace(config, calibrate=False) if postpones else config
            calibration = calibrate(self.target, self.draft, cache, allowed, self.gamma, self.device, self.run)
        else:
            cache.set_readers(_TIER_READERS)
        postpones = postpones and calibration is None and self.target.n_ctx >= CONTEXT_MIN
        self._describe_placement(cache)
        if calibration is None:
            self.run.warn(_describe_unmeasured(self.target, has_tier=ram is not None, postpones=postpones))
            is_forced = ram is not None and config.prefill is PrefillPath.RESIDENT
            self._use_paths(UNMEASURED, cache, forced="next to experts in RAM" if is_forced else "")
        elif not self._use(calibration, cache):
            return None, calibration
        # when memory of the device runs short, the cache gets fewer slots, unless the user gave its size
        watched = self.device.kind == "gpu" and not config.has_size
        make = self._policy_maker(calibration)
        tier = Tier(cache, make, self.target.model, device=self.device, watched=watched)
        manager = self._make_manager([tier, *([ram] if ram is not None else [])])
        if postpones:
            manager.postponed = partial(self._measure_now, manager)
        return manager, calibration

    def _measure_now(self, manager: PlacementManager, run: Run) -> tuple[Calibration, bool]:
        """Measures with an open placement and empty KV caches: the result, and whether the cache stays.

        Raises Cancelled where `run` is; the placement then goes on as it was, with empty slots.
        """
        with manager.measuring():
            calibration = calibrate(self.target, self.draft, manager.cache, self.config, self.gamma, self.device, run)
        assert calibration is not None  # the context has room, and measuring is allowed
        is_on = replace(self, run=run)._use(calibration, manager.cache)
        if is_on:
            manager.use(self._policy_maker(calibration))
        return calibration, is_on

    def _policy_maker(self, calibration: Calibration | None) -> MakePolicy:
        """Makes the policy for slots, with the times that were measured."""
        units = None if calibration is None else calibration.units
        config = replace(self.config.policy_config(gamma=self.gamma), cost_model=units)
        return partial(make_policy, self.config.policy, config=config)

    def _use(self, calibration: Calibration, cache: ExpertCache) -> bool:
        """Sets what was measured to be fastest; whether the cache stays: it pays, was asked for, or is emulation."""
        is_on = calibration.pays or self.keep or self.device.kind not in ("gpu", "rpc")
        if calibration.times:
            self.run.note(calibration.times)
        kept = "given by the user" if self.config.has_size else "part of the measured division of layers"
        decision = calibration.cache_decision(is_on=is_on, emulated=self.device.kind == "emulated", kept=kept)
        self.run.note(decision.sentence(), calibration.level if calibration.pays else Level.WARNING)
        if is_on:
            cache.set_readers(calibration.n_readers)
            self._use_paths(calibration, cache)
        return is_on

    def _use_paths(self, measured: Calibration, cache: ExpertCache, forced: str = "") -> None:
        """Sets how the device computes: as configured, or else the fastest way. forced: as in `path_decisions`."""
        prefill, device_path = self.config.prefill, self.config.device_path
        cache.set_prefill(measured.prefill_path if prefill is PrefillPath.AUTO else prefill, _PREFILL_TOKENS_MIN)
        cache.set_device_path(measured.device_path if device_path is None else device_path)
        for decision in measured.path_decisions(prefill, device_path, forced=forced):
            self.run.note(decision.sentence())

    def _open_on_device(self) -> ExpertCache | None:
        """The cache on the device; None, with a note, where it has no room for an expert of every layer."""
        config, device, target, model = self.config, self.device, self.target, self.target.model
        tensors, files = expert_tensors(model.path, n_layers=model.info.n_layers)
        if device.kind == "gpu" and model.host_expert_layers:
            warm_up_gpu(target, self.draft, self.gamma_max)
        reading = (devices.read_memory(device) if device.kind == "gpu" else None) or device
        sizes = {"free_bytes": reading.free_bytes, "total_bytes": reading.total_bytes, "n_ubatch": target.n_ubatch}
        cache = self._open_cache(
            device.label,
            cache_budget(config, device, tensors, model, **sizes),
            *(tensors, files),
            device=device.ggml_name,
            n_stage=n_staging_slots(config, device.kind, model.info.n_experts, mean_expert_bytes(tensors)),
            # next to slots in RAM the uploads come from these
            pin_files=device.kind == "gpu"
            and config.pins_files
            and model.dense is None
            and _has_room_to_pin(in_host_memory(tensors, model)),
            emulated_threads=emulated_threads(device) or 1,
            link_bytes_per_s=float(device.link_bytes_per_s),
            link_latency_s=device.latency_us * 1e-6,
        )
        if cache is not None and device.kind == "rpc":
            rpc.limit_waits(device.endpoint)
        return cache

    def _open_cache(
        self, label: str, budget: CacheBudget, tensors: list[ExpertTensor], files: list[Path], **settings: Any
    ) -> ExpertCache | None:
        """The cache of that size; None, with a note, without room for an expert of every layer. settings: its config's.

        tensors, files: of all experts. Raises ModelFileError where the file has changed.
        """
        model, run = self.target.model, self.run
        run.notes.extend(budget.notes)
        if budget.n_slots == 0:
            if not budget.notes:
                run.warn("The expert cache is off, as asked: every expert stays on the CPU.")
            return None
        try:
            cache = ExpertCache(
                CacheConfig(
                    files=files,
                    tensors=in_host_memory(tensors, model),
                    n_layers=model.info.n_layers,
                    n_experts=model.info.n_experts,
                    ratio=budget.ratio,
                    disk_bytes_per_s=self.config.disk_bytes_per_s,
                    **settings,
                )
            )
        except EngineError as error:  # no memory for a single slot
            run.warn(f"{error.message} The expert cache is off.")
            return None
        with ExitStack() as stack:
            stack.enter_context(cache)
            if model.dense is not None:
                model.dense.check_files()  # the cache reads where the header said
            info, n_slots = cache.info, cache.info.n_slots
            # a device may give less memory than it promised
            if n_slots < len(model.host_expert_layers):
                text = f"{label} has memory for {n_slots} experts, less than one per layer"
                run.warn(f"{text}: the expert cache is off.")
                return None
            if n_slots < info.slots_wanted:
                text = f"The expert cache holds {n_slots:,} experts instead of {info.slots_wanted:,}"
                run.warn(f"{text}: {label} has no memory for more.")
            if info.unpinned:
                text = "Uploads of experts are slower than usual: the GPU's driver gives no pinned (page-locked)"
                run.warn(f"{text} memory for them.")
            stack.pop_all()
        return cache

    def _make_manager(self, tiers: Sequence[Tier]) -> PlacementManager:
        """The manager, with everything that the policy reads."""
        target, draft, execution = self.target, self.draft, self.config.execution
        policy, reads = tiers[0].driver.policy, tiers[0].driver.policy.required_inputs
        inputs = PolicyInputs()
        if "router-scores" in reads:
            inputs.router_scores = _capture(target)
            inputs.router_scores.enable(CaptureFlags.PROBS)
        if "block-inputs" in reads:
            predicted = "the next layers' experts from what routers read"
            inputs.gate_predictor = self._predictor(policy, partial(NextGatePredictor, target.model), predicted)
        if "draft-inputs" in reads and execution.drafting != "off":
            n_layers = policy.cutoff(target.model.info.n_expert_used)
            layers = f"first {n_layers} of {target.model.info.n_expert_layers} layers"
            predicted = f"the experts of the {layers} from what the draft's layers read"
            make = partial(open_draft_predictor, target, draft, n_layers)
            inputs.draft_predictor = self._predictor(policy, make, predicted)
        usual = _TRANSFER_EXPERTS if policy.execution_model.batched_io else 0
        tiers[0].cache.set_batch(usual if execution.batch is None else execution.batch)
        inputs.hidden_states = self._keeps_hidden_states(policy)
        manager = PlacementManager(tiers, self.config, target, inputs)
        if target.n_parallel > 1 and (inputs.hidden_states or inputs.draft_predictor is not None):
            text = f"For several texts in a batch the policy {policy.name} plans"
            self.run.warn(f"{text} without what the draft computes.")
        if manager.layer_hook is not None:
            if target.n_parallel * (self.gamma_max + 1) > CAPTURED_TOKENS:
                text = f"In verifications of more than {CAPTURED_TOKENS} tokens no expert is predicted or loaded"
                self.run.warn(f"{text} between the layers.")
            _capture(target).set_hook(manager.layer_hook)
        if manager.draft_prefetch is not None and execution.drafting == "vanilla" and draft is not None:
            _capture(draft).set_hook(manager.draft_prefetch.before_draft_layer)
        return manager

    def _describe_placement(self, cache: ExpertCache) -> None:
        """Tells the user where the experts are, and by which policy."""
        config, model, label = self.config, self.target.model, self.device.label
        ignored = ignored_ablations(config.policy, config.ablations)
        ablated = "".join(f", {name}" for name in sorted(config.ablations - set(ignored)))
        n_slots, n_all = cache.info.n_slots, model.info.n_expert_layers * model.info.n_experts
        slots = f"{n_slots:,} of {n_all:,} ({n_slots / n_all:.1%}, {format_bytes(cache.info.pool_bytes)})"
        self.run.note(f"Experts are cached on {label}: {slots}, policy {config.policy}{ablated}.")
        if pinned_bytes := cache.info.pinned_bytes:
            size = format_bytes(pinned_bytes)
            self.run.warn(f"{label} reads the other experts from the file's pages: {size} stay in RAM (--no-pin: not).")
        if model.storage == "mapped":
            text = "The model is larger than the free memory: its other experts stay as they are in the file"
            self.run.warn(f"{text}, and the CPU computes those slower than repacked ones.")
        if ignored:
            self.run.warn(f"--ablate {', '.join(ignored)} changes nothing about the policy {config.policy}.")

    def _predictor(self, policy: Policy, make: Callable[[], _Predictor], predicted: str) -> _Predictor | None:
        """The predictor that `make` returns; None, with a note, where it raises ModelFileError."""
        try:
            predictor = make()
        except ModelFileError as error:
            self.run.warn(f"The policy {policy.name} predicts no experts here: {error}.")
            return None
        self.run.note(f"The policy {policy.name} predicts {predicted}.")
        return predictor

    def _keeps_hidden_states(self, policy: Policy) -> bool:
        """Whether the draft's hidden states are kept for the policy."""
        if "draft-states" not in policy.required_inputs or self.gamma == 0:
            return False
        has_states = self.has_draft_states or (self.draft is not None and self.draft.has_hidden_states)
        source = "hidden states" if has_states else "tokens alone, without its hidden states"
        self.run.note(f"The policy {policy.name} predicts experts from the draft's {source}.")
        return has_states


def warm_up_gpu(target: Context, draft: Context | None, gamma: int) -> None:
    """Decodes a batch of each size, which makes a GPU allocate its scratch memory. Leaves the KV caches empty."""
    for context in filter(None, (target, draft)):
        text = context.model.tokenize("A few words, so that there is something to compute.")
        for n in (_PREFILL_TOKENS_MIN, context.n_parallel * (gamma + 1), 1):
            n = max(1, min(n, context.n_ctx // 4, context.n_ubatch))
            context.clear()
            context.decode((text * n)[:n], phase=Phase.PREFILL, logits="last")
        context.clear()
        if context.sensor is not None:
            context.sensor.read_counts()


def _capture(context: Context) -> ActivationCapture:
    capture = context.capture_activations()
    assert capture is not None  # a target with a sensor, or a draft that a predictor reads
    return capture


def _describe_unmeasured(target: Context, *, has_tier: bool, postpones: bool) -> str:
    if has_tier:
        return Notification("Experts are not timed: they come from the disk, whose speed decides.")
    if postpones:
        return Notification(POSTPONED)
    effect = "CPU and device share work untuned."
    if target.n_ctx < CONTEXT_MIN:
        return f"Expert times were not measured, because a context of {target.n_ctx} tokens is too short: {effect}"
    return Notification(f"Expert times were not measured, as asked: {effect}")


def _has_room_to_pin(tensors: list[ExpertTensor]) -> bool:
    """Whether RAM has room for the experts, which then cannot be evicted, and an eighth is left to other programs."""
    return fits(expert_bytes(tensors) + total_memory() // 8)
