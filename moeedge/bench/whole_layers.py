"""Stock llama.cpp with whole layers on the GPU, as many as fill the memory that moeedge takes there (--n-cpu-moe).

Such a mode has a target of its own: attention of all layers and the experts of the last layers on the GPU, the other
experts in host memory as llama.cpp's programs store them by default. How many layers fit is tried with models without
weights, for which llama.cpp reports what it would allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from moeedge.bench.config import BenchMode
from moeedge.engine.loading import choose_draft, host_bytes, load_draft, weight_storage
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.hardware.devices import DeviceKind, ResolvedDevice, read_memory
from moeedge.hardware.host import default_reserve
from moeedge.llama.gguf_file import WholeLayers, expert_bytes, expert_tensors, most_whole_layers, whole_layers
from moeedge.llama.model import Model
from moeedge.planning.memory_map import MemoryShare, draft_footprint, footprint
from moeedge.run import Run
from moeedge.scheduler.sizing import in_host_memory, staging_and_scratch_bytes

# Why there is no GPU to hold layers
_NO_GPU: dict[DeviceKind, str] = {
    "none": "there is no GPU to hold whole layers",
    "emulated": "llama.cpp cannot put layers on the emulated device, which is the CPU",
    "rpc": "layers are never put on a worker's device",
}


@dataclass(frozen=True)
class DeviceUse(MemoryShare):
    """Bytes on GPUs that one mode takes, target and draft, as if it ran alone: llama.cpp's account, and the cache."""

    cache_bytes: int = 0  # slots, staging slots and the columns that the cache computes at once

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.cache_bytes


def session_use(session: Session, device: ResolvedDevice) -> DeviceUse:
    """Returns what an open session takes on GPUs; slots on the emulated device or on a worker do not count."""
    uses, cache_bytes = [use for use in session.memory_uses() if use.on_gpu], 0
    if session.placement is not None and device.kind == "gpu":
        info = session.model.info
        tensors = in_host_memory(expert_tensors(session.model.path, n_layers=info.n_layers)[0], session.model)
        columns = staging_and_scratch_bytes(tensors, info, n_ubatch=session.target.n_ubatch, n_stage=0)
        cache_bytes = session.placement.cache.info.pool_bytes + columns
    return DeviceUse(
        weights_bytes=sum(use.weights_bytes for use in uses),
        kv_bytes=sum(use.memory_bytes for use in uses),
        compute_bytes=sum(use.compute_bytes for use in uses),
        cache_bytes=cache_bytes,
    )


def missing_reason(mode: BenchMode, device: ResolvedDevice, target: Model) -> str | None:
    """Returns why a mode that chooses layers for a GPU cannot run; None if it can. target: of the other modes."""
    if mode.method == "shared":
        return None
    if target.info.n_experts == 0:
        return "the model has no experts"
    if device.kind != "gpu":
        return _NO_GPU[device.kind]
    if not target.host_expert_layers:
        return "all modes have the entire model on the GPU already"
    return None


@dataclass(frozen=True)
class Split:
    """Layers with experts on the GPU, and the memory that the mode then takes there."""

    layers: WholeLayers
    use: DeviceUse


class SplitPlanner:
    """Finds how many whole layers fit, for a mode with or without drafts. base: with the context size of the run."""

    def __init__(self, base: EngineConfig, device: ResolvedDevice, draft: Model | None) -> None:
        self._base = base
        self._device = device
        self._has_draft = draft is not None
        with load_whole_layers(base, device, 0, header_only=True) as header:
            self._n_layers = header.info.n_layers
        self._tensors, _ = expert_tensors(base.model, n_layers=self._n_layers)
        self._tried = lru_cache(self._try)

    def for_budget(self, mode: BenchMode, budget_bytes: int) -> Split | None:
        """Returns the most whole layers with which `mode` takes at most `budget_bytes`; None if it takes more."""
        left_bytes = budget_bytes - self.least_bytes(mode)
        if left_bytes < 0:
            return None
        n = most_whole_layers(self._tensors, self._n_layers, left_bytes).n_whole
        # compute buffers change with the layers, and llama.cpp aligns tensors
        while n > 0 and self._tried(n, mode.drafts).use.total_bytes > budget_bytes:
            n -= 1
        best = self._tried(n, mode.drafts)
        while (larger := self._tried(n + 1, mode.drafts)).layers.n_whole > n and larger.use.total_bytes <= budget_bytes:
            n, best = n + 1, larger
        return best

    def least_bytes(self, mode: BenchMode) -> int:
        """Returns what the mode takes without a whole layer."""
        return self._tried(0, mode.drafts).use.total_bytes

    def budget_bytes(self, mode: BenchMode, others: Sequence[tuple[BenchMode, DeviceUse]]) -> int:
        """Returns the memory to fill: that of the moeedge mode which `mode` is compared with.

        others: the moeedge modes and what they take. Without one of the same cache ratio, the memory is what --vram or
        the ratio adds to the mode's least, or all that is free but the reserve.
        """
        equal = [(other.drafts, use) for other, use in others if other.cache_ratio == mode.cache_ratio]
        if equal:
            return min(equal, key=lambda pair: pair[0] != mode.drafts)[1].total_bytes
        placement = self._base.placement
        ratio = placement.cache_ratio if mode.cache_ratio is None else mode.cache_ratio
        if ratio is not None:
            return self.least_bytes(mode) + round(ratio * expert_bytes(self._tensors))
        if placement.vram_bytes is not None:
            return self.least_bytes(mode) + placement.vram_bytes
        memory = read_memory(self._device) or self._device
        return max(0, memory.free_bytes - default_reserve(memory.total_bytes))  # a cache leaves the reserve, too

    def _try(self, n_whole: int, drafts: bool) -> Split:
        layers = whole_layers(self._tensors, self._n_layers, n_whole)
        with ExitStack() as stack:
            header = load_whole_layers(self._base, self._device, layers.n_cpu_moe, header_only=True)
            target, draft = stack.enter_context(header), None
            taken = [footprint(target, self._base.n_ctx, self._base)]
            if drafts:
                if self._has_draft:
                    draft = stack.enter_context(load_draft(self._base, self._device, header_only=True))
                chosen = choose_draft(self._base, self._device, target, draft, Run(), stack)
                taken.append(draft_footprint(chosen, target, self._base.n_ctx, self._base))
        used = sum((share for each in taken for share in each.gpus.values()), MemoryShare())
        return Split(layers, DeviceUse(*astuple(used)))


def layers_host_bytes(config: EngineConfig, device: ResolvedDevice, layers: WholeLayers) -> int:
    """Returns the bytes of weights that such a target has in host memory."""
    return host_bytes(replace(config, n_gpu_layers=None, n_cpu_moe=layers.n_cpu_moe), device)


def load_whole_layers(
    config: EngineConfig, device: ResolvedDevice, n_cpu_moe: int, *, header_only: bool = False
) -> Model:
    """Loads the target as llama.cpp's programs do with -ngl 99 --n-cpu-moe N."""
    alone = replace(config, n_gpu_layers=None, n_cpu_moe=n_cpu_moe, ram="off")
    return Model.load(
        config.model,
        n_gpu_layers=-1,
        device=device.llama_device,
        experts_on_cpu=True,
        n_cpu_moe=n_cpu_moe,
        repack=False,
        header_only=header_only,
        storage="loaded" if header_only else weight_storage(alone, device),
        head=config.draft == "mtp",
        settings=config.load,
    )
