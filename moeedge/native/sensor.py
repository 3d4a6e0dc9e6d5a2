"""The routing sensor of one llama.cpp context: activation counts and routing, read without a copy per layer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError
from moeedge.native.abi import FrameStruct, OffloadScope
from moeedge.native.library import load, newest_instance
from moeedge.native.structs import c_struct, counter, from_c, view

Counts = NDArray[np.uint32]  # [n_layers, n_experts] activations

_MAX_VIEWS = 256  # of frames, kept
MAX_FRAMES = 8  # size of the native ring (routing-sensor.h)

_REASONS = {-1: "its context is closed", -2: "bad argument", -3: "out of memory", -4: "not configured"}


@dataclass(frozen=True)
class Frame:
    """Routing of one graph (one ubatch). The arrays are views of native memory, valid until 8 further graphs ran.

    phase: a `Phase`, never AUTO.
    layer_tokens: int32 [n_layers], tokens of each layer; 0 for a layer without experts. The last layer has only the
        tokens whose logits were requested.
    ids: int32 [n_layers, n_tokens, n_used], the experts of each token, best first; undefined past layer_tokens.
    weights: float32 [n_layers, n_tokens, n_used], the router's weights as the model applies them.
    """

    serial: int
    phase: int
    n_tokens: int
    layer_tokens: NDArray[np.int32]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


@dataclass(frozen=True)
class SensorStats:
    """struct moeedge_sensor_stats: the backend's figures since the context was made. Times are in seconds."""

    graphs: int = counter("graphs (or parts of graphs) computed")
    blocks: int = counter("MoE blocks seen")
    sense_s: float = counter("finding the MoE blocks, copying ids and weights, counting", "s")
    compute_s: float = counter("computing graphs, sensing included", "s")


_StatsStruct = c_struct(SensorStats)


class Sensor:
    """The sensor of the llama.cpp context that the calling thread made last."""

    def __init__(self, library: ctypes.CDLL, instance: int, shape: tuple[int, int, int, int]) -> None:
        self.n_layers, self.n_experts, self.n_used, self.n_tokens_max = shape
        self.instance = instance  # id of the backend's instance, for calls of the C interface
        self._library = library
        self._counts = np.zeros((self.n_layers, self.n_experts), dtype=np.uint32)
        self._counts_address = self._counts.ctypes.data
        self._frames = (FrameStruct * MAX_FRAMES)()
        self._last_serial = 0
        # arrays by address and tokens: making them takes longer than all else of reading a frame
        self._views: dict[tuple[int, int, int, int], tuple[Any, Any, Any]] = {}

    @classmethod
    def newest(cls, n_layers: int, n_experts: int, n_used: int, n_ubatch: int, scope: OffloadScope) -> Sensor:
        """Bind to the context that this thread created last and set its offload scope.

        n_ubatch: the most tokens that one graph computes. Raises BackendError where our backend has no such context.
        """
        instance = newest_instance()
        if instance == 0:
            raise BackendError(
                "moeedge's backend is not part of this context.", "Call moeedge.native.attach() before making it."
            )
        library = load()
        sensor = cls(library, instance, (n_layers, n_experts, n_used, n_ubatch))
        _check(library.moeedge_instance_configure(instance, n_layers, n_experts, n_used, n_ubatch))
        sensor.set_offload_scope(scope)
        return sensor

    def set_offload_scope(self, scope: OffloadScope) -> None:
        """Change the operations that the backend takes, from the next graph that llama.cpp builds on."""
        _check(self._library.moeedge_instance_set_offload_scope(self.instance, int(scope)))

    def skip_unweighted(self, on: bool) -> None:
        """Whether experts with weight 0 are left out of verifications where our backend computes them on the CPU."""
        _check(self._library.moeedge_instance_skip_unweighted(self.instance, int(on)))

    def set_phase(self, phase: int) -> None:
        """Tag the next graphs with a `Phase`."""
        _check(self._library.moeedge_instance_set_phase(self.instance, int(phase)))

    def read_counts(self) -> Counts:
        """Activations since the last read, uint32 [n_layers, n_experts], then cleared.

        The next call reuses the array: copy it to keep it.
        """
        _check(self._library.moeedge_instance_read_counts(self.instance, self._counts_address))
        return self._counts

    def frames(self) -> list[Frame]:
        """The frames since the last call, oldest first; those that the ring has overwritten are missing."""
        frames = self.frames_after(self._last_serial)
        if frames:
            self._last_serial = frames[-1].serial
        return frames

    def frames_after(self, serial: int) -> list[Frame]:
        """The frames after that serial, for a second reader that keeps its own position."""
        n_frames = _check(self._library.moeedge_instance_frames(self.instance, serial, self._frames, MAX_FRAMES))
        return [self._view(raw) for raw in self._frames[:n_frames]]

    def _view(self, raw: FrameStruct) -> Frame:
        place = (raw.layer_tokens, raw.ids, raw.weights, raw.n_tokens)
        views = self._views.get(place)
        if views is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            shape = (self.n_layers, raw.n_tokens, self.n_used)
            views = (
                view(raw.layer_tokens, shape[:1], np.int32),
                view(raw.ids, shape, np.int32),
                view(raw.weights, shape, np.float32),
            )
            self._views[place] = views
        layer_tokens, ids, weights = views
        return Frame(raw.serial, raw.phase, raw.n_tokens, layer_tokens, ids, weights)

    def stats(self) -> SensorStats:
        """The backend's figures since the context was made."""
        raw = _StatsStruct()
        _check(self._library.moeedge_instance_get_stats(self.instance, ctypes.byref(raw)))
        return from_c(SensorStats, raw)

    def threads(self) -> int:
        """Threads that the context asked for in its last decode; 0 before the first."""
        return _check(self._library.moeedge_instance_threads(self.instance))


def _check(status: int) -> int:
    """The status if it is not negative, else raises BackendError."""
    if status < 0:
        raise BackendError(f"moeedge's sensor failed: {_REASONS.get(status, status)}.")
    return status
