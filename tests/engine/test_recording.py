"""What the collector writes down is what the model did: sensor counts, the text, plain decoding of the same text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moeedge.data.prompts import Prompt, user_turns
from moeedge.engine.drafts import DraftRequest, Proposal
from moeedge.engine.recording import (
    Recording,
    check_layers,
    describe_layers,
    parse_layers,
    record_routing,
    unseen_layers,
)
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import ContextTooSmallError, InputError, LayerRangeError
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.scheduler.stats import StepRecord
from moeedge.trace.format import Trace
from moeedge.trace.steps import activation_counts, recorded_steps, text_steps
from tests.conftest import TinyFactory
from tests.support.progress import SeenProgress
from tests.support.sessions import GREEDY, answered

TEXTS = ("one two three", "a longer question than the first one")
PROMPTS = [Prompt("prompt", "", user_turns(text)) for text in TEXTS]


class Witness:
    """Keeps what the engine says about each step, to compare the trace with."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.counts: list[np.ndarray[tuple[int, ...], np.dtype[np.uint32]]] = []

    def __call__(self, record: StepRecord, session: Session) -> None:
        self.records.append(record)
        self.counts.append(session.counts.copy())


@pytest.fixture
def session(pair: tuple[Path, Path]) -> Iterator[Session]:
    with Session.open(EngineConfig(model=pair[0], draft=pair[1], n_ctx=512, gamma=3, n_threads=1)) as opened:
        yield opened


def _record(session: Session, prompts: list[Prompt] = PROMPTS, n_predict: int = 24) -> Recording:
    return record_routing(session, prompts, n_predict=n_predict, sampling=GREEDY, raw=True, source={"dataset": "t"})


def test_trace_says_what_the_engine_did(session: Session) -> None:
    answered(session, session.model.tokenize("something else entirely"), 5)  # what ran before is not recorded
    witness = Witness()
    session.observers.append(witness)
    recording = _record(session)
    trace = recording.trace
    assert (recording.answers, recording.skipped) == (2, [])
    assert trace.meta.parameters["dataset"] == "t" and trace.meta.gamma == 3
    assert len(session.observers) == 1  # the collector took itself off
    assert trace.hidden_states is None  # not requested
    prompts = [token for text in TEXTS for token in session.model.tokenize(text)]
    assert trace.token[trace.phase == Phase.PREFILL].tolist() == prompts

    steps = recorded_steps(trace)
    verified = [i for i, record in enumerate(witness.records) if record.n_verified]
    assert steps.n_tokens.tolist() == [witness.records[i].n_verified for i in verified]
    assert steps.n_text.tolist() == [witness.records[i].n_accepted + 1 for i in verified]
    # counts recomputed from the ids equal the sensor's own counts
    expected = np.stack([witness.counts[i] for i in verified])
    np.testing.assert_array_equal(activation_counts(trace, steps, list(range(trace.meta.n_layers))), expected)
    for i, counts in zip(verified, expected, strict=True):
        assert (counts.sum(axis=1) == witness.records[i].n_verified * 4).all()
        assert witness.records[i].experts_unique == pytest.approx(np.count_nonzero(counts, axis=1).mean())


