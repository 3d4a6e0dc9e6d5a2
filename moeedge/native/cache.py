"""The expert cache of one session, which moves experts from the model's files to slots on a device in its own thread.

Contexts that it is attached to compute with the resident ones. Only `drain`, `demand`, `clear` and `close` wait.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_char, c_char_p, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError, DeviceError, EngineError, ModelFileError
from moeedge.native.abi import BLOCK_RECORD, DevicePath, PrefillPath, Status, c_field, c_struct, fill, from_c
from moeedge.native.library import load
from moeedge.native.mapping import FileVersion
from moeedge.native.sensor import Sensor
from moeedge.records import counter, counters, gauge
from moeedge.run import Closing

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ExpertTensor:
    """struct moeedge_expert_tensor: a tensor that holds one slice for each expert of a layer."""

    layer: int = c_field(c_int32)
    type: int = c_field(c_int32)  # enum ggml_type
    ne0: int = c_field()  # of one expert's slice; 1 for a scale
    ne1: int = c_field()  # 1 for biases and scales
    n_experts: int = c_field(c_int32)
    file: int = c_field(c_int32)  # index into the parts of a split model
    offset: int = c_field()  # bytes from the start of the file to expert 0
    stride: int = c_field()  # bytes from one expert to the next
    name: str = c_field(c_char * 64)  # in the GGUF file: blk.3.ffn_up_exps.weight

    @property
    def role(self) -> str:
        """The name without its layer: ffn_up_exps.weight."""
        return self.name.split(".", 2)[2]


IN_RAM = "ram"  # the "device" of a cache in RAM
MAX_BLOCKS = 4096  # block records that the native ring holds (expert-cache.h)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """struct moeedge_cache_config: device, experts and size of a cache."""

    device: str = c_field(c_char_p)  # ggml's name of it, "emulated" or IN_RAM
    files: Sequence[Path] = c_field(c_void_p)  # all parts of the model
    tensors: Sequence[ExpertTensor] = c_field(c_void_p)
    n_layers: int = c_field(c_int32)
    n_experts: int = c_field(c_int32)
    ratio: float = c_field(c_double)  # share of all experts that get a slot, 0..1
    link_bytes_per_s: float = c_field(c_double, 0.0)  # rate of the emulated device's transfers; 0: not limited
    link_latency_s: float = c_field(c_double, 0.0)  # fixed time of each of them
    disk_bytes_per_s: float = c_field(c_double, 0.0)  # rate of all reads of a cache in RAM together; 0: not limited
    pool_bytes_max: int = c_field(c_int64, 0)  # of the slots in one tensor; 0: as much as the device allows
    n_stage: int = c_field(c_int32, 0)  # extra slots per kind of expert, for streaming prefill
    emulated_threads: int = c_field(c_int32, 1)
    # a cache in RAM reads by way of the page cache, and gives its pages back
    disk_buffered: bool = c_field(c_int32, False)
    # keep the experts' pages of the files in RAM, where the device reads them itself
    pin_files: bool = c_field(c_int32, False)


@dataclass(frozen=True)
class CacheInfo:
    """struct moeedge_cache_info: what the cache has allocated."""

    n_groups: int = c_field(c_int32)  # a group: layers whose experts have the same tensors and share slots
    n_layers: int = c_field(c_int32)
    n_experts: int = c_field(c_int32)
    n_stage: int = c_field(c_int32)
    n_slots: int = c_field()  # of all groups
    slots_wanted: int = c_field()  # by the ratio; more than n_slots where the device lacks memory for them
    pool_bytes: int = c_field()  # on the device
    staging_bytes: int = c_field()  # on the host
    pinned_bytes: int = c_field()  # of the files, which the device reads itself; 0: uploads are copied
    unpinned: bool = c_field(c_int32)  # pinned staging memory was not available: transfers are slower
    is_host: bool = c_field(c_int32)  # the device's memory is the host's
    lost: bool = c_field(c_int32)
    device: str = c_field(c_char * 64)
    description: str = c_field(c_char * 128)


@dataclass(frozen=True)
class CacheStats:
    """struct moeedge_cache_stats: figures since the cache was opened, from which all records of them are made."""

    uploads: int = counter("experts that have arrived; uploads - evictions = slots_used", "experts")
    evictions: int = counter("experts that gave their slot to another one", "experts")
    cancelled: int = counter("uploads that a newer plan dropped before they began", "experts")
    failed: int = counter("uploads whose file could not be read", "experts", in_json=False)
    bytes_moved: int = counter("bytes of the uploads that have arrived", "bytes")
    transfers: int = counter("transfers that have begun, each of one expert or of several")
    transfer_s: float = counter("time in which a transfer was under way", "s")
    plans: int = counter("plans that were taken over", in_json=False)
    slots_used: int = gauge("slots that hold an expert", "slots")
    in_flight: int = gauge("experts under way", "experts", in_json=False)
    queued: int = gauge("uploads of the plan that have not begun", "experts", in_json=False)
    blocks: int = counter("MoE blocks computed")
    blocks_unknown: int = counter("MoE blocks that were not recognised and stayed on the CPU")
    pairs: int = counter("(token, expert) pairs of batches of at most 64 tokens", "pairs")
    pairs_hit: int = counter("pairs that the device computed", "pairs")
    unique: int = counter("distinct experts per block, of batches of at most 64 tokens", "experts")
    unique_hit: int = counter("distinct experts per block that were resident", "experts")
    partition_s: float = counter("splitting, building graphs, gathering, scattering, submitting", "s")
    cpu_s: float = counter("computing blocks on the CPU", "s")
    device_s: float = counter("computing blocks on the device", "s")
    wait_s: float = counter("waiting for the device, or for the disk, after the CPU's part was done", "s")
    wait_bytes: int = counter("bytes that a cache in RAM has read while a computation waited", "bytes")
    ahead: int = counter("uploads that began before their layer's turn, by prediction", "experts")
    ahead_used: int = counter("of these, those that their layer needed", "experts")
    pinned: int = gauge("slots in use by a computation", "slots", in_json=False)
    lost: bool = gauge("the device failed and is no longer used")


@dataclass(frozen=True)
class ReaderInfo:
    """struct moeedge_reader_info: how a cache in RAM reads the model's files."""

    n_threads: int = c_field(c_int32)  # reads under way
    is_direct: bool = c_field(c_int32)  # past the page cache
    piece_bytes: int = c_field()  # of a read, about
    bytes_read: int = c_field()  # since the cache was opened; direct reads are of whole blocks
    retries: int = c_field()  # of reads that failed
    error: str = c_field(c_char * 512)  # of the newest expert that could not be loaded; empty: none


