"""Grammars: greedy answers against llama.cpp with its grammar sampler, sampled ones against the exact distribution."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from scipy.stats import chi2

from moeedge.engine.grammar import GrammarSampler, new_sampler
from moeedge.engine.sampling import Candidates, Sampler
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EngineError, InputError
from moeedge.lab.widen.vocabulary import ENDOFTEXT, IM_END, N_VOCAB
from moeedge.llama.json_schema import schema_grammar
from moeedge.llama.model import Model
from moeedge.llama.samplers import Grammar, TokenArray
from tests.conftest import TinyFactory
from tests.support.stock import StockContext

P_VALUE = 1e-3  # seeds are fixed, so a passing test passes always
NEAR_TIE = 1e-3  # of logits
DATE = 'root ::= [0-9]{4} "-" [0-9]{2} "-" [0-9]{2}'
LETTERS = "root ::= [a-z ]+"
NAMES = schema_grammar('{"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 2}').text
PROMPT = list(b"A list of names and of dates: ")


@pytest.fixture(scope="module")
def model(tiny_moe: Path) -> Iterator[Model]:
    with Model.load(tiny_moe, header_only=True) as loaded:
        yield loaded


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
    source = tiny_draft if draft == "model" else draft
    config = EngineConfig(model=tiny_moe, draft=source, n_ctx=512, n_threads=1, gamma=5 if draft else 0)  # type: ignore[arg-type]
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
    tokens = []
    for draft in (None, "mtp"):
        config = EngineConfig(model=path, draft=draft, n_ctx=512, n_threads=1, gamma=3 if draft else 0)  # type: ignore[arg-type]
        with Session.open(config) as session:
            answer = session.generate(PROMPT, n_predict=40, sampling=SamplingConfig(temperature=0, grammar=LETTERS))
            list(answer)
            tokens.append(answer.tokens)
    assert answer.stats.drafted > 0
    assert tokens[0] == tokens[1]


def test_texts_of_a_batch_have_grammars_of_their_own(tiny_moe: Path, tiny_draft: Path) -> None:
    samplings = [SamplingConfig(temperature=0, grammar=text) for text in (DATE, LETTERS, "")]
    config = EngineConfig(model=tiny_moe, draft=tiny_draft, n_ctx=128, n_threads=1, gamma=3)
    with Session.open(config) as session:
        single = []
        for sampling in samplings:
            answer = session.generate(PROMPT, n_predict=20, sampling=sampling)
            list(answer)
            single.append(answer.tokens)
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


def test_schemas_give_json_that_follows_them(tiny_moe: Path, tiny_draft: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
            "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        },
        "required": ["kind", "count", "tags", "more"],
    }
    grammar = schema_grammar(json.dumps(schema)).text
    config = EngineConfig(model=tiny_moe, draft=tiny_draft, n_ctx=1024, n_threads=1, gamma=4)
    with Session.open(config) as session:
        for seed in range(4):
            sampling = SamplingConfig(temperature=1.5, seed=seed, grammar=grammar)
            answer = session.generate(PROMPT, n_predict=400, sampling=sampling)
            text = "".join(answer.pieces())
            if answer.stop_reason == "length":  # a number may have up to 16 digits, spaces go on
                continue
            value = json.loads(text)
            assert list(value) == ["kind", "count", "tags", "more"] and value["kind"] in ("a", "b")
            assert isinstance(value["count"], int) and len(value["tags"]) <= 2
            assert value["more"] in (None, True, False)
            assert answer.stop_reason == "eos"


def exact(model: Model, logits: np.ndarray, config: SamplingConfig, accepted: Sequence[int]) -> np.ndarray:
    """C(x) [x allowed] + (1 - V) M(x), with the plain sampler's C and M, float64 [n_vocab]."""
    grammar = Reference(model.vocab, config.grammar)
    for token in accepted:
        grammar.accept(token)
    allowed = np.isfinite(grammar.mask(np.zeros(N_VOCAB)))
    grammar.close()
    plain = Sampler(replace(config, grammar=""), N_VOCAB)
    c, m = np.zeros(N_VOCAB), np.zeros(N_VOCAB)
    for row, values in ((c, logits), (m, np.where(allowed, logits, -np.inf).astype(np.float32))):
        found = plain.candidates(values, [])
        row[found.ids] = found.probabilities
    return c * allowed + (1 - (c * allowed).sum()) * m


