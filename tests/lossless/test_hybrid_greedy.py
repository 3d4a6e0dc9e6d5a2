"""Greedy answers with the experts split between CPU and device equal stock's: every ratio, draft length, architecture.

On the emulated device, or on the one that $MOEEDGE_TEST_DEVICE names (tests/gpu runs this file on CUDA).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.engine.session import Session
from moeedge.llama import library
from tests.conftest import TinyFactory
from tests.lossless.conftest import PROMPT, Loaded, each_case
from tests.support.cases import MOE_CASES
from tests.support.hybrid import (
    GAMMAS,
    MANY_EXPERTS,
    RATIOS,
    AlternatingCache,
    assert_greedy,
    greedy_answer,
    hybrid_config,
)
from tests.support.stock import StockContext

N_PREDICT = 64  # more than gpt-oss's sliding window holds together with the prompt


@each_case(MOE_CASES, "ratio", RATIOS, quick=(0.17,), slow=("qwen3moe-mixed", "deepseek2-merged", "gpt-oss-q8"))
def test_greedy_equals_stock(ratio: float, loaded: Loaded) -> None:
    """All draft lengths in one session, twice: while the cache fills and when it is warm."""
    config = hybrid_config(loaded.path, loaded.draft_path, ratio)
    with Session.open(config, model=loaded.model, draft_model=loaded.draft) as session:
        for turn in range(2):
            for gamma in GAMMAS:
                session.gamma = gamma
                tokens = greedy_answer(session, PROMPT, N_PREDICT)
                assert_greedy(loaded.stock, PROMPT, tokens, loaded.expected, f"gamma {gamma}, turn {turn}")
        stats = session.placement_stats()
        if ratio == 0:
            assert stats is None or stats.pairs_hit == 0
            return
        assert stats is not None, session.info.notes
        assert stats.blocks_unknown == 0, "a chain was not understood"
        assert not stats.lost
        assert stats.pairs_hit > 0, "nothing was computed on the device"
        assert stats.pairs_hit < stats.pairs, "the first tokens come before the first upload"
        assert stats.slots_used <= stats.slots_total


@each_case(MOE_CASES)
@pytest.mark.parametrize("gamma", [4])
def test_ngram_drafts(gamma: int, loaded: Loaded) -> None:
    config = hybrid_config(loaded.path, "ngram", 0.17, gamma=gamma)
    with Session.open(config, model=loaded.model) as session:
        tokens = greedy_answer(session, PROMPT, N_PREDICT)
    assert_greedy(loaded.stock, PROMPT, tokens, loaded.expected, "ngram")


def test_a_slow_link(tiny: TinyFactory, tiny_draft: Path) -> None:
    """Transfers that take as long as several blocks: most experts are wanted before they have arrived."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    library.start()
    with StockContext(path) as stock:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        with Session.open(hybrid_config(path, tiny_draft, 0.17, device="emulated:link=5MB/s,threads=1")) as session:
            for turn in range(3):
                tokens = greedy_answer(session, PROMPT, N_PREDICT)
                assert_greedy(stock, PROMPT, tokens, expected, f"turn {turn}")
            stats = session.placement_stats()
            assert stats is not None and stats.pairs_hit > 0
            assert stats.link_bytes_per_s is not None and stats.link_bytes_per_s < 6e6
            assert stats.cancelled > 0, "the link must have been too slow for some plan"


def test_the_bundled_pair(bundled_pair: tuple[Path, Path]) -> None:
    """48 layers of 128 experts, as a new user starts: an answer of some length and a second turn."""
    target, draft = bundled_pair
    library.start()
    with StockContext(target, n_ctx=512) as stock:
        prompt = stock.tokenize("<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n")
        expected, _ = stock.greedy(prompt, 96)
        with Session.open(hybrid_config(target, draft, 0.17)) as session:
            for turn in range(2):
                tokens = greedy_answer(session, prompt, len(expected))
                assert_greedy(stock, prompt, tokens, expected, f"turn {turn}")
            stats = session.placement_stats()
            assert stats is not None and stats.pairs_hit > 0
            assert stats.evictions > 0


@each_case(MOE_CASES)
def test_a_cache_that_goes_off_and_on(loaded: Loaded) -> None:
    """Within an answer, while experts are on their way; prompts in between."""
    config = hybrid_config(loaded.path, loaded.draft_path, 0.17)
    with Session.open(config, model=loaded.model, draft_model=loaded.draft) as session:
        assert session.placement is not None
        reports: list[str] = []
        session.run.show = reports.append
        session.placement.governor = AlternatingCache()
        for turn in range(3):
            tokens = greedy_answer(session, PROMPT, N_PREDICT)
            assert_greedy(loaded.stock, PROMPT, tokens, loaded.expected, f"turn {turn}")
        stats = session.placement_stats()
        assert stats is not None
        assert stats.choice is not None
        assert stats.pairs_hit > 0
        assert reports
