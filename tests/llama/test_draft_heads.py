"""What a draft head says of itself."""

from __future__ import annotations

from typing import Literal

import pytest

from moeedge.llama.draft_heads import BlockLayout, HeadKind


@pytest.mark.parametrize(
    ("name", "n_heads", "block", "n_drafts_max"),
    [
        ("mtp", 1, None, None),  # a head that reads its own states drafts on
        ("mtp", 2, None, 2),
        ("mtp", 3, None, 3),
        ("dflash", 1, BlockLayout(mask=5, n_tokens=8, first=1, causal=False), 7),
        ("dflash", 1, BlockLayout(mask=5, n_tokens=8, first=0, causal=True), 8),
    ],
)
def test_drafts_of_a_step(
    name: Literal["mtp", "dflash"], n_heads: int, block: BlockLayout | None, n_drafts_max: int | None
) -> None:
    kind = HeadKind(name, (2,), n_skipped=0, state_at=-1, block=block, n_heads=n_heads)
    assert kind.n_drafts_max == n_drafts_max
