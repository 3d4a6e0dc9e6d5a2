"""Options that a command refuses: exit code 2, nothing on standard output, and a message that names the cause."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.conftest import TinyFactory
from tests.support.commands import refused
from tests.support.traces import plain_text, two_texts

DEVICES = {
    "-dev CUDA77": "'CUDA77' auto, none, emulated",
    "-dev emulated:link=fast": 'link "fast" rate',
    "-dev emulated:threads=0": '"0" threads',
    "-dev emulated:cores=3": 'option "cores=3"',
    "-dev rpc://": "rpc:// HOST:PORT",
    "-dev rpc://somewhere": "somewhere HOST:PORT",
}
PLACEMENT = {
    "-dev emulated --vram 4000TB": "--vram asks device",
    "-dev emulated --vram much": '"much" size',
    "-dev none --ram 12": "--ram 12 unit 12GiB",
    "-dev none --ram much": '"much" size',
    "-dev none --ram 4000TB": "--ram asks machine",
    "-dev none --ram 1KiB": "--ram small expert per layer",
    "-dev emulated --vram 1GB --cache-ratio 0.5": "--vram --cache-ratio together",
    "-dev emulated --cache-ratio 1.01": "--cache-ratio from 0 to 1 1.01",
    "-dev emulated --cache-ratio -0.01": "--cache-ratio from 0 to 1 -0.01",
    "-dev emulated --cache-ratio nan": "--cache-ratio from 0 to 1 nan",
    "-dev emulated --policy best": "'best' spac, spac-paper, spac-program, lru,",
    "-dev emulated --ablate no-luck": "--ablate 'no-luck' no-ada-bc",
    "-dev emulated --utility-cap 0": "-K from 1 to 64",
    "-dev emulated --forgetting 1.5": "--forgetting from 0 to 1",
    "-dev emulated --prefill-path fast": 'prefill "fast" cpu, resident, stream, auto',
}
BUDGET = {
    "--expert-budget 0": '--expert-budget "0"',
    "--expert-budget some": '--expert-budget "some"',
    "--expert-budget 3": "3 below 4 experts",
    "--expert-budget 8 --budget-ranking static": "'static' picks, router",
    "--expert-budget 8 --budget-layers fitted": "--budget-layers moeedge lab replay",
    "--expert-budget 8 --budget-file missing.json": "--budget-file moeedge lab replay",
    "--expert-budget 8 --budget-policy drop": "'drop' substitution, truncation",
    "--expert-budget 8 --budget-prefer-resident 2": "--budget-prefer-resident pay",
    "--expert-budget off --budget-policy truncation": "--budget-policy --expert-budget",
}
NESTED = "[" * 60_000
# command and options that all its cases have: option: what the message names
REFUSED = {
    "chat": {"": "-p standard input", "-o json": "-p standard input", "-p '  '": "-p blank"},
    "chat -p hi": {
        **DEVICES,
        **PLACEMENT,
        **BUDGET,
        "-m missing.gguf": "no file missing.gguf",
        "-m ''": "folder",
        "--temp -1": "--temp 0 or more -1",
        "--temp nan": "--temp 0 or more nan",
        "--repeat-penalty nan": "--repeat-penalty above 0 nan",
        "-t 513": "-t from 0 to 512",
        "--top-p 0": "--top-p above 0 at most 1",
        "-n -2": "-n -1",
        "-s -2": "seed -1",
        "--draft-max 99": "--draft-max from 0 to 64",
        "--draft-max=--5": "--draft-max auto '--5'",
        "-c 8": "context 8 -c",
        "--raw -sys 'be kind'": "-sys template --raw",
        "-ub -1": "-ub from 1 to 1,048,576 -1",
        "-b 0": "-b from 1 to 1,048,576 0",
        "-tb 513": "-tb from 0 to 512 513",
        "--rope-scale inf": "--rope-scale finite inf",
        "--chat-template ''": "template empty",
        "--chat-template '{{ 1 // 0 }}'": "template --chat-template by zero",
        "--chat-template '{% for i in range(10 ** 9) %}{% endfor %}'": "template --chat-template range",
        "--chat-template '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}'": (
            "template --chat-template never end"
        ),
        f"--chat-template-kwargs {NESTED}": "--chat-template-kwargs JSON nested",
        f"--chat-template-kwargs {'9' * 5000}": "--chat-template-kwargs JSON digits",
        f"-j {NESTED}": "schema JSON nested",
        "-o yaml": "'yaml' text, json",
    },
    "profile": {
        "-p '  '": "-p blank",
        "-p x --dataset mtbench": "-p --dataset together",
        "--dataset no-such-set": "no-such-set",
        "--limit -1": "--limit 0 or more",
    },
    "profile -p one": {
        **DEVICES,
        **PLACEMENT,
        "--layer one": '--layer one "one"',
        "--layer 3": "3 0 to 2",
        "--layer -1": "-1 0 to 2",
        "--layers 0-3": "3 0 to 2",
        "--layers x": '"x" list layers',
        "--layer 0 --layers 1": "--layer --layers together",
        "--temp -1": "--temp 0 or more -1",
        "-n 0": "-n least 1, 0",
        "-n -2": "-n least 1, -2",
        "--layers ''": '"" list layers',
        "--layer ''": '--layer ""',
        "--draft-max 99": "--draft-max from 0 to 64",
        "--plot x.gif": "--plot x.gif .png",
        "--plot /no/such/folder/x.png": "/no/such/folder/x.png cannot written",
        "--trace-out /": "error: / cannot written",
        "-m /no/such/model.gguf": "no file /no/such/model.gguf",
        f"-p '{'word ' * 1000}'": "context 512",
    },
    "bench": {
        **DEVICES,
        "-p 8 -m absent.gguf": "no file absent.gguf",
        "--dataset mtbanch": "'mtbanch' mtbench humaneval",
        "--modes stock": "mode 'stock' moeedge-ar",
        "-p 0 -n 0": "Nothing measure -p -n",
        "-r 0": "-r from 1 to 1,000,000, not 0",
        "-r 99999999999999": "-r from 1 to 1,000,000 99,999,999,999,999",
        "-p 8 --delay nan": "--delay from 0 to 1,000,000 nan",
        "-p 8 --delay inf": "--delay from 0 to 1,000,000 inf",
        "-p 0-99999999999": "-p range 100,000,000,000 values",
        "-p 8 --resume /dev/null": "/dev/null interrupted bench",
        "--draft-max 99": "--draft-max from 0 to 64",
        "--policy spac,oracle": "'oracle' spac, spac-paper, spac-program, lru, lfu",
        "--policy none": "'none' cache",
        "--policy spac -dev emulated --modes stock-ar": "modes no cache --modes",
        "--policy lru -dev none": "no device -dev emulated",
        "--policy spac --plot sweep.txt": "--plot sweep.txt .png",
        "--cache-ratio 0.5,1.5": "from 0 to 1 '1.5'",
        "--cache-ratio much": "from 0 to 1 'much'",
        "--cache-ratio 0.5 --vram 1GB -dev emulated": "--vram --cache-ratio together",
        "--plot sweep.png": "--plot --policy --cache-ratio",
        "--score": "--score --dataset",
    },
    "bench --dataset sample": {
        "--limit -1": "--limit 0 or more",
        "-n 0": "-n from 1 to 1,000,000",
        "-c 16": "prompt fits context 16 -c",
        "--run-code": "--run-code --score",
        "--score --ignore-eos": "--score --ignore-eos together",
    },
    "lab ablate -dev emulated": {
        "--cutoff x": '"x" --cutoff numbers',
        "--cutoff -1": "-1 layer 0 to 3",
        "--limit -1": "--limit 0 or more",
        "-n 1": "nothing measure -n",
        "--draft-type q17": "type 'q17' q4_0",
        "--cutoff 5": "--cutoff 5 layer 0 to 3",
        "--cache-ratio 0": "--cache-ratio more than 0",
        "--dataset none.jsonl": "no file none.jsonl",
    },
    "plan": {
        "-m absent.gguf": "no file absent.gguf",
        "--vram lots": '"lots" size',
        "--ram -1": '"-1" size',
        "--vram 0": "--vram more than 0",
        "--vram 8G -dev none": "-dev none memory --vram",
        "--cache-ratio 2": "--cache-ratio from 0 to 1 2",
        "-dev CUDA7": "device 'CUDA7' emulated",
        "-c -5": "-c from 0 to 16,777,216",
        "-c 4294967297": "-c from 0 to 16,777,216",
    },
    "lab replay plain.npz": {
        "--policy mru": "policy 'mru' lru",
        "--policy ,": "--policy empty",
        "--cache-ratio 2": "--cache-ratio from 0 to 1",
        "--gamma -1": "--draft-max 0 or more -1",
        "--gamma 100": "101 --gamma",
        "--acceptance 1.5": "--acceptance-chance from 0 to 1 1.5",
        "--seed -1": "--seed 0 or more",
        "--profile-texts 1": "--profile-texts no text",
        "--predictor-accuracy gate=1": "'gate=1' next-gate",
        "--predictor-accuracy next-gate=x": "'next-gate=x' NAME=SHARE",
        "--expert-bytes 0": "--expert-bytes from 1 to",
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
        "import own.npz out.npz --expert-bytes 0": "--expert-bytes from 1 to",
        "import own.npz out.csv": "out.csv .npz",
        "info own.npz --n-experts 0": "experts 1..65535",
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
    name, *rest = shlex.split(command.removeprefix("lab "))
    group = ["lab"] if command.startswith("lab ") else []
    target, draft = ["-m", str(tiny("qwen3moe"))], ["-md", str(tiny("qwen3")), "-c", "512", "-t", "1"]
    models = {"chat": [*target, *draft], "profile": [*target, *draft, "-n", "4"], "bench": target, "ablate": target}
    message = refused(*group, name, *models.get(name, []), *rest, *shlex.split(options))
    for word in REFUSED[command][options].split():
        assert word in message
    assert "Draft:" not in message  # ablate made no quantization for it
