"""What every option of every command becomes, in every spelling: parsed values, and the configurations of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.outputs.program import Recorder, commands, outcome, patched, run, scratch
from tests.outputs.values import flat, plain

# where the commands begin their work
WORK = (
    "moeedge.cli.chat_run:ModelSwitch", "moeedge.cli.bench_run:measure",
    "moeedge.planning.session_plan:make_session_plan", "moeedge.cli.profile_run:record",
    "moeedge.cli.profile_run:profile_trace", "moeedge.engine.layer_search:open_session",
    "moeedge.scheduler.disk:measure", "moeedge.cli.models:find_models", "moeedge.cli.models:want_pair",
    "moeedge.cli.models:plan_removal", "moeedge.hardware.devices:list_devices", "moeedge.cli.machine:list_running",
    "moeedge.bench.budget_choice:choose_budget", "moeedge.planning.headers:read_card",
    "moeedge.hardware.rpc:reserve_port", "moeedge.health.doctor:examine", "moeedge.engine.session:Session",
    "moeedge.lab.analysis.published:reproduced", "moeedge.lab.analysis.budget_recording:analyse_budgets",
    "moeedge.lab.cli.trace:summarize_trace", "moeedge.lab.experiments.sp_moe:quantized",
    "moeedge.lab.experiments.sp_moe:run_ablation", "moeedge.lab.experiments.sp_moe:compare_pair",
    "moeedge.lab.experiments.rivals:measure", "moeedge.lab.experiments.speculation_fit:run_fit",
    "moeedge.lab.experiments.validation:compare_with_engine", "moeedge.lab.sim.curves:trace_curves",
    "moeedge.lab.sim.papers:Papers", "moeedge.lab.sim.replay:replay", "moeedge.lab.sim.simulate:simulate",
    "moeedge.lab.widen.layout:make_wide_plan", "moeedge.lab.widen.random_model:model_like",
    "moeedge.lab.widen.random_model:model_of_header",
)  # fmt: skip
# what a command needs to get there
BASE = {name: shlex.split(words) for name, words in (line.split(": ") for line in """\
chat: -p Hello
pull: qwen3-30b-a3b
rm: qwen3-30b-a3b
lab replay: trace.npz
lab simulate: -n 8 --max-steps 2
lab trace info: trace.npz
lab trace import: trace.npz out.npz
lab widen: out.gguf
lab make-model: out.gguf --like qwen3-30b-a3b
lab surface: text.txt
lab rivals: --llama-bench text.txt
profile: --dataset toy
plan: --vram 8GiB --ram 16GiB
""".splitlines())}  # fmt: skip
TOGETHER = r"""
chat: -p a -f text.txt; --raw -sys Hi; -e -p 'a\n\x41b' -sys '\t'; -st; -dev emulated --cache-ratio 0.5 --policy lru
chat: --temp 0 -md ngram; -md none --draft-max 3; -s 7 --temp 1 -md ngram; --cpu-moe -ncmoe 2
chat: --expert-budget 4 --draft-max 3; --budget-policy truncation; -o json -q
chat: --grammar 'root ::= "a"' --json-schema '{}'; --vram 1GiB --cache-ratio 0.5; --think off --raw
chat: --samplers 'top_k,temperature'; --resume -p x; word; --ram 1GiB -dev none; -dev emulated:link=2GB/s,threads=1
chat: -t4; --temp=0.5
bench: -p 8 -n 4; -p 8,16 -t 1,2 -d 0,32; -pg 16,4; --dataset toy; --dataset toy --score
bench: --dataset toy --parallel 1,2; --draft-max 2,4,auto; --modes stock-ar,moeedge-ar,stock-sd:1-4
bench: --parallel 2 --score; --limit -1; --policy lru,spac --cache-ratio 0.2,0.5; --policy lru -dev emulated
bench: --expert-budget 4,8 --budget-policy truncation,substitution; --perplexity toy; --draft-max 0,4
bench: -md none; -b 64,128
profile: --layer 3; --layers 0,2-4; --layer 1 --layers 2; --trace trace.npz
profile: --trace trace.npz --acceptance-chance 0.5 --draft-max 2; --acceptance-chance 0.5
calibrate: --disk; --disk --expert-budget; --expert-budget; --disk -md none
list: --fits 8GiB --ram 32GiB; --ram 8GiB; -a --fits none
pull: --draft a --no-draft; --quant Q8_0
lab replay: --curve --policy lru; --texts 0:1,1:2; --policy all; --policy nothing
lab replay: --predictor-accuracy next-gate=0.5; --expert-budget 2
lab replay: --plot a.png; --profile-texts 1; --limit 1
lab simulate: --policy all; --ranges
lab simulate: --hardware h200 --model qwen3-30b-a3b --draft-max 0,4; --cache-ratio 0,0.5
lab widen: --like qwen3-30b-a3b; --embd 2048 --heads 16; --type q8_0
plan: --ram 1GiB,2GiB --disk-rate 1GB/s; --cache-ratio 0.5; -dev none; -ngl 3
: --version; nothing; serve; ls; chatt; --nothing
"""  # options that act together, separated by semicolons
VALUES: dict[str, tuple[str, ...]] = {  # by metavar
    **dict.fromkeys(("N", "K", "B|auto|off", "N|auto|all", "N|auto"), ("5", "0", "70000")),
    **dict.fromkeys(("X", "P", "R", "S", "L", "MS"), ("0.75", "0", "2.5")),
    **dict.fromkeys(("SIZE", "SIZE|auto|off", "SIZE|auto|none"), ("3GiB", "12GB", "500")),
    "LIST": ("1,4", "0.25,0.5", "lru,spac", "auto", "1GiB,2GiB", "none"),
    "LIST|all": ("1,2-4",),
    "LIST|auto": ("4,8",),
    "NAME": ("lru", "no-pin", "toy"),
    "TYPE": ("q8_0", "Q4_K_M"),
    "TEXT": (r"a\nb",),
    "LETTERS": ("kpt", "?"),
    "LEVEL": ("high",),
    "GBNF": ('root ::= "a"',),
    "JSON": ('{"a": 1}', "[]"),
    "SCHEMA": ('{"type": "object"}',),
    "ID+X": ("15+2.5", "15-1"),
    "RATE": ("1GB/s",),
    "A:B": ("0:1", "1:"),
    "PP,TG": ("16,4", "16"),
    "HOST:PORT": ("127.0.0.1:0", "0.0.0.0:5"),
    "TOKEN": ("secret",),
    "PATTERN=BUFFER,...": ("exps=CPU",),
    "FILE": ("text.txt", "missing.txt"),
    "FILE.npz": ("made.npz", "made.txt"),
    "FILE|toy|none": ("toy", "text.txt"),
    "FILE|NAME": ("missing.gguf", "qwen3-30b-a3b"),
    "FILE|NAME|mtp|ngram|auto|none": ("mtp", "ngram"),
    "FILE:SCALE,...": ("a.gguf:0.5",),
    "NAME|JINJA": ("chatml",),
    "auto|none|emulated|NAME|rpc://HOST:PORT": ("emulated:link=2GB/s,threads=1", "rpc://127.0.0.1:1", "NOSUCH9"),
    "None": ("npz", "table2"),
}
BAD = ("no such", "-3")
FILES = {"--json-schema-file": "schema.json", "--grammar-file": "list.gbnf", "--trace": "trace.npz"}


def fast(recorded: set[str] | None) -> Iterator[tuple[str, Any]]:
    """The cases of the default suite."""
    yield from _cases(recorded, of_lab=False)
    with scratch():
        for arguments in _together(""):
            yield f" {' '.join(arguments)}", outcome(run(arguments))
    yield from _foreign()


def slow(recorded: set[str] | None) -> Iterator[tuple[str, Any]]:
    """Those of the lab's commands."""
    yield from _cases(recorded, of_lab=True)


