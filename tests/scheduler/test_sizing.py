"""The cache's size for any model and device: never more than there is, never less than one expert per layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.errors import InputError
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.sizing import CacheBudget, plan_budget
from tests.support.machine import GIB

# the expert tensors of Qwen3-30B-A3B in Q4_0: 48 layers of 128 experts of 2.65 MB
_EXPERT = 2_654_208
_QWEN = {"expert_bytes_total": 48 * 128 * _EXPERT, "n_expert_layers": 48, "n_experts": 128}

_models = st.fixed_dictionaries(
    {
        "expert_bytes_total": st.integers(1, 2**42),
        "n_expert_layers": st.integers(1, 128),
        "n_experts": st.integers(1, 512),
    }
)
_memory = st.fixed_dictionaries({"free_bytes": st.integers(0, 2**40), "reserve_bytes": st.integers(0, 2**31)})


def _check(budget: CacheBudget, model: dict[str, int], memory: dict[str, int]) -> None:
    """What holds for every budget."""
    n_all = model["n_expert_layers"] * model["n_experts"]
    room = max(0, memory["free_bytes"] - memory["reserve_bytes"])
    assert 0 <= budget.n_slots <= n_all
    assert budget.ratio == budget.n_slots / n_all
    assert budget.pool_bytes <= room or budget.n_slots == 0
    assert budget.n_slots == 0 or budget.n_slots >= model["n_expert_layers"]
    assert math.isclose(budget.pool_bytes, budget.ratio * model["expert_bytes_total"], abs_tol=1, rel_tol=1e-9)
    assert all(note.endswith((".", "there.")) for note in budget.notes)


@given(_models, _memory)
def test_default_budget_fits_free_memory(model: dict[str, int], memory: dict[str, int]) -> None:
    budget = plan_budget(**model, **memory)
    _check(budget, model, memory)
    room = max(0, memory["free_bytes"] - memory["reserve_bytes"])
    if budget.n_slots:  # one more would not have fitted, or there is none
        more = budget.n_slots + 1
        n_all = model["n_expert_layers"] * model["n_experts"]
        assert more > n_all or more * model["expert_bytes_total"] > room * n_all
    else:
        assert len(budget.notes) == 1


@given(_models, _memory, st.floats(0, 1))
def test_budget_by_ratio(model: dict[str, int], memory: dict[str, int], ratio: float) -> None:
    budget = plan_budget(**model, **memory, cache_ratio=ratio)
    _check(budget, model, memory)
    wanted = int(ratio * model["n_expert_layers"] * model["n_experts"] + 1e-6)
    assert budget.n_slots <= wanted
    if budget.n_slots not in (0, wanted):
        assert "instead of" in budget.notes[0]
    if budget.n_slots == 0 and ratio > 0:
        assert "cannot hold" in budget.notes[0]


@given(_models, _memory, st.integers(0, 2**42))
def test_budget_by_size(model: dict[str, int], memory: dict[str, int], vram_bytes: int) -> None:
    budget = plan_budget(**model, **memory, vram_bytes=vram_bytes)
    _check(budget, model, memory)
    assert budget.pool_bytes <= vram_bytes


@pytest.mark.parametrize(
    ("asked", "n_slots", "words"),
    [
        ({}, 48 * 128, ()),  # all experts if they fit
        ({"cache_ratio": 0.17}, 1044, ()),
        ({"default_ratio": 0.17}, 1044, ()),  # the device's
        ({"cache_ratio": 1.0}, 48 * 128, ()),
        ({"cache_ratio": 0.0}, 0, ()),
        ({"vram_bytes": 6_000_000_000}, 6_000_000_000 // _EXPERT, ()),
        ({"vram_bytes": 48 * _EXPERT}, 48, ()),
        ({"vram_bytes": 47 * _EXPERT}, 0, ("119 MiB cannot hold one expert per layer, which takes 122 MiB.",)),
        ({"free_bytes": 0}, 0, ("cannot hold",)),
        ({"cache_ratio": 0.5, "experts_on_device": True}, 0, ("already",)),  # they are left to llama.cpp
        ({"cache_ratio": 0.5, "expert_bytes_total": 0, "n_expert_layers": 0, "n_experts": 0}, 0, ("no experts",)),
    ],
)
def test_figures_of_a_real_model(asked: dict[str, Any], n_slots: int, words: tuple[str, ...]) -> None:
    budget = plan_budget(**_QWEN | {"free_bytes": 24 * GIB} | asked)
    assert budget.n_slots == n_slots and len(budget.notes) == len(words)
    assert all(word in note for word, note in zip(words, budget.notes, strict=True))


def test_ratios_without_exact_binary_fraction() -> None:
    shape = {"expert_bytes_total": 10_000, "n_expert_layers": 1, "n_experts": 100, "free_bytes": 10_000}
    assert [plan_budget(**shape, cache_ratio=n / 100).n_slots for n in range(101)] == list(range(101))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *[({"cache_ratio": ratio}, "from 0 to 1") for ratio in (-0.01, 1.01, math.nan, math.inf)],
        ({"vram_bytes": -1}, "vram_bytes"),
        ({"vram_bytes": 1, "cache_ratio": 0.5}, "cannot be used together"),
    ],
)
def test_sizes_that_are_not_taken(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PlacementConfig(**fields)


def test_a_size_beyond_the_device_is_an_error() -> None:
    asked = {"free_bytes": 20 * GIB, "total_bytes": 24 * GIB, "vram_bytes": 30 * GIB}
    with pytest.raises(InputError, match=r"--vram asks for 30.0 GiB, and the device .* has 24.0 GiB"):
        plan_budget(**_QWEN, **asked)
    with pytest.raises(InputError) as raised:
        plan_budget(**_QWEN, **asked, in_ram=True)
    assert "--ram" in raised.value.message and "device" not in raised.value.message
    with pytest.raises(InputError) as raised:  # in RAM there is another way to run the model, so it is not a note
        plan_budget(**_QWEN, free_bytes=GIB, vram_bytes=47 * _EXPERT, in_ram=True)
    assert "--ram" in raised.value.message and "122 MiB" in raised.value.message


def test_a_size_beyond_free_memory_shrinks_with_a_note() -> None:
    memory = {"free_bytes": 4 * GIB, "total_bytes": 24 * GIB, "reserve_bytes": GIB // 2}
    budget = plan_budget(**_QWEN, **memory, vram_bytes=8 * GIB)
    assert budget.pool_bytes <= 3.5 * GIB
    [note] = budget.notes
    assert all(words in note for words in ("3.5 GiB instead of 8.0 GiB", "4.0 GiB are free", "512 MiB of these stay"))