class ExpertCache(Closing):
    """An open expert cache; `close` (or leaving the context) ends it."""

    def __init__(self, config: CacheConfig) -> None:
        """Raises DeviceError, ModelFileError (unreadable, too short), EngineError (no slot per group), BackendError."""
        self._config = config
        self._library = load()
        self._attached: list[Sensor] = []
        self._settings: dict[str, tuple[int, ...]] = {}  # arguments of the last moeedge_cache_set_* call of each kind
        self._ram: ExpertCache | None = None  # that experts are read from
        self._earlier: CacheStats | None = None  # counters before the last resize
        self._files = [_version(path) for path in config.files]
        self._residency = np.zeros((config.n_layers, config.n_experts), dtype=np.uint8)
        self._residency_address = self._residency.ctypes.data
        self._open()

    def _open(self) -> None:
        config = self._config
        files = (c_char_p * len(config.files))(*(str(path).encode() for path in config.files))
        tensors = (c_struct(ExpertTensor) * len(config.tensors))()
        for each, tensor in zip(tensors, config.tensors, strict=True):
            fill(each, tensor)
        raw = c_struct(CacheConfig, n_files=c_int32, n_tensors=c_int32)(n_files=len(files), n_tensors=len(tensors))
        addresses: Any = ctypes.addressof(files), ctypes.addressof(tensors)
        fill(raw, replace(config, files=addresses[0], tensors=addresses[1]))
        self._cache = _check(self._library.moeedge_cache_create(ctypes.byref(raw)))
        # the mover must end before the interpreter does
        self._finalizer = weakref.finalize(self, self._library.moeedge_cache_destroy, self._cache)
        self._last_block = 0
        self.info = from_c(CacheInfo, self._filled("get_info", CacheInfo))
        for name, arguments in self._settings.items():
            self._set(name, *arguments)
        if self._ram is not None:
            self.read_from(self._ram)

    def resize(self, ratio: float) -> None:
        """Free all memory on the device and allocate empty slots for a share `ratio` of the experts; no decode may run.

        Contexts, settings and counters stay; records of blocks that were not read are dropped. Where not even one slot
        per group fits the ratio is 0, without staging slots. Raises as opening, and the cache is closed then.
        """
        for path, version in zip(self._config.files, self._files, strict=True):
            if version is not None and _version(path) != version:
                raise ModelFileError(f"{path} was changed or replaced while it was in use.")
        attached, before = [*self._attached], self.stats()
        self._earlier = replace(before, evictions=before.evictions + before.slots_used)
        self.detach()
        self.close()
        n_stage, pins = (self._config.n_stage, self._config.pin_files) if ratio > 0 else (0, False)
        self._config = replace(self._config, ratio=ratio, n_stage=n_stage, pin_files=pins)
        try:
            self._open()
        except EngineError:
            self._config = replace(self._config, ratio=0.0, n_stage=0, pin_files=False)
            self._open()
        for sensor in attached:
            self.attach(sensor)

    def close(self) -> None:
        """Detach, end the mover, free the device's memory. No decode may run. May be called twice."""
        self._finalizer()

    def _call(self, name: str, *arguments: Any) -> int:
        """The result of moeedge_cache_`name`, which gets arrays by address; raises the error of a negative one."""
        raw = [each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments]
        return _check(getattr(self._library, f"moeedge_cache_{name}")(self._cache, *raw))

    def _filled(self, name: str, record: Any) -> Any:
        """A structure that moeedge_cache_`name` has filled: a new one each time, as several threads may ask."""
        raw = c_struct(record)()
        self._call(name, ctypes.byref(raw))
        return raw

    def groups(self) -> tuple[Ints, Ints, NDArray[np.int64]]:
        """Group of each layer int32 [n_layers] (-1: no experts); slots int32 and bytes per expert int64 [n_groups]."""
        layer_group = np.zeros(self.info.n_layers, dtype=np.int32)
        capacity = np.zeros(self.info.n_groups, dtype=np.int32)
        expert_bytes = np.zeros(self.info.n_groups, dtype=np.int64)
        self._call("groups", layer_group, capacity, expert_bytes)
        return layer_group, capacity, expert_bytes

    def plan(self, uploads: Ints, priority: NDArray[np.uint8], victims: Ints, victim_utility: Floats) -> None:
        """Replace the queue; transfers under way continue.

        uploads: int32 [n, 2] (layer, expert), moved by priority (uint8 [n]), highest first, then by layer, then in this
        order; experts that are resident or in flight are left out. victims: int32 [m, 2] (layer, expert) that may be
        evicted for them; victim_utility: float32 [m], the lowest is evicted first.
        """
        uploads, priority = np.ascontiguousarray(uploads, np.int32), np.ascontiguousarray(priority, np.uint8)
        victims, victim_utility = _victims(victims, victim_utility)
        if uploads.size != 2 * priority.size:
            raise ValueError("A plan needs one priority per upload.")
        self._call("plan", uploads, priority, priority.size, victims, victim_utility, victim_utility.size)

    def demand(self, layer: int, experts: Ints, victims: Ints, victim_utility: Floats, timeout_s: float) -> int:
        """Load a layer's absent experts [n] first and wait; returns how many are resident. victims: as of `plan`."""
        experts = np.ascontiguousarray(experts, np.int32)
        victims, utility = _victims(victims, victim_utility)
        return self._call("demand", layer, experts, experts.size, victims, utility, utility.size, timeout_s)

    def set_batch(self, n_experts: int) -> None:
        """Set the most experts of a layer in a transfer, awaited before the next; 0 (at first): one, not awaited."""
        self._set("batch", n_experts)

    def set_utilities(self, utilities: Floats) -> None:
        """Set utilities float32 [n_layers, n_experts]: RAM keeps the highest, of equal ones the last used."""
        if utilities.shape != self._residency.shape:
            raise ValueError("Each expert needs a utility.")
        self._call("set_utilities", np.ascontiguousarray(utilities, np.float32))

    def limit(self, n_slots: int) -> None:
        """Keep the most useful experts in about `n_slots` slots of RAM; any thread. Other caches raise BackendError."""
        self._call("limit", n_slots)
        self.info = from_c(CacheInfo, self._filled("get_info", CacheInfo))

    def residency(self) -> NDArray[np.uint8]:
        """`Residency` of each expert, uint8 [n_layers, n_experts]; the next call reuses the array."""
        self._call("residency", self._residency_address)
        return self._residency

    def copy_residency(self) -> NDArray[np.uint8]:
        """`residency` in an array of its own, for another thread than the one that plans."""
        copy = np.empty_like(self._residency)
        self._call("residency", copy)
        return copy

    def stats(self) -> CacheStats:
        now, earlier = from_c(CacheStats, self._filled("get_stats", CacheStats)), self._earlier
        if earlier is None:
            return now
        return replace(now, **{name: getattr(earlier, name) + getattr(now, name) for name in counters(CacheStats)})

    def waited_s(self) -> float:
        """`CacheStats.wait_s` since the cache was opened last: cheap enough for every step."""
        return float(self._filled("get_stats", CacheStats).wait_s)

    def trouble(self) -> tuple[bool, int]:
        """Whether the device is lost, and the number of unrecognised blocks: cheap enough for every step."""
        stats = self._filled("get_stats", CacheStats)
        n_earlier = 0 if self._earlier is None else self._earlier.blocks_unknown
        return bool(stats.lost), n_earlier + stats.blocks_unknown

    def blocks(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Records (BLOCK_RECORD) of the blocks computed since the last call, oldest first, at most the newest 4096."""
        records = np.zeros(MAX_BLOCKS, dtype=BLOCK_RECORD)
        n_records = self._call("blocks", self._last_block, records, MAX_BLOCKS)
        if n_records:
            self._last_block = int(records["serial"][n_records - 1])
        return records[:n_records]

    def drain(self, timeout_s: float) -> bool:
        """Wait until no transfer is under way and none can begin; False if that takes longer."""
        status = self._library.moeedge_cache_drain(self._cache, timeout_s)
        return status != Status.TIMEOUT and _check(status) == 0

    def clear(self, timeout_s: float = 30.0) -> None:
        """Empty the queue and all slots. Raises BackendError if transfers and slots in use take longer."""
        self._call("clear", timeout_s)

    def set_prefill(self, path: PrefillPath, n_tokens_min: int) -> None:
        """Set how batches of at least `n_tokens_min` tokens are computed."""
        self._set("prefill", path.code, n_tokens_min)

    def set_readers(self, n_threads: int, piece_bytes: int = 0) -> None:
        """Set how many threads read files, or reads are under way for RAM, of `piece_bytes` (0: unchanged)."""
        self._set("readers", n_threads, piece_bytes)

    def reader(self) -> ReaderInfo:
        """How a cache in RAM reads its files; other caches raise BackendError."""
        return from_c(ReaderInfo, self._filled("get_reader", ReaderInfo))

    def set_timing(self, on: bool) -> None:
        """Time one block in eleven alone on an asynchronous device, for calibration; such blocks take longer."""
        self._set("timing", int(on))

    def set_device_path(self, path: DevicePath) -> None:
        """Set how the device computes the resident experts of small batches (`DevicePath.PAIRS` at first)."""
        self._set("device_path", int(path))

    def _set(self, name: str, *arguments: int) -> None:
        """Call moeedge_cache_set_`name`, now and after each resize."""
        self._call(f"set_{name}", *arguments)
        self._settings[name] = arguments

    def read_from(self, ram: ExpertCache) -> None:
        """Read experts from a cache in RAM, others past the page cache; anew after its resize. Raises BackendError."""
        self._call("set_ram", ram._cache)
        self._ram = ram

    def attach(self, sensor: Sensor) -> None:
        """Let the sensor's context compute with this cache from its next graph on: in RAM, on a device, or both."""
        _check(self._library.moeedge_instance_set_cache(sensor.instance, self._cache))
        self._attached.append(sensor)

    def detach(self) -> None:
        """Let every attached context that is still open compute without this cache again."""
        while self._attached:
            self._library.moeedge_instance_remove_cache(self._attached.pop().instance, self._cache)


def _version(path: Path) -> FileVersion | None:
    """Its version; None where the system does not tell."""
    with suppress(OSError):
        return FileVersion.of(path)
    return None


def _victims(victims: Ints, utility: Floats) -> tuple[Ints, Floats]:
    """The arrays as C reads them: int32 [m, 2] and float32 [m]."""
    victims, utility = np.ascontiguousarray(victims, np.int32), np.ascontiguousarray(utility, np.float32)
    if victims.size != 2 * utility.size:
        raise ValueError("Each victim needs a utility.")
    return victims, utility


def _check(status: int) -> int:
    """The status if it is not negative, else raises its error."""
    if status >= 0:
        return status
    message = load().moeedge_last_error().decode(errors="replace")  # cut off where it is long
    if status == Status.NO_DEVICE:
        raise DeviceError(message, "List the devices with moeedge devices.")
    if status == Status.FILE_ERROR:
        raise ModelFileError(message)
    if status == Status.OUT_OF_MEMORY:
        raise EngineError(message, "Ask for less with --vram, for experts in RAM with --ram, or with --cache-ratio.")
    raise BackendError(message)
