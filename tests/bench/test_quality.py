"""Answers are checked: scores, differences from the reference (near-ties are listed, others fail), perplexity."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.bench.quality import (
    NEAR_TIE_GAP,
    NO_REFERENCE,
    AnswerScorer,
    CategoryScore,
    Scores,
    check_answers,
    check_scoring,
    different_scores,
    final_part,
    logits_in,
    measure_perplexity,
    negative_log_likelihood,
)
from moeedge.bench.samples import Sample
from moeedge.data.datasets import load_dataset, load_text
from moeedge.data.prompts import Dataset, EvaluationText, Prompt, user_turns
from moeedge.errors import DatasetError, InputError
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.records import as_dict
from moeedge.run import Run
from moeedge.scoring.answers import NOT_RUN, Reference, Score, rouge_scorer, score_answer
from tests.bench.recording import RecordedBench, Recorder, make_plan

_END = 9
_TEXT = EvaluationText("words", "the cat and the dog saw " * 8, "0")
_PROMPTS = (
    Prompt("sum", "math", user_turns("3 + 4?"), (Reference("number", ("7",)),)),
    Prompt("talk", "chat", user_turns("Hi", "Bye"), (None, Reference("contains", ("bye",)))),
    Prompt("code", "code", user_turns("Set x"), (Reference("code", tests="assert x == 1"),)),
)
_DATASET = Dataset("own", _PROMPTS, "file", Path("own.jsonl"), "", "")
_ANSWERS = {("sum", 0): "It is 7.", ("talk", 0): "Hello", ("talk", 1): "Good night", ("code", 0): "x = 1"}


def _samples() -> list[Sample]:
    return [
        Sample(mode="stock-ar", prompt=prompt, turn=turn, repetition=repetition, order=0, stop_reason="eos")
        for repetition in range(2)
        for prompt, turn in _ANSWERS
    ]


def _scorer(*, run_code: bool) -> AnswerScorer:
    return AnswerScorer(_DATASET, lambda sample: _ANSWERS[sample.prompt, sample.turn], run_code=run_code)


def test_the_mean_over_answers_and_the_reasons_for_those_left_out() -> None:
    scorer = _scorer(run_code=False)
    scored = [scorer.scored(sample) for sample in _samples()]
    assert [(s.score, s.score_reason) for s in scored[:4]] == [
        (1.0, ""), (None, NO_REFERENCE), (0.0, 'without "bye"'), (None, NOT_RUN),
    ]  # fmt: skip
    assert scored[0].answer == "It is 7."
    scored[2] = replace(scored[2], stop_reason="length")
    scores = scorer.summary(scored)
    assert scores == Scores(
        score=0.5, n_scored=2, n_answers=4, n_cut=1, scorer="contains,number",
        by_category=(CategoryScore("math", 1.0, 1), CategoryScore("chat", 0.0, 1)),
        unscored=((NO_REFERENCE, 1), (NOT_RUN, 1)),
    )  # fmt: skip
    assert str(scores) == "0.500 (2/4)"
    assert str(Scores()) == "-"
    assert str(scorer.summary([scored[1]])) == "- (0/1)"


def test_programs_run_only_on_request_and_each_text_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def counted(reference: Reference, answer: str, *, run_code: bool) -> Score:
        runs.append(answer)
        return score_answer(reference, answer, run_code=run_code)

    monkeypatch.setattr("moeedge.bench.quality.score_answer", counted)
    scorer = _scorer(run_code=True)
    scored = [scorer.scored(sample) for sample in _samples()]
    assert [s.score for s in scored] == [1.0, None, 0.0, 1.0] * 2
    assert len(runs) == 3  # neither repetitions nor answers without a reference


def test_thoughts_are_not_part_of_the_answer() -> None:
    assert final_part("<think>\n5? 6?\n</think>\n\nIt is 7.") == "\n\nIt is 7."
    assert final_part("5? 6?</think>7") == "7"  # some templates begin the thought themselves
    assert final_part("<think>\n5? 6? 7") == ""  # cut before the answer
    assert final_part("analysisIt is 5, no, 6.assistantfinalIt is 7.") == "It is 7."
    assert final_part("It is 7.") == "It is 7."


def test_notes_before_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_scoring(_DATASET, run_code=False) == [
        "1 of 4 answers will not be scored: there is no reference for them.",
        "Programs are scored with --run-code only: 1 of 4 answers.",
    ]
    assert "are run, each isolated by the " in check_scoring(_DATASET, run_code=True)[-1]
    bare = replace(_DATASET, prompts=(Prompt("a", "b", user_turns("Hi")),))
    assert check_scoring(bare, run_code=False) == ["No answer to own will be scored: no reference."]
    judged = replace(bare, unscored="people judge them")
    assert check_scoring(judged, run_code=False) == ["No answer to own will be scored: people judge them."]
    summaries = replace(_DATASET, prompts=(Prompt("a", "b", user_turns("Hi"), (Reference("rouge-l", ("x",)),)),))
    rouge_scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(InputError, match="rouge-score") as caught:
        check_scoring(summaries, run_code=False)
    assert 'pip install "moeedge[score]"' in caught.value.hint
    rouge_scorer.cache_clear()


def test_different_scores_raise_an_alarm() -> None:
    base = Scores(0.5, 2, 4, 0, "number")
    assert different_scores([("stock-ar", base), ("moeedge", replace(base, n_cut=1))]) == []
    (alarm,) = different_scores([("stock-ar", base), ("moeedge", replace(base, score=0.0))])
    assert alarm.startswith("SCORES DIFFER: moeedge has 0.000 (2/4), stock-ar 0.500 (2/4).")


def _sample(prompt: str, tokens: list[int], *, turn: int = 0, repetition: int = 0) -> Sample:
    return Sample("m", prompt, turn, repetition, 0, tokens=tokens, prompt_ids=[1])


def _logits(**values: float) -> NDArray[np.float32]:
    row = np.full(10, -5.0, dtype=np.float32)
    for name, value in values.items():
        row[int(name[1:])] = value
    return row


@pytest.mark.parametrize(("tokens", "first"), [([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0), ([9, 2, 3], 0)])
def test_the_first_difference_is_found(tokens: list[int], first: int) -> None:
    check = check_answers([_sample("a", tokens)], [_sample("a", [1, 2, 3])], lambda _s, _p: _logits(), [_END])
    assert [difference.position for difference in check.near_ties] == [first]


def test_logits_are_those_of_plain_decoding(tiny_moe: Path) -> None:
    sample = replace(_sample("a", [70, 71, 72]), prompt_ids=[65, 66, 67])
    with Model.load(tiny_moe) as model, Context(model, n_ctx=256, n_threads=1) as context:
        at_once = context.decode([65, 66, 67, 70, 71], phase=Phase.PREFILL, logits="last")[0].copy()
        assert logits_in(context)(sample, 2) == pytest.approx(at_once, abs=1e-3)


def test_a_small_gap_is_a_near_tie_and_a_large_one_a_failure() -> None:
    reference = [_sample("a", [1, 2, 3]), _sample("b", [1, 2, 3]), _sample("c", [1, 2, 3])]
    answers = [_sample("a", [1, 2, 3]), _sample("b", [1, 4, 3]), _sample("c", [1, 2, 5])]
    calls = []

    def logits_at(sample: Sample, position: int) -> NDArray[np.float32]:
        calls.append((sample.prompt, position))
        return _logits(t2=3.0, t4=3.0 - NEAR_TIE_GAP / 2) if sample.prompt == "b" else _logits(t3=3.0, t5=2.0)

    check = check_answers(answers, reference, logits_at, [_END])
    assert check.text == "1/3"
    assert calls == [("b", 1), ("c", 2)]
    assert [(d.prompt, d.position, d.reference_token, d.token) for d in check.near_ties] == [("b", 1, 2, 4)]
    assert check.near_ties[0].gap == pytest.approx(NEAR_TIE_GAP / 2, abs=1e-6)
    assert [(d.prompt, d.gap) for d in check.different] == [("c", 1.0)]
    assert not check.passed


def test_an_early_stop_is_compared_by_the_logit_of_the_stop_token() -> None:
    check = check_answers(
        [_sample("a", [1])], [_sample("a", [1, 2])], lambda _s, _p: _logits(t2=1.0, t9=0.99), [8, _END]
    )
    assert [(d.reference_token, d.token, d.near_tie) for d in check.near_ties] == [(2, None, True)]
    assert check.passed


def test_a_prompt_is_equal_when_all_its_turns_and_repetitions_are() -> None:
    reference = [_sample("a", [1], turn=0), _sample("a", [2], turn=1), _sample("b", [3])]
    answers = [*reference, _sample("a", [1], turn=0, repetition=1), _sample("a", [7], turn=1, repetition=1)]
    check = check_answers(answers, reference, lambda _s, _p: _logits(t2=1.0), [_END])
    assert check.text == "1/2"
    assert [(d.turn, d.repetition) for d in check.different] == [(1, 1)]


def test_the_reference_must_repeat_itself_too() -> None:
    unsteady = [_sample("a", [1]), _sample("a", [2], repetition=1), _sample("a", [2], repetition=2)]
    check = check_answers(unsteady, unsteady, lambda _s, _p: _logits(t1=4.0), [_END])
    assert (check.text, len(check.different)) == ("0/1", 1)  # the same difference once


def test_on_its_own_split_the_best_token_is_right() -> None:
    """Where other layers are on the GPU, the reference's token may be further from the best one than rounding."""
    reference = [_sample(name, [1, 2]) for name in "abc"]
    answers = [_sample("a", [1, 4]), _sample("b", [1, 5]), _sample("c", [1])]
    check = check_answers(
        answers, reference, lambda _s, _p: _logits(t2=1.0, t4=3.0, t5=2.9, t9=2.96), [_END], own_split=True
    )
    assert [(d.prompt, d.gap) for d in check.near_ties] == [("a", 0.0), ("c", pytest.approx(0.04, abs=1e-6))]
    assert [(d.prompt, d.gap) for d in check.different] == [("b", pytest.approx(0.1, abs=1e-6))]


