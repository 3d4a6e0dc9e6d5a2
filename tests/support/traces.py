"""Traces for tests: small random ones with all the parts that the format has, and the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.native.abi import Phase
from moeedge.trace.format import Trace, TraceMeta, ids_dtype


def make_trace(
    rows: list[tuple[int, int, int, bool]],
    *,
    n_layers: int = 2,
    n_experts: int = 8,
    n_used: int = 2,
    gamma: int = 2,
    seed: int = 0,
    weights: bool = False,
    **meta: Any,
) -> Trace:
    """Rows are (phase, sequence, step, accepted); experts are random, a token's k experts differ."""
    rng = np.random.default_rng(seed)
    n_rows = len(rows)
    phase, sequence, step, accepted = (np.array(column) for column in zip(*rows, strict=True)) if rows else [[]] * 4
    order = rng.random((n_rows, n_layers, n_experts)).argsort(axis=2)[:, :, :n_used]
    return Trace(
        meta=TraceMeta(
            model="random", n_layers=n_layers, n_experts=n_experts, n_expert_used=n_used, gamma=gamma, **meta
        ),
        ids=order.astype(ids_dtype(n_experts)),
        phase=np.asarray(phase, dtype=np.uint8),
        sequence=np.asarray(sequence, dtype=np.int32),
        step=np.asarray(step, dtype=np.int32),
        accepted=np.asarray(accepted, dtype=np.bool_),
        token=np.arange(n_rows, dtype=np.int32),
        position=np.arange(n_rows, dtype=np.int32),
        weights=rng.random(order.shape).astype(np.float16) if weights else None,
    )


def two_texts(**arguments: Any) -> Trace:
    """Two texts; steps of 3 tokens with 1, 3, 2 and 1, 2 accepted rows, and one step without drafts."""
    rows = [(Phase.PREFILL, 0, 0, True)] * 3
    for step, n_text in enumerate((1, 3, 2), start=1):
        rows += [(Phase.VERIFY, 0, step, place < n_text) for place in range(3)]
    rows += [(Phase.PREFILL, 1, 0, True)] * 2
    for step, n_text in enumerate((1, 2), start=1):
        rows += [(Phase.VERIFY, 1, step, place < n_text) for place in range(3)]
    rows.append((Phase.DECODE, 1, 3, True))
    return make_trace(rows, **arguments)


def plain_text(n_tokens: int, **arguments: Any) -> Trace:
    """One text of plain decoding, one token per step."""
    return make_trace([(Phase.DECODE, 0, step, True) for step in range(1, n_tokens + 1)], gamma=0, **arguments)


def published_trace(data_folder: Path, name: str = "gptoss20b_decode.npz") -> Path:
    """A published trace; skips where the folder lacks it."""
    file = data_folder / "traces" / name
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    return file
