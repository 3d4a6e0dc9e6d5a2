"""Grammars: greedy answers against llama.cpp with its grammar sampler, and where they begin, go on and end.

The distribution of sampled answers: tests/lossless/test_distribution.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

from moeedge.engine.answer import Generation
from moeedge.engine.grammar import new_sampler
from moeedge.engine.sampling import Candidates
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EngineError, InputError
from moeedge.lab.widen.random_model import ENDOFTEXT, IM_END, N_VOCAB
from moeedge.llama.json_schema import schema_grammar
from moeedge.llama.model import Model
from moeedge.llama.samplers import Grammar, TokenArray
from tests.conftest import TinyFactory
from tests.support.sessions import answered
from tests.support.stock import StockContext

NEAR_TIE = 1e-3  # of logits
DATE = 'root ::= [0-9]{4} "-" [0-9]{2} "-" [0-9]{2}'
LETTERS = "root ::= [a-z ]+"
NAMES = schema_grammar('{"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 2}').text
PROMPT = list(b"A list of names and of dates: ")


@pytest.fixture(scope="module")
def stock(tiny_moe: Path) -> Iterator[StockContext]:
    with StockContext(tiny_moe, n_ctx=512) as context:
        yield context


class Reference:
    """llama.cpp's grammar sampler over an entire vocabulary."""

    def __init__(self, vocab: object, text: str) -> None:
        self.sampler = lib.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        assert self.sampler

    def mask(self, logits: np.ndarray) -> np.ndarray:
        data = (lib.llama_token_data * len(logits))()
        for token, logit in enumerate(logits):
            data[token].id, data[token].logit = token, float(logit)
        array = lib.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
        lib.llama_sampler_apply(self.sampler, array)
        return np.array([data[token].logit for token in range(len(logits))], dtype=np.float32)

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self.sampler, token)

    def close(self) -> None:
        lib.llama_sampler_free(self.sampler)


@pytest.fixture(scope="module")
def plain(tiny_moe: Path) -> Iterator[Session]:
    """Without drafts."""
    with Session.open(EngineConfig(model=tiny_moe, n_ctx=256, n_threads=1)) as session:
        yield session


def follow(session: Session, grammar: str, n_predict: int = -1, **options: Any) -> Generation:
    """The greedy answer under a grammar, at its end."""
    sampling = SamplingConfig(temperature=0, grammar=grammar)
    return answered(session, PROMPT, n_predict, sampling=sampling, ignore_eos=False, **options)


def plain_greedy(stock: StockContext, text: str, n_predict: int) -> tuple[list[int], list[np.ndarray]]:
    """Tokens, an end token included, and the masked logits that each was taken from."""
    grammar = Reference(stock.vocab, text)
    stock.trim(0)
    tokens, rows, row = [], [], stock.decode(PROMPT, every=False)[0]
    while len(tokens) < n_predict:
        rows.append(grammar.mask(row))
        tokens.append(int(rows[-1].argmax()))
        if tokens[-1] in (IM_END, ENDOFTEXT):
            break
        grammar.accept(tokens[-1])
        row = stock.decode([tokens[-1]])[0]
    grammar.close()
    return tokens, rows


@pytest.mark.parametrize("text", [DATE, LETTERS, NAMES], ids=["date", "letters", "names"])
@pytest.mark.parametrize("draft", [None, "ngram", "model"])
def test_greedy_answers_are_llama_cpps(
    text: str, draft: str | None, tiny_moe: Path, tiny_draft: Path, stock: StockContext
) -> None:
    source: Any = tiny_draft if draft == "model" else draft
    config = EngineConfig(model=tiny_moe, draft=source, n_ctx=512, n_threads=1, gamma=5 if draft else 0)
    with Session.open(config) as session:
        answer = session.generate(PROMPT, n_predict=40, sampling=SamplingConfig(temperature=0, grammar=text))
        records = list(answer)
    expected, rows = plain_greedy(stock, text, 40)
    ended = expected[-1] in (IM_END, ENDOFTEXT)
    if ended:
        expected.pop()
    for ours, theirs, row in zip(answer.tokens, expected, rows, strict=False):
        if ours != theirs:
            assert row[theirs] - row[ours] < NEAR_TIE
            return
    assert answer.tokens == expected
    assert answer.stop_reason == ("eos" if ended else "length")
    assert ended or text != DATE
    if draft == "model":
        assert sum(record.n_drafted for record in records) > 0


def test_a_head_drafts_under_a_grammar(tiny: TinyFactory) -> None:
    """Own heads, and drafts that end where all that they expect is refused."""
    path = tiny("glm4moe", layers=2, experts=8, used=2)
    answers = []
    for gamma in (0, 3):
        config = EngineConfig(model=path, draft="mtp", n_ctx=512, n_threads=1, gamma=gamma)
        with Session.open(config) as session:
            answers.append(follow(session, LETTERS, 40))
    assert answers[1].stats.drafted > 0
    assert answers[0].tokens == answers[1].tokens


def test_texts_of_a_batch_have_grammars_of_their_own(tiny_moe: Path, tiny_draft: Path) -> None:
    samplings = [SamplingConfig(temperature=0, grammar=text) for text in (DATE, LETTERS, "")]
    config = EngineConfig(model=tiny_moe, draft=tiny_draft, n_ctx=128, n_threads=1, gamma=3)
    with Session.open(config) as session:
        single = [answered(session, PROMPT, 20, sampling=each, ignore_eos=False).tokens for each in samplings]
    with Session.open(replace(config, n_parallel=3)) as session:
        answers = session.generate_parallel([PROMPT] * 3, n_predict=20, sampling=samplings)
        list(answers)
        assert [found.tokens for found in answers.answers] == single


