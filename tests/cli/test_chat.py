"""Single answers of `moeedge chat`: text and JSON, prompts, drafts, samplers, and signals in the middle."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moeedge.cli import chat_run
from moeedge.cli.chat_options import SamplingOptions
from moeedge.cli.engine_options import EngineOptions
from moeedge.cli.model_files import ModelFiles, resolve_models
from moeedge.cli.options import flatten
from moeedge.engine.types import DEFAULT_SAMPLERS, SamplingConfig
from moeedge.errors import EmptyPromptError
from moeedge.hardware.host import concurrent_threads
from moeedge.ui.chat.prompt import one_shot_prompt
from tests.conftest import TinyFactory
from tests.support.commands import SIGNALS, run, run_json
from tests.support.greedy import judge
from tests.support.stock import StockContext

PROGRAM = [sys.executable, "-m", "moeedge", "chat"]
GREEDY = ["-p", "tell me", "--temp", "0", "-dev", "none"]
SHORT = ("--temp", "0", "-n", "24", "-p", "the one and the other")
DIGITS = 'root ::= [0-9] [0-9] "!"'


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """`moeedge chat ARGUMENTS` in a process of its own, without standard input."""
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 60, "check": False}
    return subprocess.run([*PROGRAM, *arguments], **given | options)


def assert_each_changes(asked: tuple[Any, ...], *options: tuple[str, ...]) -> None:
    """Each of the options gives another answer, and none the same again."""
    plain = run_json(*asked)["text"]
    for each in options:
        assert run_json(*asked, *each)["text"] != plain, each
    assert run_json(*asked)["text"] == plain


def config_of(*arguments: str, escape: bool = False) -> SamplingConfig:
    """What these options become."""
    found = []

    @flatten
    def command(sampling: SamplingOptions) -> None:
        found.append(sampling.config(escape=escape)[0])

    app = typer.Typer()
    app.command()(command)
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    return found[0]


def test_greedy_answers_are_stocks(pair: list[str], tiny_moe: Path) -> None:
    answer = run_json("chat", *pair, "--raw", "-p", "the one and the other", "--temp", "0", "-n", "48")
    with StockContext(tiny_moe) as stock:
        verdict = judge(stock, stock.tokenize("the one and the other"), answer["tokens"])
    assert verdict.faults == []


def test_text_goes_to_stdout_and_everything_else_to_stderr(pair: list[str]) -> None:
    result = run("chat", *pair, *GREEDY, "-n", "16")
    assert result.exit_code == 0
    text = run_json("chat", *pair, *GREEDY, "-n", "16")["text"]
    assert result.stdout == text + "\n" * (not text.endswith("\n"))
    header, stats = result.stderr.splitlines()
    assert header.split(" | ")[1:] == ["experts all 48 on the CPU", "drafts by tiny-qwen3-0.gguf"]
    assert "16 tokens, " in stats


def test_quiet_says_nothing_but_what_is_wrong_or_lossy(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_run, "busy_note", lambda *_: "Other programs compute.")
    arguments = [*pair, *GREEDY, "-n", "8"]
    quiet, loud = run("chat", *arguments, "-q"), run("chat", *arguments)
    assert (quiet.exit_code, quiet.stderr, loud.stderr.count("Other programs")) == (0, "", 1)
    assert quiet.stdout == loud.stdout
    lossy = run("chat", *arguments, "--draft-max", "3", "--expert-budget", "4", "-q").stderr
    assert "budget 4 (lossy)" in lossy and "tokens," not in lossy
    wrong = run("chat", *pair, "-p", " ", "-q")
    assert wrong.exit_code == 2 and wrong.stderr


def test_thinking_in_a_pipe(pair: list[str], tmp_path: Path) -> None:
    """The template's prompt ends in the start tag; random weights hardly ever write the end tag."""
    template = tmp_path / "thinks.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}"
    )
    arguments = [*pair, *GREEDY, "-n", "12", "--chat-template-file", str(template)]
    full, shown, hidden = (run("chat", *arguments, *more) for more in ([], ["--show-thinking"], ["--hide-thinking"]))
    assert len(full.stdout) > 12 and shown.stdout == full.stdout
    assert hidden.stdout == ""
    assert "12 tokens, " in hidden.stderr
    assert run_json("chat", *arguments, "--hide-thinking")["text"].strip() == full.stdout.strip()


