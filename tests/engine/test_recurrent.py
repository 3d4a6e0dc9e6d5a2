"""Models that cannot take tokens back: speculation is off and says so, turns still answer rightly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama import library
from tests.support.recurrent import make_mamba
from tests.support.stock import StockContext

GREEDY = SamplingConfig(temperature=0)
PROMPT = np.random.default_rng(4).integers(0, 256, 12).tolist()


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mamba(tmp_path_factory.mktemp("recurrent") / "mamba.gguf")


def answer(session: Session, prompt: list[int]) -> tuple[list[int], int]:
    generation = session.generate(prompt, n_predict=20, sampling=GREEDY, ignore_eos=True)
    list(generation)
    return generation.tokens, generation.stats.prefill_tokens


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_speculation_is_off_and_answers_are_right(mamba: Path, tiny_moe: Path, draft: str) -> None:
    library.start()
    edited = [*PROMPT[:6], 9, *PROMPT[6:]]
    with StockContext(mamba) as stock:
        expected = [stock.greedy(prompt, 20)[0] for prompt in (PROMPT, edited)]
    config = EngineConfig(model=mamba, draft="ngram" if draft == "ngram" else tiny_moe, gamma=4, n_ctx=256, n_threads=1)
    with Session.open(config) as session:
        assert (session.info.gamma, session.info.draft) == (0, "none")
        assert "The memory of mamba models cannot roll back rejected drafts: speculation off." in session.info.notes
        assert answer(session, PROMPT) == (expected[0], 12)
        assert answer(session, [*PROMPT, *expected[0]])[1] == 1  # a longer history goes on from the state
        assert answer(session, edited) == (expected[1], 13)  # an edited one starts anew


def test_a_recurrent_draft_is_not_used(mamba: Path, tiny_moe: Path) -> None:
    config = EngineConfig(model=tiny_moe, draft=mamba, gamma=4, n_ctx=256, n_threads=1, device="none")
    with Session.open(config) as session:
        assert session.info.draft == "none" and session.gamma == 0
        assert session.info.notes == [
            "The memory of the mamba draft cannot roll back rejected drafts: speculation off."
        ]
