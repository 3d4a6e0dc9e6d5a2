"""moeedge next to llama.cpp's own programs, llama-bench and llama-speculative-simple, built from the pinned source.

    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B BUILD -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON
    cmake --build BUILD --target llama-bench llama-speculative-simple
    python -m tests.benchmarks.llama_programs --llama-bench BUILD/bin/llama-bench \
        --speculative-simple BUILD/bin/llama-speculative-simple -m TARGET.gguf -md DRAFT.gguf --out RECORD.json

Processes take turns, in an order that rotates and reverses from round to round. Each round has, as `moeedge bench` runs
them, llama-bench's two tests (prompt of N random tokens, N tokens of decoding) and answers to one prompt of the set toy
with drafts. Each program's speed is the one that it prints itself; loading is not in it.
llama-speculative-simple and `stock-sd:GAMMA` draft equally many tokens, greedily, without a least probability. Ratios
are medians over the rounds of moeedge's speed over the program's of the same round.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeedge import paths
from moeedge.bench.experiment import rotated
from moeedge.data.datasets import load_toy
from moeedge.hardware.provenance import read_provenance
from moeedge.llama.model import Model
from moeedge.ui.tables import Column, markdown, text_column

SCHEMA = "moeedge-llama-programs-1"
_SPEED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")


@dataclass(frozen=True)
class Sample:
    """One speed that a process printed."""

    program: str
    test: str  # "pp512", "tg128" or "drafts"
    lane: str  # what drafts: "none", "gamma 4" or "gamma auto"
    round: int
    order: int  # the process's place in its round, from 0
    tokens: int
    seconds: float

    @property
    def speed_ts(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Found = Iterator[tuple[str, str, int, float]]  # test, lane, tokens, seconds


def llama_bench(options: argparse.Namespace) -> Found:
    """llama-bench's two tests."""
    arguments = ["-m", options.model, "-t", options.threads, "-p", options.n_prompt, "-n", options.n_gen, "-r", 1]
    (prefill, decode) = json.loads(_output([options.llama_bench, *arguments, "-o", "json"]))
    for record in (prefill, decode):
        test = f"pp{record['n_prompt']}" if record["n_prompt"] else f"tg{record['n_gen']}"
        yield test, "none", record["n_prompt"] or record["n_gen"], sum(record["samples_ns"]) * 1e-9


def moeedge_synthetic(options: argparse.Namespace) -> Found:
    """The same tests by `moeedge bench`, in our mode without drafts."""
    rows = _bench(options, "-md", "none", "--modes", "moeedge-ar", "-p", options.n_prompt, "-n", options.n_gen)
    for row in rows:
        phase = "prefill" if row["test"].startswith("pp") else "decode"
        tokens, seconds = (sum(sample[f"{phase}_{unit}"] for sample in row["samples"]) for unit in ("tokens", "s"))
        yield row["test"], "none", tokens, seconds


def speculative_simple(options: argparse.Namespace) -> Found:
    """An answer with drafts by llama-speculative-simple, whose count of decoded tokens contains the first one."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(options.text + "\n")  # of which the program drops one
        file.flush()
        arguments = ["-m", options.model, "-md", options.draft, "-t", options.threads, "-f", file.name]
        arguments += [
            "-n",
            options.n_predict,
            "-c",
            1024,
            "--temp",
            0,
        ]
        arguments += ["--spec-type", "draft-simple", "--spec-draft-n-max", options.draft_max]
        arguments += ["--spec-draft-n-min", 0, "--spec-draft-p-min", 0]
        text = _output([options.speculative_simple, *arguments])
    tokens, seconds = decoded(text)
    yield "drafts", f"gamma {options.draft_max}", tokens, seconds


def decoded(text: str) -> tuple[int, float]:
    """Tokens and seconds of decoding, drafts included, from the lines that llama-speculative-simple ends with."""
    found = _SPEED.search(text)
    if found is None:
        raise SystemExit("llama-speculative-simple printed no speed.")
    return int(found[1]), float(found[2])


def moeedge_drafts(options: argparse.Namespace) -> Found:
    """The same answer by `moeedge bench`, with as many drafts and with as many as pay."""
    modes = f"moeedge:{options.draft_max},moeedge:auto"
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": options.prompt}) + "\n")
        file.flush()
        dataset = ["--dataset", file.name, "-n", options.n_predict, "-c", 1024]
        rows = _bench(options, "-md", options.draft, "--modes", modes, *dataset)
    for row in rows:
        lane = "gamma auto" if row["auto_gamma"] else f"gamma {row['gamma']}"
        for sample in row["samples"]:
            yield "drafts", lane, sample["decode_tokens"], sample["decode_s"]


def _bench(options: argparse.Namespace, *arguments: object) -> list[dict[str, Any]]:
    """The rows of `moeedge bench`."""
    common = ["-m", options.model, "-dev", "none", "-t", options.threads, "-r", 1, "-o", "json"]
    return list(json.loads(_output([sys.executable, "-m", "moeedge", "bench", *common, *arguments])))


def _output(command: list[object]) -> str:
    """Both outputs of a program that succeeds. Raises SystemExit with what it said."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout if "json" in command else done.stdout + done.stderr


