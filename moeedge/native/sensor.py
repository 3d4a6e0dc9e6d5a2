"""The sensor of one llama.cpp context: activation counts, routing, the activations of its layers.

Activations are captured after each small batch, or passed to a hook before each block of it; predictors of experts
read the input of a layer's router (in a dense model, of its FFN). All of it needs an offload scope other than NONE, and
the weights in host memory: our backend must compute the layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError
from moeedge.native import abi
from moeedge.native.abi import CaptureFlags, OffloadScope, view
from moeedge.native.library import load, newest_instance
from moeedge.records import counter

Counts = NDArray[np.uint32]  # [n_layers, n_experts] activations

_MAX_VIEWS = 256  # of frames, kept
MAX_FRAMES = 8  # size of the native ring (routing-sensor.h)
CAPTURED_TOKENS = 32  # the largest batch that is captured and for which the hook is called (router-inputs.h)

_REASONS = {-1: "its context is closed", -2: "bad argument", -3: "out of memory", -4: "not configured"}


@dataclass(frozen=True)
class Frame:
    """Routing of one graph (one ubatch). The arrays are views of native memory, valid until 8 further graphs ran."""

    serial: int
    phase: int  # a `Phase`, never AUTO
    n_tokens: int
    layer_tokens: NDArray[np.int32]  # [n_layers], 0: without experts; the last layer has only those with logits
    ids: NDArray[np.int32]  # [n_layers, n_tokens, n_used], best first; undefined past layer_tokens
    weights: NDArray[np.float32]  # [n_layers, n_tokens, n_used], as the model applies them


@dataclass(frozen=True)
class SensorStats:
    """struct moeedge_sensor_stats: the backend's figures since the context was made. Times are in seconds."""

    graphs: int = counter("graphs (or parts of graphs) computed")
    blocks: int = counter("MoE blocks seen")
    sense_s: float = counter("finding the MoE blocks, copying ids and weights, counting", "s")
    compute_s: float = counter("computing graphs, sensing included", "s")


class Instance:
    """Our backend's part of one llama.cpp context. instance: its id, for calls of the C interface."""

    def __init__(self, instance: int) -> None:
        self.instance = instance
        self._library = load()

    def set_offload_scope(self, scope: OffloadScope) -> None:
        """Change the operations that the backend takes, from the next graph that llama.cpp builds on."""
        _check(self._library.moeedge_instance_set_offload_scope(self.instance, int(scope)))

    def set_phase(self, phase: int) -> None:
        """Tag the next graphs with a `Phase`."""
        _check(self._library.moeedge_instance_set_phase(self.instance, int(phase)))


class Sensor(Instance):
    """The sensor of the llama.cpp context that the calling thread made last.

    n_ubatch: the most tokens that one graph computes. Raises BackendError where our backend has no such context.
    """

    def __init__(self, n_layers: int, n_experts: int, n_used: int, n_ubatch: int) -> None:
        super().__init__(newest_instance())
        if self.instance == 0:
            raise BackendError(
                "moeedge's backend is not part of this context.", "Call moeedge.native.attach() before making it."
            )
        self.n_layers, self.n_experts, self.n_used = n_layers, n_experts, n_used
        _check(self._library.moeedge_instance_configure(self.instance, n_layers, n_experts, n_used, n_ubatch))
        self._counts = np.zeros((self.n_layers, self.n_experts), dtype=np.uint32)
        self._counts_address = self._counts.ctypes.data
        self._frames = (abi.FrameStruct * MAX_FRAMES)()
        self._stats = abi.c_struct(SensorStats)()
        self._stats_address = ctypes.byref(self._stats)
        self._last_serial = 0
        # arrays by address and tokens: making them takes longer than all else of reading a frame
        self._views: dict[tuple[int, int, int, int], tuple[Any, Any, Any]] = {}

    def skip_unweighted(self, on: bool) -> None:
        """Whether experts with weight 0 are left out of verifications where our backend computes them on the CPU."""
        _check(self._library.moeedge_instance_skip_unweighted(self.instance, int(on)))

    def read_counts(self) -> Counts:
        """Activations since the last read, uint32 [n_layers, n_experts]; the next call reuses the array."""
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

    def _view(self, raw: abi.FrameStruct) -> Frame:
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
        return Frame(raw.serial, raw.phase, raw.n_tokens, *views)

    def stats(self) -> SensorStats:
        return abi.from_c(SensorStats, self._read_stats())

    @property
    def sense_s(self) -> float:
        """Of `stats`, read twice a step: the time of counting and reading."""
        return float(self._read_stats().sense_s)

    def _read_stats(self) -> Any:
        _check(self._library.moeedge_instance_get_stats(self.instance, self._stats_address))
        return self._stats

    def threads(self) -> int:
        """Threads that the context asked for in its last decode; 0 before the first."""
        return _check(self._library.moeedge_instance_threads(self.instance))


