"""Damaged inputs: every case must end as accepted, or refused with a sentence; never in a crash, a traceback or a hang.
Of the kind benign, models with other texts and keys, every one must be accepted. Of the kind signal, sound commands get
SIGINT, SIGTERM or SIGHUP at a random moment; of the kind fault, their n-th large allocation or read fails, for every n
up to --n.

    python -m tests.fuzz KIND --n N --seed S [--out RECORD.jsonl] [--finds FOLDER]

Case number i of a kind depends on the seed and i alone: `--first i --n 1` repeats it. Each runs in a forked child with
limits on data and time; of cheap kinds many in one child, and what ends badly there again alone (counted as "again").
A model file is not probed by another process first, unless its case ends badly: it is then repeated as a user would
run it, and counted as "probed". The table counts outcomes and sentences; --finds gets the input of each bad case. The
record has a line for each batch, and the same command goes on with those that lack.
"""

from __future__ import annotations

import argparse
import functools
import gc
import gzip
import json
import multiprocessing
import os
import pkgutil
import re
import resource
import select
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from typer import Exit

import moeedge
from moeedge.hardware.provenance import read_provenance
from moeedge.records import as_dict
from tests.fuzz import faults, gguf_header, signals, texts
from tests.fuzz.guided import READERS
from tests.support.cases import MOE_CASES, RARE_CASES
from tests.support.tiny import ARCHITECTURES, make_tiny

SCHEMA = "moeedge-fuzz-1"
BATCH = 250  # cases of a line in the record
LIMIT_S = 60
_CLI_LIMIT_S = 3
STILL_RUNNING = "still running"
DATA_BYTES = 4 << 30
IN_ONE_CHILD = ("gguf", "trace", "jsonl", "record")  # cases that neither decode nor run for long
BAD = ("crash", "traceback", "hang", "files left", "process left", "control characters")
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")  # those that drive a terminal
_CUT = 400_000  # bytes of standard error that are looked at

Mutate = Callable[[Random, bytes], bytes]


@dataclass(frozen=True)
class Kind:
    """Inputs of one kind. seeds: sound files; FILE stands for the changed one in commands, {NAME} for another seed."""

    seeds: tuple[str, ...]
    mutate: Mutate
    commands: tuple[str, ...]
    suffix: str
    is_sound: bool = False  # anything but acceptance is wrong


_GGUF = ("tiny qwen3moe", "tiny deepseek2", "tiny gpt-oss", "tiny llama", "tiny gemma4", "tiny qwen35moe")
_EVERY = (
    *(f"case {name}" for name in MOE_CASES | RARE_CASES),
    *(f"tiny {name}" for name in ARCHITECTURES if name not in ("eagle3", "dflash")),  # drafts decode a target's states
)
_TEXTS = ("prompts.jsonl", "prompts.json", "prompts.csv")
_CHAT = f"{faults.CHAT} -m FILE -md none"
KINDS = {
    "gguf": Kind(_GGUF, gguf_header.mutated, ("plan -m FILE -dev none -md none -o json", "show FILE"), ".gguf"),
    "decode": Kind(_GGUF, gguf_header.mutated, (_CHAT, f"{_CHAT} --raw"), ".gguf"),
    "benign": Kind(
        _EVERY,
        gguf_header.benign,
        ("plan -m FILE -dev none -md none -o json", f"{_CHAT} --raw"),
        ".gguf",
        is_sound=True,
    ),
    "draft": Kind(
        ("tiny qwen3", "tiny eagle3"),
        gguf_header.mutated,
        (f"{faults.CHAT} --raw -m {{tiny qwen3moe}} -md FILE",),
        ".gguf",
    ),
    "trace": Kind(
        ("trace.npz", "positions.csv", "slots.csv"),
        lambda rng, data: texts.mutated_archive(rng, data) if data[:2] == b"PK" else texts.mutated(rng, data),
        ("lab trace info FILE", "lab replay FILE --cache-ratio 0.5 --policy lru", "profile --trace FILE --layer 0"),
        "",
    ),
    "jsonl": Kind(_TEXTS, texts.mutated, (f"call {READERS['jsonl'].place} FILE",), ""),
    "template": Kind(
        ("template.jinja", "tools.jinja"),
        texts.mutated_template,
        (f"{faults.CHAT} -m {{tiny qwen3moe}} -md none --chat-template-file FILE",),
        "",
    ),
    "record": Kind(
        ("calibration.json", "journal.jsonl", "surface.json", "chat.jsonl"),
        texts.mutated,
        ("lab surface FILE", *(f"call {READERS[kind].place} FILE" for kind in ("journal", "measurements", "chat"))),
        "",
    ),
}