def test_the_hidden_states_of_drafts_are_kept(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness()
    session.observers.append(witness)
    propose = session.draft.propose

    def keeping(request: DraftRequest) -> Proposal:
        return propose(request._replace(keep_hidden_states=True))

    monkeypatch.setattr(session.draft, "propose", keeping)
    trace = _record(session).trace
    steps = [record for record in witness.records if record.n_verified]
    assert any(record.n_drafted > 1 for record in steps)
    rows = np.flatnonzero(trace.phase != Phase.PREFILL)
    first = 0
    for record in steps:
        batch = trace.hidden_states[rows[first : first + record.n_verified]]
        known = 0 if record.hidden_states is None else len(record.hidden_states)
        assert known == record.n_drafted and np.isnan(batch[known:]).all()
        if record.hidden_states is not None:
            np.testing.assert_array_equal(batch[:known], record.hidden_states.astype(np.float16))
        first += record.n_verified
    assert first == rows.size and np.isnan(trace.hidden_states[trace.phase == Phase.PREFILL]).all()


def test_tokens_positions_and_weights_are_those_of_the_text(session: Session) -> None:
    trace = _record(session, PROMPTS[:1]).trace
    prompt = session.model.tokenize(TEXTS[0])
    prefill = trace.phase == Phase.PREFILL
    assert trace.token[prefill].tolist() == prompt
    assert trace.position[prefill].tolist() == list(range(len(prompt)))
    text = trace.accepted
    assert trace.position[text].tolist() == list(range(int(text.sum())))
    tokens = answered(session, prompt, 24, ignore_eos=False).tokens
    n_answer = min(int(text.sum()) - len(prompt), len(tokens))
    assert n_answer > 10
    assert trace.token[text][len(prompt) :][:n_answer].tolist() == tokens[:n_answer]
    rejected = ~trace.accepted
    assert rejected.any() and (trace.token[rejected] >= 0).all() and (trace.phase[rejected] == Phase.VERIFY).all()

    weights = trace.weights[trace.text_rows()].astype(np.float64)
    assert np.isfinite(weights).all() and (weights > 0).all()
    np.testing.assert_allclose(weights.sum(axis=2), 1.0, atol=2e-3)  # qwen3moe renormalises its top-k
    assert (np.diff(weights, axis=2) <= 1e-3).all()  # the router's first choice first

    # llama.cpp computes the last layer only for tokens whose logits are wanted
    assert (trace.layer_ids(0)[prefill] >= 0).all()
    last = trace.layer_ids(trace.meta.n_layers - 1)[prefill]
    assert (last[:-1] == -1).all() and (last[-1] >= 0).all()


def _text_ids(trace: Trace, text: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    steps = text_steps(trace)
    rows = steps.rows[steps.sequence == text, 0]
    return np.stack([np.sort(trace.layer_ids(layer)[rows], axis=1) for layer in range(trace.meta.n_layers)], axis=1)


def test_accepted_tokens_are_what_plain_decoding_sees(session: Session, tiny_moe: Path) -> None:
    """The one-token sensor is fed with the accepted tokens of the speculative run: compare with a run without draft."""
    speculative = _record(session).trace
    with Session.open(EngineConfig(model=tiny_moe, n_ctx=512, n_threads=1)) as alone:
        plain = _record(alone).trace
    assert set(plain.phase.tolist()) == {Phase.PREFILL, Phase.DECODE}
    for text in range(len(TEXTS)):
        ours, theirs = (_text_ids(trace, text) for trace in (speculative, plain))
        n_common = min(len(ours), len(theirs))
        assert n_common > 10
        # batches of different sizes round differently: near-ties of the router may fall the other way
        assert (ours[:n_common] == theirs[:n_common]).mean() > 0.99


def test_conversations_record_every_turn(session: Session) -> None:
    recording = _record(session, [Prompt("two", "", user_turns("hello there", " and then"))], n_predict=6)
    trace = recording.trace
    assert recording.answers == 2 and set(trace.sequence.tolist()) == {0, 1}
    second = (trace.sequence == 1) & (trace.phase == Phase.PREFILL)
    # what the KV cache still held of the first turn is not computed again
    assert trace.position[second][0] > 0


def test_long_prompts_are_skipped_and_named(session: Session) -> None:
    long = Prompt("long", "", user_turns("word " * 2000))
    assert _record(session, [long, *PROMPTS], n_predict=4).skipped == ["long"]
    with pytest.raises(ContextTooSmallError):
        _record(session, [long], n_predict=4)


def test_cancelling_keeps_what_there_is(session: Session) -> None:
    progress = SeenProgress()
    run = Run(cancelled=lambda: len(progress.phases) >= 5, progress=progress)
    recording = record_routing(session, PROMPTS, n_predict=50, sampling=GREEDY, raw=True, run=run)
    assert recording.answers == 1 and len(progress.phases) >= 5 and progress.amounts == [1]
    assert 0 < len(recorded_steps(recording.trace)) < 20


def test_layers_are_checked_before_anything_runs(session: Session, tiny_draft: Path, tiny: TinyFactory) -> None:
    assert check_layers(session, [2, 0]) == [2, 0]
    with pytest.raises(LayerRangeError, match="0 to 2"):
        check_layers(session, [3])
    dense = EngineConfig(model=tiny_draft, n_ctx=128)
    with Session.open(dense) as opened, pytest.raises(LayerRangeError, match="no experts"):
        check_layers(opened, [0])
    with Session.open(EngineConfig(model=tiny("deepseek2"), n_ctx=128)) as mixed:
        n_dense = min(mixed.model.info.expert_layers)
        assert n_dense > 0  # its first layers are dense
        with pytest.raises(LayerRangeError, match="Layer 0 has no experts; the layers with experts are"):
            check_layers(mixed, [0])
        assert check_layers(mixed, [0, n_dense]) == [n_dense]
    model = SimpleNamespace(info=SimpleNamespace(expert_layers=[0, 1, 2, 4]), host_expert_layers=[0])
    assert "layers 1-2, 4" in unseen_layers(SimpleNamespace(model=model)), "those on a GPU are named"
    model.host_expert_layers = [0, 1, 2, 4]
    assert not unseen_layers(SimpleNamespace(model=model))


LISTS = {"47": [47], "all": list(range(48)), " ALL ": list(range(48)), "0,5,40-47": [0, 5, *range(40, 48)]}
LISTS |= {"3, 1, 3": [3, 1], "2-2": [2], "5 - 7 , 6-8": [5, 6, 7, 8]}


def test_lists_of_layers() -> None:
    assert {text: parse_layers(text, 48) for text in LISTS} == LISTS
    assert parse_layers("47", 48, single=True) == [47]
    layers = ([], [3], [1, 2, 3], [0, 2, 4, 5, 6, 9])
    assert [describe_layers(each) for each in layers] == ["", "3", "1-3", "0, 2, 4-6, 9"]


@pytest.mark.parametrize(
    ("texts", "single", "error", "words"),
    [
        (["48", "0,48", "40-48", "-1", "999999999"], False, LayerRangeError, r"layers are 0 to 47\.$"),
        (["48", "-1"], True, LayerRangeError, "0 to 47"),
        (["", "x", "1,,2", "1-", "1.5", "0x3", "1 2", "٣", "9" * 20], False, InputError, "not a list of layers"),
        (["7-5"], False, InputError, "backwards"),
        (["1-3"], True, InputError, "--layers"),
    ],
)
def test_texts_that_are_no_layers(texts: list[str], single: bool, error: type[Exception], words: str) -> None:
    for text in texts:
        with pytest.raises(error, match=words):
            parse_layers(text, 48, single=single)
    with pytest.raises(LayerRangeError, match="are 0 only"):
        parse_layers("1", 1)