@dataclass(frozen=True)
class Activations:
    """One kind of activations of the newest small batch; views of native memory that the next one overwrites."""

    serial: int  # 1, 2, ...; 0: none yet
    layer_tokens: NDArray[np.int32]  # [n_layers], rows of each layer; 0: not captured
    rows: NDArray[np.float32]  # [n_layers, CAPTURED_TOKENS, n_embd or n_experts]


@dataclass(frozen=True)
class Block:
    """A MoE block that is computed next (in a dense model: an FFN); copies."""

    layer: int
    phase: int
    ids: NDArray[np.int32] | None  # [n_tokens, n_used], the selected experts; None in a dense model
    inputs: NDArray[np.float32] | None  # [n_tokens, n_embd], of the router; None where it is not seen


class ActivationCapture(Instance):
    """Capture and hook of one context, named by the id of its instance; `close` may be called twice.

    Set it up before the context's first decode, or have llama.cpp build a graph anew: the last keeps no activations.
    """

    def __init__(self, instance: int, *, n_layers: int, n_embd: int, n_experts: int) -> None:
        super().__init__(instance)
        self._shape = (n_layers, n_embd, n_experts)
        self._activations = abi.ActivationsStruct()
        self._hook: object = None  # a function that native code calls must not be collected
        self._error: BaseException | None = None  # raised by the hook

    def enable(self, flags: CaptureFlags) -> None:
        """Capture these activations of each small batch from now on."""
        _check(self._library.moeedge_instance_set_capture(self.instance, int(flags), *self._shape))

    def read(self, flag: CaptureFlags) -> Activations:
        raw = self._activations
        _check(self._library.moeedge_instance_get_activations(self.instance, int(flag), ctypes.byref(raw)))
        return Activations(
            serial=raw.serial,
            layer_tokens=view(raw.layer_tokens, (raw.n_layers,), np.int32),
            rows=view(raw.rows, (raw.n_layers, raw.stride, raw.width), np.float32),
        )

    def set_hook(self, hook: Callable[[Block], None] | None) -> None:
        """Call `hook`, which must not decode, before each block of a small batch; `raise_error` has its exception."""

        def called(_user: int, raw: ctypes._Pointer[abi.BlockStruct]) -> None:
            try:
                if self._error is None and hook is not None:
                    hook(_block(raw.contents))
            except BaseException as error:  # Ctrl-C, too: no exception may pass through native code
                self._error = error

        native_hook = abi.BLOCK_HOOK() if hook is None else abi.BLOCK_HOOK(called)
        _check(self._library.moeedge_instance_set_hook(self.instance, native_hook, None))
        self._hook = native_hook

    def expert_outputs(self, block: Block) -> NDArray[np.float32]:
        """The outputs of all experts, before the router's weights: float32 [n_tokens, n_experts, n_embd].

        Only within the hook's call for that block. Raises BackendError for a block that applies the router's weights
        before the experts (llama4), has a LoRA, or is of a dense model.
        """
        if block.ids is None:
            raise BackendError("A dense model has no experts.")
        _, n_embd, n_experts = self._shape
        outputs = np.empty((len(block.ids), n_experts, n_embd), dtype=np.float32)
        if self._library.moeedge_instance_expert_outputs(self.instance, outputs.ctypes.data, outputs.size) < 0:
            reason = self._library.moeedge_last_error().decode(errors="replace")
            raise BackendError(f"The outputs of layer {block.layer}'s experts are not available: {reason}")
        return outputs

    def raise_error(self) -> None:
        """Raise the exception that the hook has raised since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Remove the hook and end the capture; the context may be closed already."""
        self._library.moeedge_instance_set_hook(self.instance, abi.BLOCK_HOOK(), None)
        self._library.moeedge_instance_set_capture(self.instance, 0, *self._shape)
        self._hook = None


def _block(raw: abi.BlockStruct) -> Block:
    ids = view(raw.ids, (raw.n_tokens, raw.n_used), np.int32).copy() if raw.ids else None
    inputs = view(raw.input, (raw.n_tokens, raw.n_embd), np.float32).copy() if raw.input else None
    return Block(raw.layer, raw.phase, ids, inputs)


def _check(status: int) -> int:
    """The status if it is not negative, else raises BackendError."""
    if status < 0:
        raise BackendError(f"moeedge's part of the context failed: {_REASONS.get(status, status)}.")
    return status