def seed_files(folder: Path) -> Callable[[str], Path]:
    """Makes a sound file on demand, once."""
    from tests.support.traces import two_texts

    def make(name: str) -> Path:
        kind, _, model = name.partition(" ")
        path = folder / (f"{kind}-{model}.gguf" if model else name)
        if model and not path.exists():
            arch, dimensions = (MOE_CASES | RARE_CASES)[model] if kind == "case" else (model, {})
            pid = os.fork()
            if pid == 0:  # llama.cpp's quantizer starts threads, which no child would have
                try:
                    make_tiny(arch, folder, **dimensions).rename(path)
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            assert path.is_file(), name
        if not path.exists():
            if name == "trace.npz":
                two_texts(weights=True).save(path)
            else:
                path.write_text(SOUND[name])
        return path

    return make


SOUND = {
    "prompts.jsonl": '{"prompt": "Hello"}\n{"turns": ["a", "b"]}\n{"messages": [{"role": "user", "content": "Hi"}]}\n',
    "prompts.json": '[{"prompt": "x", "reference": {"scorer": "exact", "expect": "y"}}, {"turns": ["a"]}]',
    "prompts.csv": 'prompt,category\n"a, b",test\nc,d\n',
    "positions.csv": "pos,layer,id0,id1\n"
    + "".join(f"{p},{n},{(p + n) % 8},{p % 8}\n" for p in range(9) for n in (0, 1)),
    "slots.csv": "# n_layer=2 n_expert=8\nturn,phase,step,layer,slot,expert,weight\n"
    + "".join(f"0,{int(s > 1)},{s},{n},{k},{(s + k) % 8},0.5\n" for s in range(6) for n in (0, 1) for k in (0, 1)),
    "template.jinja": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if x %}{{ 1 }}{% endif %}",
    "tools.jinja": "{%- macro told(m) -%}{{ m['content']|trim }}{%- endmacro -%}{{ bos_token }}"
    "{%- set ns = namespace(first=true, n=0) -%}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set head = messages[0].content -%}{%- set messages = messages[1:] -%}{%- else -%}{%- set head = '' -%}"
    "{%- endif -%}{%- if tools is defined and tools -%}{{ tools|tojson(indent=2) }}{%- endif -%}"
    "{%- for m in messages -%}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Roles must alternate.') }}{%- endif -%}"
    "{%- if m.content is string and m.content.startswith('a') -%}{%- set ns.first = false -%}{%- endif -%}"
    "<|{{ m.role }}|>{{ head ~ '\\n' if loop.first and head else '' }}"
    "{{ told(m).split('</think>')[-1]|replace('x', 'y') }}{%- set ns.n = ns.n + 1 -%}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}",
    "calibration.json": '{"schema": 1, "seconds": 1.0, "step_s": {"1": 0.1}, "units": null}',
    "journal.jsonl": '{"schema": "moeedge-bench-run-1", "settings": []}\n'
    '{"part": 0, "pass": 0, "test": "a", "sample": {}}\n',
    "chat.jsonl": '{"schema": "moeedge.autosave", "version": 1, "model": "m", "model_bytes": 1, "raw": false}\n'
    '{"role": "user", "content": "Hi"}\n{"text": "a", "tokens": [1]}\n',
    "surface.json": '[{"mode": "stock-ar", "tg_ts_median": 1.0, "acceptance": 0.5, "test": "a", "samples": []}]',
}


