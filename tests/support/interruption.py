"""Ctrl-C in the middle of decoding."""

from __future__ import annotations

import pytest

from moeedge.native.compute import Decoder


def interrupt_decode(patch: pytest.MonkeyPatch, at_call: int) -> None:
    """Raises KeyboardInterrupt after the `at_call`th batch of any model, counted from now."""
    real, calls = Decoder.__call__, 0

    def interrupted(self: Decoder, batch: object, *, wait: bool) -> int:
        nonlocal calls
        calls += 1
        code = real(self, batch, wait=wait)
        if calls == at_call:
            raise KeyboardInterrupt
        return int(code)

    patch.setattr(Decoder, "__call__", interrupted)
