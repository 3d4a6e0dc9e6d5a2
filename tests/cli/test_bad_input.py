"""Options that a command refuses: exit code 2, nothing on standard output, and a message that names the cause.

Values of a single option that need no model are in tests/outputs.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moeedge.cli.common import print_error
from moeedge.errors import ModelFileError
from moeedge.llama.gguf_file import read_tensors
from moeedge.ui.console import say, stderr_console
from tests.conftest import TinyFactory
from tests.fuzz import gguf_header
from tests.support.commands import refused
from tests.support.traces import plain_text, two_texts

NESTED = "[" * 60_000
# command and options that all its cases have: option: what the message names
REFUSED = {
    "chat": {
        "": "-p standard input not terminal",
        "-p '  '": "-p blank",
        "-p x -f bad.jsonl": "cannot be used together",
        "-f - -sysf -": "standard input",
        "-f absent.txt": "absent.txt",
    },
    "chat -p hi": {
        "-dev emulated --vram 4000TB": "--vram asks device",
        "-dev emulated --vram 12": "--vram 12GB",
        "-dev none --ram 4000TB": "--ram asks machine",
        "-dev none --ram 1KiB": "--ram small expert per layer",
        "-dev emulated --cache-ratio nan": "--cache-ratio from 0 to 1 nan",
        "--expert-budget 3": "3 below 4 experts",
        "--expert-budget 8 --budget-ranking static": "'static' picks, router",
        "--expert-budget 8 --budget-layers fitted": "--budget-layers moeedge lab replay",
        "--expert-budget 8 --budget-file missing.json": "--budget-file moeedge lab replay",
        "--expert-budget 8 --budget-policy drop": "'drop' substitution, truncation",
        "--expert-budget 8 --budget-prefer-resident 2": "--budget-prefer-resident pay",
        "--expert-budget off --budget-policy truncation": "--budget-policy needs --expert-budget",
        "--budget-ranking router --budget-policy truncation": "--budget-ranking and --budget-policy need",
        "-m ''": "folder",
        "--temp nan": "--temp 0 or more nan",
        "--repeat-penalty nan": "--repeat-penalty above 0 nan",
        "--draft-max=--5": "--draft-max auto '--5'",
        "--draft-p-min 1.5": "--draft-p-min",
        "-c 8": "context 8 -c",
        "--rope-scale inf": "--rope-scale finite inf",
        "--chat-template ''": "template empty",
        "--chat-template '{{ 1 // 0 }}'": "template --chat-template by zero",
        f"--chat-template-kwargs {NESTED}": "--chat-template-kwargs JSON nested",
        f"--chat-template-kwargs {'9' * 5000}": "--chat-template-kwargs JSON digits",
        f"-j {NESTED}": "schema JSON nested",
        "-j '{'": "not JSON",
        "--grammar 'root ::= foo'": "line 1, column 10",
        "--grammar ''": "grammar is empty",
        "--samplers mirostat": "min_p",
        "--samplers top_k --sampling-seq k": "cannot be used together",
        "--think on": "Leave out --think",
        "--think off --chat-template '{{ messages[0].content }}</think>'": "Leave out --think",
    },
    "profile": {"-p x --dataset mtbench": "-p --dataset together"},
    "profile -p one": {
        "-dev CUDA77": "'CUDA77' auto, none, emulated",
        "--layer 3": "3 0 to 2",
        "-n 0": "-n least 1, 0",
        "--plot /no/such/folder/x.png": "/no/such/folder/x.png cannot written",
        "--trace-out model.gguf": "error: --trace-out cannot write .npz",
        "--trace-out /no/such/trace.npz": "error: trace.npz cannot written folder",
        "--trace-out /proc/trace.npz": "error: trace.npz cannot written",
        f"-p '{'word ' * 1000}'": "context 512",
    },
    "profile --trace own.npz": {
        "--report no/out.html": "cannot be written",
        "-p one": "prompt",
        "--layer 2": "0 to 1",
        "--acceptance-chance 2": "acceptance",
    },
    "bench": {
        "-p 0 -n 0": "Nothing measure -p -n",
        "-r 99999999999999": "-r from 1 to 1,000,000 99,999,999,999,999",
        "-p 8 --delay nan": "--delay from 0 to 1,000,000 nan",
        "-p 0-99999999999": "-p range 100,000,000,000 values",
        "--draft-max 99": "--draft-max from 0 to 64",
        "--policy lru -dev none": "no device -dev emulated",
        "--policy spac --plot sweep.txt": "--plot sweep.txt .png",
        "--plot sweep.png": "--plot --policy --cache-ratio",
        "--cpu-moe -ncmoe 0,1": "--cpu-moe and --n-cpu-moe",
        "-pg 0,4": "",
        "-d 8 -p 0 -n 0": "",
        "--score": "--score --dataset",
        "--dataset bad.jsonl": "bad.jsonl, line 2:",
    },
    "bench --dataset sample": {
        "-n 0": "-n from 1 to 1,000,000",
        "-n 8,16": "",
        "-d 64": "",
        "--score --ignore-eos": "--score --ignore-eos together",
        "--draft-max 4,0 -md draft.gguf": "",
        "--expert-budget , -md draft.gguf": "",
        "--expert-budget 6 -md draft.gguf --budget-file unread.json": "",
        "--expert-budget 6 -md draft.gguf --budget-ranking router,oracle": "",
        "--expert-budget 6 -md draft.gguf --perplexity absent.txt": "",
    },
    "bench -md draft.gguf -c 512 --dataset toy --parallel 2": {
        "--score": "--parallel",
        "-p 64": "--parallel",
        "-p 0": "--parallel",
        "-t 1,2": "--parallel",
        "--expert-budget 4": "--parallel",
        "-dev none --ram 1MiB": "--parallel --ram",
        "--parallel 0": "0",
        "--parallel 65": "65",
    },
    "bench --dataset toy": {"--fit fit.json": "--fit"},
    "bench -md draft.gguf -dev none --ram off": {
        "--accept 1.5": "",
        "--accept x": "",
        "--accept .5 -n 1": "",
        "--accept-confidence constant": "",
        "--accept .5 --dataset toy": "",
        "--accept .5 --parallel 2": "",
        "--routing absent.npz": "",
    },
    "list": {"--fits 12": "--fits 12GB"},
    "lab surface": {"rows.json": "", "absent.json": ""},
    "lab ablate -dev emulated": {"--cutoff 5": "--cutoff 5 layer 0 to 3", "-n 1": "nothing measure -n"},
    "plan": {"--vram 0": "--vram more than 0", "-c 4294967297": "-c from 0 to 16,777,216"},
    "lab replay plain.npz": {
        "--policy ,": "--policy empty",
        "--gamma 100": "101 --gamma",
        "--profile-texts 1": "--profile-texts no text",
        "--predictor-accuracy next-gate=x": "'next-gate=x' NAME=SHARE",
        "--max-uploads -1": "uploads >= -1.0",
    },
    "lab simulate -n 40 --max-steps 8": {
        "--hardware abacus": "hardware 'abacus' rtx3090",
        "--model gpt-9": "model 'gpt-9' mixtral-8x7b",
        "--policy magic": "policy 'magic' spac, lru,",
        "--gamma 2.5": "integers 2.5",
        "--cache-ratio much": '--cache-ratio numbers "much"',
        "--cache-ratio 2": "--cache-ratio from 0 to 1",
        "--seed -1": "--seed 0 or more",
        "--utility-cap 0": "-K from 1 to 64",
        "--model x.gguf": "model file --trace",
        "--policy oracle": "'oracle' replay only",
        "--trace own.npz": "2 layers 48 model trace --model",
    },
    "lab trace": {
        "info none.npz": "none.npz not exist",
        "import own.npz own.npz": "own.npz read",
        "import own.npz missing/out.npz": "cannot be written no folder",
        "import own.npz out.csv": "out.csv .npz",
    },
}


@pytest.mark.parametrize(
    ("command", "options"), [(command, options) for command, cases in REFUSED.items() for options in cases]
)
def test_bad_input_is_refused(
    command: str, options: str, tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain_text(60).save(tmp_path / "plain.npz")
    two_texts(weights=True).save(tmp_path / "own.npz")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": oops}\n')
    (tmp_path / "rows.json").write_text("[{}]")
    (tmp_path / "draft.gguf").symlink_to(tiny("qwen3"))
    name, *rest = shlex.split(command.removeprefix("lab "))
    group = ["lab"] if command.startswith("lab ") else []
    target, draft = ["-m", str(tiny("qwen3moe"))], ["-md", "draft.gguf", "-c", "512", "-t", "1"]
    models = {"chat": [*target, *draft], "profile": [*target, *draft, "-n", "4"], "bench": target, "ablate": target}
    own = [] if "--trace" in rest else models.get(name, [])
    message = refused(*group, name, *own, *rest, *shlex.split(options))
    for word in REFUSED[command][options].split():
        assert word in message
    assert "Draft:" not in message  # ablate made no quantization for it


def test_auto_is_no_budget_of_bench(pair: list[str]) -> None:
    assert "auto" not in refused("bench", *pair, "--expert-budget", "16,x")


def test_a_file_does_not_drive_the_terminal(tiny_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the names that an error tells, which also may be long."""
    data = tiny_moe.read_bytes()
    header = gguf_header.parse(data)
    header.pairs += [gguf_header.Pair(b"own.\x1b]0;title\x07\x1b[31m\n" + b"x" * 70_000, 4, 1)] * 2
    path = tmp_path / "names.gguf"
    path.write_bytes(gguf_header.written(header).ljust(header.size + 150_000, b"\0") + data[header.size :])
    with pytest.raises(ModelFileError) as caught:
        read_tensors(path)
    print_error(caught.value.message, "b" * 70_000)
    say(stderr_console(), "\x1b[31m")
    text = capsys.readouterr().err
    assert "own." in text and "\x1b" not in text and len(text) < 4000 and text.count("\n") == 2


@pytest.mark.parametrize(("grammar", "word"), [('foo ::= "a"', "root"), ('root ::= root "a"', "recursion")])
def test_the_reason_of_a_grammar_is_known_before_llama_cpp_is_started(grammar: str, word: str) -> None:
    command = [sys.executable, "-m", "moeedge", "chat", "-q", "-p", "hi", "--grammar", grammar]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and word in result.stderr
