"""The chat's loop on a real engine, with a scripted user: turns, settings, budgets, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import SamplingConfig
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.ui.chat import repl
from moeedge.ui.chat import session as chat_session
from moeedge.ui.chat.commands import Result
from moeedge.ui.chat.settings import Settings
from tests.conftest import TinyFactory
from tests.support.machine import files_of_at_most
from tests.support.sessions import plain_config
from tests.ui.talk import GREEDY, Line, Talk, cut_off, on_step


def with_budget(session: Session, budget: int, **others: Any) -> Session:
    """A session on the same model whose verifications use at most so many experts."""
    config = replace(session.config, expert_budget=ExpertBudget(budget=budget, **others))
    return Session.open(config, model=session.model)


def test_what_happened_to_memory_meanwhile_is_said_before_the_line_is_carried_out(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(session, "watch_memory", lambda: said.append("memory"))
    monkeypatch.setattr(repl, "run_command", lambda _repl, line: said.append(line) or Result())
    Talk(session, ["/info", "/stats"], tmp_path)
    assert said == ["memory", "/info", "memory", "/stats"]


def test_two_turns_are_one_conversation(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["tell me", "", "and then?", "/exit", "never read"], tmp_path)
    assert talk.code == 0
    assert [message.role for message in talk.messages] == ["user", "assistant"] * 2
    assert talk.out == "".join(f"{message.content}\n" for message in talk.messages[1::2])
    assert talk.err.count("12 tokens, ") == 2
    first, second = (turn.stats for turn in talk.repl.turns)
    assert second.prefill_tokens < second.prompt_tokens - first.prompt_tokens + 16  # the KV cache kept the first turn


def test_regen_answers_again(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["/regen", "tell me", "/regen"], tmp_path)
    assert "There is no answer to generate again." in talk.err
    first, again = (turn.stats for turn in talk.repl.turns)
    assert len(talk.messages) == 2
    assert first.generated_tokens == again.generated_tokens == 12
    assert talk.out == f"{talk.messages[1].content}\n" * 2  # greedy: the same once more
    sampling = SamplingConfig(temperature=2, top_k=0, top_p=1, min_p=0, seed=5)
    talk = Talk(session, ["tell me", "/regen"], tmp_path, settings=replace(GREEDY, sampling=sampling))
    assert [turn.stats.seed for turn in talk.repl.turns] == [5, 6]
    one, other = talk.out.split("\n", 1)
    assert one != other


def test_set_reaches_the_engine(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["/set gamma 0", "/set n=3", "tell me", "/set gamma 2", "and?"], tmp_path)
    plain, speculative = (turn.stats for turn in talk.repl.turns)
    assert plain.drafted == 0
    assert 0 < speculative.drafted <= 2 * speculative.steps
    assert plain.generated_tokens == speculative.generated_tokens == 3
    assert "gamma = 2" in talk.err


def test_a_budget_is_changed_and_switched_off(session: Session, tmp_path: Path) -> None:
    """Off, the chat answers as one without a budget: nothing of the lossy answers is left in the KV cache."""
    with with_budget(session, 4) as budgeted:
        lines: list[Line] = ["tell me", "/set budget 6", "/regen", "/set budget off", "/regen", "/stats", "and?"]
        talk = Talk(budgeted, lines, tmp_path, settings=replace(GREEDY, budget=4))
        first, second, third, last = (turn.stats for turn in talk.repl.turns)
        assert 0 < first.experts_max <= 4 < second.experts_max <= 6
        assert first.experts_natural is not None and first.experts_natural > 4
        assert (third.budgeted_steps, third.experts_natural, last.kept_probability) == (0, None, None)
        assert third.prefill_tokens == third.prompt_tokens
        assert "budget 4 (lossy)" in talk.err and "budget 6 (lossy)" in talk.err and "budget = off" in talk.err
        after = talk.err.split("budget = off")[1]
        assert "(lossy)" not in after.split("all 3 answers")[0]
        totals = " ".join(after.split("all 3 answers")[1].split())
        assert "budget 4 (lossy), budget 6 (lossy)" in totals
    exact = Talk(session, ["tell me", "and?"], tmp_path)
    assert talk.messages == exact.messages


def test_without_drafts_a_budget_is_idle(session: Session, tmp_path: Path) -> None:
    with with_budget(session, 4) as budgeted:
        talk = Talk(budgeted, ["tell me", "/set gamma 0", "/regen"], tmp_path, settings=replace(GREEDY, budget=4))
    last = talk.repl.turns[-1].stats
    assert (last.budgeted_steps, last.prefill_tokens) == (0, last.prompt_tokens)  # nothing lossy is in the KV cache
    assert "budget 4 (idle)" in talk.err.split("gamma = 0")[1]
    assert talk.repl.conversation.budgets == ["budget 4 (lossy)"]


def test_a_conversation_keeps_its_budgets(session: Session, tmp_path: Path) -> None:
    """Whoever saves, loads or resumes it later learns that some of its answers were lossy."""
    saved, again, resumed, empty = (tmp_path / name for name in ("saved", "again", "resumed", "empty"))
    labels = [ExpertBudget(budget=4).label, ExpertBudget(budget=6).label]
    with with_budget(session, 4) as budgeted:
        settings = replace(GREEDY, budget=4)
        Talk(budgeted, ["tell me", "/set budget 6", "and?", f"/save {saved}"], tmp_path, settings=settings)
        on_step(budgeted, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        Talk(budgeted, ["tell me"], tmp_path, settings=settings)
    session.reset()
    Talk(session, [f"/load {saved}", "more", f"/save {again}", "/clear", f"/save {empty}"], tmp_path / "new")
    Talk(session, ["/resume", f"/save {resumed}"], tmp_path)
    budgets = [json.loads(path.read_text())["budgets"] for path in (saved, again, resumed, empty)]
    assert budgets == [labels, labels, labels[1:], []]


def test_resume_under_a_budget_is_silent_about_settings(session: Session, tmp_path: Path) -> None:
    cut_off(session, tmp_path, 1, settings=replace(GREEDY, n_predict=5))
    with with_budget(session, 4) as budgeted:
        talk = Talk(budgeted, ["/resume"], tmp_path, settings=Settings(gamma=4, budget=4))
        assert talk.repl.settings.budget == 4 and "The last answer goes on." in talk.err
        assert "/set change them" not in talk.err


def test_budgets_that_cannot_be_are_refused_and_the_first_comes_back(session: Session, tmp_path: Path) -> None:
    refused: list[Line] = ["/set budget 3", "/set budget 0", "/set budget many"]
    idle: list[Line] = ["/set budget 9999999999", "/set budget 8", "/set gamma 0", "/set budget 5"]
    with with_budget(session, 5, coverage="truncation") as budgeted:
        for lines in (refused, idle):
            talk = Talk(budgeted, lines, tmp_path, settings=replace(GREEDY, budget=5))
            assert talk.repl.settings.budget == 5
            assert budgeted.info.expert_budget == ExpertBudget(budget=5, coverage="truncation")
    assert "changes nothing" in talk.err
    assert talk.err.count("The expert budget has no effect") == 2


def test_what_a_chat_began_without_is_refused(tiny: TinyFactory, tmp_path: Path) -> None:
    with Session.open(plain_config(tiny("qwen3moe"))) as session:
        talk = Talk(session, ["/set gamma 8", "/set budget 8"], tmp_path, settings=Settings(gamma=session.gamma))
    assert "speculation stays off" in talk.err and "--expert-budget" in talk.err
    assert (talk.repl.settings.gamma, talk.repl.settings.budget) == (0, None)


@pytest.mark.parametrize("lines", [["/set gamma auto", "/set seed 3"], ["/set seed 3", "/set gamma auto"]])
@pytest.mark.parametrize(("settings", "n_said"), [(Settings(gamma=4), 1), (GREEDY, 0)])
def test_a_seed_with_lengths_that_follow_times(
    session: Session, tmp_path: Path, lines: list[Line], settings: Settings, n_said: int
) -> None:
    talk = Talk(session, [*lines, "/set n_predict 5"], tmp_path, settings=settings)
    assert talk.err.count("may give other answers") == n_said
    session.set_draft_length(4)


def test_read_goes_before_the_next_message(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("first note")
    talk = Talk(session, [f"/read {file}", "sum up", "/read", f"/read {tmp_path / 'none'}"], tmp_path)
    assert talk.messages[0].content == "first note\nsum up"
    assert "10 characters read" in talk.err
    assert "/read takes the name of a file." in talk.err
    assert "none cannot be read: No such file or directory." in talk.err


def test_a_failed_save_is_told_once_and_leaves_no_file(session: Session, tmp_path: Path) -> None:
    with files_of_at_most(700):
        talk = Talk(session, ["tell me", "and?", "more"], tmp_path)
    assert (talk.code, len(talk.messages)) == (0, 6)
    assert talk.err.count("File too large") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_does_not_fit_is_taken_back(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["word " * 600, "tell me"], tmp_path)
    assert "but the context of 512 holds" in talk.err
    assert talk.asked == ["tell me"]


def test_raw_continues_the_text(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["tell me", "/system be kind", "more"], tmp_path, raw=True)
    assert "There is no system prompt with --raw." in talk.err
    assert talk.repl.turns[0].stats.prompt_tokens == len(session.model.tokenize("tell me"))


def test_ctrl_c_in_mid_answer_keeps_its_text_and_hints_at_the_prompt(session: Session, tmp_path: Path) -> None:
    on_step(session, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    lines: list[Line] = ["tell me", KeyboardInterrupt, "/set n 5", "and?"]
    talk = Talk(session, lines, tmp_path, settings=replace(GREEDY, n_predict=200))
    assert talk.code == 0
    assert "Use /exit or Ctrl-D to leave.\n" in talk.err
    stopped, finished = talk.repl.turns
    assert (stopped.stop_reason, finished.stop_reason) == ("interrupted", "length")
    assert 0 < stopped.stats.generated_tokens < 30
    assert talk.messages[1].content != ""
    assert ", stopped" in talk.err


def test_ctrl_c_before_the_first_token_takes_the_question_back(session: Session, tmp_path: Path) -> None:
    def stop_twice() -> None:
        for _ in range(2):  # the second one does not wait for the step
            os.kill(os.getpid(), signal.SIGINT)

    on_step(session, 1, stop_twice)
    talk = Talk(session, ["tell me", "and?"], tmp_path)
    assert "Your message got no answer" in talk.err
    assert talk.asked == ["and?"]
    assert talk.repl.turns[-1].stop_reason == "length"


@pytest.mark.parametrize(
    ("module", "place", "asked"),
    [(chat_session, "prompt_tokens", ["and more"]), (repl, "print_turn", ["tell me", "and more"])],
)
def test_ctrl_c_next_to_the_answer_does_not_end_the_chat(
    module: Any, place: str, asked: list[str], session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the answer the question is taken back, after it the answer stays; the chat goes on either way."""
    real, signals = getattr(module, place), iter([signal.SIGINT])

    def interrupted(*arguments: Any, **options: Any) -> Any:
        for signum in signals:
            signal.raise_signal(signum)
        return real(*arguments, **options)

    monkeypatch.setattr(module, place, interrupted)
    talk = Talk(session, ["tell me", "and more"], tmp_path)
    assert (talk.code, talk.asked) == (0, asked)


