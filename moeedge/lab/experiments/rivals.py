"""moeedge next to other programs on the same file, with equal threads: a process per program, setting and repetition.

Processes take turns in an order that rotates from repetition to repetition, so that only one computes and only one
holds the model; the page cache is equal for all. Tests of random tokens are llama-bench's. The test "drafts" is a
greedy answer to one prompt. A program's speed is the one that it measures itself; loading is not in it. Of its settings
the fastest counts, test by test.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from moeedge.errors import EngineError
from moeedge.hardware.host import fits
from moeedge.hardware.provenance import Provenance
from moeedge.records import figure, filled, quotient, stored
from moeedge.run import Run, rotated

if TYPE_CHECKING:  # the options' defaults are read for --help, which must not load llama.cpp
    from moeedge.bench.journal import Journal

SCHEMA: Literal["moeedge-rivals-1"] = "moeedge-rivals-1"
LLAMA, IK, STOCK, OURS = RIVALS = ("llama.cpp", "ik_llama.cpp", "stock", "moeedge")  # in the order of the columns
DRAFTS = "drafts"
_N_CTX = 1024  # of the answer
_COPY = 1.05  # memory of a copied model, in sizes of its file
_SLOWER = 1.15  # settings that are slower than others of their program by this in every test are measured once
_DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
# fields of RivalPlan with llama-bench, and the settings that are measured; without repacking weights are as in the file
_BENCHES = [("llama_bench", LLAMA, f"--repack {on}") for on in "10"]
_BENCHES += [("ik_llama_bench", IK, f"-fa {fa} -rtr {on}") for fa in "01" for on in "01"]
_SIMPLE = "--spec-type draft-simple --spec-draft-n-max {} --spec-draft-n-min 0 --spec-draft-p-min {}"
_DRAFTING = [("llama_speculative_simple", LLAMA, _SIMPLE)]
_SPEC_BENCH = "--spec-type draft:n_max={},n_min=0,p_min={} --output-format jsonl --in-prefix-bos"  # that: no template
_DRAFTING += [("ik_speculative", IK, _SPEC_BENCH)]

Timed = Iterator[tuple[str, int, float, str, float | None]]  # test, tokens, seconds, version, limit in t/s


@dataclass(frozen=True)
class RivalSample:
    """One test by one process."""

    rival: str = figure("The program: moeedge, stock (llama.cpp in moeedge's loop), llama.cpp, ik_llama.cpp")
    settings: str = figure("Its settings; of moeedge bench the mode")
    test: str = figure("ppN: a prompt of N random tokens; tgN: N tokens decoded; drafts: an answer with drafts")
    repetition: int = figure("Repetition, from 0")
    order: int = figure("Place of the process in its repetition, from 0")
    tokens: int = figure("Tokens that were timed")
    seconds: float = figure("Time that they took", "s")
    build: str = figure("Version that the program tells; empty: none")
    limit_ts: float | None = figure("Of moeedge's processes, the speed at this machine's limits", "t/s", default=None)

    speed_ts = quotient("tokens", "seconds", "Tokens per second", "t/s", empty=0.0)

    @property
    def mode(self) -> str:
        """The program with its settings."""
        return f"{self.rival} {self.settings}"

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the same work of other programs."""
        return self.test, self.repetition


@dataclass(frozen=True, kw_only=True)
class RivalRow(Provenance):
    """A test: the speed of each program with its fastest settings."""

    schema: Literal["moeedge-rivals-1"] = figure("Name of this schema; a changed meaning changes it", default=SCHEMA)
    model: str = figure("File of the target")
    model_bytes: int = figure("Its size", "bytes")
    draft: str = figure('File of the draft; "none" without')
    threads: int = figure("Threads of every program", least=1)
    test: str = stored(RivalSample, "test")
    speeds: dict[str, float] = figure("Median speed of each program with its fastest settings, by name", "t/s")
    settings: dict[str, str] = figure("These settings, by name of the program")
    fastest: str | None = figure("The fastest program but moeedge, with its settings")
    ratio: float | None = figure("Median over repetitions of moeedge's speed over that of the fastest. A ratio")
    low: float | None = figure("Lower end of its 95 % interval; null of one pair", default=None, optional=True)
    high: float | None = figure("Upper end of the interval", default=None, optional=True)
    limit_ts: float | None = figure(
        "Speed at the limits of memory and multiplications, median of moeedge's processes; experts as if each token of "
        "a prompt chose on its own",
        "t/s",
        default=None,
    )
    repetitions: int = figure("Repetitions that were asked for", least=1)
    other_load_before: float = figure("Processors that other programs used before the run")
    samples: tuple[RivalSample, ...] = figure("The raw samples")


