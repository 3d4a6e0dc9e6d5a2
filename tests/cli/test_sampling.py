"""Samplers, grammars and chat templates on the command line of chat: each option acts, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moeedge.cli.chat_options import SamplingOptions, TemplateOptions
from moeedge.cli.options import flatten
from moeedge.engine.types import DEFAULT_SAMPLERS, SamplingConfig
from moeedge.llama.reasoning import TemplateChoice
from tests.support.commands import refused, run, run_json

GREEDY = ("--temp", "0", "-n", "24", "-p", "the one and the other")
DIGITS = 'root ::= [0-9] [0-9] "!"'


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


@pytest.mark.parametrize(
    "options",
    [
        ("--logit-bias", "65+30"),
        ("--logit-bias", "65+1e400"),
        ("--logit-bias", "69-inf", "-l", "65+0.5"),
        ("--presence-penalty", "40"),
        ("--frequency-penalty", "40"),
        ("--dry-multiplier", "40", "--dry-sequence-breaker", "none"),
        ("--grammar", DIGITS),
        ("-j", '{"type": "integer"}'),
        ("--format", "json"),
        ("--chat-template", "vicuna"),
        ("--chat-template", "{{ messages[0].content }}"),
        ("--chat-template-kwargs", '{"bos_token": "x", "messages": 1}', "--chat-template", "{{ bos_token }} text"),
        ("-r", "dh"),
    ],
    ids=lambda options: " ".join(options)[:40],
)
def test_an_option_acts_on_a_greedy_answer(options: tuple[str, ...], pair: list[str]) -> None:
    assert run_json("chat", *pair, *GREEDY, *options)["text"] != run_json("chat", *pair, *GREEDY)["text"]


@pytest.mark.parametrize(
    "options",
    [
        ("--typical", "0.1"),
        ("--top-nsigma", "0.2"),
        ("--xtc-probability", "1", "--xtc-threshold", "0.01"),
        ("--dynatemp-range", "1.5"),
        ("--samplers", "temperature"),
        ("--sampling-seq", "t"),
    ],
    ids=lambda options: options[0],
)
def test_an_option_acts_on_a_sampled_answer(options: tuple[str, ...], pair: list[str]) -> None:
    sampled = ("--temp", "1.5", "-s", "1", "-n", "24", "-p", "the one and the other")
    assert run_json("chat", *pair, *sampled, *options)["text"] != run_json("chat", *pair, *sampled)["text"]


def test_ignore_eos_goes_on(pair: list[str]) -> None:
    """A bias makes an end token likely; without one the answer goes on to its limit."""
    ends = ("-l", "303+60")
    assert run_json("chat", *pair, *GREEDY, *ends)["stop_reason"] == "eos"
    report = run_json("chat", *pair, *GREEDY, *ends, "--ignore-eos")
    assert report["stop_reason"] == "length" and len(report["tokens"]) == 24


def test_json_names_what_an_answer_followed(pair: list[str], tmp_path: Path) -> None:
    grammar, template = tmp_path / "digits.gbnf", tmp_path / "plain.jinja"
    grammar.write_text(DIGITS)
    template.write_text("{{ messages[0].content }}{{ mood }}")
    report = run_json(
        *("chat", *pair, *GREEDY, "--grammar-file", grammar, "--samplers", "top_k;temperature"),
        *("--chat-template-file", template, "--chat-template-kwargs", '{"mood": "!"}'),
    )
    stats = report["stats"]
    assert report["text"][:2].isdecimal() and report["stop_reason"] == "eos"
    assert stats["grammar"] == DIGITS and stats["samplers"] == ["top_k", "temperature"]
    assert stats["template"] == {"source": template.read_text(), "arguments": {"mood": "!"}, "think": "auto"}


def test_schemas_from_files_and_what_they_do_not_enforce(pair: list[str], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3, "uniqueItems": true}'
    )
    result = run("chat", *pair, *GREEDY, "-jf", schema, "-o", "json")
    assert "uniqueItems" in result.stderr
    value: Any = json.loads(json.loads(result.stdout)["text"])
    assert 1 <= len(value) <= 3 and set(value) <= {True, False}


def test_thinking_is_switched_where_the_template_has_a_switch(pair: list[str]) -> None:
    switch = (
        "{{ messages[0].content }}{% if enable_thinking is defined %}"
        "{{ 'on' if enable_thinking else 'switched off' }}{% endif %}"
    )
    texts = {
        think: run_json("chat", *pair, *GREEDY, "--chat-template", switch, "--think", think)["prompt_tokens"]
        for think in ("auto", "on", "off")
    }
    assert texts["auto"] < texts["on"] < texts["off"]
    for same in (("--reasoning", "off"), ("-rea", "off"), ("--reasoning-budget", "0"), ("--think", "false")):
        assert run_json("chat", *pair, *GREEDY, "--chat-template", switch, *same)["prompt_tokens"] == texts["off"]
    with_grammar = run("chat", *pair, *GREEDY, "--chat-template", switch, "--grammar", DIGITS, "-o", "json")
    assert json.loads(with_grammar.stdout)["prompt_tokens"] == texts["off"]
    assert "think" in with_grammar.stderr
    assert TemplateOptions(think="true").choice() == TemplateChoice(think="on")


@pytest.mark.parametrize("off", [["--think=false"], ["--reasoning-budget", "0"], ["-rea", "off"]])
def test_a_model_that_never_thinks_may_be_told_not_to(pair: list[str], off: list[str]) -> None:
    plain, told = (run_json("chat", *pair, *GREEDY, *options) for options in ((), off))
    assert (told["text"], told["prompt_tokens"]) == (plain["text"], plain["prompt_tokens"])
    assert told["stats"]["template"]["think"] == "off"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--grammar", "root ::= foo"), "line 1, column 10"),
        (("--grammar", "root ::= ("), "line 1"),
        (("-j", "{"), "not JSON"),
        (("-j", '{"type": "foo"}'), "foo"),
        (("--format", "yaml"), "json"),
        (("--grammar", DIGITS, "-j", "{}"), "cannot be used together"),
        (("--grammar", ""), "grammar is empty"),
        (("--samplers", "top_k;foo"), "'foo'"),
        (("--samplers", "mirostat"), "min_p"),
        (("--sampling-seq", "kz"), "'z'"),
        (("--samplers", "top_k", "--sampling-seq", "k"), "cannot be used together"),
        (("--logit-bias", "hello"), "15043+1"),
        (("--typical", "0"), "--typical"),
        (("--mirostat", "2"), "--typical"),
        (("--chat-template", "nosuch"), "chatml"),
        (("--chat-template", "{% for"), "line 1"),
        (("--chat-template-kwargs", "[1]"), "object"),
        (("--chat-template-kwargs", "{"), "column 2"),
        (("--think", "maybe"), "auto"),
        (("--think", "on"), "Leave out --think"),
        (("--think", "off", "--chat-template", "{{ messages[0].content }}</think>"), "Leave out --think"),
        (("--no-jinja",), "--chat-template NAME"),
        (("--raw", "--chat-template", "chatml"), "--raw"),
        (("--reasoning-budget", "100"), "100"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_bad_values_are_one_sentence(options: tuple[str, ...], words: str, pair: list[str]) -> None:
    assert words in refused("chat", *pair, *GREEDY, *options)


def test_jinja_is_taken(pair: list[str]) -> None:
    assert run_json("chat", *pair, *GREEDY, "--jinja")["text"] == run_json("chat", *pair, *GREEDY)["text"]