@pytest.mark.parametrize("top_k", [3, 40])
def test_sampled_answers_have_the_exact_distribution(model: Model, top_k: int) -> None:
    """Two tokens of a verification with one draft, from a draft model with other logits."""
    rng = np.random.default_rng(7)
    rows = rng.normal(0, 0.7, (3, N_VOCAB)).astype(np.float32)
    rows[:, list(b"abcdef")] += 3.0  # some likely tokens are allowed, some are not
    config = SamplingConfig(temperature=1.0, top_k=top_k, min_p=0.02, seed=3, grammar='root ::= [a-c] [bd-f] "."')
    sampler = new_sampler(config, model)
    assert isinstance(sampler, GrammarSampler)
    n_draws, first_counts, pairs = 6000, np.zeros(N_VOCAB), np.zeros((N_VOCAB, N_VOCAB))
    n_accepted_drafts = 0
    for _ in range(n_draws):
        path = sampler.recent([])
        q = sampler.candidates(rows[2], path)
        draft = sampler.pick(q)
        state = sampler.state
        n_accepted, token = sampler.accept(rows[:2], [draft], [q], [])
        n_accepted_drafts += n_accepted
        first, second = (draft, token) if n_accepted else (token, sampler.accept(rows[1:2], [], [], [token])[1])
        first_counts[first] += 1
        pairs[first, second] += 1
        sampler.state = {"random": sampler.state["random"], "n_taken": state["n_taken"]}  # back to the start
    assert 0.1 < n_accepted_drafts / n_draws < 0.95
    assert p_value(first_counts, exact(model, rows[0], config, [])) > P_VALUE
    for first in b"abc":
        assert p_value(pairs[first], exact(model, rows[1], config, [first])) > P_VALUE


def p_value(counts: np.ndarray, distribution: np.ndarray) -> float:
    """Of Pearson's test; rare tokens are counted together."""
    assert counts[distribution == 0].sum() == 0
    expected = counts.sum() * distribution
    common = expected >= 5
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    return float(chi2.sf(((seen - wanted) ** 2 / wanted).sum(), len(wanted) - 1))


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


def test_an_answer_goes_on_where_it_was_cut_off(tiny_moe: Path) -> None:
    sampling = SamplingConfig(temperature=0, grammar=DATE)
    with Session.open(EngineConfig(model=tiny_moe, n_ctx=256, n_threads=1)) as session:
        entire = session.generate(PROMPT, n_predict=20, sampling=sampling)
        list(entire)
        begun = entire.tokens[:3]
        rest = session.generate(PROMPT, n_predict=20, sampling=sampling, begun=begun)
        list(rest)
        assert rest.tokens == entire.tokens
        with pytest.raises(InputError):
            session.generate(PROMPT, sampling=sampling, begun=list(b"no date"))


def test_a_complete_grammar_ends_the_answer_also_with_ignore_eos(tiny_moe: Path) -> None:
    with Session.open(EngineConfig(model=tiny_moe, n_ctx=256, n_threads=1)) as session:
        for temperature in (0.0, 1.0):
            sampling = SamplingConfig(temperature=temperature, seed=1, grammar=DATE, ignore_eos=True)
            answer = session.generate(PROMPT, n_predict=50, sampling=sampling)
            text = "".join(answer.pieces())
            assert answer.stop_reason == "eos" and len(text) == len("2026-11-23")


def test_a_grammar_that_may_end_goes_on_with_ignore_eos(tiny_moe: Path) -> None:
    sampling = SamplingConfig(temperature=1, seed=1, grammar="root ::= [a-z]*", ignore_eos=True)
    with Session.open(EngineConfig(model=tiny_moe, n_ctx=256, n_threads=1)) as session:
        answer = session.generate(PROMPT, n_predict=40, sampling=sampling)
        text = "".join(answer.pieces())
    assert len(text) >= 40 and len(set(text)) > 3


def test_the_most_likely_allowed_token_may_be_far_from_the_top(model: Model) -> None:
    logits = np.arange(N_VOCAB, dtype=np.float32)[::-1].copy()
    logits[ord("z")] = logits[ord("y")] = -5.0  # the least likely of all, and equal
    sampler = new_sampler(SamplingConfig(temperature=0, grammar="root ::= [yz]"), model)
    assert sampler.accept(logits[None], [], [], []) == (0, ord("y"))
    nothing = new_sampler(SamplingConfig(temperature=0, grammar='root ::= "\\u0000"'), model)
    with pytest.raises(EngineError):
        nothing.accept(logits[None], [], [], [])


def test_a_filter_that_puts_a_refused_token_in_place_does_not_end_the_process(model: Model) -> None:
    """llama.cpp does where a grammar takes in a token that it refuses; infill draws the end of the answer."""
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
def test_what_is_wrong_with_a_grammar_has_a_place(text: str, place: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError) as raised:
        Grammar.parse(text)
    assert place in raised.value.message
    assert raised.value.exit_code == 2
    assert capfd.readouterr().err == ""  # llama.cpp's own text is not shown


def test_repetitions_in_quotes_are_text(model: Model) -> None:
    grammar = Grammar.parse('root ::= "{3,2}" # {5,1}\n', model.vocab)
    assert grammar.allowed(TokenArray(4), list(b"{a")).tolist() == [True, False]
