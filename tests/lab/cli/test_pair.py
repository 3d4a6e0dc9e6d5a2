"""`moeedge lab pair` from the command line."""

from __future__ import annotations

from tests.support.commands import refused, run, run_json


def test_draft_and_target_are_compared_in_the_lab(pair: list[str]) -> None:
    found = run_json("lab", "pair", *pair, "-p", "one two three", "-n", "8")
    assert found["layers"] == [0, 1, 2] and len(found["entropy_popularity_bits"]) == 3
    assert "mean" in run("lab", "pair", *pair, "-p", "one two three", "-n", "8").stdout
    assert "-md" in refused("lab", "pair", *pair[:2], "-md", "none", "-p", "one")
