"""Computes how much memory of each kind a session takes, from headers alone.

Every decision is the session's own code (engine/loading.py, llama/model_memory.py, scheduler/sizing.py), and llama.cpp
reports what it would allocate.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

import psutil

from moeedge.engine import loading
from moeedge.engine.context_choice import beyond_training
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.host import default_reserve
from moeedge.llama.gguf_file import expert_bytes, mean_expert_bytes, read_tensors
from moeedge.llama.model import Model
from moeedge.llama.model_memory import N_CTX_STEP, ModelMemory, choose_n_ctx
from moeedge.planning.headers import LoadableModel, ModelFacts, loadable, read_facts
from moeedge.planning.memory_map import (
    KERNEL_BYTES,
    Footprint,
    MemoryItem,
    MemoryMap,
    MemoryPool,
    MemoryShare,
    PlannedMachine,
    draft_footprint,
    footprint,
)
from moeedge.run import Closing, Run
from moeedge.scheduler import sizing
from moeedge.scheduler.sizing import CacheBudget


class Planner(Closing):
    """Memory maps of one model (and draft) on one machine, at any context size; a context manager.

    reserve: bytes of the device to leave free besides the cache's own reserve. names: pull names of headers alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        machine: PlannedMachine,
        *,
        reserve: int = 0,
        names: Mapping[Path, str] = MappingProxyType({}),
    ) -> None:
        self.machine = machine
        self.reserve = reserve
        self.notes: list[str] = []
        self._map = lru_cache(maxsize=None)(self._compute)
        self._target = lru_cache(maxsize=None)(self._load_target)
        with ExitStack() as stack:
            self.file: LoadableModel = stack.enter_context(loadable(config.model))
            self.draft_file: LoadableModel | None = None
            config = replace(config, model=self.file.path)
            if isinstance(config.draft, Path) and config.gamma > 0:
                self.draft_file = stack.enter_context(loadable(config.draft))
                config = replace(config, draft=self.draft_file.path)
            self.config = config
            self._stack = stack
            header = self._target(False)
            self.facts, self._experts = read_facts(header, self.file, names)
            draft = self._load_draft(header)
            self.chosen = loading.choose_draft(config, machine.device, header, draft, Run(notes=self.notes), stack)
            self.draft_facts: ModelFacts | None = None
            if self.chosen.model is not None and self.draft_file is not None:
                self.draft_facts, _ = read_facts(self.chosen.model, self.draft_file, names)
            self._program_bytes = psutil.Process().memory_info().rss
            self._stack = stack.pop_all()

    def _load_target(self, all_on_gpu: bool) -> Model:
        machine = self.machine
        config, sizes = replace(self.config, ram="auto"), (machine.ram_free_bytes, machine.ram_total_bytes)
        storage = loading.weight_storage(config, machine.device, *sizes, whole_fits=all_on_gpu)  # without --ram
        device = replace(machine.device, storage=storage)
        target = loading.load_target(self.config, device, whole_fits=all_on_gpu, header_only=True)
        return self._stack.enter_context(target)

    def _load_draft(self, target: Model) -> Model | None:
        if self.draft_file is None or not target.can_reject_drafts:
            return None
        taken = {"loaded": target.info.size_bytes, "on demand": self.facts.dense_bytes, "mapped": 0}[target.storage]
        draft = loading.load_draft(
            self.config,
            self.machine.device,
            header_only=True,
            free_bytes=self.machine.ram_free_bytes - taken,
            total_bytes=self.machine.ram_total_bytes,
        )
        return self._stack.enter_context(draft)

    @property
    def _models(self) -> list[Model]:
        return list(filter(None, (self._target(False), self.chosen.model)))

    @property
    def _memory(self) -> list[ModelMemory]:
        return loading.memory_of(self.config, self._models)

    def _all_on_gpu(self, n_ctx: int) -> bool:
        """Whether a session with -c n_ctx (0: without -c) keeps the entire model on the GPU."""
        if self.machine.device.kind != "gpu":
            return False
        return loading.whole_model_fits(replace(self.config, n_ctx=n_ctx), self.machine.device, self._models)

    def _footprints(self, target: Model, n_ctx: int) -> tuple[Footprint, Footprint]:
        return footprint(target, n_ctx, self.config), draft_footprint(self.chosen, target, n_ctx, self.config)

    def _kv_room(self, all_on_gpu: bool) -> int:
        """Returns the bytes that are free for KV caches after the models are loaded."""
        target, device = self._target(all_on_gpu), self.machine.device
        loaded = self._footprints(target, N_CTX_STEP)
        if device.kind == "gpu" and loading.kv_on_gpu(self.config, device, target):
            weights = sum(model.gpus[device.ggml_name].weights_bytes for model in loaded)
            return max(0, device.free_bytes - KERNEL_BYTES - weights)
        return max(0, self.machine.ram_free_bytes - sum(model.fixed_bytes for model in loaded))

    def default_map(self) -> MemoryMap:
        """Returns the map of a session with the user's -c, or with the context that it chooses without one."""
        if self.config.n_ctx:
            self.notes.extend(beyond_training(self.config, self.facts.n_ctx_train))
            return self.map(self.config.n_ctx)
        all_on_gpu = self._all_on_gpu(0)
        kv_in_ram = not loading.kv_on_gpu(self.config, self.machine.device, self._target(False))
        n_ctx, note = choose_n_ctx(
            self._memory, free_bytes=self._kv_room(all_on_gpu), loads_experts=self.loads_on_demand and kv_in_ram
        )
        self.notes.extend([note] if note else [])
        return self._map(n_ctx, all_on_gpu)

    @property
    def loads_on_demand(self) -> bool:
        """Whether a chat loads experts from the file into RAM as it needs them, without --ram."""
        return self._target(self._all_on_gpu(self.config.n_ctx)).storage == "on demand"

    def map(self, n_ctx: int) -> MemoryMap:
        """Returns the map of a session with -c n_ctx."""
        all_on_gpu, refused = self._all_on_gpu(n_ctx), ""
        try:
            choose_n_ctx(self._memory, n_ctx, self._kv_room(all_on_gpu))
        except InputError as error:
            refused = error.message
        return replace(self._map(n_ctx, all_on_gpu), refused=refused)

    def _compute(self, n_ctx: int, all_on_gpu: bool) -> MemoryMap:
        target, machine, device = self._target(all_on_gpu), self.machine, self.machine.device
        ours, drafts = self._footprints(target, n_ctx)
        host_experts = expert_bytes(sizing.in_host_memory(self._experts, target))
        # next to the weights that they change: on a GPU, if the model uses one
        tensors = (tensor for adapter in self.config.context.adapters for tensor in read_tensors(adapter.path))
        adapters = MemoryItem("LoRA adapters", sum(tensor.size_bytes for tensor in tensors))
        places, budget, lines = [], CacheBudget(0.0, 0, 0), list[MemoryItem]()
        if device.kind == "gpu":
            share = ours.gpus[device.ggml_name]
            weights = _weights(share.weights_bytes, self.facts.experts_bytes - host_experts)
            lines = _items(weights, share, drafts.gpus[device.ggml_name])
            lines += [adapters, MemoryItem("kernels (an allowance)", KERNEL_BYTES)]
        if device.kind != "none":
            budget, cache = self._cache(target, device.free_bytes - sum(line.n_bytes for line in lines))
            lines += cache
        if device.kind in ("gpu", "rpc"):
            places.append(MemoryPool(device.label, device.total_bytes, device.free_bytes, tuple(lines)))
        weights = _weights(ours.ram.weights_bytes, host_experts, ours.fixed_bytes)
        ram = _items(weights, ours.ram, drafts.ram, drafts.ram.weights_bytes - drafts.fixed_bytes)
        ram += [] if target.uses_gpu else [adapters]
        ram += [MemoryItem("program and vocabulary", self._program_bytes)]
        ram += lines if device.kind == "emulated" else []
        if target.storage != "loaded":
            ram.append(MemoryItem("reserve", default_reserve(machine.ram_total_bytes), spare=True))
        free_bytes = machine.ram_free_bytes
        places.append(MemoryPool("RAM", machine.ram_total_bytes, free_bytes, tuple(ram), target.storage))
        n_whole, n_all = target.n_whole_layers, max(1, self._n_all)
        shares = [*ours.gpus.values(), ours.ram, *drafts.gpus.values(), drafts.ram]
        return MemoryMap(
            n_ctx=n_ctx,
            kv_bytes=sum(share.kv_bytes for share in shares),
            compute_bytes=sum(share.compute_bytes for share in shares),
            places=tuple(replace(place, lines=tuple(filter(attrgetter("n_bytes"), place.lines))) for place in places),
            budget=budget,
            cache_ratio=1.0 if all_on_gpu else budget.n_slots / n_all,
            device_ratio=1.0 if all_on_gpu else (budget.n_slots + n_whole * target.info.n_experts) / n_all,
            n_whole_layers=0 if all_on_gpu else n_whole,
            whole_on_gpu=all_on_gpu,
        )

    @property
    def _n_all(self) -> int:
        return self.facts.n_expert_layers * self.facts.n_experts

    @property
    def host_experts(self) -> tuple[int, int]:
        """Layers whose experts are in host memory, and the bytes of these experts."""
        target = self._target(False)
        return len(target.host_expert_layers), expert_bytes(sizing.in_host_memory(self._experts, target))

    def _cache(self, target: Model, free_bytes: int) -> tuple[CacheBudget, list[MemoryItem]]:
        """Returns the expert cache on a device with `free_bytes` left, and its items."""
        device, requested, n_ubatch = self.machine.device, self.config.placement, self.config.n_ubatch
        free_bytes, total_bytes = max(0, free_bytes - self.reserve), device.total_bytes
        budget = sizing.cache_budget(
            requested, device, self._experts, target, free_bytes=free_bytes, total_bytes=total_bytes, n_ubatch=n_ubatch
        )
        reserve = MemoryItem("reserve", self.reserve + sizing.reserve_bytes(device, total_bytes), spare=True)
        if not budget.n_slots:
            return budget, [reserve]
        tensors = sizing.in_host_memory(self._experts, target)
        n_stage = sizing.n_staging_slots(requested, device.kind, target.info.n_experts, mean_expert_bytes(tensors))
        overhead = sizing.staging_and_scratch_bytes(tensors, target.info, n_ubatch=n_ubatch, n_stage=n_stage)
        slots = MemoryItem(f"expert slots: {budget.n_slots:,} of {self._n_all:,}", budget.pool_bytes)
        return budget, [MemoryItem("cache: staging and columns", overhead), reserve, slots]

    def largest_n_ctx(self, ratio: float = 0.0, *, from_disk: bool = False) -> int:
        """Returns the largest context up to the trained one with at least that ratio of a cache; 0 if none fits.

        from_disk: accept a model larger than the memory. A cache that can be on with any context must be on.
        """
        found = self._largest(ratio, from_disk, needs_cache=True)
        return found if found or ratio > 0 else self._largest(ratio, from_disk, needs_cache=False)

    def _largest(self, ratio: float, from_disk: bool, *, needs_cache: bool) -> int:
        trained, rest = self.facts.n_ctx_train, (ratio, from_disk, needs_cache)
        if self._is_acceptable(trained, *rest):
            return trained
        steps = range(N_CTX_STEP, trained, N_CTX_STEP)
        return N_CTX_STEP * bisect(steps, False, key=lambda n_ctx: not self._is_acceptable(n_ctx, *rest))

    def _is_acceptable(self, n_ctx: int, ratio: float, from_disk: bool, needs_cache: bool) -> bool:
        planned = self.map(n_ctx)
        if planned.verdict == "does not fit" or (planned.verdict == "from disk" and not from_disk):
            return False
        has_none = self.machine.device.kind == "none" or not self._experts or self.config.placement.cache_ratio == 0
        if has_none or not needs_cache:
            return True
        return planned.whole_on_gpu or (planned.budget.n_slots > 0 and planned.cache_ratio >= ratio)

    def close(self) -> None:
        self._stack.close()


