"""Greedy answers through our backend and speculation equal plain greedy decoding by stock llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.llama import library
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES, case_model
from tests.support.greedy import judge
from tests.support.sessions import GREEDY, answered
from tests.support.stock import StockContext

Speculation = tuple[str, int | str] | None
StockOf = Callable[[Path], StockContext]
answer = partial(answered, ignore_eos=False)
N_PREDICT = 64  # more than gpt-oss's sliding window holds together with the prompt
PROMPT = np.random.default_rng(4).integers(0, 256, 20).tolist()
# drafts that copy: the n-gram lookup has something to find from the first step on
REPETITIVE = PROMPT[:10] * 3
DRAFTS = [None, *((kind, gamma) for kind in ("model", "ngram") for gamma in (1, 4, 8, "auto"))]
QUICK_DRAFTS = (None, ("model", 4), ("ngram", 4))  # with every model
SEVERAL_DRAFTS = {"qwen3moe": DRAFTS, "gpt-oss": (*QUICK_DRAFTS, ("model", "auto"), ("ngram", "auto"))}


@pytest.fixture(scope="module")
def stock_of() -> Iterator[StockOf]:
    """Stock contexts by model, kept over the module's tests."""
    library.start()
    with ExitStack() as stack:
        yield cache(lambda path: stack.enter_context(StockContext(path, n_ctx=512)))


def opened(target: Path, speculation: Speculation, draft: Path, **options: Any) -> Session:
    kind, gamma = speculation or ("none", 0)
    source = {"none": None, "ngram": "ngram", "model": draft}[kind]
    length = {"auto_gamma": True} if gamma == "auto" else {"gamma": gamma}
    return Session.open(EngineConfig(model=target, draft=source, n_ctx=512, n_threads=1, **length, **options))


@pytest.mark.parametrize(
    ("case", "speculation"),
    [(case, each) for case in MOE_CASES for each in SEVERAL_DRAFTS.get(case, QUICK_DRAFTS)],
)
def test_greedy_equals_stock(
    case: str, speculation: Speculation, tiny: TinyFactory, tiny_draft: Path, stock_of: StockOf
) -> None:
    path = case_model(tiny, case)
    reference = stock_of(path)
    with opened(path, speculation, tiny_draft) as session:
        for prompt in (PROMPT, REPETITIVE):
            tokens = answer(session, prompt, N_PREDICT).tokens
            assert len(tokens) == N_PREDICT
            if tokens != reference.answer(prompt, N_PREDICT):
                assert speculation is not None, "without batches there is no near-tie"
                verdict = judge(reference, prompt, tokens)
                assert verdict.ties, "the sequences differ, so stock must have seen a tie"
                assert not verdict.faults, f"not greedy at {verdict.faults}, noise {verdict.noise:.2g}"


def test_most_answers_need_no_tie(tiny: TinyFactory, tiny_draft: Path, stock_of: StockOf) -> None:
    """Near-ties are rare: of 20 answers of the target with the smallest noise, every token is stock's."""
    path = tiny("gpt-oss")
    rng = np.random.default_rng(5)
    with opened(path, ("model", 4), tiny_draft) as session:
        for _ in range(20):
            prompt = rng.integers(0, 256, 12).tolist()
            assert answer(session, prompt, 24).tokens == stock_of(path).answer(prompt, 24)


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_drafts_are_accepted(kind: str, tiny_moe: Path, tiny_draft: Path) -> None:
    """That the comparisons above cover acceptance as well as rejection."""
    with opened(tiny_moe, (kind, 4), tiny_draft) as session:
        stats = answer(session, REPETITIVE, N_PREDICT).stats
        assert 0 < stats.accepted < stats.drafted
        assert stats.tokens_per_step > 1


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0, 8])
def test_bundled_pair(gamma: int, bundled_pair: tuple[Path, Path], stock_of: StockOf) -> None:
    target, draft = bundled_pair
    with opened(target, ("model", gamma), draft) as session:
        for question in ("What is 7 plus 5?", "Tell me a short story about a river."):
            prompt = session.model.chat_tokens([{"role": "user", "content": question}])
            verdict = judge(stock_of(target), prompt, answer(session, prompt, 40, ignore_eos=True).tokens)
            assert not verdict.faults
            assert gamma or not verdict.ties


def test_moe_draft_has_a_sensor_of_its_own(tiny: TinyFactory, tiny_moe: Path, stock_of: StockOf) -> None:
    """Target and draft both route: phases and shapes show that neither sensor sees the other's graphs."""
    with opened(tiny_moe, ("model", 4), tiny("llama")) as session:
        assert session.draft_context is not None
        sensors = session.target.sensor, session.draft_context.sensor
        assert sensors[0] is not None and sensors[1] is not None
        seen: list[set[Phase]] = [set(), set()]
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
        for _ in generation:
            for sensor, phases, n_used in zip(sensors, seen, (4, 2), strict=True):
                frames = sensor.frames()
                phases.update(Phase(frame.phase) for frame in frames)
                assert all(frame.ids.shape[2] == n_used for frame in frames)
    assert seen == [{Phase.PREFILL, Phase.VERIFY, Phase.DECODE} & seen[0], {Phase.PREFILL, Phase.DRAFT}]
    assert Phase.VERIFY in seen[0]
    assert not judge(stock_of(tiny_moe), PROMPT, generation.tokens).faults
