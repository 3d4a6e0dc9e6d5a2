"""The comparison with llama.cpp's programs: what their output says, and ratios of medians over rounds."""

from __future__ import annotations

import pytest

from tests.benchmarks.llama_programs import Sample, decoded, summary


def test_speeds_that_the_program_prints() -> None:
    text = """encoded   35 tokens in    0.252 seconds, speed:  138.889 t/s
decoded   61 tokens in    0.500 seconds, speed:  122.000 t/s"""
    assert decoded(text) == (61, 0.5)
    with pytest.raises(SystemExit):
        decoded("encoded   35 tokens in    0.252 seconds")


def test_ratios_pair_the_processes_of_a_round() -> None:
    theirs = [Sample("llama-bench", "tg8", "none", i, 0, 8, seconds) for i, seconds in enumerate((1.0, 2.0, 4.0))]
    ours = [Sample("moeedge", "tg8", "none", i, 1, 8, seconds) for i, seconds in enumerate((1.0, 1.0, 1.0))]
    (row,) = summary([*theirs, *ours, Sample("moeedge", "tg8", "none", 3, 0, 8, 0.1)])
    assert (row["program"], row["rounds"], row["ratio"]) == ("llama-bench", 3, pytest.approx(2.0))
    assert (row["program_ts"], row["moeedge_ts"]) == (4.0, 8.0)