@dataclass(frozen=True)
class Variant:
    """A program with settings: a process in each repetition. read: its output."""

    rival: str
    settings: str
    command: tuple[str, ...]
    read: Callable[[str], Timed]
    once: bool = False  # measured in the first repetition alone


@dataclass(frozen=True, kw_only=True)
class RivalPlan:
    """The command's options: programs (None: left out), and what they do."""

    model: Path | None = None
    model_draft: str | None = None
    llama_bench: Path | None = None
    ik_llama_bench: Path | None = None
    llama_speculative_simple: Path | None = None
    ik_speculative: Path | None = None
    n_prompt: Sequence[int] = (512, 2048, 2, 4, 9, 17)
    n_predict: int = 64  # tokens decoded one by one, and of the answer
    draft_max: Sequence[int] = (1, 2, 4, 8)
    threads: int = 0
    repetitions: int = 3
    samples: int = 1  # of each test of random tokens in a process
    no_warmup: bool = False  # nothing is computed before it is measured: a long prompt takes as long again
    # once the files are known
    target: Path = Path()
    draft_file: Path | None = None
    question: str = ""  # that is answered
    rendered: str = ""  # the same in the chat template

    def variants(self, folder: Path, run: Run) -> Iterator[Variant]:
        """The processes of a repetition. folder: gets the prompt's files. run: says what is left out."""
        sizes = ["-p", ",".join(map(str, self.n_prompt)) or 0, "-n", self.n_predict]
        for rival, mode in ((STOCK, "stock-ar"), (OURS, "moeedge-ar")):
            yield self._ours(rival, mode, "-md", "none", *sizes, samples=self.samples)
        is_copied = fits(int(_COPY * self.target.stat().st_size))  # by -rtr 1, which does not map the file
        for path, rival, words in self._given(_BENCHES, run):
            if words.endswith("-rtr 1") and not is_copied:
                run.say(f"{rival} {words} is left out: a copy of the model does not fit the memory.")
            else:
                cold = ["-w", 0] if rival == IK else ["--no-warmup"]
                own = [*sizes, *words.split(), *cold[: 2 * self.no_warmup], "-ngl", 0]
                command = self._command(path, *own, "-r", self.samples, "-o", "json")
                # the arm "stock" is the same library with repacked weights: once shows that its loop costs nothing
                yield Variant(rival, words, command, read_llama_bench, once=rival == LLAMA and words == "--repack 1")
        if self.draft_file is None:
            return
        (text := folder / "prompt.txt").write_text(f"{self.rendered}\n", encoding="utf-8")  # programs drop a line break
        (prompt := folder / "prompt.jsonl").write_text(json.dumps({"prompt": self.question}) + "\n", encoding="utf-8")
        longest = max(self.draft_max)
        lengths = [*(f"{gamma}/p0" for gamma in self.draft_max), f"{longest}/p0.75"]
        answer = ["-md", self.draft_file, "-n", self.n_predict, "-c", _N_CTX]
        plain = ("stock-ar", f"stock-ngram:{longest}")
        for mode in (*plain, *(f"stock-sd:{length}" for length in lengths), "moeedge:auto"):
            yield self._ours(OURS if mode.startswith(OURS) else STOCK, mode, *answer, "--dataset", prompt)
        answer += ["-f", text, "--temp", 0, "-ngl", 0, "-ngld", 0]
        for path, rival, words in self._given(_DRAFTING, run):
            for length in lengths:
                command = self._command(path, *answer, *words.format(*length.split("/p")).split())
                yield Variant(rival, length, command, read_spec_bench if rival == IK else read_speculative)

    def _given(self, programs: Sequence[tuple[str, str, str]], run: Run) -> Iterator[tuple[Path, str, str]]:
        for name in dict.fromkeys(name for name, *_ in programs if getattr(self, name) is None):
            run.say(f"There is no --{name.replace('_', '-')}: its tests are left out.")
        yield from ((path, *rest) for name, *rest in programs if (path := getattr(self, name)) is not None)

    def _ours(self, rival: str, mode: str, *words: object, samples: int = 1) -> Variant:
        program = (sys.executable, "-m", "moeedge", "bench")
        words = (*words, *["--no-warmup"][: self.no_warmup])
        command = self._command(*program, *words, "--modes", mode, "-dev", "none", "-r", samples, "-o", "json")
        return Variant(rival, mode, command, read_bench)

    def _command(self, *words: object) -> tuple[str, ...]:
        return tuple(map(str, (*words, "-m", self.target, "-t", self.threads)))


