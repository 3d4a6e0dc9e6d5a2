"""What users type: further spellings, llama.cpp's environment variables, words of other programs, unknown options."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from moeedge.cli.app import COMMANDS, WORDS, environment_kept, load_command
from moeedge.cli.common import unescaped
from moeedge.cli.foreign import COMMAND_NAMES, foreign_options
from moeedge.cli.foreign import COMMANDS as FOREIGN_COMMANDS
from moeedge.cli.spelling import Speller, name_options
from moeedge.errors import InputError
from tests.support.commands import all_commands, refused, run, run_json

CHAT = load_command("chat")


def translated(line: str, **settings: tuple[str, ...]) -> list[str]:
    return Speller("chat", CHAT, **settings).translate(line.split())  # type: ignore[arg-type]


HUB = "ggml-org/gpt-oss-20b-GGUF"
# what users of llama.cpp and ollama type
LINES = f"""\
chat -m hf.co/{HUB}:MXFP4 -hfd ggml-org/Qwen3-0.6B-GGUF --draft 8 --draft-min 1 -devd CUDA0 -ngld 99 --draft-p-min 0.75
chat -hf {HUB} -hff gpt-oss-20b-mxfp4.gguf -hft TOKEN --offline --spec-type draft-mtp --spec-draft-n-max 8
chat -mu https://huggingface.co/{HUB}/resolve/main/gpt-oss-20b-mxfp4.gguf --model-draft d.gguf --spec-draft-n-min 1
chat --model model.gguf -f prompt.txt -sysf system.txt --n-predict -1 --gpu-layers 20 --cpu-moe --device none -sm row
chat --hf-repo {HUB}:MXFP4 --rpc 192.168.0.2:50052 --temperature 0.7 --top-k 40 --top-p 0.95 --min-p 0.05 --seed 42
chat --reasoning-format none --reasoning-budget 0 -cnv -st -i -mli --color on -e --no-display-prompt --no-warmup
chat -v -lv 4 --log-disable --simple-io --context-shift --keep 64 -np 4 --poll 50 -fit on -tb 8 -fa on -no-cnv
bench -m model.gguf -p 512,1024 -n 128 -ngl 99 -r 5 -t 1,2 -d 0,4096 -pg 512,128 -fa 1 -ctk q8_0 -ctv q8_0
bench -mmp 0 -sm layer --poll 0 -o json
run gpt-oss-20b "Why is the sky blue?"
run gpt-oss-20b --verbose --format json --think=high --hidethinking --nowordwrap
ls
rm gpt-oss-20b
"""


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("--flash-attn -n 4", "--flash-attn on -n 4"),
        ("-fa -1 -n 4", "-fa -1 -n 4"),
        ("-t4 -n-1", "-t 4 -n -1"),
        ("-p -hf", "-p -hf"),  # a value may begin with a dash
        ("-hf me/it:Q4_0 -hfd me/small", "-m hf:me/it:Q4_0 -md hf:me/small"),
        ("-hff x.gguf -hf me/it", "-m hf:me/it:x.gguf"),
        ("--spec-type=ngram-mod", "-md ngram"),
        ("-cnv --log-disable -fit on -p x", "-p x"),
        ("-lv 1 -v", "--verbose"),
        ("-c 5 --usage --nonsense", "--help"),
    ],
)
def test_what_options_of_llama_cpp_become(typed: str, means: str) -> None:
    assert translated(typed.replace("-n-1", "-n=-1")) == means.split()


@pytest.mark.parametrize(
    ("typed", "n_lines"),
    [("-sm layer", 1), ("--split-mode none", 0), ("--poll 50 --keep 64", 2), ("-devd CUDA0 -devd CUDA0", 1)],
)
def test_harmless_options_are_taken_with_a_line(typed: str, n_lines: int) -> None:
    speller = Speller("chat", CHAT)
    assert speller.translate([*typed.split(), "-p", "x"]) == ["-p", "x"]
    assert len(speller.warnings) == n_lines
    result = run("chat", *typed.split(), "-m", "none.gguf")
    assert result.stderr.count("no effect") == n_lines and "none.gguf" in result.stderr


def test_np_is_the_parallel_of_bench() -> None:
    speller = Speller("bench", load_command("bench"))
    assert speller.translate(["-np", "1,2"]) == ["--parallel", "1,2"] and not speller.warnings


def test_words_without_a_dash() -> None:
    words = ("-m", "-p")
    assert translated("it what is this -n 3", words=words) == ["-n", "3", "-m", "it", "-p", "what is this"]
    assert translated("it -- --why", words=words) == ["-m", "it", "-p", "--why"]
    with pytest.raises(InputError, match="-m it"):
        translated("it")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("chat -xyz", "-xyz"),
        ("chat -ngk 3", "-ngk -ngl"),
        ("chat --temprature 0", "--temprature --temperature"),
        ("chat -ojson", "-ojson '-o json'"),
        ("bench --temp 0", "--temp chat profile"),
        ("lab trace info --nothing", "--nothing 'lab trace info'"),
        ("chat --spec-type draft-magic", "draft-magic ngram-mod"),
        ("chat -fit off", "on"),
        ("chat -c abc", "-c whole 'abc'"),
        ("chat -hf", "-hf value"),
        ("rm", "NAME"),
        ("chta", "chta chat"),
        ("serve", "server"),
    ],
)
def test_what_does_not_exist_is_named_entirely(line: str, named: str) -> None:
    message = refused(*line.split())
    assert all(word.strip("'") in message for word in named.split())


def test_every_refusal_names_what_to_do() -> None:
    """An option that a command has by now needs no row."""
    refusals = {name: row for name, row in foreign_options().items() if row.kind == "refused"}
    assert all(row.hint and "{}" not in row.text + row.hint for row in refusals.values())
    assert refusals.keys() & Speller("chat", CHAT).spellings == set()
    assert "-hf OWNER/REPO" in refused("chat", "-hff", "x.gguf")


def test_no_command_is_also_a_word_of_another_program() -> None:
    assert not set(COMMANDS) & (set(FOREIGN_COMMANDS) | set(COMMAND_NAMES))
    assert set(COMMAND_NAMES.values()) <= set(COMMANDS)


def test_spellings_are_unique() -> None:
    for name, command in all_commands().items():
        found = [spelling for param in command.params for spelling in (*param.opts, *param.secondary_opts)]
        assert len(found) == len(set(found)), name


def test_the_environment_sets_what_arguments_do_not(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["chat", *pair, "-p", "one two", "-dev", "none", "--temp", "0", "--draft-max", "2"]
    monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "3")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "256")  # the argument is 512
    result = run(*arguments, "-o", "json")
    assert result.exit_code == 0, result.stderr
    assert "LLAMA_ARG_N_PREDICT=3" in result.stderr and "LLAMA_ARG_CTX_SIZE" not in result.stderr
    assert len(run_json(*arguments)["tokens"]) == 3
    assert len(run_json(*arguments, "-n", "2")["tokens"]) == 2


def test_an_argument_beats_a_variable_of_another_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "draft-mtp")
    assert translated("-p x") == ["-md", "mtp", "-p", "x"]
    assert translated("-md none") == translated("--spec-type none") == ["-md", "none"]
    speller = Speller("chat", CHAT)
    speller.translate([])
    assert [str(setting) for setting in speller.settings] == ["LLAMA_ARG_SPEC_TYPE=draft-mtp"]


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("LLAMA_ARG_TEMPERATURE", "warm", "takes a number"),
        ("LLAMA_ARG_TEMPERATURE", "-1", "0 or more"),
        ("LLAMA_ARG_MLOCK", "maybe", "takes 1 or 0"),
        ("LLAMA_ARG_SPEC_TYPE", "draft-magic", "takes one of none"),
    ],
)
def test_a_bad_value_in_the_environment_is_named(
    variable: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    message = refused("chat", "-p", "hi", "-dev", "none")
    assert variable in message and value in message and reason in message


def test_variables_of_llama_cpp_are_for_commands_with_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_N_MAX", "7")
    assert "absent.npz" in refused("lab", "replay", "absent.npz")
    assert all(not param.envvar for param in load_command("lab replay").params)


def test_prompts_from_files(pair: list[str], tmp_path: Path) -> None:
    prompt, system = tmp_path / "prompt.txt", tmp_path / "system.txt"
    prompt.write_text("one two\n", encoding="utf-8")
    system.write_text("three\tfour\n", encoding="utf-8")
    common = ["chat", *pair, "-n", "6", "-dev", "none", "--temp", "0", "-o", "json"]
    by_file = run_json(*common[:-2], "-f", prompt, "-sysf", system)
    by_text = run_json(*common[:-2], "-p", r"one two", "-sys", r"three\tfour", "-e")
    assert by_file["text"] == by_text["text"]
    assert by_file["prompt_tokens"] == by_text["prompt_tokens"]
    assert by_file["prompt_tokens"] > run_json(*common[:-2], "-f", prompt)["prompt_tokens"]
    prompt.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused("profile", "-f", prompt, "-dev", "none")


def test_escapes() -> None:
    assert unescaped(r"a\nb\t\"\'\\n\x41\q") == "a\nb\t\"'\\nA\\q"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("n_threads (-t) must be from 0 to 512", "-t must be from 0 to 512"),
        ("the context (-c) must be at least 1", "-c must be at least 1"),
        ("top_k must be >= 0", "--top-k must be >= 0"),
        ("nothing to measure (-p and -n are 0)", "Nothing to measure (-p and -n are 0)"),
    ],
)
def test_errors_name_options(message: str, shown: str) -> None:
    assert name_options(message, {"--top-k"}) == shown


def test_what_an_option_sets_in_the_environment_ends_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", "before")
    before = dict(os.environ)
    assert run("plan", "--offline", "-hft", "after", "--color", "off").exit_code == 0
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("variable", "value", "option"),
    [
        ("LLAMA_ARG_NO_MMAP", "0", "--no-mmap"),  # llama.cpp asks only whether it is set
        ("LLAMA_ARG_MMAP", "disabled", "--no-mmap"),
        ("LLAMA_ARG_MMAP", "enabled", "--mmap"),
        ("LLAMA_ARG_CONTEXT_SHIFT", "true", "--context-shift"),
        ("LLAMA_ARG_FLASH_ATTN", "disabled", "-fa off"),
        ("LLAMA_ARG_REASONING", "-1", "--think auto"),
    ],
)
def test_switches_in_the_environment(variable: str, value: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = CHAT.make_context("chat", option.split()).params
    monkeypatch.setenv(variable, value)
    speller = Speller("chat", CHAT)
    assert speller.translate([]) == []
    [setting] = speller.settings
    assert str(setting) == f"{variable}={value}"
    for name, content in speller.sets.items():
        monkeypatch.setenv(name, content)
    assert CHAT.make_context("chat", []).params == wanted


def test_an_argument_comes_before_a_switch_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_NO_MMAP", "1")
    monkeypatch.setenv("LLAMA_ARG_MMAP", "1")
    speller = Speller("chat", CHAT)
    assert speller.translate(["--mmap"]) == ["--mmap"] and speller.settings == []
    assert speller.sets["LLAMA_ARG_MMAP"] == "off"


@pytest.mark.parametrize(
    ("line", "repository", "means"),
    [
        ("-hf me/it-GGUF", "", "-m hf:me/it-GGUF:it.gguf"),
        ("", "me/it-GGUF", "-m hf:me/it-GGUF:it.gguf"),
        ("-hf me/it-GGUF -hff other.gguf", "", "-m hf:me/it-GGUF:other.gguf"),
        ("-m it.gguf", "me/it-GGUF", "-m it.gguf"),
        ("", "", ""),
    ],
)
def test_file_of_a_repository_in_the_environment(
    line: str, repository: str, means: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_HF_FILE", "it.gguf")
    monkeypatch.setenv("LLAMA_ARG_HF_REPO", repository)
    assert translated(line) == means.split()


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("help", "--help"),
        ("help show", "show --help"),
        ("help lab replay", "lab replay --help"),
        ("version", "--version"),
        ("show -m bundled", "show bundled"),
        ("list --json", "list -o json"),
    ],
)
def test_two_ways_to_type_the_same(typed: str, means: str) -> None:
    first, second = run(*typed.split()), run(*means.split())
    assert first.exit_code == second.exit_code == 0
    assert first.output == second.output


def test_a_chat_needs_no_word_and_reads_standard_input(pair: list[str]) -> None:
    answers = [
        run(*words, *pair, "-n", "4", "-s", "1", "--temp", "0", "-q", "--json", piped="one two").stdout
        for words in (["chat"], [], ["-f", "-"], ["--system="])
    ]
    assert len({json.loads(answer)["text"] for answer in answers}) == 1
    plain, told = (
        run("chat", *pair, "-n", "4", "-q", "--json", "-p", "one", *words) for words in ([], ["--system", "be brief"])
    )
    assert json.loads(told.stdout)["prompt_tokens"] > json.loads(plain.stdout)["prompt_tokens"]
    assert "No such option: --nonsense" in refused("--nonsense")


@pytest.mark.parametrize("command", ["chat", "bench", "profile", "plan"])
def test_the_short_help_has_a_line_for_each_option(command: str) -> None:
    short, every = run(command, "--help").stdout, run(command, "-t", "2", "--help-all").stdout
    lines = short.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 80
    assert not any(line.endswith("...") for line in lines)  # a text that was cut
    assert "--ctx-size" in short and "--cache-type-k" not in short
    assert "--cache-type-k" in every or command == "plan"


@pytest.mark.parametrize("line", LINES.splitlines())
def test_a_line_of_another_program_acts(line: str) -> None:
    typed, *rest = shlex.split(line)
    name = COMMAND_NAMES.get(typed, typed)
    command = load_command(name)
    arguments = Speller(name, command, words=WORDS.get(typed, ())).translate(rest)
    with environment_kept():  # as the program does
        assert command.make_context(name, arguments, resilient_parsing=False).args == []