@pytest.mark.parametrize("variables", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "utf-8:strict"}], ids=["C", "utf-8"])
def test_piped_bytes_are_no_prompt(pair: list[str], variables: dict[str, str]) -> None:
    """In the C locale Python lets such bytes through as lone surrogates."""
    done = process(*pair, stdin=None, input=b"ab\xff\n", env=os.environ | variables)
    assert done.returncode == 2
    assert b"Byte 2 " in done.stderr


def test_more_threads_than_cores_are_obeyed_with_a_warning(tiny_moe: Path) -> None:
    most = concurrent_threads()
    base = ["-m", tiny_moe, "-md", "none", "-n", "2", "-p", "hi", "-dev", "none", "-q", "-o", "json"]
    more = run("chat", *base, "-t", most + 1, "-tb", most + 2)
    assert more.exit_code == 0 and json.loads(more.stdout)["stats"]["threads"] == most + 1
    assert more.stderr.count(f"-t {most + 1} and -tb {most + 2}:") == 1
    assert not run("chat", *base, "-t", most, "-tb", most).stderr


def test_verbose_shows_the_log_on_stderr(pair: list[str]) -> None:
    done = process(*pair, "-p", "hi", "-n", "2", "-o", "json", "--verbose", text=True)
    assert json.loads(done.stdout)["stop_reason"] == "length"
    assert "llama_model_loader" in done.stderr


def test_a_reader_that_leaves_is_no_crash(pair: list[str]) -> None:
    command = f'{" ".join(PROGRAM)} "$@" -p hi -n 400 | head -c 1'
    shell = ["sh", "-c", command, "sh", *pair]
    done = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert len(done.stdout) == 1
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr


