"""Activations of a context's layers: captured after each small batch, or passed to a hook before each block of it.

Predictors of experts read the input of a layer's router (in a dense model, of its FFN). Both ways work where our
backend computes the layers: with an offload scope other than NONE, and with the weights in host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeedge.errors import BackendError
from moeedge.native.abi import BLOCK_HOOK, ActivationsStruct, BlockStruct, CaptureFlags, OffloadScope
from moeedge.native.library import load

CAPTURED_TOKENS = 32  # the largest batch that is captured and for which the hook is called (activation-capture.h)


@dataclass(frozen=True)
class Activations:
    """One kind of activations of the newest small batch; views of native memory that the next one overwrites.

    layer_tokens: int32 [n_layers], rows of each layer; 0: the layer was not captured.
    rows: float32 [n_layers, CAPTURED_TOKENS, n_embd or n_experts].
    """

    serial: int  # 1, 2, ...; 0: none yet
    layer_tokens: npt.NDArray[np.int32]
    rows: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Block:
    """A MoE block that is computed next (in a dense model: an FFN); copies.

    ids: int32 [n_tokens, n_used], the selected experts; None in a dense model.
    inputs: float32 [n_tokens, n_embd], the router's input; None where it is not known.
    """

    layer: int
    phase: int
    ids: npt.NDArray[np.int32] | None
    inputs: npt.NDArray[np.float32] | None


class ActivationCapture:
    """Capture and hook of one context, named by the id of its instance; `close` may be called twice.

    Set it up before the context's first decode, or have llama.cpp build its next graph anew: llama.cpp would reuse the
    last graph, whose memory layout does not keep the activations.
    """

    def __init__(self, instance: int, *, n_layers: int, n_embd: int, n_experts: int) -> None:
        self._library = load()
        self._instance = instance
        self._shape = (n_layers, n_embd, n_experts)
        self._activations = ActivationsStruct()
        self._hook: object = None  # a function that native code calls must not be collected
        self._error: BaseException | None = None  # raised by the hook

    def set_offload_scope(self, scope: OffloadScope) -> None:
        """As `Sensor.set_offload_scope`, for a context without a sensor."""
        _check(self._library.moeedge_instance_set_offload_scope(self._instance, int(scope)))

    def set_phase(self, phase: int) -> None:
        """As `Sensor.set_phase`, for a context without a sensor."""
        _check(self._library.moeedge_instance_set_phase(self._instance, int(phase)))

    def enable(self, flags: CaptureFlags) -> None:
        """Capture these activations of each small batch from now on."""
        _check(self._library.moeedge_instance_set_capture(self._instance, int(flags), *self._shape))

    def read(self, flag: CaptureFlags) -> Activations:
        """One kind of activations of the newest small batch."""
        raw = self._activations
        _check(self._library.moeedge_instance_get_activations(self._instance, int(flag), ctypes.byref(raw)))
        return Activations(
            serial=raw.serial,
            layer_tokens=np.ctypeslib.as_array(raw.layer_tokens, (raw.n_layers,)),
            rows=np.ctypeslib.as_array(raw.rows, (raw.n_layers, raw.stride, raw.width)),
        )

    def set_hook(self, hook: Callable[[Block], None] | None) -> None:
        """Call `hook` before each block of a small batch, in the decoding thread; None removes it.

        The hook must not decode. An exception of it stops the hook, not the decode: `raise_error` raises it.
        """
        raw = BLOCK_HOOK() if hook is None else BLOCK_HOOK(self._guarded(hook))
        _check(self._library.moeedge_instance_set_hook(self._instance, raw, None))
        self._hook = raw

    def _guarded(self, hook: Callable[[Block], None]) -> Callable[[int, object], None]:
        def called(_user: int, raw: ctypes._Pointer[BlockStruct]) -> None:
            if self._error is not None:
                return
            try:
                hook(_block(raw.contents))
            except BaseException as error:  # Ctrl-C, too: no exception may pass through native code
                self._error = error

        return called  # type: ignore[return-value]

    def expert_outputs(self, block: Block) -> npt.NDArray[np.float32]:
        """What each expert of `block` gives for each token, selected or not: float32 [n_tokens, n_experts, n_embd].

        Before the router's weights. Only within the hook's call for that block. Raises BackendError where the block
        cannot be computed for all experts: it applies the router's weights before the experts (llama4), has a LoRA, or
        is of a dense model.
        """
        if block.ids is None:
            raise BackendError("A dense model has no experts.")
        _, n_embd, n_experts = self._shape
        outputs = np.empty((len(block.ids), n_experts, n_embd), dtype=np.float32)
        status = self._library.moeedge_instance_expert_outputs(self._instance, outputs.ctypes.data, outputs.size)
        if status < 0:
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
        self._library.moeedge_instance_set_hook(self._instance, BLOCK_HOOK(), None)
        self._library.moeedge_instance_set_capture(self._instance, 0, *self._shape)
        self._hook = None


def _check(status: int) -> None:
    if status < 0:
        raise BackendError(f"moeedge's backend cannot capture activations (code {status}).")


def _block(raw: BlockStruct) -> Block:
    as_array = np.ctypeslib.as_array
    return Block(
        layer=raw.layer,
        phase=raw.phase,
        ids=as_array(raw.ids, (raw.n_tokens, raw.n_used)).copy() if raw.ids else None,
        inputs=as_array(raw.input, (raw.n_tokens, raw.n_embd)).copy() if raw.input else None,
    )