def read_llama_bench(output: str) -> Timed:
    """Reads `llama-bench -o json`, around which ik_llama.cpp's may print other lines. Raises ValueError."""
    if "[\n" not in output or "]" not in output:
        raise ValueError("it printed no JSON")
    for record in json.loads(output[output.index("[\n") : output.rindex("]") + 1]):
        test = f"pp{record['n_prompt']}" if record["n_prompt"] else f"tg{record['n_gen']}"
        build = f"{record['build_number']} ({record['build_commit']})"
        samples_s = [1e-9 * sample_ns for sample_ns in record["samples_ns"]]
        yield test, len(samples_s) * (record["n_prompt"] or record["n_gen"]), sum(samples_s), build, None


def read_speculative(output: str) -> Timed:
    """Reads what llama-speculative-simple prints last. Raises ValueError."""
    if (decoded := _DECODED.search(output)) is None:
        raise ValueError("it printed no speed")
    yield DRAFTS, int(decoded[1]), float(decoded[2]), "", None


def read_spec_bench(output: str) -> Timed:
    """Reads the attempts of ik_llama.cpp's llama-spec-bench. Raises ValueError."""
    for row in (json.loads(line) for line in output.splitlines() if line.startswith('{"row_type":"attempt"')):
        if row["error"]:
            raise ValueError(row["error"])
        yield DRAFTS, row["generated"], row["decode_s"], "", None


def read_bench(output: str) -> Timed:
    """Reads `moeedge bench -o json`."""
    for row in json.loads(output):
        phase = "prefill" if row["n_prompt"] else "decode"
        tokens, seconds = (sum(sample[f"{phase}_{unit}"] for sample in row["samples"]) for unit in ("tokens", "s"))
        limit_ts = row.get("prompt_limit_ts" if row["n_prompt"] else "limit_ts")
        yield DRAFTS if row["dataset"] else row["test"], tokens, seconds, row["version"], limit_ts


def measure(plan: RivalPlan, variants: Sequence[Variant], journal: Journal, run: Run) -> Iterator[RivalSample]:
    """Yields the samples of the journal, then those that it lacks, until `run` is cancelled.

    A rival's variant that fails is left out from there on, as is one that was clearly slower than another of this rival
    in all tests of the first repetition. Raises EngineError where ours fails.
    """
    kept: list[RivalSample] = [sample for own in journal.samples(0, 0).values() for sample in own]
    yield from kept
    done, failed = {(sample.mode, sample.repetition) for sample in kept}, set[str]()
    first = [sample for sample in kept if sample.repetition == 0]
    run.progress.start("measuring", plan.repetitions * len(variants))
    for repetition in range(plan.repetitions):
        if repetition == 1 and (slow := outrun(first)):
            failed |= slow
            run.say(f"Measured once, as other settings are {_SLOWER:g} times as fast: {', '.join(sorted(slow))}.")
        for order, variant in enumerate(rotated(variants, repetition)):
            label = f"{variant.rival} {variant.settings}"
            run.progress.phase(label, f"repetition {repetition + 1}, {label}")
            run.progress.add()
            if label in failed or (label, repetition) in done or (variant.once and repetition):
                continue
            try:
                timed = list(variant.read(_output(variant.command)))
                if not timed:
                    raise ValueError("it printed no test")
                if not all(tokens > 0 and 0 < seconds < math.inf for _, tokens, seconds, *_ in timed):
                    raise ValueError("it printed a time that is none")
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = str(error)
                if isinstance(error, (KeyError, TypeError)):
                    reason = f"its JSON is not as expected ({error})"
                if not run.cancelled() and variant.rival in (OURS, STOCK):
                    raise EngineError(f"{label} failed: {reason}.", "Go on with --resume.") from None
                failed.add(label)
                if not run.cancelled():
                    run.say(f"{label} is left out, as it failed: {reason}.")
                timed = []
            for test, tokens, seconds, build, limit_ts in timed:
                about = (variant.rival, variant.settings, test, repetition, order)
                sample = RivalSample(*about, tokens, seconds, build, limit_ts)
                journal.add((0, 0, test), sample)
                if repetition == 0:
                    first.append(sample)
                yield sample
            if run.cancelled():
                return