def test_output_that_the_encoding_lacks_becomes_a_question_mark(pair: list[str]) -> None:
    done = process(*pair, "-p", "hi", "-n", "100", "--temp", "0", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


def test_sources_of_drafts(tiny: TinyFactory, capfd: pytest.CaptureFixture[str]) -> None:
    own_head, plain, small = tiny("glm4moe"), tiny("qwen3moe"), tiny("qwen3")
    assert resolve_models(own_head, "mtp") == resolve_models(own_head, "auto") == ModelFiles(own_head, "mtp")
    assert resolve_models(own_head, None) == ModelFiles(own_head, None)
    assert "No draft model" not in capfd.readouterr().err
    assert resolve_models(plain, "auto") == ModelFiles(plain, "ngram")
    assert "No draft model" in capfd.readouterr().err

    def chosen(**given: Any) -> tuple[object, bool]:
        config = EngineOptions(**given).config(default_draft="auto")
        return config.draft, config.auto_gamma

    assert chosen(model=own_head) == ("mtp", True)  # what nobody asked for drafts what pays
    assert chosen(model=plain) == ("ngram", True)
    assert chosen(model=plain, draft_max=3) == ("ngram", False)
    assert chosen(model=plain, model_draft="none") == (None, False)
    assert chosen(model=plain, model_draft=str(small)) == (small, False)
    assert EngineOptions(model=plain).config().draft is None  # commands that compare nothing with it


class _Silent(io.StringIO):
    """A pipe whose other end says nothing for a while."""

    def read(self, size: int | None = -1, /) -> str:
        time.sleep(0.05)
        return "late"


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows -p; waiting for it is said, and closed it is empty."""
    monkeypatch.setattr("moeedge.ui.chat.prompt._PATIENCE_S", 0.01)
    said: list[str] = []
    assert one_shot_prompt("hi", _Silent(), notice=said.append) == "hi\n\nlate"
    assert len(said) == 1 and "Ctrl-D" in said[0]
    with pytest.raises(EmptyPromptError):
        one_shot_prompt(None, None, notice=typer.echo)
    assert one_shot_prompt("hi", None, notice=typer.echo) == "hi"


@pytest.mark.parametrize("options", ["-dev none", "-dev emulated --cache-ratio 0.5"])
def test_a_chat_loads_neither_the_lab_nor_what_draws_and_fits(options: str, pair: list[str]) -> None:
    program = """
import sys
from moeedge.cli.app import app
try:
    app(sys.argv[1:], prog_name="moeedge")
finally:
    print("loaded:", *{"matplotlib", "scipy", "torch", "moeedge.lab"} & set(sys.modules), file=sys.stderr)
"""
    words = ["chat", *pair, "-p", "one two", "-n", "4", "-q", *options.split()]
    ran = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stderr.splitlines()[-1].split() == ["loaded:"], ran.stderr


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_signal_keeps_what_was_said(pair: list[str], form: str, signum: signal.Signals, code: int) -> None:
    """JSON is whole and says that it was interrupted."""
    command = [*PROGRAM, *pair, *GREEDY, "--context-shift", "-o", form]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    endless = subprocess.Popen(command, text=True, **pipes)
    try:
        assert endless.stdout is not None and endless.stderr is not None
        assert "on the CPU" in endless.stderr.readline()  # the header has come
        if form == "json":
            time.sleep(1.0)  # such an answer says nothing until it is printed as a whole
        first = "" if form == "json" else endless.stdout.read(50)
        endless.send_signal(signum)
        rest, stderr = endless.communicate(timeout=60)
    finally:
        endless.kill()
        endless.wait()
    assert endless.returncode == code, stderr
    assert "Traceback" not in stderr and rest.endswith("\n")
    if form == "text":
        assert len(first + rest) > 50 and ", stopped" in stderr
        return
    report = json.loads(rest)
    assert report["stop_reason"] == "interrupted"
    assert min(len(report["tokens"]), len(report["text"])) > 10
    assert report["stats"]["tg_ts"] > 0


def test_json_names_what_an_answer_followed(pair: list[str], tmp_path: Path) -> None:
    grammar, template = tmp_path / "digits.gbnf", tmp_path / "plain.jinja"
    grammar.write_text(DIGITS)
    template.write_text("{{ messages[0].content }}{{ mood }}")
    report = run_json(
        *("chat", *pair, *SHORT, "--grammar-file", grammar, "--samplers", "top_k;temperature"),
        *("--chat-template-file", template, "--chat-template-kwargs", '{"mood": "!"}'),
    )
    stats = report["stats"]
    assert report["text"][:2].isdecimal() and report["stop_reason"] == "eos"
    assert stats["grammar"] == DIGITS and stats["samplers"] == ["top_k", "temperature"]
    assert stats["template"] == {"source": template.read_text(), "arguments": {"mood": "!"}, "think": "auto"}
    assert "root ::=" in run_json("chat", *pair, *SHORT, "--format", "json")["stats"]["grammar"]


def test_options_reach_the_samplers() -> None:
    assert config_of() == SamplingConfig()  # llama.cpp's defaults
    config = config_of(
        *("--samplers", "top-k; temperature,xtc", "-l", "65+1.5", "-l", "66-inf", "--logit-bias", "7-2"),
        *("--dry-sequence-breaker", "none", "-r", "a", "-r", "b"),
        *("--typical", "0.5", "--top-nsigma", "2", "--dynatemp-exp", "2"),
    )
    assert config.samplers == ("top_k", "temperature", "xtc")
    assert config.logit_bias == ((65, 1.5), (66, -1e30), (7, -2.0))
    assert config.dry_sequence_breakers == () and config.stop == ("a", "b")
    assert (config.typical_p, config.top_n_sigma, config.dynatemp_exponent) == (0.5, 2, 2)
    assert config_of("-r", "\\n", escape=True).stop == ("\n",)
    assert config_of("--sampling-seq", "edskypmxt").samplers == DEFAULT_SAMPLERS


def test_options_act_on_an_answer(pair: list[str]) -> None:
    """A bias makes an end token likely; without one the answer goes on to its limit."""
    asked = ("chat", *pair, *SHORT)
    assert_each_changes(
        asked,
        ("--logit-bias", "65+30"),
        ("--logit-bias", "65+1e400"),
        ("--logit-bias", "69-inf", "-l", "65+0.5"),
        ("--presence-penalty", "40"),
        ("--frequency-penalty", "40"),
        ("--dry-multiplier", "40", "--dry-sequence-breaker", "none"),
        ("--format", "json"),
        ("--chat-template", "vicuna"),
        ("--chat-template-kwargs", '{"bos_token": "x", "messages": 1}', "--chat-template", "{{ bos_token }} text"),
        ("-r", "dh"),
    )
    ends = ("-l", "303+60")
    assert run_json(*asked, *ends)["stop_reason"] == "eos"
    report = run_json(*asked, *ends, "--ignore-eos")
    assert report["stop_reason"] == "length" and len(report["tokens"]) == 24


def test_an_option_acts_on_a_sampled_answer(pair: list[str]) -> None:
    sampled = ("chat", *pair, "--temp", "1.5", "-s", "1", "-n", "24", "-p", "the one and the other")
    assert_each_changes(
        sampled,
        ("--typical", "0.1"),
        ("--top-nsigma", "0.2"),
        ("--xtc-probability", "1", "--xtc-threshold", "0.01"),
        ("--dynatemp-range", "1.5"),
        ("--samplers", "temperature"),
        ("--sampling-seq", "t"),
    )
