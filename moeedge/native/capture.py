"""What the layers of a context read: kept after each small batch, or handed to a hook before each block of it.

Predictors of experts go by the values that a layer's router reads (in a dense model, its FFN). Both work where our
backend computes the layers: with claims, and with the weights in host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeedge.errors import BackendError
from moeedge.native.abi import BLOCK_HOOK, BlockStruct, CapturedStruct, CaptureFlags, OffloadScope
from moeedge.native.library import load

CAPTURED_TOKENS = 32  # of a batch, at most: larger ones are neither kept nor stopped at (native/src/capture.h)


@dataclass(frozen=True)
class Activations:
    """One kind of values of the newest small batch; views of native memory that the next one overwrites.

    layer_tokens: int32 [n_layers], rows of each layer; 0: nothing is known of it.
    rows: float32 [n_layers, most tokens, n_embd or n_experts].
    """

    serial: int  # 1, 2, ...; 0: nothing yet
    layer_tokens: npt.NDArray[np.int32]
    rows: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Block:
    """A MoE block that is computed next (in a dense model: an FFN); copies.

    ids: int32 [n_tokens, n_used], the chosen experts; None in a dense model.
    inputs: float32 [n_tokens, n_embd], what the router read; None where it is not known.
    """

    layer: int
    phase: int
    ids: npt.NDArray[np.int32] | None
    inputs: npt.NDArray[np.float32] | None


class ActivationCapture:
    """Of one context, named by the id of its instance; `close` ends it and may be called twice.

    Set it up before the context's first decode, or have llama.cpp build its next graph anew: it would reuse its last
    one, whose memory is laid out without us.
    """

    def __init__(self, instance: int, *, n_layers: int, n_embd: int, n_experts: int) -> None:
        self._library = load()
        self._instance = instance
        self._shape = (n_layers, n_embd, n_experts)
        self._captured = CapturedStruct()
        self._hook: object = None  # what native code calls must not be collected
        self._error: BaseException | None = None  # out of the hook

    def _check(self, status: int) -> None:
        if status < 0:
            raise BackendError(f"moeedge's backend cannot capture what layers read (code {status}).")

    def set_offload_scope(self, claims: OffloadScope) -> None:
        """As a sensor's, for a context that has none."""
        self._check(self._library.moeedge_instance_set_claims(self._instance, int(claims)))

    def set_phase(self, phase: int) -> None:
        """As a sensor's, for a context that has none."""
        self._check(self._library.moeedge_instance_set_phase(self._instance, int(phase)))

    def keep(self, what: CaptureFlags) -> None:
        """Keeps that of each small batch from now on."""
        self._check(self._library.moeedge_instance_set_capture(self._instance, int(what), *self._shape))

    def kept(self, what: CaptureFlags) -> Activations:
        """One kind of what the newest small batch left."""
        raw = self._captured
        self._check(self._library.moeedge_instance_captured(self._instance, int(what), ctypes.byref(raw)))
        as_array = np.ctypeslib.as_array
        return Activations(
            serial=raw.serial,
            layer_tokens=as_array(raw.layer_tokens, (raw.n_layers,)),
            rows=as_array(raw.rows, (raw.n_layers, raw.stride, raw.width)),
        )

    def call(self, hook: Callable[[Block], None] | None) -> None:
        """Has `hook` called before each block of a small batch, by the decoding thread; None: no more.

        It must not decode. What it raises stops it, not the decode: `raise_error` brings it up.
        """
        raw = BLOCK_HOOK() if hook is None else BLOCK_HOOK(self._guarded(hook))
        self._check(self._library.moeedge_instance_set_hook(self._instance, raw, None))
        self._hook = raw

    def _guarded(self, hook: Callable[[Block], None]) -> Callable[[int, object], None]:
        def called(_user: int, raw: ctypes._Pointer[BlockStruct]) -> None:
            if self._error is not None:
                return
            try:
                hook(_block(raw.contents))
            except BaseException as error:  # Ctrl-C, too: nothing may pass through native code
                self._error = error

        return called  # type: ignore[return-value]

    def raise_error(self) -> None:
        """Raises what the hook raised since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """No more hook, nothing kept; the context may be gone."""
        self._library.moeedge_instance_set_hook(self._instance, BLOCK_HOOK(), None)
        self._library.moeedge_instance_set_capture(self._instance, 0, *self._shape)
        self._hook = None


def _block(raw: BlockStruct) -> Block:
    as_array = np.ctypeslib.as_array
    return Block(
        layer=raw.layer,
        phase=raw.phase,
        ids=as_array(raw.ids, (raw.n_tokens, raw.n_used)).copy() if raw.ids else None,
        inputs=as_array(raw.input, (raw.n_tokens, raw.n_embd)).copy() if raw.input else None,
    )
