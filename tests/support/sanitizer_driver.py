"""Exercises each part of the native library: run by the sanitizer tests with an instrumented build.

MOEEDGE_LIBRARY=libmoeedge.so LD_PRELOAD=libasan.so python -m tests.support.sanitizer_driver MODEL...
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

import llama_cpp

from moeedge import native
from moeedge.errors import BackendError
from moeedge.native import ActivationCapture, Block, CaptureFlags, OffloadScope
from tests.support.sensed import model_number, sensed_context
from tests.support.stock import StockContext, transcript


def exercise(path: Path, scope: OffloadScope, *, n_threads: int = 1) -> None:
    """A context's life: transcripts with the sensor read after each, threads and offload scope changed in between."""
    context, sensor = sensed_context(path, scope, n_ubatch=32, n_threads=n_threads)
    with context:
        keys = ("block_count", "embedding_length", "expert_count")
        n_layers, n_embd, n_experts = (model_number(context, key) for key in keys)
        capture = ActivationCapture(sensor.instance, n_layers=n_layers, n_embd=n_embd, n_experts=n_experts)
        for phase, change in enumerate((OffloadScope.ALL, OffloadScope.NONE, OffloadScope.MOE), start=1):
            sensor.set_phase(phase)
            capture.enable(
                (CaptureFlags.INPUTS | CaptureFlags.PROBS, CaptureFlags.PROBS, CaptureFlags.NOTHING)[phase % 3]
            )
            capture.set_hook(look if phase > 1 else None)
            transcript(context, seed=phase)
            capture.raise_error()
            if phase % 3 < 2:
                captured = capture.read(CaptureFlags.PROBS)
                for layer, n_tokens in enumerate(captured.layer_tokens):
                    assert captured.rows[layer, :n_tokens].sum() == captured.rows[layer, :n_tokens].sum()
            for frame in sensor.frames():
                # every row that is defined, so that a view past its memory is touched
                for layer, n_tokens in enumerate(frame.layer_tokens):
                    assert (frame.ids[layer, :n_tokens] >= 0).all()
                    assert frame.weights[layer, :n_tokens].sum() == frame.weights[layer, :n_tokens].sum()
            sensor.read_counts()
            sensor.stats()
            context.trim(0)
            sensor.set_offload_scope(change)
            llama_cpp.llama_set_n_threads(context.context, phase % 2 + 1, n_threads)
        for refused in (lambda: sensor.set_phase(-1), lambda: sensor.set_offload_scope(7)):  # type: ignore[arg-type]
            try:
                refused()
            except BackendError:
                continue
            raise AssertionError("a bad argument was accepted")
        capture.enable(CaptureFlags.INPUTS)
        capture.set_hook(look)  # the context is freed with both
    try:
        sensor.read_counts()
    except BackendError:
        return
    raise AssertionError("a closed context was read")


def look(block: Block) -> None:
    """A hook that reads all of its arguments."""
    assert block.ids is not None and (block.ids >= 0).all()
    assert block.inputs is None or block.inputs.sum() == block.inputs.sum()


def churn(path: Path, start: threading.Barrier) -> None:
    """Make and free contexts as fast as possible while other threads do the same: the list of instances."""
    start.wait()
    for _ in range(20):
        context, sensor = sensed_context(path, OffloadScope.ALL, n_ctx=64)
        with context:
            context.decode([1])
            assert len(sensor.frames()) == 1


def misuse() -> None:
    """Call the C interface without a context or with impossible shapes."""
    library = native.load()
    assert library.moeedge_instance_configure(0, 1, 1, 1, 1) < 0
    assert library.moeedge_instance_threads(-5) < 0
    assert library.moeedge_instance_set_capture(0, 1, 1, 1, 1) < 0
    assert library.moeedge_set_default_offload_scope(9) < 0
    library.ggml_backend_init.restype = ctypes.c_void_p
    assert library.ggml_backend_init()


def main(arguments: list[str]) -> None:
    """Exercises each model in turn, then all at once in threads."""
    paths = [Path(path) for path in arguments]
    for path in paths:
        for scope in OffloadScope:
            exercise(path, scope)
    start = threading.Barrier(len(paths))
    threads = [threading.Thread(target=exercise, args=(path, OffloadScope.ALL)) for path in paths]
    threads += [threading.Thread(target=churn, args=(path, start)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with StockContext(paths[0]) as unsensed:  # an instance without a sensor
        transcript(unsensed)
        library = native.load()
        instance = library.moeedge_newest_instance()
        assert library.moeedge_instance_configure(instance, 3, 16, 17, 1) < 0, "more experts used than there are"
        # a sensor that is smaller than the model: what does not fit is left out
        assert library.moeedge_instance_configure(instance, 2, 4, 2, 8) == 0
        assert library.moeedge_instance_set_offload_scope(instance, int(OffloadScope.ALL)) == 0
        transcript(unsensed, seed=5)
    misuse()
    assert native.load().moeedge_live_instances() == 0
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
