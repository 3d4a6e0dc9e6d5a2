"""Scores of a run: every answer once, means over answers, reasons for answers without a score, and the alarm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench.samples import Sample
from moeedge.bench.scores import (
    NO_REFERENCE,
    AnswerScorer,
    CategoryScore,
    Scores,
    check_scoring,
    different_scores,
    final_part,
)
from moeedge.data.datasets import load_dataset
from moeedge.data.prompts import Dataset, Prompt, user_turns
from moeedge.errors import InputError
from moeedge.records import as_dict
from moeedge.scoring import answers
from moeedge.scoring.answers import NOT_RUN, Reference, Score, score_answer
from tests.bench.recording import RecordedBench, Recorder, make_plan, run

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

    monkeypatch.setattr("moeedge.bench.scores.score_answer", counted)
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
    answers.rouge_scorer.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(InputError, match="rouge-score"):
        check_scoring(summaries, run_code=False)


def test_different_scores_raise_an_alarm() -> None:
    base = Scores(0.5, 2, 4, 0, "number")
    assert different_scores([("stock-ar", base), ("moeedge", replace(base, n_cut=1))]) == []
    (alarm,) = different_scores([("stock-ar", base), ("moeedge", replace(base, score=0.0))])
    assert alarm.startswith("SCORES DIFFER: moeedge has 0.000 (2/4), stock-ar 0.500 (2/4).")


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


def test_a_run_without_scores_has_none_in_its_record(tmp_path: Path, tiny_moe: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "Hi", "reference": {"scorer": "exact", "expect": "x"}}))
    rows, _ = run(make_plan(tiny_moe, None, dataset=load_dataset(str(path)), n_predict=2))
    record = as_dict(rows[0])
    assert record["score"] is record["n_scored"] is record["n_cut"] is record["scorer"] is None
    assert record["samples"][0]["answer"] is record["samples"][0]["score"] is None