def _cases(recorded: set[str] | None, *, of_lab: bool) -> Iterator[tuple[str, Any]]:
    """Name and record of every case; recorded: the cases of the commands to run, others might do their work."""
    with scratch() as folder:
        _write_files(folder)
        for name, command in commands().items():
            if name.startswith("lab ") == of_lab and (recorded is None or name in recorded):
                yield from _command(name, command)


def _write_files(folder: Path) -> None:
    from tests.support.traces import two_texts

    (folder / "text.txt").write_text("One.\nTwo.\n")
    (folder / "schema.json").write_text('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    (folder / "list.gbnf").write_text('root ::= "a" | "b"')
    two_texts(weights=True).save(folder / "trace.npz")


def _command(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The case without options in full; of the others what differs from it."""
    parsed: dict[str, Any] = {}
    original = command.invoke

    def invoke(context: Any) -> Any:
        for param in command.params:
            if param.expose_value and context.params.get(param.name) != param.default:
                parsed[param.opts[0]] = plain(context.params.get(param.name))
        return original(context)

    def record(arguments: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
        parsed.clear()
        recorder.seen = {}
        result = run([*name.split(), *BASE.get(name, []), *arguments], env=env)
        ended = {"config": recorder.seen} if recorder.seen else {"ended": outcome(result)}
        return flat({"parsed": dict(parsed)} | ended)

    with Recorder(WORK) as recorder, patched((command, "invoke", invoke)):
        base = record([])
        yield name, base
        for param in command.params:
            about = [param.opts, param.secondary_opts, param.metavar, plain(param.default), param.envvar, param.help]
            yield f"{name} {param.opts[0]} declared", [*about, param.rich_help_panel]
        for label, arguments, env in _arguments(name, command):
            found = record(arguments, env)
            keys = found.keys() if "ended.exit" in found else found.keys() | base.keys()
            yield f"{name} {label}", {key: found.get(key) for key in sorted(keys) if found.get(key) != base.get(key)}


def _arguments(name: str, command: Any) -> Iterator[tuple[str, list[str], dict[str, str] | None]]:
    """Label, arguments and environment of the cases of a command."""
    also: dict[str, list[str]] = {}
    for spelling, first in import_module("moeedge.cli.declare").hidden_spellings(command).items():
        also.setdefault(first, []).append(spelling)
    for param in command.params:
        first = param.opts[0]
        if not first.startswith("-") or first in ("--help", "-h"):
            continue
        others = [*param.opts[1:], *param.secondary_opts, *also.get(first, [])]
        if param.is_flag or param.count:
            found = [[spelling] for spelling in (first, *others)] + [[f"{first}=1"]]
            values: list[str] = []
        else:
            metavar = str(param.metavar)
            words_of = [word for word in metavar.split("|") if word.islower()] if "|" in metavar else []
            values = [FILES[param.opts[-1]]] if param.opts[-1] in FILES else []
            values += [*words_of, *VALUES.get(metavar, ())] or ["5", "0.5", "text.txt"]
            if name == "lab simulate" and param.opts[-1] == "--n-predict":
                values = ["5", "0"]
            found = [[first, value] for value in (*values, *BAD)]
            found += [[spelling, values[0]] for spelling in others] + [[first]]
        for arguments in found:
            yield " ".join(arguments), arguments, None
        variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
        for variable in variables:
            for value in ("1", "off") if param.is_flag else (values[0], "no such"):
                yield f"{variable}={value}", [], {variable: value}
    for arguments in _together(name):
        yield " ".join(arguments), arguments, None


def _together(name: str) -> list[list[str]]:
    lines = (line.partition(": ") for line in TOGETHER.splitlines())
    return [shlex.split(each) for command, _, cases in lines if command == name for each in cases.split("; ") if each]


def _foreign() -> Iterator[tuple[str, Any]]:
    """What becomes of the words of other programs."""
    spelling, foreign = import_module("moeedge.cli.spelling"), import_module("moeedge.cli.foreign")
    errors = import_module("moeedge.errors")
    for name in ("chat", "bench"):
        command = commands()[name]
        for option, row in foreign.foreign_options().items():
            values = getattr(row, "by_value", None) or getattr(row, "values", None) or ("7",)
            for value in (*values, *getattr(row, "same", ()), None, "no such"):
                speller = spelling.Speller(name, command)
                try:
                    found: Any = speller.translate([option, *([] if value is None else [value])])
                except errors.InputError as error:
                    found = [type(error).__name__, plain(error.message)[:60]]
                yield f"{name} foreign {option} {value}", [found, speller.sets, len(speller.warnings)]
