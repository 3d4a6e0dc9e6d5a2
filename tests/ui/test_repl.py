"""The chat's loop on a real engine, with a scripted user."""

from __future__ import annotations

import copy
import io
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moeedge.engine import autosave
from moeedge.engine.autosave import Autosave, UnfinishedChat, unfinished_chats
from moeedge.engine.conversation import Conversation, Message, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama.reasoning import TemplateChoice
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.scheduler.stats import StepRecord
from moeedge.ui.chat import repl
from moeedge.ui.chat import session as chat_session
from moeedge.ui.chat.commands import Result
from moeedge.ui.chat.repl import Repl
from moeedge.ui.chat.session import origin_of
from moeedge.ui.chat.settings import Settings
from tests.conftest import TinyFactory

GREEDY = Settings(sampling=SamplingConfig(temperature=0), n_predict=12, gamma=4)
Line = str | type[BaseException] | Callable[["Talk"], None]


@pytest.fixture(scope="module")
def session(tiny: TinyFactory) -> Iterator[Session]:
    config = EngineConfig(model=tiny("qwen3moe"), draft=tiny("qwen3"), n_ctx=512, n_threads=1)
    with Session.open(config) as session:
        yield session


@pytest.fixture(autouse=True)
def fresh(session: Session) -> Iterator[None]:
    session.gamma = 4
    yield
    session.observers.clear()
    session.reset()


class Talk:
    """A chat that reads `lines` and ends; `err` is all output but the answers."""

    def __init__(
        self,
        session: Session,
        lines: list[Line],
        folder: Path,
        *,
        settings: Settings = GREEDY,
        raw: bool = False,
        switch: Callable[[str], Session] | None = None,
    ) -> None:
        out, err = io.StringIO(), io.StringIO()
        self.folder = folder
        self.begun: list[str] = []  # what the prompts began with
        self.repl = Repl(
            session,
            Conversation(),
            settings,
            read=self._reader(lines),
            switch=switch,
            out=Console(file=out),
            err=Console(file=err, width=200),
            autosave=Autosave(lambda: folder, origin_of(session, raw=raw)),
            unfinished=unfinished_chats(lambda: folder),
            raw=raw,
        )
        self.code = self.repl.run()
        self.out, self.err = out.getvalue(), err.getvalue()

    def _reader(self, lines: list[Line]) -> Callable[[str], str]:
        left = iter(lines)

        def read(begun: str) -> str:
            self.begun.append(begun)
            line = next(left, None)
            while callable(line) and not isinstance(line, type):  # a look at the chat between two lines
                line(self)
                line = next(left, None)
            if line is None:
                raise EOFError
            if isinstance(line, str):
                return line
            raise line

        return read

    @property
    def messages(self) -> list[Message]:
        return self.repl.conversation.messages


def on_step(session: Session, number: int, action: Callable[[], None]) -> None:
    """Call `action` in the middle of an answer, after its step `number`."""
    seen: list[StepRecord] = []

    def observe(record: StepRecord, _session: Session) -> None:
        seen.append(record)
        if len(seen) == number:
            action()

    session.observers.append(observe)


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


def test_regen_with_a_seed_says_something_else(session: Session, tmp_path: Path) -> None:
    settings = Settings(
        sampling=SamplingConfig(temperature=2, top_k=0, top_p=1, min_p=0, seed=5), n_predict=12, gamma=4
    )
    talk = Talk(session, ["tell me", "/regen"], tmp_path, settings=settings)
    assert [turn.stats.seed for turn in talk.repl.turns] == [5, 6]
    first, second = talk.out.split("\n", 1)
    assert first != second


def test_set_reaches_the_engine(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["/set gamma 0", "/set n=3", "tell me", "/set gamma 2", "and?"], tmp_path)
    plain, speculative = (turn.stats for turn in talk.repl.turns)
    assert plain.drafted == 0
    assert 0 < speculative.drafted <= 2 * speculative.steps
    assert plain.generated_tokens == speculative.generated_tokens == 3
    assert "gamma = 2" in talk.err


