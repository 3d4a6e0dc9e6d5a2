"""Benchmark, run with -m bench: Python's share of a step at a vocabulary of 151,936 tokens."""

from __future__ import annotations

import pytest

from tests.benchmarks.python_share import LLAMA, PARTS, REST, SAMPLING, VOCABULARY, measure
from tests.conftest import TinyFactory

LIMIT_US = 1000.0


@pytest.mark.bench
@pytest.mark.parametrize("length", ["0", "4", "auto"])
def test_a_step_pays_at_most_1_ms(tiny: TinyFactory, length: str) -> None:
    """Processor time of the decoding thread outside of llama.cpp, sampling included."""
    pair = tiny("qwen3moe", vocab=VOCABULARY), tiny("qwen3", vocab=VOCABULARY)
    cases = [(sampling, length) for sampling in ("greedy", "default", "penalty")]
    for share in measure(*pair, cases, answers=2, n_predict=48):
        assert share.cpu_us < LIMIT_US, f"{share.sampling}: {share.parts_cpu_us}"


def test_every_part_of_a_step_is_timed(tiny: TinyFactory) -> None:
    """A short run without a limit, in every run of the suite."""
    pair = tiny("qwen3moe", vocab=1000), tiny("qwen3", vocab=1000)
    plain, drafted = measure(*pair, [("greedy", "0"), ("default", "2")], answers=1, n_predict=8)
    for share in (plain, drafted):
        assert share.parts_cpu_us.keys() == {*PARTS, REST} - {LLAMA}
        assert share.sampling in SAMPLING
        assert share.cpu_us > 0 and share.llama_wall_us > 0
    assert plain.tokens_per_batch == 1 < drafted.tokens_per_batch
    assert plain.parts_cpu_us["governor"] == drafted.parts_cpu_us["governor"] == 0
