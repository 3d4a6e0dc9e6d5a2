"""Ctrl-C in the middle of decoding, and a GPU that fails there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moeedge.engine.drafts import ContextDraft
from moeedge.engine.session import Session
from moeedge.native.compute import Decoder, DriverThrewError


def interrupt_decode(patch: pytest.MonkeyPatch, at_call: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Raises the error after the `at_call`th batch of any model, counted from now."""
    real, calls = Decoder.__call__, 0

    def interrupted(self: Decoder, batch: object, *, wait: bool) -> int:
        nonlocal calls
        calls += 1
        code = real(self, batch, wait=wait)
        if calls == at_call:
            raise error
        return int(code)

    patch.setattr(Decoder, "__call__", interrupted)


def pretend_gpu(session: Session) -> None:
    """Models on the CPU say that they use a GPU."""
    session.model.uses_gpu = True
    if isinstance(session.draft, ContextDraft):
        session.draft.context.model.uses_gpu = True


@contextmanager
def failing(at_call: int, code: int | None = -3) -> Iterator[list[int]]:
    """The `at_call`th decode of any context fails with a result of llama_decode, None: with the driver's exception.

    Yields the number of tokens of each decode.
    """
    calls: list[int] = []
    real = Decoder.__call__

    def decode(self: Decoder, batch: object, *, wait: bool) -> int:
        calls.append(int(batch.n_tokens))  # type: ignore[attr-defined]
        if len(calls) == at_call and code is None:
            raise DriverThrewError("vk::Queue::submit: ErrorDeviceLost")
        return code if len(calls) == at_call else real(self, batch, wait=wait)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "__call__", decode)
        yield calls