def test_a_huge_budget_changes_nothing(session: Session, tmp_path: Path) -> None:
    with Session.open(replace(session.config, expert_budget=ExpertBudget(budget=4)), model=session.model) as budgeted:
        lines: list[Line] = ["/set budget 9999999999", "tell me"]
        talk = Talk(budgeted, lines, tmp_path, settings=replace(GREEDY, budget=4))
    assert "changes nothing" in talk.err
    assert talk.messages == Talk(session, ["tell me"], tmp_path).messages


def test_a_budget_is_changed_and_switched_off(session: Session, tiny: TinyFactory, tmp_path: Path) -> None:
    """Off, the chat answers as one without a budget: nothing of the lossy answers is left in the KV cache."""
    config = replace(session.config, expert_budget=ExpertBudget(budget=4))
    with Session.open(config, model=session.model) as budgeted:
        settings = replace(GREEDY, budget=4)
        lines: list[Line] = ["tell me", "/set budget 6", "/regen", "/set budget off", "/regen", "/stats", "and?"]
        talk = Talk(budgeted, lines, tmp_path, settings=settings)
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
    config = replace(session.config, expert_budget=ExpertBudget(budget=4))
    lines: list[Line] = ["tell me", "/set gamma 0", "/regen"]
    with Session.open(config, model=session.model) as budgeted:
        talk = Talk(budgeted, lines, tmp_path, settings=replace(GREEDY, gamma=budgeted.gamma, budget=4))
    first, last = (turn.stats for turn in talk.repl.turns)
    assert first.budgeted_steps > 0 and last.budgeted_steps == 0
    assert last.prefill_tokens == last.prompt_tokens  # nothing lossy is left in the KV cache
    assert "budget 4 (idle)" in talk.err.split("gamma = 0")[1]
    assert talk.repl.conversation.budgets == ["budget 4 (lossy)"]


