"""Modes, sweeps over policies and cache ratios, and the passes and orders in which they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.bench.arms import split_passes
from moeedge.bench.config import (
    MODES,
    Sweep,
    applicable_modes,
    mode_config,
    parse_modes,
    parse_policies,
    parse_ratios,
)
from moeedge.bench.experiment import synthetic_modes
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.scheduler.config import PlacementConfig

POLICY_PAIR = ("spac", "lru")
_ALL = parse_modes("stock-ar,stock-sd,moeedge,moeedge-ar")


def test_without_a_draft_moeedge_decodes_one_token_at_a_time() -> None:
    kept, notes = applicable_modes(parse_modes("stock-ar,stock-sd,moeedge,moeedge-ar"), has_draft=False)
    assert [(mode.name, mode.drafts) for mode in kept] == [("stock-ar", False), ("moeedge", False)]
    assert len(notes) == 3
    assert applicable_modes(parse_modes("stock-ar,moeedge-ar"), has_draft=False)[1] == []
    everything = tuple(MODES.values())
    assert applicable_modes(everything, has_draft=True) == (everything, [])


def test_the_engine_configuration_of_a_mode() -> None:
    base = EngineConfig(model=Path("t.gguf"), draft=Path("d.gguf"), gamma=5)
    configs = {name: mode_config(base, mode) for name, mode in MODES.items()}
    assert {name: (c.mode, c.draft, c.gamma) for name, c in configs.items()} == {
        "stock-ar": ("stock", None, 0),
        "stock-sd": ("stock", Path("d.gguf"), 5),
        "stock-ngram": ("stock", "ngram", 5),
        "moeedge": ("moeedge", Path("d.gguf"), 5),
        "moeedge-ar": ("moeedge", None, 0),
        "stock-ncmoe": ("stock", None, 0),
        "stock-ncmoe-sd": ("stock", Path("d.gguf"), 5),
    }


def test_lists_of_policies_and_ratios() -> None:
    assert parse_policies("spac, lru,spac") == ("spac", "lru")
    assert parse_ratios("0.17, 0,1,0.170") == (0.17, 0, 1)
    assert parse_policies(None) == parse_ratios(None) == ()
    refused = {"spac,bogus": "policy 'bogus'", "none": "'none' has no cache", " ,": "--policy is an empty list"}
    for text, words in refused.items():
        with pytest.raises(InputError, match=words) as caught:
            parse_policies(text)
        assert "spac, spac-paper, spac-program, lru, " in caught.value.hint
    for text in ("1.1", "-0.1", "nan", "a lot", "0.1,,x", ","):
        with pytest.raises(InputError, match="ratio") as caught:
            parse_ratios(text)
        assert "--cache-ratio 0.1,0.3" in caught.value.hint


def test_every_mode_of_ours_is_measured_with_every_policy_and_ratio() -> None:
    modes = Sweep(POLICY_PAIR, (0.17, 0.5)).modes(_ALL)
    assert [mode.label for mode in modes] == [
        "stock-ar",
        "stock-sd",
        *(f"{name} {policy} {r}" for name in ("moeedge", "moeedge-ar") for policy in POLICY_PAIR for r in (0.17, 0.5)),
    ]
    assert [mode.label for mode in Sweep((), (0.17,)).modes(_ALL)][2:] == ["moeedge 0.17", "moeedge-ar 0.17"]
    with pytest.raises(InputError, match="have no expert cache"):
        Sweep(("spac",), ()).modes(parse_modes("stock-ar"))


def test_the_engine_configuration_of_a_sweep() -> None:
    base = EngineConfig(model=Path("t.gguf"), placement=PlacementConfig(vram_bytes=1 << 30, forgetting=0.2))
    stock, swept = Sweep(("lru",), (0.17,)).modes(parse_modes("stock-ar,moeedge"))
    assert mode_config(base, stock).placement == base.placement
    placement = mode_config(base, swept).placement
    found = (placement.policy, placement.cache_ratio, placement.vram_bytes, placement.forgetting)
    assert found == ("lru", 0.17, None, 0.2)


def test_caches_run_side_by_side_or_one_by_one_with_the_reference() -> None:
    modes = Sweep(("spac", "lru"), ()).modes(_ALL[:3])
    (only,) = split_passes(modes, together=True)
    assert (only.modes, only.repeated) == (modes, None)
    modes = Sweep(("spac", "lru", "static"), ()).modes(_ALL[:3])
    passes = split_passes(modes, together=False)
    assert [[mode.label for mode in current.modes] for current in passes] == [
        ["stock-ar", "stock-sd", "moeedge spac"],
        ["stock-ar", "moeedge lru"],
        ["stock-ar", "moeedge static"],
    ]
    assert [current.repeated for current in passes] == [None, "stock-ar", "stock-ar"]
    alone = split_passes([mode for mode in modes if mode.is_swept], together=False)
    assert [(len(current.modes), current.repeated) for current in alone] == [(1, None)] * 3
    assert len(split_passes(modes[:3], together=False)) == 1
    layered = parse_modes("stock-ncmoe,stock-ncmoe-sd")
    assert [current.modes for current in split_passes([], together=True, apart=layered)] == [
        (mode,) for mode in layered
    ]


def test_synthetic_tests_repeat_no_cache() -> None:
    kept, notes = synthetic_modes(Sweep(("spac", "lru"), ()).modes(_ALL))
    assert [mode.label for mode in kept] == ["stock-ar", "moeedge spac", "moeedge lru"]
    assert len(notes) == 3