def run_case(
    arguments: list[str],
    home: Path,
    limit_s: float = LIMIT_S,
    *,
    probes: bool = True,
    fault: faults.Fault | None = None,
) -> tuple[str, str]:
    """The outcome of `moeedge ARGUMENTS` in a child, and the last line of its standard error."""
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            _child(arguments, home, errors.fileno(), probes, fault)
        end_s = time.monotonic() + limit_s
        while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end_s:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "hang", ""
            time.sleep(0.002)
        with suppress(ProcessLookupError):  # what the child has left behind
            os.killpg(pid, signal.SIGKILL)
        errors.seek(0)
        text = errors.read(_CUT).decode("utf-8", "replace")
    return _told(os.waitstatus_to_exitcode(done[1]), text)


def _child(arguments: list[str], home: Path, errors: int, probes: bool, fault: faults.Fault | None) -> None:
    """Never returns."""
    code = 70
    try:
        _prepare(home, errors, probes)
        if fault is not None:
            fault.arm()
        code = _code_of(arguments)
    finally:
        if fault is not None:
            fault.note()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _prepare(home: Path, errors: int, probes: bool) -> None:
    """Limits, environment and streams of a child."""
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream, target in ((0, null), (1, null), (2, errors)):
        os.dup2(target, stream)
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.pop("MOEEDGE_NO_PROBE", None)
    os.environ |= {"MOEEDGE_NO_PROBE": "1"} if not probes else {}
    os.environ |= {"HOME": str(home), "MOEEDGE_CACHE": str(home / "cache"), "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


def _code_of(arguments: list[str]) -> int:
    """The exit code of a command in this process; a traceback goes to standard error."""
    try:
        if arguments[0] == "call":
            from moeedge.cli.common import cli_errors

            module, _, name = arguments[1].partition(":")
            with cli_errors():
                getattr(import_module(module), name)(*arguments[2:])
        else:
            sys.argv = ["moeedge", *arguments]
            import_module("moeedge.__main__").main()
        return 0
    except Exit as end:
        return end.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        return 70


def in_one_child(options: argparse.Namespace, first: int, n: int, folder: Path) -> Iterator[tuple[int, str, str]]:
    """Number, outcome and last line of cases that one child runs in turn, up to the first that ends it or is bad."""
    incoming, outgoing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with tempfile.TemporaryFile() as errors:
                _prepare(folder, errors.fileno(), probes=False)
                for number, arguments, _, _ in cases(options.kind, options.seed, first, n, folder):
                    os.ftruncate(errors.fileno(), 0)
                    os.lseek(errors.fileno(), 0, os.SEEK_SET)
                    code = _code_of(arguments)
                    sys.stderr.flush()
                    text = os.pread(errors.fileno(), _CUT, 0).decode("utf-8", "replace")
                    os.write(outgoing, (json.dumps([number, *_told(code, text)]) + "\n").encode())
        finally:
            os._exit(0)
    os.close(outgoing)
    with os.fdopen(incoming, "rb", 0) as lines:
        try:
            while select.select([lines], [], [], LIMIT_S)[0] and (line := lines.readline()):
                yield tuple(json.loads(line))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _told(code: int, text: str) -> tuple[str, str]:
    """The outcome by exit code and standard error, and the last line of that."""
    last = (text.strip().splitlines() or [""])[-1]
    if code < 0:
        return "crash", f"signal {-code}: {last}"
    if "Traceback (most recent call last)" in text:
        return "traceback", last
    if _CONTROL.search(text):
        return "control characters", repr(last)
    return {0: "accepted", 1: "failed", 2: "refused"}.get(code, f"exit code {code}"), last


def cases(
    kind: str, seed: int, first: int, n: int, folder: Path
) -> Iterator[tuple[int, list[str], bytes, faults.Fault | None]]:
    """Number, arguments, changed input, failing call of each case; the input is in folder/case until the next one."""
    find = seed_files(folder)
    if kind == "fault":
        for number, (command, fault) in enumerate(faults.faults(first, n)):
            yield number, words_of(command, find), b"", fault
        return
    for number in range(first, first + n):
        rng = Random(f"{seed} {number}")
        if kind == "cli":
            yield number, _arguments(rng), b"", None
        elif kind == "signal":
            command = rng.choice(signals.COMMANDS).replace("OUT", str(folder / "written/out"))
            yield number, words_of(command, find), b"", None
        else:
            about = KINDS[kind]
            sound = find(rng.choice(about.seeds))
            data = about.mutate(rng, sound.read_bytes())
            path = folder / f"case{about.suffix or sound.suffix}"
            path.write_bytes(data)
            yield number, words_of(rng.choice(about.commands), find, path), data, None


def words_of(command: str, find: Callable[[str], Path], path: Path | None = None) -> list[str]:
    """The command's words with the paths of its inputs."""
    words = shlex.split(command.replace("{", "'{").replace("}", "}'"))
    return [str(path) if word == "FILE" else str(find(word[1:-1])) if word[:1] == "{" else word for word in words]


def _arguments(rng: Random) -> list[str]:
    """A random command line: a command or none, options of its own and of others, values of every kind."""
    from tests.outputs.program import commands, scratch

    with scratch():
        known = commands()
    name = rng.choice([*known])
    options = [
        option for param in known[rng.choice((name, name, rng.choice([*known])))].params for option in param.opts
    ]
    values = ("", "0", "-1", "1,2", "nan", "inf", "9" * 40, "auto", "none", "off", "text.txt", "/", "/dev/null")
    values += ("\udcff", "1GiB")
    words = [word for _ in range(rng.randrange(5)) for word in (rng.choice(options), rng.choice(values))]
    if name == "worker":  # it would wait
        return ["worker", "--help"]
    return [*name.split(), *words, *rng.choice((["--help"], ["--no-such"], []))]


def preload() -> None:
    """Does once what each child would do first: without it most of a case's time is importing."""
    from moeedge.cli import app
    from moeedge.llama import library

    for module in pkgutil.walk_packages(moeedge.__path__, "moeedge."):
        if not module.name.endswith(("__main__", "probe_child")):
            import_module(module.name)
    library.start()
    app.load_command = functools.cache(app.load_command)
    for name in app.COMMANDS:
        for param in app.load_command(name).params:
            param.get_runtime_param()
    gc.collect()
    gc.freeze()


def sentence(last: str) -> str:
    """What a line says without the paths, names and numbers in it: the class of an outcome."""
    text = re.sub(r"/\S+|'[^']*'", "X", last.removeprefix("error: "))
    return re.sub(r"-?\d[\d.,]*", "N", text)[:70]


def run_batch(options: argparse.Namespace, first: int, n: int) -> dict[str, object]:
    """A line of the record: the outcomes of cases `first` to `first` + `n`, what they said, and the bad ones."""
    outcomes: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    bad: list[str] = []
    kind = KINDS.get(options.kind)

    def count(outcome: str, last: str) -> None:
        outcomes[outcome] += 1
        classes[f"{outcome}: {sentence(last)}"] += outcome != "accepted"

    with tempfile.TemporaryDirectory() as name:
        folder, position = Path(name), first
        while position < first + n:
            if options.kind in IN_ONE_CHILD:
                for number, outcome, last in in_one_child(options, position, first + n - position, folder):
                    if outcome not in ("accepted", "refused", "failed"):
                        break
                    count(outcome, last)
                    position = number + 1
            # alone: all of another kind, and one that went wrong after others
            outcomes["again"] += options.kind in IN_ONE_CHILD and position < first + n
            n_alone = min(1, first + n - position) if options.kind in IN_ONE_CHILD else n
            for number, arguments, data, fault in cases(options.kind, options.seed, position, n_alone, folder):
                outcome, last, was_probed = outcome_of(options, number, arguments, folder, fault)
                count(outcome, last)
                outcomes["probed"] += was_probed
                is_unsound = kind is not None and kind.is_sound and outcome != "accepted"
                if outcome in BAD or outcome.startswith("exit code") or is_unsound:
                    about = f"{fault}, " if fault else ""
                    bad.append(f"{about}case {number}: {outcome}: moeedge {' '.join(arguments)[:200]}: {last[:200]}")
                    print(bad[-1].encode("utf-8", "replace").decode(), flush=True)
                    if options.finds is not None:
                        options.finds.mkdir(parents=True, exist_ok=True)
                        (options.finds / f"{options.kind}-{options.seed}-{number}").write_bytes(data)
            position += n_alone
    return {"first": first, "n": n, "outcomes": +outcomes, "classes": +classes, "bad": bad}


def outcome_of(
    options: argparse.Namespace, number: int, arguments: list[str], folder: Path, fault: faults.Fault | None
) -> tuple[str, str, bool]:
    """The outcome of a case, its last line, and whether it ended well only with the probe."""
    if options.kind == "signal":
        return *signals.run_case(Random(f"{options.seed} {number} moments"), arguments, folder), False
    if options.kind == "cli":
        outcome, last = run_case(arguments, folder, _CLI_LIMIT_S)
        return STILL_RUNNING if outcome == "hang" else outcome, last, False  # it computes, as it was asked to
    is_sound = options.kind in KINDS and KINDS[options.kind].is_sound
    outcome, last = run_case(arguments, folder, probes=is_sound, fault=fault)
    if outcome not in BAD or is_sound or KINDS.get(options.kind, KINDS["jsonl"]).suffix != ".gguf":
        return outcome, last, False
    outcome, last = run_case(arguments, folder)
    return outcome, last, outcome not in BAD


def table_row(record: Path) -> str:
    """A packed record's row in SECURITY.md: kind, cases, accepted, refused, ended with an error, running, bad."""
    with gzip.open(record, "rt", encoding="utf-8") as file:
        _, *lines = map(json.loads, file)
    outcomes: Counter[str] = sum((Counter(line["outcomes"]) for line in lines), Counter())
    kind, n_bad = record.name.removeprefix("fuzz-").partition(".")[0], sum(len(line["bad"]) for line in lines)
    n = outcomes.total() - outcomes["probed"] - outcomes["again"]
    counts = (n, *(outcomes[each] for each in ("accepted", "refused", "failed", STILL_RUNNING)), n_bad)
    return f"| `{kind}` | {' | '.join(f'{count:,}' for count in counts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=[*KINDS, "cli", "signal", "fault"])
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--finds", type=Path, help="folder that gets the input of each bad case")
    options = parser.parse_args()
    if options.kind == "fault":
        faults.restart_with_shim()
    preload()

    lines: list[dict[str, Any]] = []
    if options.out is not None and options.out.is_file():
        head, *rest = options.out.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        if (begun := json.loads(head)).get("kind") != options.kind or begun["seed"] != options.seed:
            parser.error(f"{options.out} is of another kind or seed")
        lines = [json.loads(line) for line in rest]
    elif options.out is not None:
        command = " ".join(Path(word).name for word in sys.argv[1:])
        about = {"schema": SCHEMA, "environment": as_dict(read_provenance()), "command": command}
        about |= {"kind": options.kind, "seed": options.seed}
        options.out.write_text(json.dumps(about) + "\n", encoding="utf-8")
    batches = faults.batches(options.n) if options.kind == "fault" else _batches(options.first, options.n)
    done = {(line["first"], line["n"]) for line in lines}
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("fork")) as pool:
        for future in as_completed([pool.submit(run_batch, options, *each) for each in batches if each not in done]):
            lines.append(future.result())
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    totals = {name: sum((Counter(line[name]) for line in lines), Counter()) for name in ("outcomes", "classes")}
    print(f"{options.kind}, seed {options.seed}: {dict(totals['outcomes'])}")
    for text, n in totals["classes"].most_common(60):
        print(f"{n:6} {text}")
    sys.exit(any(line["bad"] for line in lines))


def _batches(first: int, n: int) -> list[tuple[int, int]]:
    return [(start, min(BATCH, first + n - start)) for start in range(first, first + n, BATCH)]


if __name__ == "__main__":
    main()
