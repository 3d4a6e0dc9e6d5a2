"""What users of llama.cpp and ollama type acts: the command's own parser reads it, values included."""

from __future__ import annotations

import json
import shlex

import pytest

from moeedge.cli.app import WORDS, environment_kept, load_command
from moeedge.cli.foreign import COMMAND_NAMES
from moeedge.cli.spelling import Speller
from tests.support.commands import refused, run

HUB = "ggml-org/gpt-oss-20b-GGUF"
LINES = f"""\
chat -m hf.co/{HUB}:MXFP4 -hfd ggml-org/Qwen3-0.6B-GGUF --draft 8 --draft-min 1 -devd CUDA0 -ngld 99 --draft-p-min 0.75
chat -hf {HUB} -hff gpt-oss-20b-mxfp4.gguf -hft TOKEN --offline --spec-type draft-mtp --spec-draft-n-max 8
chat -mu https://huggingface.co/{HUB}/resolve/main/gpt-oss-20b-mxfp4.gguf --model-draft d.gguf --spec-draft-n-min 1
chat -m model.gguf -p "Why is the sky blue?" -sys "Be brief." --predict 128 -c 8192 -t 8 -ngl all -ncmoe 10 -dev CUDA0
chat --model model.gguf -f prompt.txt -sysf system.txt --n-predict -1 --gpu-layers 20 --cpu-moe --device none -sm row
chat --hf-repo {HUB}:MXFP4 --rpc 192.168.0.2:50052 --temperature 0.7 --top-k 40 --top-p 0.95 --min-p 0.05 --seed 42
chat --repeat-penalty 1.1 --repeat-last-n 64 --presence-penalty 0.5 --frequency-penalty 0.5 --typical 0.9
chat --top-nsigma 1.0 --xtc-probability 0.5 --dry-multiplier 0.8 --samplers "top_k;top_p;temperature"
chat --logit-bias 15043+1 --ignore-eos --grammar-file list.gbnf -j "{{}}" --chat-template chatml --jinja -r "User:"
chat --reasoning-format none --reasoning-budget 0 -cnv -st -i -mli --color on -e --no-display-prompt --no-warmup
chat -v -lv 4 --log-disable --simple-io --context-shift --keep 64 -np 4 --poll 50 -fit on -tb 8 -fa on -no-cnv
chat -ctk q8_0 -ctv q8_0 -b 2048 -ub 512 --mlock --no-mmap -ot "exps=CPU" --lora adapter.gguf --rope-freq-base 1000000
bench -m model.gguf -p 512,1024 -n 128 -ngl 99 -r 5 -t 1,2 -d 0,4096 -pg 512,128 -fa 1 -ctk q8_0 -ctv q8_0
bench -mmp 0 -sm layer --poll 0 -o json
run gpt-oss-20b "Why is the sky blue?"
run gpt-oss-20b --verbose --format json --think=high --hidethinking --nowordwrap
ls
ps
show gpt-oss-20b
pull gpt-oss-20b
rm gpt-oss-20b
"""


@pytest.mark.parametrize("line", LINES.splitlines())
def test_a_line_of_another_program_acts(line: str) -> None:
    typed, *rest = shlex.split(line)
    name = COMMAND_NAMES.get(typed, typed)
    command = load_command(name)
    arguments = Speller(name, command, words=WORDS.get(typed, ())).translate(rest)
    with environment_kept():  # as the program does
        assert command.make_context(name, arguments, resilient_parsing=False).args == []


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
