"""Recorded routing: the rows of a trace, fitted to the layers and experts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace, unusable_trace

_NEXT_ROWS = 16  # that lend experts where the model uses more than the trace has
_STEP = 0.618  # of the recording, between the texts of two repetitions
_MOST_ROWS = 8192  # of a trace from which experts are borrowed so


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class RecordedRouting:
    """The experts of T tokens in reading order; the sequences of a trace follow one another.

    ids: int32 [T, n_layers, k], of which a layer takes its first experts. starts: first row of each sequence. scaling:
    how the trace was fitted; empty where it has the model's own layers, experts and experts per token. A layer gets the
    recorded one at the same share of the depth. A recorded expert stands for a block of n // n_recorded experts, of
    which a token uses as many as give k; who has too few takes those of the next tokens.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    scaling: str = ""

    def rows(self, positions: NDArray[np.int64], unrelated: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Experts [n, n_layers, k] of tokens at these positions of the joined sequences, which begin anew at the end.

        unrelated: tokens that are no part of the text, such as rejected drafts: they get the rows half the recording
        further, which are of another sequence where there are several.
        """
        n = len(self.ids)
        return np.ascontiguousarray(self.ids[(positions + np.where(unrelated, n // 2, 0)) % n])

    def offset(self, repetition: int) -> int:
        """The row at which the texts of a repetition begin, far from those of the others."""
        return int(repetition * _STEP * len(self.ids)) % len(self.ids)

    def boundaries(self, first: int, n: int) -> list[int]:
        """The positions from 0 to n - 1, of a text that begins at the row `first`, at which another sequence begins."""
        rows = np.arange(first, first + n) % len(self.ids)
        return [int(position) for position in np.flatnonzero(np.isin(rows, self.starts))]


def read_routing(path: Path, *, n_layers: int, n_experts: int, used_per_layer: Sequence[int]) -> RecordedRouting:
    """The routing of a trace file, fitted to a model with `used_per_layer` experts per token, 0 for a dense layer.

    Raises InputError for an unusable file, one without a token whose experts are all recorded, and a dense model.
    """
    if not any(used_per_layer):
        raise InputError("The model has no experts to route to.", "Leave out --routing.")
    trace = Trace.load(path)
    recorded = trace.ids[:, trace.expert_layers()]
    is_text = trace.accepted & (trace.phase != Phase.DRAFT) & (recorded != trace.sentinel).all(axis=(1, 2))
    if not is_text.any():
        raise unusable_trace(path, "no token has experts in every layer")
    ids, sequence = recorded[is_text].astype(np.int32), trace.sequence[is_text]
    starts = np.flatnonzero(np.diff(sequence, prepend=sequence[0] - 1))
    own_layers = [layer for layer, used in enumerate(used_per_layer) if used]
    k, n_recorded = max(used_per_layer), trace.meta.n_experts
    before, after = (n_recorded, *ids.shape[1:]), (n_experts, len(own_layers), k)
    if before == after and {used_per_layer[layer] for layer in own_layers} == {k}:
        out = np.zeros((len(ids), n_layers, k), dtype=np.int32)
        out[:, own_layers] = ids
        return RecordedRouting(out, starts)
    # each recorded expert stands for a block of the model's: which of them it is, is fixed for a sequence and a layer
    n_block, n_each = max(n_experts // n_recorded, 1), -(-k // ids.shape[2])
    is_distinct = n_experts % n_recorded == 0 and n_each <= n_block
    ids = ids if is_distinct else ids[:_MOST_ROWS]
    starts, text = starts[starts < len(ids)], np.searchsorted(starts, np.arange(len(ids)), side="right") - 1
    out, rng = np.zeros((len(ids), n_layers, k), dtype=np.int32), np.random.default_rng(0)
    for index, layer in enumerate(own_layers):
        order = rng.permuted(np.tile(np.arange(n_block), (len(starts), n_recorded, 1)), axis=2)[:, :, :n_each]
        blocks = np.arange(n_recorded) * n_experts // n_recorded
        own = ids[:, index * ids.shape[1] // len(own_layers)]
        experts = (blocks[own][:, None] + order[text[:, None], own].swapaxes(1, 2)).reshape(len(own), -1)
        out[:, layer] = experts[:, :k] if is_distinct else _distinct(experts, k, n_experts)
    names = ("experts", "layers with experts", "experts per token")
    changes = (f"{name} {old} -> {new}" for name, old, new in zip(names, before, after, strict=True) if old != new)
    return RecordedRouting(out, starts, ", ".join(changes) or "experts per token by layer")


def _distinct(experts: NDArray[np.int64], k: int, n_experts: int) -> NDArray[np.int32]:
    """For each row [T, any number] the first `k` distinct experts of it and of the rows after it, then free ones."""
    out = np.empty((len(experts), k), dtype=np.int32)
    for row in range(len(experts)):
        found = dict.fromkeys(experts[row : row + 1 + _NEXT_ROWS].ravel().tolist())
        out[row] = list(found if len(found) >= k else found | dict.fromkeys(range(n_experts)))[:k]
    return out
