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
    "-dev emulated:link=fast": 'link "fast"',
    "-dev emulated:threads=0": '"0" threads',
    "-dev emulated:cores=3": "cores=3",
    "-dev rpc://": "rpc://",
    "-dev rpc://somewhere": "somewhere",
}
PLACEMENT = {
    "-dev emulated --vram 4000TB": "device",
    "-dev emulated --vram much": '"much"',
    "-dev emulated --vram 1GB --cache-ratio 0.5": "--vram --cache-ratio",
    "-dev emulated --cache-ratio 1.01": "[0, 1] 1.01",
    "-dev emulated --cache-ratio -0.01": "[0, 1] -0.01",
    "-dev emulated --cache-ratio nan": "[0, 1] nan",
    "-dev emulated --policy best": "'best' spac, spac-paper, lru,",
    "-dev emulated --ablate no-luck": "'no-luck'",
    "-dev emulated --utility-cap 0": "K 1..64",
    "-dev emulated --forgetting 1.5": "forgetting [0, 1]",
    "-dev emulated --prefill-path fast": '"fast"',
}
# command and options that all its cases have: option: what the message names
REFUSED = {
    "chat": {"": "-p", "-o json": "-p", "-p '  '": "-p"},
    "chat -p hi": {
        **DEVICES,
        **PLACEMENT,
        "-m missing.gguf": "missing.gguf",
        "-m ''": "folder",
        "--temp -1": "temperature",
        "--temp nan": "temperature",
        "--repeat-penalty nan": "repeat_penalty",
        "-t 513": "(-t) 0..512",
        "--top-p 0": "top_p (0, 1]",
        "-n -2": "(-n) -1",
        "-s -2": "seed -1",
        "--draft-max 99": "(--draft-max) 0..64",
        "-c 8": "context",
        "--raw -sys 'be kind'": "-sys --raw",
        "-o yaml": "'yaml' text, json",
    },
    "profile": {
        "-p '  '": "-p",
        "-p x --dataset mtbench": "-p --dataset",
        "--dataset no-such-set": "no-such-set",
        "--limit -1": "--limit",
    },
    "profile -p one": {
        **DEVICES,
        **PLACEMENT,
        "--layer one": '--layer "one"',
        "--layer 3": "3 0 to 2",
        "--layer -1": "0 to 2",
        "--layers 0-3": "0 to 2",
        "--layers x": '"x"',
        "--layer 0 --layers 1": "--layer --layers",
        "--temp -1": "temperature",
        "-n 0": "-n",
        "-n -2": "-n",
        "--layers ''": '""',
        "--layer ''": '--layer ""',
        "--draft-max 99": "(--draft-max)",
        "--plot x.gif": "x.gif",
        "--plot /no/such/folder/x.png": "/no/such/folder/x.png",
        "--trace-out /": "/",
        "-m /no/such/model.gguf": "model.gguf",
        f"-p '{'word ' * 1000}'": "context",
    },
    "bench": {
        **DEVICES,
        "-p 8 -m absent.gguf": "absent.gguf",
        "--dataset mtbanch": "'mtbanch' mtbench humaneval",
        "--modes stock": "'stock'",
        "-p 0 -n 0": "-p -n",
        "-r 0": "(-r)",
        "--draft-max 99": "(--draft-max) 0..64",
        "--policy spac,oracle": "'oracle' spac, spac-paper, lru, lfu",
        "--policy none": "'none'",
        "--policy spac -dev emulated --modes stock-ar": "--modes",
        "--policy lru -dev none": "-dev emulated",
        "--policy spac --plot sweep.txt": "--plot sweep.txt",
        "--cache-ratio 0.5,1.5": "[0, 1] '1.5'",
        "--cache-ratio much": "[0, 1] 'much'",
        "--cache-ratio 0.5 --vram 1GB -dev emulated": "--vram --cache-ratio",
        "--plot sweep.png": "--plot --policy --cache-ratio",
        "--trace-out out.npz": "--dataset",
        "--score": "--score --dataset",
    },
    "bench --dataset sample": {
        "--limit -1": "--limit",
        "-n 0": "(-n)",
        "-c 16": "-c",
        "--trace-out no/out.npz": "no/out.npz",
        "--trace-out out.npz --modes stock-ar": "--modes",
        "--run-code": "--run-code --score",
        "--score --ignore-eos": "--score --ignore-eos",
    },
    "ablate -dev emulated": {
        "--cutoff x": "'x'",
        "--cutoff -1": "'-1'",
        "--limit -1": "--limit",
        "-n 1": "-n",
        "--draft-type q17": "'q17'",
        "--cutoff 5": "--cutoff 5",
        "--cache-ratio 0": "--cache-ratio",
        "--dataset none.jsonl": "none.jsonl",
    },
    "plan": {
        "-m absent.gguf": "absent.gguf",
        "--vram lots": '"lots"',
        "--ram -1": '"-1"',
        "--vram 0": "--vram",
        "--vram 8G -dev none": "-dev none",
        "--cache-ratio 2": "cache ratio",
        "-dev CUDA7": "CUDA7",
        "-c -5": "(-c) 0..16,777,216",
        "-c 4294967297": "(-c) 0..16,777,216",
    },
    "replay plain.npz": {
        "--policy mru": "'mru'",
        "--policy ,": "--policy",
        "--cache-ratio 2": "[0, 1]",
        "--gamma -1": "gamma",
        "--gamma 100": "--gamma",
        "--acceptance 1.5": "acceptance",
        "--seed -1": "--seed",
        "--profile-texts 1": "--profile-texts",
        "--predictor-accuracy gate=1": "next-gate",
        "--predictor-accuracy next-gate=x": "NAME=SHARE",
        "--expert-bytes 0": "--expert-bytes",
        "--max-uploads -1": "0",
    },
    "simulate -n 40 --max-steps 8": {
        "--hardware abacus": "'abacus'",
        "--model gpt-9": "'gpt-9'",
        "--policy magic": "magic",
        "--gamma 2.5": "2.5",
        "--cache-ratio much": "--cache-ratio",
        "--cache-ratio 2": "[0, 1]",
        "--seed -1": "--seed",
        "--utility-cap 0": "1..64",
        "--model x.gguf": "--trace",
        "--gantt /proc/none/g.png": "/proc/none/g.png",
        "--gantt g.txt": "--gantt g.txt",
        "--event-log /": "/",
        "--trace own.npz": "trace",
    },
    "trace": {
        "info none.npz": "none.npz",
        "convert own.npz out.txt": "--to",
        "convert own.npz own.npz": "own.npz",
        "import own.npz missing/out.npz": "missing/",
        "import own.npz out.npz --expert-bytes 0": "--expert-bytes",
        "import own.npz out.csv": ".npz",
        "convert own.npz - --to positions": "output",
        "info own.npz --n-experts 0": "experts",
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
    name, *rest = shlex.split(command)
    target, draft = ["-m", str(tiny("qwen3moe"))], ["-md", str(tiny("qwen3")), "-c", "512", "-t", "1"]
    models = {"chat": [*target, *draft], "profile": [*target, *draft, "-n", "4"], "bench": target, "ablate": target}
    message = refused(name, *models.get(name, []), *rest, *shlex.split(options))
    for word in REFUSED[command][options].split():
        assert word in message
    assert "Draft:" not in message  # ablate made no quantization for it
