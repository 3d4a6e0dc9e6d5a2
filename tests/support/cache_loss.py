"""A cache whose remote worker dies while the mover uploads, in a separate process: the process must go on.

    python -m tests.support.cache_loss rpc://HOST:PORT

Prints "moving" once uploads are under way; the caller then kills the worker. Prints "done" at the end and must exit by
itself: no thread may still wait for the worker.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from moeedge import native
from moeedge.errors import MoeedgeError
from moeedge.hardware.devices import resolve
from moeedge.hardware.spec import DeviceSpec
from moeedge.native.cache import CacheConfig, ExpertCache
from tests.support.experts import acquire, ask, carry_out, write_experts

PATIENCE_S = 20.0


def refused(call: Callable[[], object]) -> str:
    """The message of the error that the call raises, promptly."""
    begin_s = time.monotonic()
    try:
        call()
    except MoeedgeError as error:
        assert time.monotonic() - begin_s < 1.0, "the call waited for a lost device"
        return error.message
    raise AssertionError("a lost device was used")


def lose(config: CacheConfig) -> None:
    """Move experts until the device is lost, then call the cache again and close it."""
    everything = [(layer, expert) for layer in range(config.n_layers) for expert in range(config.n_experts)]
    cache = ExpertCache(config)
    ask(cache, everything, victims=everything)
    assert cache.drain(PATIENCE_S)
    print("moving", flush=True)
    turn = 0
    while not cache.stats().lost:
        assert turn < 10_000, "the worker lives on"
        turn += 1
        ask(cache, everything[turn % 7 :: 2], victims=everything[(turn + 1) % 2 :: 2])
        time.sleep(0.002)
    assert "its worker does not answer" in refused(lambda: cache.drain(PATIENCE_S))
    assert "is lost" in refused(cache.clear)
    assert (acquire(cache, 0, [0, 1, 2]) == -1).all(), "an expert of a lost device is resident"
    ask(cache, everything)
    assert cache.residency().shape == (config.n_layers, config.n_experts)
    begin_s = time.monotonic()
    cache.close()
    assert time.monotonic() - begin_s < 1.0
    assert "is lost" in refused(lambda: ExpertCache(config))


def main(arguments: list[str]) -> None:
    native.attach()
    device = resolve(DeviceSpec.parse(arguments[0])).ggml_name
    with tempfile.TemporaryDirectory() as folder:
        model = write_experts(Path(folder) / "experts.bin", n_experts=16, width=256)
        lose(model.config(0.5, device=device))
        with ExpertCache(model.config(0.5)) as cache:  # another device is not affected
            carry_out(cache, [(0, 0)])
            assert (cache.stats().uploads, cache.stats().lost) == (1, False)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
