"""What users of llama.cpp and ollama type from habit, and what becomes of it: one table for tests and the reference."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, Literal

from moeedge.cli.app import COMMANDS, load_command, positions
from moeedge.cli.foreign import COMMAND_NAMES, Already, Ignored, Sets, foreign_options
from moeedge.cli.foreign import COMMANDS as FOREIGN_COMMANDS
from moeedge.cli.spelling import Speller
from moeedge.errors import InputError

Source = Literal["llama.cpp", "llama-bench", "ollama"]
_BASE = {"llama.cpp": "chat", "llama-bench": "bench", "ollama": ""}

_LLAMA_CPP = """\
-m model.gguf
--model model.gguf
-m hf.co/ggml-org/gpt-oss-20b-GGUF:MXFP4
-m ggml-org/gpt-oss-20b-GGUF:MXFP4
-hf ggml-org/gpt-oss-20b-GGUF
--hf-repo ggml-org/gpt-oss-20b-GGUF:MXFP4
-hf ggml-org/gpt-oss-20b-GGUF -hff gpt-oss-20b-mxfp4.gguf
-mu https://huggingface.co/ggml-org/gpt-oss-20b-GGUF/resolve/main/gpt-oss-20b-mxfp4.gguf
-hft TOKEN
--offline
-md draft.gguf
--model-draft draft.gguf
-hfd ggml-org/Qwen3-0.6B-GGUF
--draft 8
--draft-max 8
--spec-draft-n-max 8
--draft-min 1
--spec-draft-n-min 1
-devd CUDA0
--device-draft none
-ngld 99
--gpu-layers-draft 99
--draft-p-min 0.75
--spec-type draft-mtp
-p "Why is the sky blue?"
-f prompt.txt
-sys "Be brief."
-sysf system.txt
-n 128
--predict 128
--n-predict -1
-c 8192
--ctx-size 8192
-t 8
-ngl 99
-ngl all
--gpu-layers 20
-ncmoe 10
--cpu-moe
-dev CUDA0
--device none
--list-devices
-ts 3,1
-sm none
-sm layer
--split-mode row
-mg 0
--rpc 192.168.0.2:50052
--temp 0.7
--temperature 0.7
--top-k 40
--top-p 0.95
--min-p 0.05
--repeat-penalty 1.1
--repeat-last-n 64
--presence-penalty 0.5
--frequency-penalty 0.5
--typical 0.9
--top-nsigma 1.0
--xtc-probability 0.5
--dry-multiplier 0.8
--mirostat 2
--samplers "top_k;top_p;temperature"
--logit-bias 15043+1
--ignore-eos
--grammar-file list.gbnf
-j "{}"
--chat-template chatml
--jinja
--reasoning-format none
--reasoning-budget 0
-s 42
--seed 42
-cnv
-no-cnv
-st
-i
-mli
--color on
-e
--no-display-prompt
--no-warmup
-v
-lv 4
--log-disable
--simple-io
--context-shift
--keep 64
-r "User:"
--prompt-cache state.bin
--numa distribute
--rope-freq-base 1000000
--mmproj mmproj.gguf
--host 0.0.0.0
--port 8080
-np 4
--parallel 1
--poll 50
-fit on
-tb 8
-fa on
-ctk q8_0 -ctv q8_0
-b 2048 -ub 512
--mlock
--no-mmap
-ot "exps=CPU"
--lora adapter.gguf
"""
_LLAMA_BENCH = """\
-m model.gguf -p 512 -n 128
-ngl 99 -r 5
-p 512,1024 -t 1,2 -d 0,4096
-pg 512,128
-fa 1
-ctk q8_0 -ctv q8_0
-mmp 0
-nopo 1
-sm none
-sm layer
--poll 0
-o json
"""
_OLLAMA = """\
run gpt-oss-20b
run gpt-oss-20b "Why is the sky blue?"
run gpt-oss-20b --verbose
run gpt-oss-20b --keepalive 5m
run gpt-oss-20b --format json
run gpt-oss-20b --think=high
run gpt-oss-20b --hidethinking
run gpt-oss-20b --nowordwrap
ls
list
ps
show gpt-oss-20b
pull gpt-oss-20b
rm gpt-oss-20b
serve
create mine
stop gpt-oss-20b
"""


@dataclass(frozen=True)
class Habit:
    """One thing that is typed. acts: whether it does what its user expects; result: what becomes of it, in words."""

    source: Source
    typed: str
    acts: bool
    result: str
    arguments: tuple[str, ...] = ()  # as the command declares them; empty: refused


def habits() -> list[Habit]:
    """The table, from the declarations of the commands' options."""
    spellers: dict[str, Speller] = {}
    typed: tuple[tuple[Source, str], ...] = (
        ("llama.cpp", _LLAMA_CPP),
        ("llama-bench", _LLAMA_BENCH),
        ("ollama", _OLLAMA),
    )
    return [_habit(source, line, spellers) for source, lines in typed for line in lines.splitlines()]


def _habit(source: Source, line: str, spellers: dict[str, Speller]) -> Habit:
    words = shlex.split(line)
    name = _BASE[source] or words.pop(0)
    if name in FOREIGN_COMMANDS:
        row = FOREIGN_COMMANDS[name]
        return Habit(source, line, False, f"{row.message} {row.hint}")
    command = COMMAND_NAMES.get(name, name)
    if command not in COMMANDS:
        raise ValueError(f"{line!r} names no command")
    key = name if positions(name) else command
    if key not in spellers:
        spellers[key] = Speller(command, load_command(command), words=positions(name))
    try:
        arguments = spellers[key].translate(words)
    except InputError as error:
        return Habit(source, line, False, f"{error.message} {error.hint}".strip())
    became = shlex.join(arguments)
    meaning = _meaning(words)
    if meaning:
        result = meaning
    elif source == "ollama":
        result = f"`moeedge {' '.join(filter(None, [command, became]))}`"
    else:
        result = "the same" if arguments == words else f"`{became}`"
    return Habit(source, line, True, result, (command, *arguments))


def _meaning(words: list[str]) -> str:
    """What an option means that is taken and stands for no other."""
    row: Any = foreign_options().get(words[0]) if words else None
    if isinstance(row, Already):
        return f"taken: {row.meaning}"
    if isinstance(row, Ignored):
        return f"{'taken' if words[1] in row.same else 'no effect, which a line says'}: {row.reason}"
    if isinstance(row, Sets):
        value = words[1] if len(words) > 1 else row.default
        variable, content = row.by_value[value]
        return f"sets {variable}={content}" if variable else "the same"
    return ""