def test_a_conversation_keeps_its_budgets(session: Session, tmp_path: Path) -> None:
    """Whoever saves, loads or resumes it later learns that some of its answers were lossy."""
    saved, again, resumed, empty = (tmp_path / name for name in ("saved", "again", "resumed", "empty"))
    labels = [ExpertBudget(budget=4).label, ExpertBudget(budget=6).label]
    with Session.open(replace(session.config, expert_budget=ExpertBudget(budget=4)), model=session.model) as budgeted:
        settings = replace(GREEDY, budget=4)
        lines: list[Line] = ["tell me", "/set budget 6", "and?", f"/save {saved}"]
        Talk(budgeted, lines, tmp_path, settings=settings)
        on_step(budgeted, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        Talk(budgeted, ["tell me"], tmp_path, settings=settings)
    session.reset()
    Talk(session, [f"/load {saved}", "more", f"/save {again}", "/clear", f"/save {empty}"], tmp_path / "new")
    Talk(session, ["/resume", f"/save {resumed}"], tmp_path)
    budgets = [json.loads(path.read_text())["budgets"] for path in (saved, again, resumed, empty)]
    assert budgets == [labels, labels, labels[1:], []]


def test_resume_under_a_budget_is_silent_about_settings(session: Session, tmp_path: Path) -> None:
    cut_off(session, tmp_path, 1, settings=replace(GREEDY, n_predict=5))
    with Session.open(replace(session.config, expert_budget=ExpertBudget(budget=4)), model=session.model) as budgeted:
        talk = Talk(budgeted, ["/resume"], tmp_path, settings=Settings(gamma=4, budget=4))
        assert talk.repl.settings.budget == 4 and "The last answer goes on." in talk.err
        assert "/set change them" not in talk.err


@pytest.mark.parametrize("text", ["3", "0", "many"])
def test_a_bad_budget_changes_nothing(text: str, session: Session, tmp_path: Path) -> None:
    config = replace(session.config, expert_budget=ExpertBudget(budget=5))
    with Session.open(config, model=session.model) as budgeted:
        talk = Talk(budgeted, [f"/set budget {text}"], tmp_path, settings=replace(GREEDY, budget=5))
        assert talk.repl.settings.budget == 5
        assert budgeted.info.expert_budget is config.expert_budget


def test_a_chat_without_a_budget_gets_none(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["/set budget 8", "tell me"], tmp_path)
    assert "--expert-budget" in talk.err
    assert talk.repl.settings.budget is None
    assert talk.repl.turns[0].stats.budgeted_steps == 0


def test_the_first_budget_comes_back(session: Session, tmp_path: Path) -> None:
    first = ExpertBudget(budget=5, coverage="truncation")
    with Session.open(replace(session.config, expert_budget=first), model=session.model) as budgeted:
        lines: list[Line] = ["/set budget 8", "/set gamma 0", "/set budget 5"]
        talk = Talk(budgeted, lines, tmp_path, settings=replace(GREEDY, budget=5))
        assert budgeted.info.expert_budget == first
    assert talk.err.count("The expert budget has no effect") == 2


def test_gamma_without_a_draft_is_refused(tiny: TinyFactory, tmp_path: Path) -> None:
    with Session.open(EngineConfig(model=tiny("qwen3moe"), n_ctx=256, n_threads=1)) as session:
        talk = Talk(session, ["/set gamma 8"], tmp_path, settings=Settings(gamma=session.gamma))
    assert "speculation stays off" in talk.err
    assert talk.repl.settings.gamma == 0


@pytest.mark.parametrize("lines", [["/set gamma auto", "/set seed 3"], ["/set seed 3", "/set gamma auto"]])
def test_a_seed_with_lengths_that_follow_times(session: Session, tmp_path: Path, lines: list[Line]) -> None:
    """It is said once, and not where answers are greedy."""
    talk = Talk(session, [*lines, "/set n_predict 5"], tmp_path, settings=Settings(gamma=4))
    assert talk.err.count("may give other answers") == 1
    session.set_draft_length(4)
    talk = Talk(session, lines, tmp_path, settings=GREEDY)
    assert talk.err.count("may give other answers") == 0
    session.set_draft_length(4)


def test_read_goes_before_the_next_message(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("first note")
    talk = Talk(session, [f"/read {file}", "sum up", "/read", f"/read {tmp_path / 'none'}"], tmp_path)
    assert talk.messages[0].content == "first note\nsum up"
    assert "10 characters read" in talk.err
    assert "/read takes the name of a file." in talk.err
    assert "none cannot be read: No such file or directory." in talk.err


def test_load_restores_a_conversation(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    saved = Conversation("Be kind.", [Message("user", "hi"), Message("assistant", "ho"), Message("user", "open")])
    saved.save(file)
    talk = Talk(session, [f"/load {file}", "/system", "tell me"], tmp_path)
    assert "2 messages loaded" in talk.err
    assert "no answer and was left out" in talk.err
    assert "Be kind." in talk.err
    assert [message.content for message in talk.messages[:3]] == ["hi", "ho", "tell me"]


def test_a_prompt_that_does_not_fit_is_taken_back(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["word " * 600, "tell me"], tmp_path)
    assert "but the context of 512 holds" in talk.err
    assert [message.content for message in talk.messages[::2]] == ["tell me"]


def test_raw_continues_the_text(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["tell me", "/system be kind", "more"], tmp_path, raw=True)
    assert "There is no system prompt with --raw." in talk.err
    assert talk.repl.turns[0].stats.prompt_tokens == len(session.model.tokenize("tell me"))


def test_ctrl_c_at_the_prompt_hints(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, [KeyboardInterrupt, "/exit"], tmp_path)
    assert (talk.code, talk.err) == (0, "Use /exit or Ctrl-D to leave.\n")


def test_ctrl_c_in_mid_answer_keeps_its_text(session: Session, tmp_path: Path) -> None:
    on_step(session, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    settings = Settings(sampling=GREEDY.sampling, n_predict=200, gamma=4)
    talk = Talk(session, ["tell me", "/set n 5", "and?"], tmp_path, settings=settings)
    assert talk.code == 0
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
    assert [message.content for message in talk.messages[::2]] == ["and?"]
    assert talk.repl.turns[-1].stop_reason == "length"


@pytest.mark.parametrize("place", ["prompt_tokens", "print_turn"])
def test_ctrl_c_next_to_the_answer_does_not_end_the_chat(
    place: str, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the answer the question is taken back, after it the answer stays; the chat goes on either way."""
    module = chat_session if place == "prompt_tokens" else repl
    real = getattr(module, place)
    calls: list[int] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(module, place, interrupted)
    talk = Talk(session, ["tell me", "and more"], tmp_path)
    assert talk.code == 0
    asked = [message.content for message in talk.messages if message.role == "user"]
    assert asked == (["and more"] if place == "prompt_tokens" else ["tell me", "and more"])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_mid_answer_leaves_it_to_be_continued(
    signum: signal.Signals, session: Session, tmp_path: Path
) -> None:
    settings = replace(GREEDY, n_predict=60)
    expected = Talk(session, ["tell me"], tmp_path / "whole", settings=settings)
    session.reset()
    on_step(session, 3, lambda: os.kill(os.getpid(), signum))
    talk = Talk(session, ["tell me", "never read"], tmp_path, settings=settings)
    assert talk.code == 128 + signum
    (left,) = unfinished_chats(lambda: tmp_path)
    assert left.conversation.messages == talk.messages == [Message("user", "tell me")]
    assert 0 < len(left.tokens) < 60
    assert "--resume" in talk.err
    assert left.origin == origin_of(session, raw=False)
    session.reset()
    resumed = Talk(session, ["/resume"], tmp_path, settings=settings)
    assert resumed.messages == expected.messages
    assert resumed.repl.turns[0].stats.generated_tokens == 60 - len(left.tokens)
    assert unfinished_chats(lambda: tmp_path) == []


@pytest.mark.parametrize("at_step", [1, 3])
def test_a_signal_after_regen_keeps_an_answer(at_step: int, session: Session, tmp_path: Path) -> None:
    """Until the new answer has a token the old one is on disk, then the new one's tokens are."""
    first = Talk(session, ["tell me"], tmp_path)
    session.reset()

    prompts: list[int] = []  # steps after each
    on_disk: list[UnfinishedChat] = []

    def observe(record: StepRecord, _session: Session) -> None:
        if record.n_verified == 0:
            prompts.append(0)
        prompts[-1] += 1
        if len(prompts) == 2 and prompts[-1] == at_step:
            (path,) = tmp_path.glob("*.jsonl")
            on_disk.append(autosave._read(path))  # what kill -9 would leave
            for _ in range(2):  # the second signal does not wait for the step
                os.kill(os.getpid(), signal.SIGTERM)

    session.observers.append(observe)
    talk = Talk(session, ["tell me", "/regen"], tmp_path)
    assert talk.code == 143
    (left,) = unfinished_chats(lambda: tmp_path)
    assert on_disk[0].conversation == left.conversation
    if at_step == 1:
        assert (left.conversation.messages, left.tokens) == (first.messages, [])
    else:
        assert left.conversation.messages == first.messages[:1]
        assert first.messages[1].content.startswith(left.text) and left.tokens


def test_a_failed_save_is_told_once_and_leaves_no_file(session: Session, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
        talk = Talk(session, ["tell me", "and?", "more"], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (talk.code, len(talk.messages)) == (0, 6)
    assert talk.err.count("File too large") == 1
    assert list(tmp_path.iterdir()) == []


def test_signals_are_given_back(session: Session, tmp_path: Path) -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    Talk(session, ["tell me"], tmp_path)
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def cut_off(session: Session, folder: Path, n_steps: int, *, settings: Settings = GREEDY) -> list[int]:
    """A chat that ends after `n_steps` steps of its answer as by kill -9; the tokens of the answer until then."""
    saved = Autosave(lambda: folder, origin_of(session, raw=False))
    conversation = Conversation("be kind")
    conversation.ask("tell me")
    saved.update(conversation, asdict(settings))
    answer = session.generate(
        prompt_tokens(session.model, conversation, template=session.template),
        n_predict=settings.n_predict,
        sampling=settings.sampling,
    )
    pieces = answer.pieces()
    n_saved = 0
    for _ in range(n_steps):
        saved.add_step(next(pieces), answer.tokens[n_saved:])
        n_saved = len(answer.tokens)
    answer.close()
    session.reset()
    saved.close(keep=True)
    return answer.tokens


def test_resume_goes_on_with_the_same_answer(session: Session, tmp_path: Path) -> None:
    settings = replace(GREEDY, n_predict=30)
    expected = Talk(session, ["/system be kind", "tell me"], tmp_path / "one", settings=settings)
    begun = cut_off(session, tmp_path, 3, settings=settings)
    assert 0 < len(begun) < 30
    talk = Talk(session, ["/resume", "/resume"], tmp_path)
    assert talk.messages == expected.messages
    assert talk.out == expected.out  # with the part before the end
    assert talk.repl.conversation.system == "be kind"
    assert talk.repl.settings == replace(settings, ctx=session.info.n_ctx)
    assert talk.repl.turns[0].stats.generated_tokens == 30 - len(begun)
    assert "There is no chat to resume." in talk.err
    assert unfinished_chats(lambda: tmp_path) == []


def test_tokens_that_the_model_lacks_are_answered_anew(session: Session, tmp_path: Path) -> None:
    settings = replace(GREEDY, n_predict=10)
    expected = Talk(session, ["/system be kind", "tell me"], tmp_path / "one", settings=settings)
    cut_off(session, tmp_path, 1, settings=settings)
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("a") as file:
        file.write('{"text": "x", "tokens": [-1, 4294967296]}\n')
    assert Talk(session, ["/resume"], tmp_path).messages == expected.messages


TEMPLATE = TemplateChoice("{{ messages[-1].content }}{{ mood }}", {"mood": ": "})
CONSTRAINED = SamplingConfig(
    temperature=1.2,
    seed=5,
    grammar='root ::= "[" [a-z]+ "]"',
    samplers=("top_k", "temperature"),
    logit_bias=((93, -9),),
)


def test_resume_restores_grammar_samplers_and_template(session: Session, tmp_path: Path) -> None:
    settings = Settings(sampling=CONSTRAINED, n_predict=30, gamma=4, template=TEMPLATE)
    expected = Talk(session, ["/system be kind", "tell me"], tmp_path / "one", settings=settings)
    assert expected.messages[-1].content[0] == "["
    session.template = TEMPLATE
    begun = cut_off(session, tmp_path, 3, settings=settings)
    session.template = TemplateChoice()
    assert 0 < len(begun) < 30
    talk = Talk(session, ["/resume"], tmp_path)
    assert talk.messages[-1].content.startswith(session.model.piece(begun[0]).decode())
    assert session.template == talk.repl.settings.template == TEMPLATE
    assert talk.repl.settings.sampling == CONSTRAINED
    assert talk.repl.turns[0].stats.generated_tokens == 30 - len(begun)


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


def test_think_is_refused_without_a_switch(session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["/set think on"], tmp_path)
    assert "no variable" in talk.err and talk.repl.settings.template.think == "auto"
    talk = Talk(session, ["/set think off"], tmp_path)  # it never thinks
    assert "no variable" not in talk.err and talk.repl.settings.template.think == "off"


def test_resume_with_another_model_answers_anew(session: Session, tmp_path: Path) -> None:
    cut_off(session, tmp_path, 2)
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"model_bytes": ', b'"model_bytes": 1'))
    talk = Talk(session, ["/resume"], tmp_path)
    assert talk.repl.turns[0].stats.generated_tokens == 12
    assert [message.role for message in talk.messages] == ["user", "assistant"]


def test_resume_keeps_the_text_if_it_cannot_go_on(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(session, tmp_path, 2)
    (left,) = unfinished_chats(lambda: tmp_path)
    monkeypatch.setattr(session.target, "n_ctx", 8)
    talk = Talk(session, ["/resume"], tmp_path)
    assert talk.messages[-1] == Message("assistant", left.text)
    assert "context" in talk.err


def test_resume_replaces_no_conversation(session: Session, tmp_path: Path) -> None:
    cut_off(session, tmp_path, 1)
    talk = Talk(session, ["hello", "/resume", "and?", "/clear", "/resume"], tmp_path)
    assert "/clear" in talk.err
    assert len(talk.repl.turns) == 3
    assert [message.content for message in talk.messages[::2]] == ["tell me"]


def test_resume_says_that_other_settings_apply(session: Session, tmp_path: Path) -> None:
    for given, is_said in ((replace(GREEDY, n_predict=5), True), (Settings(gamma=4), False)):
        cut_off(session, tmp_path, 1)
        talk = Talk(session, ["/resume"], tmp_path, settings=given)
        assert talk.repl.settings == replace(GREEDY, ctx=session.info.n_ctx)
        assert ("settings apply" in talk.err) == is_said


def test_resume_lists_and_drops(session: Session, tmp_path: Path) -> None:
    for _ in range(3):
        cut_off(session, tmp_path, 1)
    talk = Talk(session, ["/sessions", "/resume 4", "/resume 2", "/resume drop", "n", "/resume drop", "y"], tmp_path)
    assert talk.err.count("1 message with tiny-qwen3moe") == 4
    assert "There is no unfinished chat 4." in talk.err and '"tell me"' in talk.err
    assert "Nothing is deleted." in talk.err
    assert len(talk.repl.turns) == 1
    assert unfinished_chats(lambda: tmp_path) == []


def test_a_chat_that_is_not_saved_leaves_the_resumed_file(session: Session, tmp_path: Path) -> None:
    cut_off(session, tmp_path, 1)
    (tmp_path / "file").touch()
    chat = Repl(
        session,
        Conversation(),
        GREEDY,
        read=lambda _begun: "/exit",
        switch=None,
        out=Console(file=io.StringIO()),
        err=Console(file=io.StringIO()),
        unfinished=unfinished_chats(lambda: tmp_path),
    )
    assert chat.run("/resume") == 0
    assert len(chat.turns) == 1
    assert len(unfinished_chats(lambda: tmp_path)) == 1


def test_every_change_is_on_disk(session: Session, tmp_path: Path) -> None:
    """After each line, the file holds what the chat holds."""
    states: list[tuple[Conversation, Conversation]] = []
    lines = ["tell me", "/set temp 0.5", "and?", "/regen", "/system be kind", "/clear", "again"]

    def peek() -> str:
        (path,) = tmp_path.glob("*.jsonl")
        states.append((copy.deepcopy(talk.conversation), autosave._read(path).conversation))
        if not lines:
            raise EOFError
        return lines.pop(0)

    read = iter([lambda: lines.pop(0)])
    talk = Repl(
        session,
        Conversation(),
        GREEDY,
        read=lambda _begun: next(read, peek)(),
        switch=None,
        out=Console(file=io.StringIO()),
        err=Console(file=io.StringIO()),
        autosave=Autosave(lambda: tmp_path, origin_of(session, raw=False)),
    )
    assert talk.run() == 0
    assert len(states) == 7
    for state, saved in states:
        assert state == saved
