"""Lists of policies and cache ratios: how they are read, and which modes and passes come of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.bench.config import MODES, Sweep, mode_config, parse_modes, parse_policies, parse_ratios
from moeedge.bench.passes import largest_cache, split_passes
from moeedge.bench.synthetic import synthetic_modes
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.policies.registry import POLICIES
from moeedge.scheduler.config import PlacementConfig

POLICY_PAIR = ("spac", "lru")
_ALL = parse_modes("stock-ar,stock-sd,moeedge,moeedge-ar")


def test_lists() -> None:
    assert parse_policies("spac, lru,spac", POLICIES) == ("spac", "lru")
    assert parse_ratios("0.17, 0,1,0.170") == (0.17, 0, 1)
    assert parse_policies(None, POLICIES) == parse_ratios(None) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spac,bogus", '"bogus"'),
        ("none", '"none"'),
        (" ,", "--policy"),
    ],
)
def test_policies_that_cannot_be_compared(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        parse_policies(text, POLICIES)
    assert "spac, spac-paper, lru, " in caught.value.hint


@pytest.mark.parametrize("text", ["1.1", "-0.1", "nan", "a lot", "0.1,,x", ","])
def test_ratios_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="ratio") as caught:
        parse_ratios(text)
    assert "between 0 and 1" in caught.value.hint


def test_every_mode_of_ours_is_measured_with_every_policy_and_ratio() -> None:
    modes = Sweep(POLICY_PAIR, (0.17, 0.5)).modes(_ALL)
    assert [mode.label for mode in modes] == [
        "stock-ar",
        "stock-sd",
        *(f"{name} {policy} {r}" for name in ("moeedge", "moeedge-ar") for policy in POLICY_PAIR for r in (0.17, 0.5)),
    ]
    assert [mode.label for mode in Sweep((), (0.17,)).modes(_ALL)][2:] == ["moeedge 0.17", "moeedge-ar 0.17"]
    assert Sweep().modes(_ALL) == _ALL
    assert not Sweep().asked
    with pytest.raises(InputError, match="Stock modes have no expert cache"):
        Sweep(("spac",), ()).modes(parse_modes("stock-ar"))


def test_the_engine_is_told_the_combination() -> None:
    base = EngineConfig(model=Path("t.gguf"), placement=PlacementConfig(vram_bytes=1 << 30, forgetting=0.2))
    stock, swept = Sweep(("lru",), (0.17,)).modes(parse_modes("stock-ar,moeedge"))
    assert mode_config(base, stock).placement == base.placement
    told = mode_config(base, swept).placement
    assert (told.policy, told.cache_ratio, told.vram_bytes, told.forgetting) == ("lru", 0.17, None, 0.2)


def test_caches_that_fit_run_side_by_side() -> None:
    modes = Sweep(("spac", "lru"), ()).modes(_ALL[:3])
    (one,) = split_passes(modes, together=True)
    assert (one.modes, one.repeated) == (modes, None)


def test_caches_that_do_not_fit_run_one_by_one_beside_the_reference() -> None:
    modes = Sweep(("spac", "lru", "static"), ()).modes(_ALL[:3])
    passes = split_passes(modes, together=False)
    assert [[mode.label for mode in one.modes] for one in passes] == [
        ["stock-ar", "stock-sd", "moeedge spac"],
        ["stock-ar", "moeedge lru"],
        ["stock-ar", "moeedge static"],
    ]
    assert [one.repeated for one in passes] == [None, "stock-ar", "stock-ar"]
    alone = split_passes([mode for mode in modes if mode.is_swept], together=False)
    assert [(len(one.modes), one.repeated) for one in alone] == [(1, None)] * 3
    assert len(split_passes(modes[:3], together=False)) == 1


def test_the_largest_cache_is_tried_first() -> None:
    swept = Sweep((), (0.1, 0.5, 0.2)).modes([MODES["moeedge"]])
    assert largest_cache(swept).cache_ratio == 0.5
    assert largest_cache([*swept, MODES["moeedge"]]).cache_ratio is None  # as much as there is


def test_synthetic_tests_repeat_no_cache() -> None:
    kept, notes = synthetic_modes(Sweep(("spac", "lru"), ()).modes(_ALL))
    assert [mode.label for mode in kept] == ["stock-ar", "moeedge spac", "moeedge lru"]
    assert len(notes) == 3
