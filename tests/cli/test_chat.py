"""Single answers of `moeedge chat`: text and JSON, where the prompt comes from, and bad input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from moeedge import native
from moeedge.cli.engine_options import EngineOptions
from moeedge.cli.model_files import ModelFiles, resolve_models
from moeedge.errors import EmptyPromptError
from moeedge.hardware.processor import concurrent_threads
from moeedge.ui.chat.prompt import one_shot_prompt
from tests.conftest import TinyFactory
from tests.support.commands import refused, run
from tests.support.greedy import judge
from tests.support.stock import StockContext

STATS_KEYS = (
    "pp_ts tg_ts ttft_s steps drafted accepted acceptance_rate tokens_per_step experts_per_verification "
    "device gamma draft policy seed model n_ctx threads"
)


def chat(*arguments: str, piped: str = "") -> Any:
    """The report of `moeedge chat ARGUMENTS -o json`."""
    result = run("chat", *arguments, "-o", "json", piped=piped)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_json_has_the_documented_keys(pair: list[str]) -> None:
    report = chat(*pair, "-p", "tell me", "--temp", "0", "-n", "16", "--draft-max", "3")
    assert list(report) == ["text", "tokens", "prompt_tokens", "stop_reason", "stats", "provenance"]
    assert set(report["stats"]) >= set(STATS_KEYS.split())
    assert len(report["tokens"]) == 16
    assert report["stop_reason"] == "length"
    stats = report["stats"]
    assert (stats["gamma"], stats["device"], stats["policy"]) == (3, "none", "none")
    assert "hit_rate_pairs" not in stats  # there is no cache
    assert (stats["n_ctx"], stats["threads"]) == (512, 1)
    assert stats["drafted"] >= stats["accepted"] >= 0
    assert stats["acceptance_rate"] == stats["accepted"] / stats["drafted"]
    assert 4 <= stats["experts_per_verification"] <= 16  # top-4 of 16
    assert min(stats["pp_ts"], stats["tg_ts"], stats["ttft_s"]) > 0


def test_greedy_answers_repeat_and_are_stocks(pair: list[str], tiny_moe: Path) -> None:
    arguments = [*pair, "--raw", "-p", "the one and the other", "--temp", "0", "-n", "48"]
    first, second = chat(*arguments), chat(*arguments)
    assert first["tokens"] == second["tokens"]
    with StockContext(tiny_moe) as stock:
        verdict = judge(stock, stock.tokenize("the one and the other"), first["tokens"])
    assert verdict.faults == []


def test_a_seed_repeats_and_is_reported(pair: list[str]) -> None:
    arguments = [*pair, "-p", "tell me", "-s", "7", "-n", "24"]
    first, second = chat(*arguments), chat(*arguments)
    assert first["tokens"] == second["tokens"]
    assert first["stats"]["seed"] == 7
    assert chat(*pair, "-p", "tell me", "-s", "8", "-n", "24")["tokens"] != first["tokens"]


def test_text_goes_to_stdout_and_everything_else_to_stderr(pair: list[str]) -> None:
    arguments = [*pair, "-p", "tell me", "--temp", "0", "-n", "16", "-dev", "none"]
    report = chat(*arguments)
    result = run("chat", *arguments)
    assert result.exit_code == 0
    assert result.stdout == report["text"] + "\n" * (not report["text"].endswith("\n"))
    header, stats = result.stderr.splitlines()
    assert header.split(" | ")[1:] == ["experts all 48 on the CPU", "drafts by tiny-qwen3-0.gguf"]
    assert "16 tokens, " in stats


def test_quiet_says_nothing_but_what_is_wrong_or_lossy(pair: list[str]) -> None:
    arguments = [*pair, "-p", "tell me", "--temp", "0", "-n", "8", "-dev", "none"]
    quiet = run("chat", *arguments, "-q")
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    assert quiet.stdout == run("chat", *arguments).stdout
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
    arguments = [*pair, "-p", "tell me", "--temp", "0", "-n", "12", "--chat-template-file", str(template)]
    full, shown, hidden = (run("chat", *arguments, *more) for more in ([], ["--show-thinking"], ["--hide-thinking"]))
    assert len(full.stdout) > 12 and shown.stdout == full.stdout
    assert hidden.stdout == ""
    assert "12 tokens, " in hidden.stderr
    assert chat(*arguments, "--hide-thinking")["text"].strip() == full.stdout.strip()


def test_piped_text_is_the_prompt(pair: list[str]) -> None:
    arguments = [*pair, "--temp", "0", "-n", "8"]
    given = chat(*arguments, "-p", "tell me")
    assert chat(*arguments, piped="tell me\n")["tokens"] == given["tokens"]


@pytest.mark.parametrize("encoding", ["C", "utf-8"])
def test_piped_bytes_are_no_prompt(pair: list[str], encoding: str) -> None:
    """In the C locale Python lets such bytes through as lone surrogates."""
    command = [sys.executable, "-m", "moeedge", "chat", *pair]
    environment = os.environ | ({"LC_ALL": "C"} if encoding == "C" else {"PYTHONIOENCODING": "utf-8:strict"})
    done = subprocess.run(command, input=b"ab\xff\n", capture_output=True, timeout=60, check=False, env=environment)
    assert done.returncode == 2
    assert b"Byte 2 " in done.stderr


def test_piped_text_follows_the_given_prompt(pair: list[str]) -> None:
    arguments = [*pair, "--temp", "0", "-n", "8"]
    both = chat(*arguments, "-p", "sum it up:", piped="one\ntwo\n")
    assert both["tokens"] == chat(*arguments, "-p", "sum it up:\n\none\ntwo")["tokens"]


def test_system_prompt_and_template_count(pair: list[str]) -> None:
    arguments = [*pair, "-p", "tell me", "-n", "1"]
    plain, system, raw = (chat(*arguments, *more)["prompt_tokens"] for more in ([], ["-sys", "be kind"], ["--raw"]))
    assert raw < plain < system


def test_multi_letter_options_with_one_dash(tiny: TinyFactory) -> None:
    target = str(tiny("qwen3moe"))
    report = chat(
        "-m", target, "-md", "ngram", "-sys", "be kind", "-ngl", "0", "-dev", "none", "-st", "-n", "4", "-p", "hi hi hi"
    )
    assert report["stats"]["draft"] == "ngram"
    assert len(report["tokens"]) == 4


def test_a_model_without_draft_says_so(tiny: TinyFactory) -> None:
    result = run("chat", "-m", str(tiny("qwen3moe")), "-t", "1", "-n", "4", "-p", "hi")
    assert result.exit_code == 0
    assert "No draft model" in result.stderr


def test_a_dense_model_works_and_says_so(tiny: TinyFactory) -> None:
    result = run("chat", "-m", str(tiny("qwen3")), "-t", "1", "-n", "4", "-p", "hi")
    assert result.exit_code == 0
    assert "experts" not in result.stderr


def test_more_threads_than_cores_are_obeyed_with_a_warning(tiny: TinyFactory) -> None:
    most = concurrent_threads()
    base = ["-m", str(tiny("qwen3moe")), "-md", "none", "-n", "2", "-p", "hi", "-dev", "none"]
    for option, n_threads in (("-t", most + 1), ("-tb", most + 2)):
        result = run("chat", *base, "-q", option, str(n_threads))
        assert result.exit_code == 0
        assert result.stderr.count(f"{option} {n_threads}:") == 1
    assert chat(*base, "-t", str(most + 1))["stats"]["threads"] == most + 1
    assert not run("chat", *base, "-q", "-t", str(most), "-tb", str(most)).stderr


def test_a_busy_machine_is_said_once(tiny: TinyFactory) -> None:
    command = [sys.executable, "-m", "moeedge", "chat", "-m", str(tiny("qwen3moe")), "-md", "none", "-p", "hi"]
    command += ["-n", "2", "-t", str(os.cpu_count())]
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        for quiet in ([], ["-q"]):
            done = subprocess.run([*command, *quiet], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            assert done.returncode == 0
            assert done.stderr.count("Other programs use") == (0 if quiet else 1)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_verbose_shows_the_log_on_stderr(pair: list[str]) -> None:
    command = [sys.executable, "-m", "moeedge", "chat", *pair, "-p", "hi", "-n", "2", "-o", "json", "--verbose"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["stop_reason"] == "length"
    assert "llama_model_loader" in done.stderr


def test_a_full_context_stops_the_answer_and_says_so(tiny: TinyFactory) -> None:
    arguments = ["-m", str(tiny("qwen3moe")), "-t", "1", "-c", "64", "--temp", "0", "-p", "hi"]
    result = run("chat", *arguments)
    assert result.exit_code == 0
    assert "context full" in result.stderr
    assert "-c N" in result.stderr
    shifted = chat(*arguments, "--context-shift", "-n", "200")
    assert (shifted["stop_reason"], len(shifted["tokens"])) == ("length", 200)


def test_a_file_that_is_no_model(pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "notes.gguf"
    file.write_text("these are notes")
    assert "notes.gguf" in refused("chat", *pair, "-m", file, "-p", "hi")


def test_no_terminal(pair: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moeedge", "chat", *pair],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "not a terminal" in done.stderr
    assert "-p TEXT" in done.stderr


def test_a_reader_that_leaves_is_no_crash(pair: list[str]) -> None:
    command = f'{sys.executable} -m moeedge chat "$@" -p hi -n 400 | head -c 1'
    shell = ["sh", "-c", command, "sh", *pair]
    done = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert len(done.stdout) == 1
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


def test_output_that_the_encoding_lacks_becomes_a_question_mark(pair: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moeedge", "chat", *pair, "-p", "hi", "-n", "100", "--temp", "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


def test_sources_of_drafts(tiny: TinyFactory) -> None:
    own_head, plain = tiny("glm4moe"), tiny("qwen3moe")
    assert resolve_models(own_head, "mtp") == resolve_models(own_head, "auto") == ModelFiles(own_head, "mtp")
    assert resolve_models(own_head, None) == ModelFiles(own_head, None)
    assert resolve_models(plain, "auto") == ModelFiles(plain, "ngram")


def test_heads_and_n_grams_that_nobody_asked_for_draft_what_pays(tiny: TinyFactory) -> None:
    def chosen(**given: Any) -> tuple[object, bool]:
        config = EngineOptions(**given).config(default_draft="auto")
        return config.draft, config.auto_gamma

    own_head, plain, small = tiny("glm4moe"), tiny("qwen3moe"), tiny("qwen3")
    assert chosen(model=own_head) == ("mtp", True)
    assert chosen(model=plain) == ("ngram", True)
    assert chosen(model=plain, draft_max=3) == ("ngram", False)
    assert chosen(model=plain, model_draft="none") == (None, False)
    assert chosen(model=plain, model_draft=str(small)) == (small, False)
    assert EngineOptions(model=plain).config().draft is None  # commands that compare nothing with it


def test_pairs_that_the_options_name(bundled_pair: tuple[Path, Path]) -> None:
    target, draft = bundled_pair
    assert resolve_models(None, None) == ModelFiles(target, draft)
    assert resolve_models(target, None) == ModelFiles(target, draft)
    assert resolve_models(None, "none") == ModelFiles(target, None)
    assert resolve_models(None, "ngram") == ModelFiles(target, "ngram")
    assert resolve_models(None, "auto") == ModelFiles(target, draft)
    assert resolve_models(Path("other.gguf"), None) == ModelFiles(Path("other.gguf"), None)
    assert resolve_models(Path("other.gguf"), "small.gguf") == ModelFiles(Path("other.gguf"), Path("small.gguf"))


def test_the_bundled_pair_is_called_a_toy(bundled_pair: tuple[Path, Path]) -> None:
    result = run("chat", "-p", "What is 3 + 4?", "--temp", "0", "-n", "8", "-t", "1")
    assert result.exit_code == 0
    assert "a toy" in result.stderr


def test_a_device_that_is_listed_is_accepted(pair: list[str]) -> None:
    native.attach()
    name = native.devices()[0].name
    assert run("chat", *pair, "-p", "hi", "-n", "1", "-dev", name).exit_code == 0


def test_ngl_without_a_gpu_is_not_silent(pair: list[str]) -> None:
    native.attach()
    if any(device.kind in ("GPU", "IGPU") for device in native.devices()):
        pytest.skip("there is a GPU")
    said = run("chat", *pair, "-p", "hi", "-n", "1", "-ngl", "99").stderr
    assert "-ngl has" in said and "moe have" not in said


class _Silent(io.StringIO):
    """A pipe whose other end says nothing for a while."""

    def read(self, size: int | None = -1, /) -> str:
        import time

        time.sleep(0.05)
        return "late"


def test_waiting_for_standard_input_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeedge.ui.chat.prompt._PATIENCE_S", 0.01)
    said: list[str] = []
    assert one_shot_prompt("hi", _Silent(), notice=said.append) == "hi\n\nlate"
    assert len(said) == 1 and "Ctrl-D" in said[0]


def test_closed_standard_input_is_empty() -> None:
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