def test_the_likelihood_by_its_definition() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=np.float32)) + np.float32(700)
    assert negative_log_likelihood(logits, [0, 2]) == pytest.approx([math.log(2), -math.log(0.8)], abs=1e-4)


def test_tokens_one_by_one_and_in_batches(tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model, Context(model, n_ctx=64, n_threads=1) as context:
        tokens = model.tokenize(_TEXT.text)
        losses = []
        for start in range(0, len(tokens), 64):
            part = tokens[start : start + 64]
            context.clear()
            for token, target in pairwise(part):
                logits = context.decode([token], phase=Phase.DECODE, logits="last")
                losses.append(float(negative_log_likelihood(logits, [target])[0]))
        for batch_tokens in (1, 5, 9):
            measured = measure_perplexity(context, _TEXT, batch_tokens=batch_tokens)
            assert (measured.n_tokens, measured.batch_tokens) == (len(losses), batch_tokens)
            assert measured.nll == pytest.approx(np.mean(losses), abs=0.01)  # a batch rounds otherwise
            assert measured.value == pytest.approx(math.exp(measured.nll))
        assert context.n_past == 0
        assert measure_perplexity(context, _TEXT, batch_tokens=5, run=Run(cancelled=lambda: True)) is None
        with pytest.raises(InputError):
            measure_perplexity(context, EvaluationText("one", "a", "0"), batch_tokens=5)


def test_texts(tmp_path: Path) -> None:
    toy = load_text("toy")
    assert toy.text.count("<|im_start|>assistant") >= 28
    own = tmp_path / "own.txt"
    own.write_text("hello", encoding="utf-8")
    assert load_text(str(own)).name == "own.txt"
    for content in (b" ", b"\xff"):
        own.write_bytes(content)
        with pytest.raises(DatasetError):
            load_text(str(own))
    with pytest.raises(DatasetError):
        load_text(str(tmp_path / "absent.txt"))


def test_a_run_scores_every_mode_alike(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    path = tmp_path / "own.jsonl"
    limit = {"scorer": "contains", "max_chars": 100_000}
    records = [
        {"id": "x", "prompt": "Hi", "reference": limit},
        {"id": "x", "prompt": "Say xyzzy", "reference": {"scorer": "exact", "expect": "xyzzy"}},
        {"turns": ["a", "b"], "references": [None, limit]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    plan = make_plan(tiny_moe, tiny_draft, dataset=load_dataset(str(path)), score=True, n_predict=4)
    recorder = Recorder()
    with RecordedBench(plan, recorder) as bench:
        bench.measure()
        rows = bench.rows()
        assert bench.rows()[0].scores == rows[0].scores
    assert "1 of 4 answers will not be scored: there is no reference for them." in recorder.notes
    for row in rows:
        record = json.loads(json.dumps(as_dict(row)))
        assert record["score"] == pytest.approx(2 / 3)
        assert (record["n_scored"], record["n_answers"], record["scorer"]) == (3, 4, "contains,exact")
        assert record["n_cut"] == 4  # a random model does not stop
        assert record["unscored"] == [{"reason": NO_REFERENCE, "n": 1}]
        by_prompt = {(s["prompt"], s["turn"]): (s["score"], s["score_reason"]) for s in record["samples"]}
        assert by_prompt["x", 0] == (1.0, "")
        assert by_prompt["x#2", 0] == (0.0, 'not "xyzzy"')  # a repeated id is made unique
        assert all(isinstance(s["answer"], str) for s in record["samples"])
