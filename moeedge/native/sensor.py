"""The sensor of one llama.cpp context: activation counts and routing, read without a copy per layer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from moeedge.errors import BackendError
from moeedge.native.abi import FrameStruct, OffloadScope
from moeedge.native.library import load
from moeedge.native.structs import c_struct, counter, from_c

Counts = NDArray[np.uint32]  # [n_layers, n_experts] activations


# as many as the native ring holds (sensor.h)
MAX_FRAMES = 8


@dataclass(frozen=True)
class Frame:
    """Routing of one graph (one ubatch). The arrays are views into native memory, valid until 8 further graphs ran.

    phase: a `moeedge.engine.types.Phase`, never AUTO.
    layer_tokens: int32 [n_layers], tokens that the layer saw; 0 for a layer without experts. The last layer sees only
        the tokens whose logits were asked for.
    ids: int32 [n_layers, n_tokens, n_used], the experts of each token, best first; rows past layer_tokens hold nothing.
    weights: float32 [n_layers, n_tokens, n_used], the router's weights as the model applies them.
    """

    serial: int
    phase: int
    n_tokens: int
    layer_tokens: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True)
class SensorStats:
    """struct moeedge_stats: the backend's figures since the context was made. Times are in seconds."""

    graphs: int = counter("graphs (or parts of graphs) computed")
    blocks: int = counter("MoE blocks seen")
    sense_s: float = counter("finding the MoE blocks, copying ids and weights, counting", "s")
    compute_s: float = counter("computing graphs, sensing included", "s")


_StatsStruct = c_struct(SensorStats)


class Sensor:
    """Bound to the llama.cpp context that the calling thread made last."""

    def __init__(self, library: ctypes.CDLL, instance: int, shape: tuple[int, int, int, int]) -> None:
        self.n_layers, self.n_experts, self.n_used, self.n_tokens_max = shape
        self._library = library
        self._instance = instance
        self._counts = np.zeros((self.n_layers, self.n_experts), dtype=np.uint32)
        self._counts_pointer = self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))
        self._frames = (FrameStruct * MAX_FRAMES)()
        self._last_serial = 0

    @classmethod
    def newest(cls, n_layers: int, n_experts: int, n_used: int, n_ubatch: int, claims: OffloadScope) -> Sensor:
        """Bind to the context that this thread created last and set its claims.

        n_ubatch: the most tokens that one graph computes. Raises BackendError where our backend has no such context.
        """
        library = load()
        instance = library.moeedge_newest_instance()
        if instance == 0:
            raise BackendError(
                "moeedge's backend is not part of this context.", "Call moeedge.native.attach() before making it."
            )
        sensor = cls(library, instance, (n_layers, n_experts, n_used, n_ubatch))
        sensor._check(library.moeedge_instance_configure(instance, n_layers, n_experts, n_used, n_ubatch))
        sensor.set_offload_scope(claims)
        return sensor

    @property
    def instance(self) -> int:
        """Id of the backend's instance, for the calls of the C interface that name one."""
        return self._instance

    def _check(self, status: int) -> int:
        if status < 0:
            reasons = {-1: "its context is closed", -2: "bad argument", -3: "out of memory", -4: "not configured"}
            raise BackendError(f"moeedge's sensor failed: {reasons.get(status, status)}.")
        return status

    def set_offload_scope(self, claims: OffloadScope) -> None:
        """Change what the backend claims, from the next graph that llama.cpp builds on."""
        self._check(self._library.moeedge_instance_set_claims(self._instance, int(claims)))

    def set_phase(self, phase: int) -> None:
        """Tag the graphs to come (a `moeedge.engine.types.Phase`)."""
        self._check(self._library.moeedge_instance_set_phase(self._instance, int(phase)))

    def read_counts(self) -> npt.NDArray[np.uint32]:
        """Activations since the last read, uint32 [n_layers, n_experts], then cleared.

        The array is reused by the next call: copy it to keep it.
        """
        self._check(self._library.moeedge_instance_read_counts(self._instance, self._counts_pointer))
        return self._counts

    def frames(self) -> list[Frame]:
        """The frames since the last call, oldest first; those that the ring has overwritten are missing."""
        frames = self.frames_after(self._last_serial)
        if frames:
            self._last_serial = frames[-1].serial
        return frames

    def frames_after(self, serial: int) -> list[Frame]:
        """The frames behind that one, for a second reader with a mark of its own."""
        n_frames = self._check(self._library.moeedge_instance_frames(self._instance, serial, self._frames, MAX_FRAMES))
        return [self._view(self._frames[i]) for i in range(n_frames)]

    def _view(self, raw: FrameStruct) -> Frame:
        shape = (self.n_layers, raw.n_tokens, self.n_used)
        as_array = np.ctypeslib.as_array
        return Frame(
            serial=raw.serial,
            phase=raw.phase,
            n_tokens=raw.n_tokens,
            layer_tokens=as_array(raw.layer_tokens, (self.n_layers,)),
            ids=as_array(raw.ids, shape),
            weights=as_array(raw.weights, shape),
        )

    def stats(self) -> SensorStats:
        """The backend's counters."""
        raw = _StatsStruct()
        self._check(self._library.moeedge_instance_stats(self._instance, ctypes.byref(raw)))
        return from_c(SensorStats, raw)

    def threads(self) -> int:
        """Threads that the context asked for in its last decode; 0 before the first."""
        return self._check(self._library.moeedge_instance_threads(self._instance))
