"""Models with a recurrent state: without snapshots speculation is off and says so; turns still answer rightly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.engine.conftest import Check
from tests.support.interruption import interrupt_decode
from tests.support.recurrent import make_mamba
from tests.support.sessions import answered, plain_config
from tests.support.stock import StockContext

PROMPT = np.random.default_rng(4).integers(0, 256, 12).tolist()


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mamba(tmp_path_factory.mktemp("recurrent") / "mamba.gguf")


def answer(session: Session, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were computed."""
    generation = answered(session, prompt, 20)
    return generation.tokens, generation.stats.prefill_tokens


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_speculation_is_off_and_answers_are_right(mamba: Path, tiny_moe: Path, draft: str) -> None:
    library.start()
    edited = [*PROMPT[:6], 9, *PROMPT[6:]]
    with StockContext(mamba) as stock:
        expected = [stock.answer(prompt, 20) for prompt in (PROMPT, edited)]
    with Session.open(plain_config(mamba, "ngram" if draft == "ngram" else tiny_moe, device="auto")) as session:
        assert (session.info.gamma, session.info.draft) == (0, "none")
        assert "Speculation is off: mamba models cannot take rejected tokens back." in session.info.notes
        assert answer(session, PROMPT) == (expected[0], 12)
        assert answer(session, [*PROMPT, *expected[0]])[1] == 1  # a longer history goes on from the state
        assert answer(session, edited) == (expected[1], 13)  # an edited one starts anew


def test_a_recurrent_draft_is_not_used(mamba: Path, tiny_moe: Path) -> None:
    with Session.open(plain_config(tiny_moe, mamba)) as session:
        assert session.info.draft == "none" and session.gamma == 0
        assert session.info.notes == ["Speculation is off: mamba drafts cannot take rejected tokens back."]
    with Model.load(mamba) as shared:
        for _ in range(2):
            with Session.open(plain_config(tiny_moe, mamba), draft_model=shared) as session:
                assert session.info.draft == "none"
        assert shared.info.n_layers


@pytest.fixture(scope="module", params=["qwen35moe", "nemotron_h_moe"])
def hybrid(request: pytest.FixtureRequest, tiny: TinyFactory) -> Path:
    """Layers with a recurrent state, with attention and with experts."""
    return tiny(request.param)


@pytest.mark.parametrize("draft", ["ngram", "model"])
@pytest.mark.parametrize("gamma", [1, 4, 12])
def test_a_model_with_snapshots_takes_drafts_back(
    hybrid: Path, tiny_draft: Path, draft: str, gamma: int, check: Check
) -> None:
    prompt = PROMPT * 3  # n-grams repeat
    asked = plain_config(hybrid, "ngram" if draft == "ngram" else tiny_draft, gamma=gamma)
    with Session.open(asked) as session:
        assert session.info.gamma == session.target.n_snapshots == min(gamma, 8)
        generation = answered(session, prompt, 60)
        assert generation.stats.accepted < generation.stats.drafted
        assert generation.stats.accepted > 0 or draft == "model"
        check(session, prompt, generation.tokens)
        for text, is_kept in (([*prompt, *generation.tokens, 7, 8], True), ([*prompt[:20], 9, *prompt[20:]], False)):
            tokens, n_prefilled = answer(session, text)
            assert (n_prefilled < len(text)) == is_kept  # from the state; further back than the snapshots
            check(session, text, tokens)


@pytest.mark.parametrize("n_back", [1, 2, 3, 4, 5, 20])
def test_going_back_within_the_last_batch_and_beyond(hybrid: Path, n_back: int) -> None:
    """A state of the last batch is gone back to once; anything else empties the memory."""
    tokens = np.random.default_rng(1).integers(0, 256, 30).tolist()
    with Model.load(hybrid) as model, Context(model, n_ctx=256, n_threads=1, n_snapshots=8) as context:
        context.decode(tokens[:20], phase=Phase.PREFILL, logits="none")
        for token in tokens[20:25]:
            context.decode([token], phase=Phase.DECODE)
        context.decode(tokens[25:30], phase=Phase.VERIFY, logits="all")
        context.trim(30 - n_back)
        assert context.n_past == (30 - n_back if n_back < 5 else 0)
        kept = context.n_past
        again = context.decode(tokens[kept:], phase=Phase.VERIFY, logits="last").copy()
        context.clear()
        expected = context.decode(tokens, phase=Phase.PREFILL, logits="last")
        np.testing.assert_allclose(again, expected, atol=0.05)
        context.trim(28)
        assert context.n_past == 28
        context.trim(27)  # a second time
        assert context.n_past == 0


@pytest.mark.parametrize(("at_call", "n_checkpoints"), [(2, 0), (3, 0), (4, 0), (6, 0), (4, 8)])
def test_ctrl_c_loses_the_state_of_a_model_with_snapshots(
    hybrid: Path, at_call: int, n_checkpoints: int, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, or what came after the last checkpoint."""
    with Session.open(plain_config(hybrid, "ngram", n_checkpoints=n_checkpoints)) as session:
        with monkeypatch.context() as patch:
            interrupt_decode(patch, at_call)
            cut = answered(session, PROMPT * 3, 30)
        assert cut.stop_reason == "interrupted"
        text = [*PROMPT * 3, *cut.tokens]
        tokens, n_prefilled = answer(session, text)
        assert (n_prefilled < len(text)) or not n_checkpoints
        check(session, text, tokens)


@pytest.mark.parametrize(("n_ubatch", "gamma"), [(1, 0), (2, 0), (3, 1), (5, 3), (12, 8)])
def test_small_batches_shorten_drafts(hybrid: Path, n_ubatch: int, gamma: int, check: Check) -> None:
    """llama.cpp ends the process where a graph has no room for the drafts that it may have to take back."""
    asked = plain_config(hybrid, "ngram", gamma=8, n_ctx=256, n_batch=64, n_ubatch=n_ubatch)
    with Session.open(asked) as session:
        assert session.info.gamma == session.target.n_snapshots == gamma
        assert any("-ub" in note for note in session.info.notes) == (gamma < 8)
        session.set_draft_length(16)
        assert session.gamma == gamma
        check(session, PROMPT * 3, answer(session, PROMPT * 3)[0])


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
@pytest.mark.parametrize("architecture", ["qwen35moe", "nemotron_h_moe", "gpt-oss"])
def test_a_message_that_changes_costs_no_conversation(
    architecture: str, draft: str | None, tiny: TinyFactory, tiny_draft: Path, check: Check
) -> None:
    """As when a chat template leaves the reasoning of earlier answers out."""
    asked = plain_config(tiny(architecture), tiny_draft if draft == "model" else draft, n_checkpoints=8)
    first, second = PROMPT * 6, [3, 5, 7] * 10
    with Session.open(asked) as session:
        generation = answered(session, first, 60)
        check(session, first, generation.tokens)
        text = [*first, *generation.tokens[40:], *second]
        for _ in range(2):  # the same again goes back once more
            tokens, n_prefilled = answer(session, text)
            assert n_prefilled <= len(text) - len(first) + 8
            check(session, text, tokens)
