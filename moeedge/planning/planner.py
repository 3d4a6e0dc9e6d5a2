"""Computes how much memory of each kind a session takes, from headers alone.

Every decision is the session's own: the place of layers (engine/loading.py), the context size (llama/context_size.py),
the number of cache slots (scheduler/sizing.py). llama.cpp reports what it would allocate.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import psutil

from moeedge.engine.context_choice import beyond_training
from moeedge.engine.loading import choose_draft, kv_on_gpu, load_draft, load_target, weight_storage, whole_model_fits
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.memory import default_reserve
from moeedge.llama.context_size import N_CTX_STEP, choose_n_ctx, choose_ram_tier_n_ctx
from moeedge.llama.gguf_file import expert_bytes, read_tensors
from moeedge.llama.model import Model
from moeedge.llama.settings import ContextSettings
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
from moeedge.scheduler.sizing import (
    CacheBudget,
    cache_budget,
    in_host_memory,
    n_staging_slots,
    reserve_bytes,
    staging_and_scratch_bytes,
)


class Planner:
    """Memory maps of one model (and draft) on one machine, at any context size; a context manager.

    reserve: bytes of the device to leave free in addition to the cache's own reserve. names: pull names of models of
    which only the header is on this machine.
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
        self._maps: dict[tuple[int, bool], MemoryMap] = {}
        self._targets: dict[bool, Model] = {}
        with ExitStack() as stack:
            self.file: LoadableModel = stack.enter_context(loadable(config.model))
            self.draft_file: LoadableModel | None = None
            config = replace(config, model=self.file.path)
            if isinstance(config.draft, Path) and config.gamma > 0:
                self.draft_file = stack.enter_context(loadable(config.draft))
                config = replace(config, draft=self.draft_file.path)
            self.config = config
            self._stack = stack
            header = self._target(all_on_gpu=False)
            self.facts, self._experts = read_facts(header, self.file, names)
            draft = self._load_draft(header)
            self.chosen = choose_draft(config, machine.device, header, draft, self.notes, stack)
            self.draft_facts: ModelFacts | None = None
            if self.draft is not None and self.draft_file is not None:
                self.draft_facts, _ = read_facts(self.draft, self.draft_file, names)
            self._program_bytes = psutil.Process().memory_info().rss
            self._stack = stack.pop_all()

    def _target(self, *, all_on_gpu: bool) -> Model:
        if all_on_gpu not in self._targets:
            machine = self.machine
            storage = weight_storage(
                replace(self.config, ram="auto"),  # as in a chat without --ram
                machine.device,
                machine.ram_free_bytes,
                machine.ram_total_bytes,
                whole_fits=all_on_gpu,
            )
            device = replace(machine.device, storage=storage)
            model = load_target(self.config, device, whole_fits=all_on_gpu, header_only=True)
            self._targets[all_on_gpu] = self._stack.enter_context(model)
        return self._targets[all_on_gpu]

    def _load_draft(self, target: Model) -> Model | None:
        if self.draft_file is None or not target.can_reject_drafts:
            return None
        taken = {"loaded": target.info.size_bytes, "on demand": self.facts.dense_bytes, "mapped": 0}[target.storage]
        draft = load_draft(
            self.config,
            self.machine.device,
            header_only=True,
            free_bytes=self.machine.ram_free_bytes - taken,
            total_bytes=self.machine.ram_total_bytes,
        )
        return self._stack.enter_context(draft)

    @property
    def _models(self) -> list[Model]:
        header = self._target(all_on_gpu=False)
        return [header] if self.draft is None else [header, self.draft]

    @property
    def _settings(self) -> tuple[ContextSettings, ContextSettings]:
        return self.config.context, self.config.draft_context

    def _all_on_gpu(self, n_ctx: int) -> bool:
        """Whether a session with -c n_ctx (0: without -c) keeps the entire model on the GPU."""
        if self.machine.device.kind != "gpu":
            return False
        return whole_model_fits(replace(self.config, n_ctx=n_ctx), self.machine.device, self._models)

    def _kv_room(self, all_on_gpu: bool) -> int:
        """Returns the bytes that are free for KV caches after the models are loaded."""
        target = self._target(all_on_gpu=all_on_gpu)
        loaded = [
            footprint(target, N_CTX_STEP, self.config),
            draft_footprint(self.chosen, target, N_CTX_STEP, self.config),
        ]
        device = self.machine.device
        if device.kind == "gpu" and kv_on_gpu(self.config, device, target):
            weights = sum(model.gpu(device.ggml_name).weights_bytes for model in loaded)
            return max(0, device.free_bytes - KERNEL_BYTES - weights)
        return max(0, self.machine.ram_free_bytes - sum(model.fixed_bytes for model in loaded))

    @property
    def draft(self) -> Model | None:
        """The draft model, if drafts come from a file of their own."""
        return self.chosen.model

    def default_map(self) -> MemoryMap:
        """Returns the map of a session with the user's -c, or with the context that it chooses without one."""
        all_on_gpu = self._all_on_gpu(self.config.n_ctx)
        if self.config.n_ctx:
            self.notes.extend(beyond_training(self.config, self.facts.n_ctx_train))
            return self.map(self.config.n_ctx)
        if self.loads_on_demand and not kv_on_gpu(self.config, self.machine.device, self._target(all_on_gpu=False)):
            n_ctx, note = choose_ram_tier_n_ctx(self._target(all_on_gpu=False))
        else:
            n_ctx, note = choose_n_ctx(self._models, free_bytes=self._kv_room(all_on_gpu), settings=self._settings)
        self.notes.extend([note] if note else [])
        return self._map(n_ctx, all_on_gpu)

    @property
    def loads_on_demand(self) -> bool:
        """Whether a chat loads experts from the file into RAM as it needs them, without --ram."""
        return self._target(all_on_gpu=self._all_on_gpu(self.config.n_ctx)).storage == "on demand"

    def map(self, n_ctx: int) -> MemoryMap:
        """Returns the map of a session with -c n_ctx."""
        all_on_gpu = self._all_on_gpu(n_ctx)
        refused = ""
        try:
            choose_n_ctx(self._models, n_ctx, self._kv_room(all_on_gpu), settings=self._settings)
        except InputError as error:
            refused = error.message
        return replace(self._map(n_ctx, all_on_gpu), refused=refused)

    def _map(self, n_ctx: int, all_on_gpu: bool) -> MemoryMap:
        if (n_ctx, all_on_gpu) not in self._maps:
            self._maps[n_ctx, all_on_gpu] = self._compute(n_ctx, all_on_gpu)
        return self._maps[n_ctx, all_on_gpu]

    def _compute(self, n_ctx: int, all_on_gpu: bool) -> MemoryMap:
        target = self._target(all_on_gpu=all_on_gpu)
        ours = footprint(target, n_ctx, self.config)
        drafts = draft_footprint(self.chosen, target, n_ctx, self.config)
        device = self.machine.device
        places = []
        budget = CacheBudget(0.0, 0, 0)
        if device.kind == "gpu":
            share = ours.gpu(device.ggml_name)
            weights = _weights(share.weights_bytes, expert_bytes(self._experts) - self._host_expert_bytes(target))
            lines = _items(weights, share, drafts.gpu(device.ggml_name))
            lines += [MemoryItem("LoRA adapters", self._adapter_bytes)] if self._adapter_bytes else []
            lines.append(MemoryItem("kernels (an allowance)", KERNEL_BYTES))
            budget, cache = self._cache(target, device.free_bytes - sum(line.n_bytes for line in lines))
            places.append(MemoryPool(device.label, device.total_bytes, device.free_bytes, (*lines, *cache)))
        elif device.kind != "none":
            budget, cache = self._cache(target, device.free_bytes)
            if device.kind == "rpc":
                places.append(MemoryPool(device.label, device.total_bytes, device.free_bytes, tuple(cache)))
        ram = self._ram_lines(target, ours, drafts)
        if device.kind == "emulated":
            ram += cache
        if target.storage != "loaded":
            ram.append(MemoryItem("reserve", default_reserve(self.machine.ram_total_bytes), spare=True))
        machine = self.machine
        places.append(
            MemoryPool("RAM", machine.ram_total_bytes, machine.ram_free_bytes, tuple(ram), storage=target.storage)
        )
        n_whole = target.n_whole_layers
        shares = [*ours.gpus.values(), ours.ram, *drafts.gpus.values(), drafts.ram]
        return MemoryMap(
            n_ctx=n_ctx,
            kv_bytes=sum(share.kv_bytes for share in shares),
            compute_bytes=sum(share.compute_bytes for share in shares),
            places=tuple(places),
            budget=budget,
            cache_ratio=1.0 if all_on_gpu else budget.n_slots / max(1, self._n_all),
            device_ratio=1.0
            if all_on_gpu
            else (budget.n_slots + n_whole * target.info.n_experts) / max(1, self._n_all),
            n_whole_layers=0 if all_on_gpu else n_whole,
            whole_on_gpu=all_on_gpu,
        )

    @property
    def _n_all(self) -> int:
        info = self._target(all_on_gpu=False).info
        return info.n_expert_layers * info.n_experts

    @property
    def _adapter_bytes(self) -> int:
        """Next to the weights that they change: on a GPU, if the model uses one."""
        files = [adapter.path for adapter in self.config.context.adapters]
        return sum(tensor.size_bytes for file in files for tensor in read_tensors(file))

    @property
    def host_experts(self) -> tuple[int, int]:
        """Layers whose experts are in host memory, and the bytes of these experts."""
        target = self._target(all_on_gpu=False)
        return len(target.host_expert_layers), self._host_expert_bytes(target)

    def _host_expert_bytes(self, target: Model) -> int:
        return expert_bytes(in_host_memory(self._experts, target))

    def _cache(self, target: Model, free_bytes: int) -> tuple[CacheBudget, list[MemoryItem]]:
        """Returns the expert cache on a device with `free_bytes` left, and its items."""
        device, requested, info = self.machine.device, self.config.placement, target.info
        free_bytes = max(0, free_bytes - self.reserve)
        budget = cache_budget(
            requested,
            device,
            self._experts,
            target,
            free_bytes=free_bytes,
            total_bytes=device.total_bytes,
            n_ubatch=self.config.n_ubatch,
        )
        lines = []
        if budget.n_slots:
            n_stage = n_staging_slots(requested, device.kind, info.n_experts)
            tensors = in_host_memory(self._experts, target)
            overhead = staging_and_scratch_bytes(tensors, info, n_ubatch=self.config.n_ubatch, n_stage=n_stage)
            lines.append(MemoryItem("cache: staging and columns", overhead))
        kept = self.reserve + reserve_bytes(device, device.total_bytes)
        lines += [MemoryItem("reserve", kept, spare=True)] if kept else []
        if budget.n_slots:
            lines.append(MemoryItem(f"expert slots: {budget.n_slots:,} of {self._n_all:,}", budget.pool_bytes))
        return budget, lines

    def _ram_lines(self, target: Model, ours: Footprint, drafts: Footprint) -> list[MemoryItem]:
        weights = _weights(ours.ram.weights_bytes, self._host_expert_bytes(target), ours.fixed_bytes)
        draft_mapped = drafts.ram.weights_bytes - drafts.fixed_bytes
        others = [
            MemoryItem("LoRA adapters", 0 if target.uses_gpu else self._adapter_bytes),
            MemoryItem("program and vocabulary", self._program_bytes),
        ]
        return [*_items(weights, ours.ram, drafts.ram, draft_mapped), *(item for item in others if item.n_bytes)]

    def largest_n_ctx(self, ratio: float = 0.0, *, from_disk: bool = False) -> int:
        """Returns the largest context up to the trained one that fits with at least that cache ratio; 0 if none does.

        from_disk: accept a model larger than the memory. A cache that can be on must be on.
        """
        trained = self.facts.n_ctx_train
        if self._is_acceptable(trained, ratio, from_disk):
            return trained
        low, high = 0, -(-trained // N_CTX_STEP)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_acceptable(middle * N_CTX_STEP, ratio, from_disk) else (low, middle)
        return low * N_CTX_STEP

    def _is_acceptable(self, n_ctx: int, ratio: float, from_disk: bool) -> bool:
        found = self.map(n_ctx)
        if found.verdict == "does not fit" or (found.verdict == "from disk" and not from_disk):
            return False
        if self.machine.device.kind == "none" or not self._experts or self.config.placement.cache_ratio == 0:
            return True
        return found.whole_on_gpu or (found.budget.n_slots > 0 and found.cache_ratio >= ratio)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _items(
    weights: list[MemoryItem], ours: MemoryShare, drafts: MemoryShare, draft_mapped_bytes: int = 0
) -> list[MemoryItem]:
    """Returns the items of target and draft in one kind of memory; empty ones are left out."""
    items = [
        *weights,
        MemoryItem("KV cache", ours.kv_bytes),
        MemoryItem("compute buffers", ours.compute_bytes),
        MemoryItem("draft: weights", drafts.weights_bytes, draft_mapped_bytes),
        MemoryItem("draft: KV cache", drafts.kv_bytes),
        MemoryItem("draft: compute buffers", drafts.compute_bytes),
    ]
    return [item for item in items if item.n_bytes]


def _weights(n_bytes: int, experts: int, repacked: int | None = None) -> list[MemoryItem]:
    """Returns the items of the target's weights in one kind of memory; `experts` of the `n_bytes` are experts.

    repacked: bytes that cannot be dropped, by default all. llama.cpp does not report their tensors; nearly all of them
    are experts.
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
