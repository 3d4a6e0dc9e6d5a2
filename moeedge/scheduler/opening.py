"""Expert placement is put together here: budget, slots on the device, policy, measurements; or why there is none."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError, InputError
from moeedge.hardware import devices, rpc
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_tensors
from moeedge.native import CAPTURED_TOKENS, ActivationCapture, CaptureFlags
from moeedge.native.abi import Phase, PrefillPath
from moeedge.native.cache import CacheConfig, ExpertCache, ExpertTensor
from moeedge.notifications import Notify
from moeedge.policies.base import CacheShape, CutoffPolicy, Policy, PolicyConfig
from moeedge.policies.registry import POLICIES, ignored_ablations, make_policy
from moeedge.scheduler.calibration import Calibration, calibrate
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.manager import ExpertPlacement
from moeedge.scheduler.microbench import CONTEXT_MIN
from moeedge.scheduler.on_demand import LayerHook
from moeedge.scheduler.prediction import DraftRouterPredictor, open_draft_foresight, open_gate_foresight
from moeedge.scheduler.sizing import Budget, cache_budget, stage_slots
from moeedge.units import format_bytes

_PREFILL_TOKENS_MIN = 65  # smaller batches are split as verifications are
_BATCH = 64  # experts in one transfer, of a policy that asks for it: all of a layer's that a step brings
_PATHS = {"cpu": PrefillPath.CPU, "resident": PrefillPath.RESIDENT, "stream": PrefillPath.STREAM}


@dataclass(frozen=True)
class Opened:
    """Placement, or None; `notes` say what there is and why something is off."""

    placement: ExpertPlacement | None
    notes: list[str] = field(default_factory=list)
    calibration: Calibration | None = None
    vram_bytes: int | None = None  # used on the device


def check_policy(config: PlacementConfig) -> None:
    """Raises InputError for a policy that nobody knows; to be called before anything is loaded."""
    if config.policy not in POLICIES:
        raise InputError(f'There is no policy "{config.policy}".', f"Known: {', '.join(POLICIES)}.")


def open_placement(
    config: EngineConfig,
    device: ResolvedDevice,
    target: Context,
    draft: Context | None,
    *,
    gamma: int,
    notify: Notify,
) -> Opened:
    """The placement of `target`'s experts on `device`. The caller closes it before it frees the contexts.

    draft: its speed is measured; None without a draft model. gamma: the draft length, 0 without speculation.
    notify: called before the device is measured.
    """
    if config.mode == "stock" or target.sensor is None:
        return Opened(None)
    notes = list(device.notes)
    if device.kind == "none":
        if config.placement.asked:
            notes.append("There is no device for experts: --vram and --cache-ratio have no effect.")
        idle = ignored_ablations("none", config.placement.ablations)
        if idle:
            notes.append(f"There is no device for experts: --ablate {', '.join(idle)} has no effect.")
        return Opened(None, notes)
    opening = _Opening(config, device, target, draft, gamma, notify, notes)
    with ExitStack() as stack:
        cache = opening.open_cache(stack)
        if cache is None:
            return Opened(None, notes)
        opened = opening.start(cache)
        if opened.placement is not None:
            stack.pop_all()
        return opened


@dataclass(frozen=True)
class _Opening:
    config: EngineConfig
    device: ResolvedDevice
    target: Context
    draft: Context | None
    gamma: int
    notify: Notify
    notes: list[str]

    def open_cache(self, stack: ExitStack) -> ExpertCache | None:
        """Slots on the device; None, and a note, where there is no room or no need for them."""
        info = self.target.model.info
        tensors, files = expert_tensors(self.target.model.path, n_layers=info.n_layers)
        if self.device.kind == "gpu" and not self.target.model.experts_on_gpu:
            self.settle()
        budget = self._budget(tensors)
        self.notes.extend(budget.notes)
        if budget.n_slots == 0:
            if not budget.notes:
                self.notes.append("The expert cache is off, as asked: every expert stays on the CPU.")
            return None
        cache_config = CacheConfig(
            device=self.device.ggml_name,
            files=files,
            tensors=tensors,
            n_layers=info.n_layers,
            n_experts=info.n_experts,
            ratio=budget.ratio,
            n_stage=stage_slots(self.config.placement, self.device.kind, info.n_experts),
            emulated_threads=self._emulated_threads(),
            link_bytes_per_s=float(self.device.link_bytes_per_s),
            link_latency_s=self.device.latency_us * 1e-6,
        )
        try:
            cache = stack.enter_context(ExpertCache.open(cache_config))
        except EngineError as error:  # no memory for a single slot
            self.notes.append(f"{error.message} The expert cache is off.")
            return None
        if self.device.kind == "rpc":
            rpc.limit_waits(self.device.endpoint)
        if cache.info.n_slots < info.n_expert_layers:
            self.notes.append(
                f"{self.device.label} has memory for {cache.info.n_slots} experts, less than one per layer: "
                "the expert cache is off."
            )
            return None
        if cache.info.n_slots < cache.info.slots_wanted:
            self.notes.append(
                f"The expert cache has shrunk from {cache.info.slots_wanted:,} slots to {cache.info.n_slots:,}: "
                f"{self.device.label} has no room for more."
            )
        if cache.info.unpinned:
            self.notes.append("The host gives no pinned memory for transfers: experts move more slowly.")
        return cache

    def settle(self) -> None:
        """Lets a GPU load its kernels and allocate their scratch, so that what is free afterwards stays free.

        Compute buffers are there since the contexts were made; the rest comes with the first batches of each size.
        Leaves the KV caches empty.
        """
        for context in (self.target, self.draft):
            if context is None:
                continue
            text = context.model.tokenize("A few words, so that there is something to compute.")
            for n in (_PREFILL_TOKENS_MIN, self.gamma + 1, 1):
                n = max(1, min(n, context.n_ctx // 4, context.n_ubatch))
                context.clear()
                context.decode((text * n)[:n], phase=Phase.PREFILL, logits="last")
            context.clear()
            if context.sensor is not None:
                context.sensor.read_counts()

    def _budget(self, tensors: list[ExpertTensor]) -> Budget:
        reading = devices.read_memory(self.device) if self.device.kind == "gpu" else None
        return cache_budget(
            self.config.placement,
            self.device,
            tensors,
            self.target.model.info,
            free_bytes=reading.free_bytes if reading is not None else self.device.free_bytes,
            total_bytes=reading.total_bytes if reading is not None else self.device.total_bytes,
            n_ubatch=self.target.n_ubatch,
            experts_on_device=self.target.model.experts_on_gpu,
        )

    def _emulated_threads(self) -> int:
        if self.device.kind != "emulated":
            return 1
        # half the cores: the CPU's part runs beside it, and two teams on the same cores wait for each other
        return self.device.threads or max(1, library.physical_cores() // 2)

    def start(self, cache: ExpertCache) -> Opened:
        """Measures, makes the policy and attaches; placement is None where measuring showed that it does not pay."""
        requested = self.config.placement
        info = self.target.model.info
        sensor = self.target.sensor
        assert sensor is not None  # open_placement looked
        group, capacity, _ = cache.groups()
        shape = CacheShape(info.n_layers, info.n_experts, group, capacity)
        settings = PolicyConfig(
            gamma=self.gamma,
            cap=requested.utility_cap,
            forgetting=requested.forgetting,
            ablations=requested.ablations,
            cutoff_layer=requested.execution.cutoff_layer,
        )
        calibration = calibrate(
            self.target,
            self.draft,
            cache,
            shape,
            requested,
            settings,
            device_label=self.device.label,
            emulated_threads=self._emulated_threads() if self.device.kind == "emulated" else 0,
            notify=self.notify,
        )
        calibration = self._at_least_the_link(calibration, cache)
        self._describe(cache)
        prefill = (
            requested.prefill if requested.prefill != "auto" else calibration.prefill_path if calibration else "cpu"
        )
        cache.set_prefill(_PATHS[prefill], _PREFILL_TOKENS_MIN)
        if calibration is None:
            self.notes.append(self._unmeasured())
        else:
            self.notes.append(calibration.sentence(emulated=self.device.kind == "emulated", prefill=prefill))
            settings = replace(settings, cost_model=calibration.units)
            if self.device.kind in ("gpu", "rpc") and not calibration.pays and not requested.asked:
                self.notes.append(
                    "By this measurement the cache does not pay here: it is off; --cache-ratio R or --vram SIZE "
                    "keeps it on, moeedge calibrate measures again."
                )
                return Opened(None, self.notes, calibration)
        policy = make_policy(requested.policy, shape, settings)
        within = self._within(cache, policy)
        foresight = self._draft_foresight(policy)
        batch = requested.execution.batch
        cache.set_batch((_BATCH if policy.execution_model.batched_io else 0) if batch is None else batch)
        placement = ExpertPlacement(
            cache,
            sensor,
            policy,
            device=self.device.label,
            cache_ratio=cache.info.n_slots / (info.n_expert_layers * info.n_experts),
            expert_layers=info.expert_layers,
            read_vram=lambda: self._memory(cache),
            on_lost=self._forget_worker,
            scores=self._scores(policy),
            within=within,
            foresight=foresight,
            vanilla=requested.execution.drafting == "vanilla",
            reads_hidden_states=self._reads_hidden_states(policy),
        )
        if within is not None:
            self._target_capture().set_hook(within)
        if placement.drafting is not None and requested.execution.drafting == "vanilla":
            self._draft_capture().set_hook(placement.drafting.block)
        memory = self._memory(cache)
        return Opened(placement, self.notes, calibration, memory[0] if memory else None)

    def _at_least_the_link(self, calibration: Calibration | None, cache: ExpertCache) -> Calibration | None:
        """An emulated link makes good what a busy machine delayed, which a short measurement takes for speed."""
        if (
            calibration is None
            or calibration.units is None
            or not (self.device.link_bytes_per_s or self.device.latency_us)
        ):
            return calibration
        expert_bytes = float(cache.groups()[2].mean())
        link_s = expert_bytes / self.device.link_bytes_per_s if self.device.link_bytes_per_s else 0.0
        floor_s = link_s + self.device.latency_us * 1e-6
        units = calibration.units
        return replace(calibration, units=replace(units, transfer_expert_s=max(units.transfer_expert_s, floor_s)))

    def _target_capture(self) -> ActivationCapture:
        capture = self.target.capture_activations()
        assert capture is not None  # it has a sensor
        return capture

    def _draft_capture(self) -> ActivationCapture:
        capture = self.draft.capture_activations() if self.draft is not None else None
        assert capture is not None  # foresight was opened on it
        return capture

    def _scores(self, policy: Policy) -> ActivationCapture | None:
        """Where the routers' probabilities are kept for a policy that needs them."""
        if "router-scores" not in policy.required_inputs:
            return None
        capture = self._target_capture()
        capture.enable(CaptureFlags.PROBS)
        return capture

    def _within(self, cache: ExpertCache, policy: Policy) -> LayerHook | None:
        """What is to happen between the layers of a verification, if anything."""
        gate = None
        if "block-inputs" in policy.required_inputs:
            gate, why_not = open_gate_foresight(self.target)
            if gate is None:
                self.notes.append(f"The policy {policy.name} foretells nothing here: {why_not}.")
            else:
                self.notes.append(f"The policy {policy.name} foretells the next layers' experts by what routers read.")
        load_misses = self.config.placement.execution.misses == "load"
        within = LayerHook(cache, policy, gate=gate, load_misses=load_misses)
        if not within.is_needed:
            return None
        if self.gamma >= CAPTURED_TOKENS:
            self.notes.append(
                f"Verifications of more than {CAPTURED_TOKENS} tokens are not watched between the layers: nothing is "
                "foretold or loaded there."
            )
        return within

    def _draft_foresight(self, policy: Policy) -> DraftRouterPredictor | None:
        """What is foretold while the draft works, for a policy that needs it."""
        if "draft-inputs" not in policy.required_inputs or self.config.placement.execution.drafting == "off":
            return None
        n_all = n_ahead = self.target.model.info.n_expert_layers
        if isinstance(policy, CutoffPolicy):
            n_ahead = policy.cutoff(self.target.model.info.n_expert_used)
        foresight, why_not = open_draft_foresight(self.target, self.draft, n_ahead)
        if foresight is None:
            self.notes.append(f"The policy {policy.name} foretells nothing here: {why_not}.")
        else:
            self.notes.append(
                f"The policy {policy.name} foretells experts for the first {n_ahead} of {n_all} layers, by what the "
                "draft's layers read."
            )
        return foresight

    def _reads_hidden_states(self, policy: Policy) -> bool:
        """Whether the draft's hidden states are to be kept for the policy; a note says what it foretells by."""
        if "draft-states" not in policy.required_inputs or self.gamma == 0:
            return False
        has_hidden_states = self.draft is not None and self.draft.has_hidden_states
        by = "hidden states" if has_hidden_states else "tokens alone, without its hidden states"
        self.notes.append(f"The policy {policy.name} foretells experts by the draft's {by}.")
        return has_hidden_states

    def _unmeasured(self) -> str:
        """Why nothing is known of this machine, and what follows."""
        n_ctx = self.target.n_ctx
        why = f"a context of {n_ctx} tokens has no room for it" if n_ctx < CONTEXT_MIN else "as asked"
        return f"Nothing was measured, {why}: work is not balanced between CPU and device."

    def _describe(self, cache: ExpertCache) -> None:
        info = self.target.model.info
        requested = self.config.placement
        ignored = ignored_ablations(requested.policy, requested.ablations)
        ablated = sorted(requested.ablations - set(ignored))
        n_all = info.n_expert_layers * info.n_experts
        self.notes.append(
            f"Experts on {self.device.label}: {cache.info.n_slots:,} of {n_all:,} have a slot "
            f"({cache.info.n_slots / n_all:.1%}, {format_bytes(cache.info.pool_bytes)}); "
            f"policy {requested.policy}{''.join(f', {name}' for name in ablated)}."
        )
        if self.target.model.experts_mapped:
            self.notes.append(
                "The model is larger than the free memory: its other experts stay as they are in the file, and the CPU "
                "computes those slower than repacked ones."
            )
        if ignored:
            self.notes.append(f"--ablate {', '.join(ignored)} changes nothing about the policy {requested.policy}.")

    def _memory(self, cache: ExpertCache) -> tuple[int, int] | None:
        stats = cache.stats()
        filled_bytes = cache.info.pool_bytes * stats.slots_used // max(1, cache.info.n_slots)
        reading = devices.read_memory(self.device, pool_bytes=cache.info.pool_bytes, filled_bytes=filled_bytes)
        return (reading.used_bytes, reading.total_bytes) if reading is not None else None

    def _forget_worker(self) -> None:
        if self.device.kind == "rpc":
            rpc.mark_lost(self.device.endpoint)
