"""Which modes run, and in which order."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from moeedge.bench.config import MODES, applicable_modes, mode_config, parse_modes
from moeedge.bench.harness import rotated
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError


def test_a_list_of_modes() -> None:
    assert [mode.name for mode in parse_modes("moeedge, stock-ar,moeedge")] == ["moeedge", "stock-ar"]
    with pytest.raises(InputError, match="stock") as caught:
        parse_modes("stock-ar,stock")
    assert "moeedge-ar" in caught.value.hint
    with pytest.raises(InputError):
        parse_modes(" ,")


def test_without_a_draft_moeedge_decodes_one_token_at_a_time() -> None:
    kept, notes = applicable_modes(parse_modes("stock-ar,stock-sd,moeedge,moeedge-ar"), has_draft=False)
    assert [(mode.name, mode.drafts) for mode in kept] == [("stock-ar", False), ("moeedge", False)]
    assert len(notes) == 3
    assert applicable_modes(parse_modes("stock-ar,moeedge-ar"), has_draft=False)[1] == []
    everything = tuple(MODES.values())
    assert applicable_modes(everything, has_draft=True) == (everything, [])


def test_what_the_engine_is_told() -> None:
    base = EngineConfig(model=Path("t.gguf"), draft=Path("d.gguf"), gamma=5)
    told = {name: mode_config(base, mode) for name, mode in MODES.items()}
    assert {name: (c.mode, c.draft, c.gamma) for name, c in told.items()} == {
        "stock-ar": ("stock", None, 0),
        "stock-sd": ("stock", Path("d.gguf"), 5),
        "moeedge": ("moeedge", Path("d.gguf"), 5),
        "moeedge-ar": ("moeedge", None, 0),
    }


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_mode_runs_equally_often_in_every_place_and_after_every_other(n: int) -> None:
    modes = list(MODES.values())[:n]
    orders = [rotated(modes, turn) for turn in range(2 * n)]
    for place in range(n):
        assert set(Counter(order[place] for order in orders).values()) == {2}
    after = Counter(pair for order in orders for pair in pairwise(order))
    assert all(after[a, b] == after[b, a] > 0 for a, b in permutations(modes, 2) if after[a, b] or after[b, a])