def outrun(samples: Sequence[RivalSample]) -> set[str]:
    """Returns the modes that one other of the same program outruns by _SLOWER in every test of the samples."""
    from moeedge.bench.samples import grouped

    slow = set()
    for own in grouped(samples, attrgetter("rival")).values():
        by_mode = grouped(own, attrgetter("mode"))
        speeds = {mode: {sample.test: sample.speed_ts for sample in each} for mode, each in by_mode.items()}
        for mode, slower in speeds.items():
            if any(all(fast.get(test, 0.0) > _SLOWER * slower[test] for test in slower) for fast in speeds.values()):
                slow.add(mode)
    return slow


def _output(command: Sequence[str]) -> str:
    """What a program printed: JSON, or else both outputs. Raises ValueError with its last line where it failed."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ValueError(lines[-1].rstrip(".") if lines else f"exit code {done.returncode}")
    return done.stdout if "json" in command else done.stdout + done.stderr


def make_rows(
    plan: RivalPlan, samples: Sequence[RivalSample], *, source: Provenance, other_load_before: float
) -> list[RivalRow]:
    """Returns a row per test. Settings that were measured once count where a program has no others."""
    import numpy as np

    from moeedge.bench.figures import interval_around
    from moeedge.bench.samples import grouped

    rows = []
    for test, own in grouped(samples, attrgetter("test")).items():
        by_mode = grouped(own, attrgetter("mode"))
        medians = {mode: median(sample.speed_ts for sample in each) for mode, each in by_mode.items()}
        worth = {mode: (len(by_mode[mode]) > 1, speed_ts) for mode, speed_ts in medians.items()}
        best = {by_mode[mode][0].rival: mode for mode in sorted(worth, key=worth.__getitem__)}  # the last counts
        fastest = max((mode for rival, mode in best.items() if rival != OURS), key=worth.__getitem__, default=None)
        base = {sample.key: sample.speed_ts for sample in by_mode.get(fastest or "", ())}
        ours = [each for each in by_mode.get(best.get(OURS, ""), ()) if each.key in base]
        pairs = [each.speed_ts / base[each.key] for each in ours]
        ratio = median(pairs) if pairs else None
        low, high = (None, None) if ratio is None or len(pairs) < 2 else interval_around(ratio, np.array(pairs))
        limits = [each.limit_ts for each in own if each.rival == OURS and each.limit_ts is not None]
        rows.append(
            filled(
                RivalRow,
                *(source, plan),
                model=plan.target.name,
                model_bytes=plan.target.stat().st_size,
                draft="none" if plan.draft_file is None else plan.draft_file.name,
                test=test,
                speeds={rival: medians[best[rival]] for rival in RIVALS if rival in best},
                settings={rival: by_mode[best[rival]][0].settings for rival in RIVALS if rival in best},
                fastest=fastest,
                ratio=ratio,
                low=low,
                high=high,
                limit_ts=median(limits) if limits else None,
                other_load_before=other_load_before,
                samples=tuple(own),
            )
        )
    return rows


def settings_of(plan: RivalPlan, source: Provenance) -> dict[str, Any]:
    """Returns what must be the same for samples of two runs to belong together."""
    values = asdict(plan) | {name: getattr(source, name) for name in ("version", "commit", "cpu", "os")}
    sizes = {name: [str(path), path.stat().st_size] for name, path in values.items() if isinstance(path, Path)}
    return json.loads(json.dumps(values | sizes))  # type: ignore[no-any-return]
