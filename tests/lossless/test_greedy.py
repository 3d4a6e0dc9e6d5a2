"""Greedy answers through our backend and speculation equal plain greedy decoding by stock llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama import library
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES
from tests.support.greedy import judge
from tests.support.stock import StockContext

GREEDY = SamplingConfig(temperature=0.0)
N_PREDICT = 64  # more than gpt-oss's sliding window holds together with the prompt
PROMPT = np.random.default_rng(4).integers(0, 256, 20).tolist()
# drafts that copy: the n-gram lookup has something to find from the first step on
REPETITIVE = PROMPT[:10] * 3
DRAFTS = [None, *((kind, gamma) for kind in ("model", "ngram") for gamma in (1, 4, 8, "auto"))]
QUICK_DRAFTS = (None, ("model", 4), ("ngram", 4))  # with every model; the others are slow but for qwen3moe


@pytest.fixture(scope="module")
def stock() -> Iterator[Callable[[Path], StockContext]]:
    """Stock contexts by model, kept over the module's tests."""
    library.start()
    contexts: dict[Path, StockContext] = {}

    def get(path: Path) -> StockContext:
        if path not in contexts:
            contexts[path] = StockContext(path, n_ctx=512)
        return contexts[path]

    yield get
    for context in contexts.values():
        context.close()


def config(target: Path, speculation: tuple[str, int | str] | None, draft: Path, **options: Any) -> EngineConfig:
    kind, gamma = speculation or ("none", 0)
    source = {"none": None, "ngram": "ngram", "model": draft}[kind]
    length = {"auto_gamma": True} if gamma == "auto" else {"gamma": gamma}
    return EngineConfig(model=target, draft=source, n_ctx=512, n_threads=1, **length, **options)


@pytest.mark.parametrize(
    ("case", "speculation"),
    [
        pytest.param(
            case,
            speculation,
            id=f"{case}-{'-'.join(map(str, speculation)) if speculation else 'plain'}",
            marks=() if case == "qwen3moe" or speculation in QUICK_DRAFTS else pytest.mark.slow,
        )
        for case in MOE_CASES
        for speculation in DRAFTS
    ],
)
def test_greedy_equals_stock(
    case: str,
    speculation: tuple[str, int] | None,
    tiny: TinyFactory,
    tiny_draft: Path,
    stock: Callable[[Path], StockContext],
) -> None:
    arch, dimensions = MOE_CASES[case]
    path = tiny(arch, **dimensions)
    reference = stock(path)
    with Session.open(config(path, speculation, tiny_draft)) as session:
        for prompt in (PROMPT, REPETITIVE):
            generation = session.generate(prompt, n_predict=N_PREDICT, sampling=GREEDY)
            for _ in generation:
                pass
            assert len(generation.tokens) == N_PREDICT
            expected, _ = reference.greedy(prompt, N_PREDICT)
            if generation.tokens != expected:
                assert speculation is not None, "without batches there is no near-tie"
                verdict = judge(reference, prompt, generation.tokens)
                assert verdict.ties, "the sequences differ, so stock must have seen a tie"
                assert not verdict.faults, f"not greedy at {verdict.faults}, noise {verdict.noise:.2g}"


def test_most_answers_need_no_tie(tiny: TinyFactory, tiny_draft: Path, stock: Callable[[Path], StockContext]) -> None:
    """Near-ties are rare: of 20 answers of the target with the smallest noise, every token is stock's."""
    path = tiny("gpt-oss")
    rng = np.random.default_rng(5)
    with Session.open(config(path, ("model", 4), tiny_draft)) as session:
        for _ in range(20):
            prompt = rng.integers(0, 256, 12).tolist()
            generation = session.generate(prompt, n_predict=24, sampling=GREEDY)
            for _ in generation:
                pass
            assert generation.tokens == stock(path).greedy(prompt, 24)[0]


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_drafts_are_accepted(kind: str, tiny_moe: Path, tiny_draft: Path) -> None:
    """That the comparisons above cover acceptance as well as rejection."""
    with Session.open(config(tiny_moe, (kind, 4), tiny_draft)) as session:
        generation = session.generate(REPETITIVE, n_predict=N_PREDICT, sampling=GREEDY)
        for _ in generation:
            pass
        assert 0 < generation.stats.accepted < generation.stats.drafted
        assert generation.stats.tokens_per_step > 1


def test_draft_equal_to_the_target_is_always_accepted(tiny: TinyFactory) -> None:
    path = tiny("gpt-oss")
    with Session.open(config(path, ("model", 4), path)) as session:
        generation = session.generate(PROMPT, n_predict=41, sampling=GREEDY)
        for _ in generation:
            pass
        assert generation.stats.accepted == generation.stats.drafted == 32
        assert generation.stats.steps == 8


def test_moe_draft_has_a_sensor_of_its_own(
    tiny: TinyFactory, tiny_moe: Path, stock: Callable[[Path], StockContext]
) -> None:
    """Target and draft both route: phases and shapes show that neither sensor sees the other's graphs."""
    with Session.open(config(tiny_moe, ("model", 4), tiny("llama"))) as session:
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
    assert not judge(stock(tiny_moe), PROMPT, generation.tokens).faults


@pytest.mark.parametrize("speculation", [None, ("model", 4), ("ngram", 4)])
def test_stock_mode_is_the_same_loop(
    speculation: tuple[str, int] | None, tiny_moe: Path, tiny_draft: Path, stock: Callable[[Path], StockContext]
) -> None:
    """Our backend takes no operations: the same tokens as with it, plain decoding the same as plain llama_cpp calls."""
    answers = []
    for mode in ("stock", "moeedge"):
        with Session.open(config(tiny_moe, speculation, tiny_draft, mode=mode)) as session:
            generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
            for _ in generation:
                pass
            answers.append(generation.tokens)
    assert answers[0] == answers[1]
    if speculation is None:
        assert answers[0] == stock(tiny_moe).greedy(PROMPT, N_PREDICT)[0]


def test_prefix_reuse_keeps_the_answer(tiny_moe: Path, tiny_draft: Path, stock: Callable[[Path], StockContext]) -> None:
    """A second turn computes only the new tokens and gives the answer of stock for the entire prompt."""
    with Session.open(config(tiny_moe, ("model", 4), tiny_draft)) as session:
        first = session.generate(PROMPT, n_predict=20, sampling=GREEDY)
        for _ in first:
            pass
        prompt = [*PROMPT, *first.tokens, *REPETITIVE[:7]]
        second = session.generate(prompt, n_predict=30, sampling=GREEDY)
        for _ in second:
            pass
        assert second.stats.prefill_tokens < 10
    verdict = judge(stock(tiny_moe), prompt, second.tokens)
    assert not verdict.faults


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_bundled_pair(gamma: int, bundled_pair: tuple[Path, Path], stock: Callable[[Path], StockContext]) -> None:
    target, draft = bundled_pair
    reference = stock(target)
    with Session.open(config(target, ("model", gamma), draft)) as session:
        for question in ("What is 7 plus 5?", "Tell me a short story about a river."):
            prompt = session.model.tokenize(session.model.render_chat([{"role": "user", "content": question}]))
            generation = session.generate(prompt, n_predict=40, sampling=GREEDY, ignore_eos=True)
            for _ in generation:
                pass
            verdict = judge(reference, prompt, generation.tokens)
            assert not verdict.faults
            assert gamma or not verdict.ties
