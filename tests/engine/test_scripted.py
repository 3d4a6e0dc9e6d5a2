"""Scripted acceptance: the text is the script's, drafts are accepted as it says, at the cost of real drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.bench.experiment import GREEDY
from moeedge.engine.scripted import ConfidenceModel, Script
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.llama.model import Model

N = 120


@pytest.mark.parametrize("confidences", ["calibrated", "constant"])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_a_script_accepts_at_its_rate(acceptance: float, confidences: ConfidenceModel, tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model:
        script = Script.draw(model, 20_000, acceptance, confidences, 1)
        other = Script.draw(model, 20_000, 0.3, confidences, 1)
        assert not set(script.text.tolist()) & set(model.eog_tokens)
    accepted = script.text == script.drafts
    assert accepted.mean() == pytest.approx(acceptance, abs=0.015)
    assert np.array_equal(script.text, other.text)
    if confidences == "calibrated" and 0 < acceptance < 1:  # confidence is the chance
        sure = script.confidences > 0.8
        assert accepted[sure].mean() == pytest.approx(script.confidences[sure].mean(), abs=0.02)
        assert accepted[~sure].mean() == pytest.approx(script.confidences[~sure].mean(), abs=0.02)
    else:
        assert set(script.confidences.tolist()) == {acceptance}


@pytest.mark.parametrize("draft", ["model", "ngram"])
@pytest.mark.parametrize("gamma", [1, 4, "auto"])
@pytest.mark.parametrize("mode", ["stock", "moeedge"])
def test_answers_follow_the_script(mode: str, gamma: int | str, draft: str, tiny_moe: Path, tiny_draft: Path) -> None:
    config = EngineConfig(
        model=tiny_moe, draft=tiny_draft if draft == "model" else "ngram", n_ctx=512, n_threads=1, device="none",
        gamma=16 if gamma == "auto" else int(gamma), auto_gamma=gamma == "auto", mode=mode,  # type: ignore[arg-type]
    )  # fmt: skip
    with Session.open(config) as session:
        script = Script.draw(session.model, 400, 0.7, "calibrated", 3)
        session.follow(script)
        generation = session.generate(script.text[:10].tolist(), n_predict=N, sampling=GREEDY, ignore_eos=True)
        position, n_drafted = 10, 0
        for record in generation:
            if record.n_verified:
                accepted = script.text == script.drafts
                n = next((i for i in range(record.n_drafted) if not accepted[position + i]), record.n_drafted)
                assert record.n_accepted == n
            position += len(record.tokens)
            n_drafted += record.n_drafted
        assert generation.tokens == script.text[10 : 10 + N].tolist()
        assert n_drafted > 0
        session.follow(None)
        own = session.generate(script.text[:10].tolist(), n_predict=8, sampling=GREEDY)
        assert [token for record in own for token in record.tokens] != script.text[10:18].tolist()


def test_a_draft_model_decodes_one_token_for_each_draft(tiny_moe: Path, tiny_draft: Path) -> None:
    """Accepted drafts stay in its KV cache, as those of a trained draft do."""
    config = EngineConfig(model=tiny_moe, draft=tiny_draft, gamma=4, n_ctx=512, device="none", mode="stock")
    with Session.open(config) as session:
        context, counts = session.draft_context, list[int]()
        assert context is not None
        decode = context.decode_parts

        def counted(parts, **how):  # type: ignore[no-untyped-def]
            counts.append(sum(len(part.tokens) for part in parts))
            return decode(parts, **how)

        context.decode_parts = counted  # type: ignore[method-assign]
        script = Script.draw(session.model, 400, 1.0, "constant", 3)
        session.follow(script)
        for _ in session.generate(script.text[:10].tolist(), n_predict=41, sampling=GREEDY, ignore_eos=True):
            pass
        # after the prompt, 8 steps of 4 drafts; each begins with what the draft lacks: the last draft and our token
        assert counts[1:] == [1, 1, 1, 1] + [2, 1, 1, 1] * 7