def _items(
    weights: list[MemoryItem], ours: MemoryShare, drafts: MemoryShare, draft_mapped_bytes: int = 0
) -> list[MemoryItem]:
    return [
        *weights,
        MemoryItem("KV cache", ours.kv_bytes),
        MemoryItem("compute buffers", ours.compute_bytes),
        MemoryItem("draft: weights", drafts.weights_bytes, draft_mapped_bytes),
        MemoryItem("draft: KV cache", drafts.kv_bytes),
        MemoryItem("draft: compute buffers", drafts.compute_bytes),
    ]


def _weights(n_bytes: int, experts: int, repacked: int | None = None) -> list[MemoryItem]:
    """Returns the items of the target's weights in one kind of memory; `experts` of the `n_bytes` are experts.

    repacked: bytes that cannot be dropped, by default all; nearly all of them are experts.
    """
    fixed = n_bytes if repacked is None else repacked
    if n_bytes < experts:  # the other layers are elsewhere
        return [MemoryItem("weights of these layers", n_bytes, n_bytes - fixed)]
    fixed_experts = min(experts, fixed)
    dense, fixed_dense = n_bytes - experts, fixed - fixed_experts
    return [
        MemoryItem("experts", experts, experts - fixed_experts),
        MemoryItem("dense weights", dense, dense - fixed_dense),
    ]