def test_a_grammar_of_a_file_is_set_and_switched_off(session: Session, tmp_path: Path) -> None:
    grammar, schema = tmp_path / "ab.gbnf", tmp_path / "bool.json"
    grammar.write_text('root ::= "ab" | "cd"')
    schema.write_text('{"type": "boolean", "not": {"const": true}}')
    lines: list[Line] = [f"/set grammar {grammar}", "one", f"/set grammar {schema}", "two", "/set grammar off", "three"]
    talk = Talk(session, lines, tmp_path)
    answers = [message.content for message in talk.messages if message.role == "assistant"]
    assert answers[0] in ("ab", "cd") and answers[1].strip() in ("true", "false")
    assert "not enforced: not" in talk.err
    assert len(answers[2]) > 5 and talk.repl.settings.sampling.grammar == ""
    grammar.write_text("root ::= nothing")
    bad = Talk(session, [f"/set grammar {grammar}"], tmp_path)
    assert "line 1, column 10" in bad.err and bad.repl.settings.sampling.grammar == ""


@pytest.mark.parametrize(("word", "is_said", "kept"), [("on", True, "auto"), ("off", False, "off")])
def test_thinking_needs_a_switch(word: str, is_said: bool, kept: str, session: Session, tmp_path: Path) -> None:
    talk = Talk(session, [f"/set think {word}"], tmp_path)
    assert (("no variable" in talk.err), talk.repl.settings.template.think) == (is_said, kept)