def test_a_context_shift_keeps_the_place_in_the_grammar(tiny_moe: Path) -> None:
    config = EngineConfig(model=tiny_moe, draft="ngram", n_ctx=64, n_threads=1, gamma=3, context_shift=True)
    text = 'root ::= ("abc" [a-z]{20})+'
    sampling = SamplingConfig(temperature=1, seed=2, grammar=text, ignore_eos=True)
    with Session.open(config) as session:
        answer = session.generate(PROMPT, n_predict=120, sampling=sampling)
        found = "".join(answer.pieces())
    assert answer.notes and len(found) > 100
    assert all(found[i : i + 3] == "abc"[: len(found) - i] for i in range(0, len(found), 23))


def test_going_back_repeats_the_draws(model: Model) -> None:
    rows = np.random.default_rng(1).normal(0, 1, (4, N_VOCAB)).astype(np.float32)
    sampler = new_sampler(SamplingConfig(seed=4, grammar=LETTERS), model)
    certain = [Candidates.certain(token) for token in b"abc"]
    sampler.accept(rows[:1], [], [], [])
    state = sampler.state
    first = sampler.accept(rows, list(b"abc"), certain, [])
    after = sampler.accept(rows[:1], [], [], [])
    sampler.state = state
    assert sampler.accept(rows, list(b"abc"), certain, []) == first
    assert sampler.accept(rows[:1], [], [], []) == after


def test_the_grammar_holds_after_reasoning(model: Model) -> None:
    """While an answer reasons all tokens may come; drafts beyond the end tag follow the grammar."""
    logits = np.zeros((6, N_VOCAB), dtype=np.float32)
    for row, token in enumerate(b"x</t>!"):
        logits[row, token] = 9.0
    logits[5, ord("7")] = 8.0
    for temperature in (0.0, 0.5):
        config = SamplingConfig(temperature=temperature, top_k=2, min_p=0.5, seed=1, grammar="root ::= [0-9]")
        sampler = new_sampler(config, model, after="</t>")
        drafts = list(b"x</t>")
        assert sampler.accept(logits, drafts, [Candidates.certain(token) for token in drafts], []) == (5, ord("7"))
        begun = new_sampler(config, model, begun=drafts, after="</t>")
        assert begun.accept(logits[5:], [], [], []) == (0, ord("7"))
        begun.state = {"random": begun.state["random"], "n_taken": 3}
        assert begun.accept(logits[3:], list(b"t>"), [Candidates.certain(token) for token in b"t>"], [])[1] == ord("7")


def test_an_answer_goes_on_where_it_was_cut_off(plain: Session) -> None:
    entire = follow(plain, DATE, 20)
    assert follow(plain, DATE, 20, begun=entire.tokens[:3]).tokens == entire.tokens
    with pytest.raises(InputError):
        follow(plain, DATE, begun=list(b"no date"))


def test_ignore_eos_goes_on_where_a_grammar_may_end_and_ends_where_it_is_complete(plain: Session) -> None:
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig(temperature=temperature, seed=1, grammar=DATE, ignore_eos=True)
        answer = plain.generate(PROMPT, n_predict=50, sampling=sampling)
        text = "".join(answer.pieces())
        assert answer.stop_reason == "eos" and len(text) == len("2026-11-23")
    sampling = SamplingConfig(temperature=1, seed=1, grammar="root ::= [a-z]*", ignore_eos=True)
    text = "".join(plain.generate(PROMPT, n_predict=40, sampling=sampling).pieces())
    assert len(text) >= 40 and len(set(text)) > 3


def test_the_most_likely_allowed_token_may_be_far_from_the_top(model: Model) -> None:
    logits = np.arange(N_VOCAB, dtype=np.float32)[::-1].copy()
    logits[ord("z")] = logits[ord("y")] = -5.0  # the least likely of all, and equal
    sampler = new_sampler(SamplingConfig(temperature=0, grammar="root ::= [yz]"), model)
    assert sampler.accept(logits[None], [], [], []) == (0, ord("y"))
    nothing = new_sampler(SamplingConfig(temperature=0, grammar='root ::= "\\u0000"'), model)
    with pytest.raises(EngineError):
        nothing.accept(logits[None], [], [], [])
    # llama.cpp ends the process where a grammar takes in a token that it refuses; infill draws the end of the answer
    config = SamplingConfig(temperature=1, seed=1, grammar="root ::= [a-z]{5}", samplers=("infill",))
    with pytest.raises(EngineError):
        new_sampler(config, model).accept(np.zeros((1, N_VOCAB), dtype=np.float32), [], [], [])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", ""),
        ('root ::= "a', "line 1, column 12"),
        ("root ::= foo", "line 1, column 10"),
        ('rot ::= "a"', "'root'"),
        ('root ::= x\nx := "b"', "line 2, column 3"),
        ('root ::= root "a"', "left recursion"),
        ('root ::= ("a"', "line 1, column 14"),
        ('root ::= "x" "a"{3,2}', "line 1, column 17"),
    ],
)
def test_what_is_wrong_with_a_grammar_has_a_place(
    model: Model, text: str, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as raised:
        Grammar.parse(text)
    assert place in raised.value.message
    assert raised.value.exit_code == 2
    assert capfd.readouterr().err == ""  # llama.cpp's own text is not shown
    grammar = Grammar.parse('root ::= "{3,2}" # {5,1}\n', model.vocab)  # repetitions in quotes are text
    assert grammar.allowed(TokenArray(4), list(b"{a")).tolist() == [True, False]