def summary(samples: list[Sample]) -> list[dict[str, Any]]:
    """Per test and lane of ours: medians over rounds, and that of the ratio to the program that has the test."""
    rows = []
    ours = dict.fromkeys((s.test, s.lane) for s in samples if s.program == "moeedge")
    for test, lane in ours:
        theirs = {s.round: s for s in samples if s.program != "moeedge" and s.test == test}
        own = {s.round: s for s in samples if s.program == "moeedge" and (s.test, s.lane) == (test, lane)}
        common = sorted(own.keys() & theirs.keys())
        rows.append(
            {
                "test": test,
                "lane": lane,
                "program": theirs[common[0]].program,
                "program_lane": theirs[common[0]].lane,
                "rounds": len(common),
                "program_ts": statistics.median(theirs[i].speed_ts for i in common),
                "moeedge_ts": statistics.median(own[i].speed_ts for i in common),
                "ratio": statistics.median(own[i].speed_ts / theirs[i].speed_ts for i in common),
            }
        )
    return rows


def main() -> None:
    """Measures, prints the table; --out keeps the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--speculative-simple", type=Path, required=True)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path, default=paths.bundled_draft())
    parser.add_argument("--draft-max", type=int, default=4)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("--n-predict", type=int, default=128, help="tokens of the answer with drafts")
    parser.add_argument("--prompt-id", default="conversation-5", help="of the set toy")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.prompt = next(p for p in load_toy().prompts if p.id == options.prompt_id).turns[0][-1].content
    with Model.load(options.model, header_only=True) as model:
        options.text = model.render_chat([{"role": "user", "content": options.prompt}])
    lanes: list[tuple[str, Callable[[argparse.Namespace], Found]]] = [
        ("llama-bench", llama_bench),
        ("moeedge", moeedge_synthetic),
        ("llama-speculative-simple", speculative_simple),
        ("moeedge", moeedge_drafts),
    ]
    samples: list[Sample] = []
    for round_ in range(options.rounds):
        for order, (program, measure) in enumerate(rotated(lanes, round_)):
            for test, lane, tokens, seconds in measure(options):
                samples.append(Sample(program, test, lane, round_, order, tokens, seconds))
                print(f"round {round_ + 1}: {program} {test} {lane}: {samples[-1].speed_ts:.1f} t/s", file=sys.stderr)
    rows = summary(samples)
    columns = [text_column("test", "test"), text_column("program", "program")]
    columns += [text_column("its drafts", "program_lane"), text_column("our drafts", "lane")]
    columns += [Column("program t/s", "program_ts", ".1f")]
    columns += [Column("moeedge t/s", "moeedge_ts", ".1f"), Column("ratio", "ratio", ".3f")]
    print(markdown(columns, rows), end="")
    if options.out is not None:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_provenance()),
            "model": options.model.name,
            "draft": options.draft.name,
            "prompt": options.prompt,
            **{name: getattr(options, name) for name in ("draft_max", "n_prompt", "n_gen", "n_predict", "threads")},
            "version": _output([options.llama_bench, "--version"]).strip(),
            "summary": rows,
            "samples": [asdict(sample) for sample in samples],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
