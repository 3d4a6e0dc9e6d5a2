"""All measurements at full shapes, one after the other: other programs, recorded routing, drafts that cost, beyond RAM.

    moeedge lab trace import gptoss20b_decode.npz ROUTING.npz --n-experts 32
    python -m tests.benchmarks.full_shapes FOLDER --routing ROUTING.npz --llama-bench FILE --ik-llama-bench FILE

FOLDER gets the models (`moeedge lab make-model`; about 90 GB with all) and, in `records`, a record per step and a log
of what it printed. A step whose record is there is left out, and an interrupted one goes on where it was, so that the
same command goes on with everything. --steps names some, --list shows them; --again runs them a second time and says
which figures lie within the intervals of the first. Before each step the machine must be quiet,
and the disk must have room for the models that it needs. All programs get their memory in pages of 2 MiB
(glibc's tunable).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from moeedge.hardware.host import BUSY, others_now
from tests.benchmarks.performance import read, repeated
from tests.support.ballast import Ballast

MOEEDGE = (sys.executable, "-m", "moeedge")
_WAIT_S, _PAUSE_S = 120, 5  # for a quiet machine
_LEAST_FREE_BYTES = 2 << 30
# name of a file -> options of make-model, and about how many bytes it takes
MODELS = {
    "qwen3-30b": ("--like qwen3-30b-a3b --quant q4_k_m", 18.6e9),
    "gptoss-20b": ("--like gpt-oss-20b --quant mxfp4", 12.1e9),
    "gptoss-20b-q8": ("--like gpt-oss-20b --quant q8_0", 22.3e9),
    "qwen3-30b-2": ("--like qwen3-30b-a3b --quant q4_k_m --layers 2", 1.3e9),  # long prompts take long
    "qwen3-30b-head": ("--like qwen3-30b-a3b --quant q4_k_m --layers 1", 0.9e9),
    "gptoss-20b-head": ("--like gpt-oss-20b --quant mxfp4 --layers 1", 1.7e9),
    # of Qwen3-0.6B's width, with as many layers as take a fifth and a tenth of a step's bytes (of its time more)
    "qwen3-30b-fifth": ("--like qwen3-0.6b --quant q8_0 --layers 17", 0.5e9),
    "qwen3-30b-tenth": ("--like qwen3-0.6b --quant q8_0 --layers 3", 0.3e9),
    "gptoss-20b-fifth": ("--like qwen3-0.6b --quant q8_0 --layers 18 --vocab 201088", 0.6e9),
    "gptoss-20b-tenth": ("--like qwen3-0.6b --quant q8_0 --layers 2 --vocab 201088", 0.3e9),
}
# a sixth of the layers in each mixture of types, and about how many bytes a layer takes
QUANTS = {"q5_k_m": 0.44e9, "q3_k_m": 0.31e9, "iq4_xs": 0.34e9, "q8_0": 0.67e9, "q4_0": 0.36e9, "bf16": 1.3e9}
_N_FLOOR_LAYERS = 8
MODELS |= {
    f"qwen3-30b-{_N_FLOOR_LAYERS}-{quant}": (
        f"--like qwen3-30b-a3b --quant {quant} --layers {_N_FLOOR_LAYERS}",
        (_N_FLOOR_LAYERS + 1) * layer_bytes,
    )
    for quant, layer_bytes in QUANTS.items()
}
_TESTS = "-p 512,2,4,9,17 -n 64 -r 3 -t 2"
_LONG = "-p 2048 -n 1 -r 3 -t 2 --no-warmup"  # apart, as it takes most of the time
_FEW = "-p 2,4,9,17 -n 64 -r 6 --samples 4 -t 2"  # whose samples are short, where memory has two speeds
_FLOORS = "-p 512,2048,9 -n 64 -r 3 -t 2"
_ACCEPT = "-n 64 -r 3 -t 2 -b 64 -ub 64 -dev none --ram off -o json"
_TEXTS = "bench -md none -dev none --modes stock-ar,moeedge-ar --parallel 1,2,4,8 --dataset toy --limit 8 -n 32 -t 2"
_BUDGETS = {"gptoss-20b": "12,16,24", "qwen3-30b": "24,32,48"}  # of 32 and 128 experts
_RATES, _DRAFTS = ".5,.7,.8,.9", ("fifth", "tenth", "head", "ngram")
_ARMS = "stock@t2,stock@t4,stock@t8,moeedge,moeedge-auto"


@dataclass(frozen=True)
class Step:
    """A command whose standard output is the record; models: those that it needs, by name."""

    name: str
    words: str  # {NAME}: a model's path, {routing}, {programs} and {out} as given
    models: tuple[str, ...]
    program: tuple[str, ...] = field(default=MOEEDGE)
    ballast_bytes: int = 0  # memory that another process holds meanwhile


def steps() -> list[Step]:
    tests_of = {"": _TESTS, "-long": _LONG, "-few": _FEW}
    made = [Step(f"rivals-{name}{kind}", f"lab rivals -m {{{name}}} {tests} {{programs}} -o json", (name,))
            for kind, tests in tests_of.items() for name in ("gptoss-20b", "qwen3-30b")]  # fmt: skip
    for quant in QUANTS:
        name = f"qwen3-30b-{_N_FLOOR_LAYERS}-{quant}"
        made.append(Step(f"floors-{quant}", f"lab rivals -m {{{name}}} {_FLOORS} {{programs}} -o json", (name,)))
    long = "-p 4096,16384 -n 1 -r 3 -t 2 --no-warmup"
    made.append(
        Step("prompts-qwen3-30b", f"lab rivals -m {{qwen3-30b-2}} {long} {{programs}} -o json", ("qwen3-30b-2",))
    )
    routed = "bench -md none -dev none --ram off --modes stock-ar,moeedge-ar --routing {routing} -o json"
    made += [Step(f"routed-{name}{kind}", f"{routed} {tests} -m {{{name}}}", (name,))
             for kind, tests in (("", _TESTS), ("-long", _LONG)) for name in ("gptoss-20b", "qwen3-30b")]  # fmt: skip
    for name in ("gptoss-20b", "qwen3-30b"):
        for kind in _DRAFTS:
            is_free = kind == "ngram"
            fixed = [f"{arm}:{n}" for arm in ("stock-sd", "moeedge") for n in (1, 2, 4, 8)[: 3 + is_free]]
            modes = ",".join(["stock-ar", *fixed, "moeedge-ar", "moeedge:auto"])
            draft, models = f"{name}-{kind}", (name,) if is_free else (name, f"{name}-{kind}")
            words = f"bench -m {{{name}}} -md {kind if is_free else f'{{{draft}}}'} {_ACCEPT} --accept {_RATES}"
            words += f" --modes {modes}"
            made.append(Step(f"accept-{name}-{kind}", words + " --routing {routing}" * (name == "gptoss-20b"), models))
    for name, budgets in _BUDGETS.items():
        made.append(Step(f"texts-{name}", f"{_TEXTS} -r 3 --ignore-eos -o json -m {{{name}}}", (name,)))
        words = (
            f"bench -m {{{name}}} -md {{{name}-fifth}} {_ACCEPT} --accept .8 --draft-max 8 --expert-budget {budgets}"
        )
        made.append(Step(f"budget-{name}", words, (name, f"{name}-fifth")))
    beyond = "-m {gptoss-20b-q8} -md {gptoss-20b-fifth} --routing {routing} -n 512 --rounds 5 --ballast 6GiB"
    program = (sys.executable, "-m", "tests.benchmarks.beyond_ram")
    models = ("gptoss-20b-q8", "gptoss-20b-fifth")
    made.append(Step("beyond-ram", f"{beyond} --arms {_ARMS} --out {{out}}", models, program))
    prompts = "-m {gptoss-20b-q8} --routing {routing} --rounds 5 --ballast 6GiB --prompt-tokens 512,2048 --out {out}"
    arms = "--arms stock,stock@ub1024,stock@ub2048,moeedge,moeedge@ub2048"
    made.append(Step("beyond-ram-prompts", f"{prompts} {arms}", models[:1], program))
    words = f"lab rivals -m {{{models[0]}}} -p 512 -n 64 -r 3 -t 2 {{programs}} -o json"
    made.append(Step("rivals-beyond-ram", words, models[:1], ballast_bytes=6 << 30))
    return made


def make_models(names: tuple[str, ...], folder: Path) -> None:
    """Writes the models that are missing. Ends the program where there is no room for them."""
    missing = [name for name in names if not (folder / f"{name}.gguf").is_file()]
    needed, free = sum(MODELS[name][1] for name in missing) + _LEAST_FREE_BYTES, shutil.disk_usage(folder).free
    if needed > free:
        raise SystemExit(f"{folder} has {free / 1e9:.0f} GB free, and {', '.join(missing)} take {needed / 1e9:.0f} GB.")
    for name in missing:
        words = [*MOEEDGE, "lab", "make-model", str(folder / f"{name}.gguf"), *MODELS[name][0].split()]
        subprocess.run(words, check=True)


def wait_until_quiet() -> None:
    """Ends the program where other programs go on computing."""
    start_s = time.monotonic()
    while (others := others_now()) > BUSY:
        if time.monotonic() - start_s > _WAIT_S:
            raise SystemExit(f"Other programs use {others:.1f} processors: nothing is measured.")
        time.sleep(_PAUSE_S)


def run_step(step: Step, options: argparse.Namespace) -> bool:
    """Runs a step whose record is missing; returns whether the record is there."""
    first = options.folder / "records" / f"{step.name}.json"
    record = first.with_stem(f"{step.name}-again") if options.again else first
    log = record.with_suffix(".log")
    if record.is_file():
        return True
    make_models(step.models, options.folder)
    wait_until_quiet()
    part = record.with_suffix(".part")
    programs = {name: getattr(options, name) for name in ("llama_bench", "ik_llama_bench")}
    given = [f"--{name.replace('_', '-')} {path}" for name, path in programs.items() if path is not None]
    places = {name: str(options.folder / f"{name}.gguf") for name in MODELS}
    words = step.words.format(**places, routing=options.routing, programs=" ".join(given), out=part).split()
    begun = re.findall(r"--resume (\S+\.jsonl)", log.read_text(encoding="utf-8")) if log.is_file() else []
    words += ["--resume", begun[-1]] if begun and Path(begun[-1]).is_file() else []
    print(f"{time.strftime('%H:%M')} {step.name}: {' '.join(words)}", flush=True)
    tunables = [*filter(None, [os.environ.get("GLIBC_TUNABLES")]), "glibc.malloc.hugetlb=1"]
    environment = os.environ | {"GLIBC_TUNABLES": ":".join(tunables)}
    command = [*step.program, *words]
    with (
        Ballast(step.ballast_bytes),
        log.open("a", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            output, _ = process.communicate()
        except BaseException:  # Ctrl-C or SIGTERM: the programs that it runs would disturb the next step
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.communicate()  # it says how to go on
            raise
    if process.returncode != 0:
        print(f"{step.name} ended with {process.returncode}: see {log}")
        return False
    if "{out}" not in step.words:
        part.write_bytes(output)
    part.rename(record)
    if options.again and first.is_file():
        print("\n".join(repeated(read(first), read(record))), flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--routing", type=Path)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--ik-llama-bench", type=Path)
    parser.add_argument("--steps", default="", help="names, separated by commas; default: all")
    parser.add_argument("--again", action="store_true", help="a second time, compared with the first")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    every = steps()
    chosen = [step for step in every if step.name in options.steps.split(",")] if options.steps else every
    if options.list:
        print("\n".join(step.name for step in every))
        return
    if options.routing is None and any("{routing}" in step.words for step in chosen):
        parser.error("--routing is missing")
    (options.folder / "records").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    failed = [step.name for step in chosen if not run_step(step, options)]
    if failed:
        raise SystemExit(f"Not measured: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
