"""A model larger than RAM: tokens/s and bytes read, next to stock llama.cpp on the mapped file.

    moeedge lab make-model BIG.gguf --like gpt-oss-20b --quant q8_0
    moeedge lab trace import gptoss20b_decode.npz --experts 32 --out ROUTING.npz
    python -m tests.benchmarks.beyond_ram -m BIG.gguf --routing ROUTING.npz -n 512 --ballast 10GiB --out RECORD.json

Every run is a process of its own that begins with an empty page cache (dropping it needs root) and without kept
activations. A round has all arms in turn, in rotated order and with the same environment. An arm may have its own
threads and micro-batch: stock@t4, stock@ub2048.

With --routing a run decodes a random text under recorded routing, at another place of the recording in each round, and
drafts are accepted at the rate --accept; the speed of each quarter of the answer tells filling from the steady state.
Without it a run answers prompts of the data set `toy`, greedily, one after the other in an empty context, and answers
must equal those of the first arm, near-ties included: the kernels are the same. --prompt-tokens measures prompts of
other lengths instead. Bytes are those that the process has read from the disk (/proc/self/io). --ballast: memory that
another process holds locked meanwhile, so that the file is a larger multiple of what is left. The disk's limit is
measured around each run (random reads past the page cache). Wall time on a virtual disk varies: look at the ratios.
An interrupted run goes on with the same command: --out has every run that has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from moeedge import paths
from moeedge.bench.samples import disk_bytes_read
from moeedge.data.datasets import load_toy
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.drafts import Script
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.hardware.provenance import Provenance, read_provenance
from moeedge.native.abi import Phase
from moeedge.paths import replace_file
from moeedge.run import rotated
from moeedge.scheduler import disk
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.governor import GAMMA_MAX
from moeedge.units import parse_size
from tests.support.ballast import Ballast

SCHEMA = "moeedge-beyond-ram-3"
QUARTERS = 4  # of an answer under recorded routing: the first fills the memory, the last is the steady state
ARMS = ("stock", "stock-sd", "moeedge", "moeedge-sd")  # and -auto: drafts as measured
GREEDY = SamplingConfig(temperature=0.0, seed=0)


def read_bytes() -> int:
    """What this process has read from the disk so far."""
    return disk_bytes_read() or 0


def config_of(arm: str, options: argparse.Namespace) -> EngineConfig:
    arm, *own = arm.split("@")
    sizes = {part.rstrip("0123456789"): int(part.lstrip("tub")) for part in own}
    drafts = arm.endswith(("-sd", "-auto"))
    is_stock = arm.startswith("stock")
    ram: int | Literal["auto", "off"] = "off" if is_stock else options.ram
    return EngineConfig(
        model=options.model,
        draft=options.draft if drafts else None,
        gamma=GAMMA_MAX if arm.endswith("-auto") else options.draft_max if drafts else 0,
        auto_gamma=arm.endswith("-auto"),
        n_ctx=options.ctx_size,
        n_threads=sizes.get("t", options.threads),
        n_ubatch=sizes.get("ub", options.ubatch_size),
        routing=options.routing,
        device="none",
        ram=ram,
        placement=PlacementConfig(policy=options.policy, calibrate=False),
        mode="stock" if is_stock else "moeedge",
    )


def run_arm(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    start_s, start_bytes = time.perf_counter(), read_bytes()
    with Session.open(config_of(arm, options)) as session:
        record: dict[str, Any] = {
            "arm": arm,
            "load_s": time.perf_counter() - start_s,
            "load_bytes": read_bytes() - start_bytes,
            "notes": session.info.notes,
            "slots": session.info.cache_slots,
            "pool_bytes": session.info.pool_bytes,
            "answers": [],
            "prompts": [],
        }
        if options.prompt_tokens:
            record["prompts"] = [_prefill(session, n) for n in options.prompt_tokens]
        elif options.routing:
            record["answers"] = [_forced_answer(session, options)]
        else:
            prompts = [prompt.turns[0][-1].content for prompt in load_toy().prompts[: options.n_prompts]]
            record["answers"] = [_answer(session, text, options.n_predict) for text in prompts]
        stats = session.placement_stats()
        record["cache"] = None if stats is None else asdict(stats)
        record["reader"] = None if session.placement is None else asdict(session.placement.cache.reader())
    return record


def _forced_answer(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """An answer under recorded routing, with the place of the recording and of its boundaries."""
    n = options.n_before + options.n_predict + 2 * GAMMA_MAX
    script = Script.draw(session.model, n, options.accept, "calibrated", options.round)
    session.follow(script, options.round)
    answer = _generate(session, script.text[: options.n_before].tolist(), options.n_predict)
    routing = session.target.routing
    assert routing is not None
    boundaries = [position - options.n_before for position in routing.recorded.boundaries(routing.offset, n)]
    return answer | {"boundaries": boundaries, "scaling": routing.recorded.scaling}


def _answer(session: Session, text: str, n_predict: int) -> dict[str, Any]:
    conversation = Conversation(system="")
    conversation.ask(text)
    return _generate(session, prompt_tokens(session.model, conversation, raw=False), n_predict)


def _generate(session: Session, prompt: list[int], n_predict: int) -> dict[str, Any]:
    session.reset()
    generation = session.generate(prompt, n_predict=n_predict, sampling=GREEDY, ignore_eos=True)
    before_bytes, prefill_bytes = read_bytes(), 0
    quarters: list[dict[str, float]] = []
    start_s, start_bytes, n_done, n_all = time.perf_counter(), before_bytes, 0, 0
    for n, step in enumerate(generation):
        if n == 0:
            prefill_bytes = read_bytes() - before_bytes
            start_s, start_bytes = time.perf_counter(), before_bytes + prefill_bytes
            continue
        n_all += len(step.tokens)
        if n_all >= (len(quarters) + 1) * (n_predict - 1) // QUARTERS:
            now_s, now_bytes = time.perf_counter(), read_bytes()
            quarters.append({"tokens": n_all - n_done, "seconds": now_s - start_s, "bytes": now_bytes - start_bytes})
            start_s, start_bytes, n_done = now_s, now_bytes, n_all
    stats = generation.stats
    return {
        "quarters": quarters,
        "tokens": generation.tokens,
        "prompt_tokens": stats.prefill_tokens,
        "prefill_s": stats.prefill_s,
        "prefill_bytes": prefill_bytes,
        "decode_s": stats.decode_s,
        "decode_tokens": stats.generated_tokens - 1,
        "decode_bytes": read_bytes() - before_bytes - prefill_bytes,
        "steps": stats.steps,
        "acceptance_rate": stats.acceptance_rate,
        "experts_per_verification": stats.experts_per_verification,
    }


def _prefill(session: Session, n_tokens: int) -> dict[str, Any]:
    """A prompt of so many tokens, of the set's texts one after the other."""
    text = " ".join(turn[-1].content for prompt in load_toy().prompts for turn in prompt.turns)
    tokens = session.model.tokenize(text)
    tokens = (tokens * (1 + n_tokens // len(tokens)))[:n_tokens]
    session.reset()
    start_s, start_bytes = time.perf_counter(), read_bytes()
    session.target.sequences[0].prefill(tokens, logits="last")
    record = {"tokens": n_tokens, "prefill_s": time.perf_counter() - start_s, "bytes": read_bytes() - start_bytes}
    logits = session.target.decode([tokens[0]], phase=Phase.DECODE)
    return record | {"best": int(logits[-1].argmax()), "best_logit": float(logits[-1].max())}


def drop_caches(files: list[Path]) -> str:
    """Empties the page cache, or at least drops the files' pages; returns what was done."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError:
        for file in files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "pages of the model's file dropped"
    return "page cache dropped"


def disk_limit(model: Path) -> float:
    """Bytes per second of random reads of 1 MiB, four at a time: the best of two sizes."""
    rates = disk.measure(model, depths=(4,), pieces_bytes=(1 << 20,), read_s=0.7).rates
    return max(rate.bytes_per_s for rate in rates)


def decode_ts(run: dict[str, Any]) -> float:
    """Decoded tokens per second, over all answers of a run."""
    answers = run["answers"]
    return float(sum(a["decode_tokens"] for a in answers) / sum(a["decode_s"] for a in answers))


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        mine = [run for run in runs if run["arm"] == arm]
        row: dict[str, Any] = {"arm": arm, "runs": len(mine), "load_s": statistics.median(r["load_s"] for r in mine)}
        if mine[0]["answers"]:
            tokens = sum(a["decode_tokens"] for a in mine[0]["answers"])
            row["decode_ts"] = statistics.median(map(decode_ts, mine))
            row["decode_bytes_per_token"] = statistics.median(
                sum(a["decode_bytes"] for a in run["answers"]) / tokens for run in mine
            )
            quarters = [run["answers"][-1]["quarters"] for run in mine]
            row["quarters_ts"] = [
                statistics.median(own[i]["tokens"] / own[i]["seconds"] for own in quarters)
                for i in range(min(map(len, quarters)))
            ]
            row["first_prefill_s"] = statistics.median(run["answers"][0]["prefill_s"] for run in mine)
        if mine[0]["prompts"]:  # in their order: the first one finds an empty cache
            row["prompts"] = [
                {"tokens": prompt["tokens"], "prefill_s": statistics.median(r["prompts"][i]["prefill_s"] for r in mine)}
                for i, prompt in enumerate(mine[0]["prompts"])
            ]
        caches = [run["cache"] for run in mine if run["cache"]]
        if caches:
            row["hit_rate_pairs"] = statistics.median(c["pairs_hit"] / max(1, c["pairs"]) for c in caches)
            row["wait_share"] = statistics.median(
                c["wait_s"] / max(1e-9, c["wait_s"] + c["cpu_s"] + c["partition_s"]) for c in caches
            )
            row["read_share_of_limit"] = statistics.median(
                run["cache"]["wait_bytes"]
                / max(1e-9, run["cache"]["wait_s"])
                / statistics.mean(run["disk_limits_bytes_per_s"])
                for run in mine
                if run["cache"]
            )
            row["disk_bytes_per_s"] = statistics.median(c["bytes_moved"] / max(1e-9, c["transfer_s"]) for c in caches)
        rows.append(row)
    return rows


def check_answers(runs: list[dict[str, Any]]) -> int:
    """How many answers differ from those of the first run."""
    first = runs[0]["answers"]
    return sum(
        mine["tokens"] != theirs["tokens"] for run in runs for mine, theirs in zip(run["answers"], first, strict=True)
    )


def run_in_process(arm: str, turn: int, given: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """One run of a round in a process of its own, between two measurements of the disk."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOEEDGE_CACHE"] = folder
        limits = [disk_limit(options.model)]
        command = [sys.executable, "-m", "tests.benchmarks.beyond_ram", *given, "--run", arm, "--round", str(turn)]
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | {"MOEEDGE_CACHE": empty}
            environment["GOMP_SPINCOUNT"] = "1000"  # as `moeedge chat` has it
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            raise SystemExit(f"{arm} failed: {done.stderr[-2000:]}")
        limits.append(disk_limit(options.model))
    run: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
    return run | {"round": turn, "disk_limits_bytes_per_s": limits}


def _file_name(argument: str) -> str:
    """An argument without the folders of a path."""
    return Path(argument).name if argument.startswith("/") else argument


def main(arguments: list[str] | None = None) -> None:
    """Runs the arms in turn, or one arm in this process (--run)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path, default=paths.bundled_draft())
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--n-prompts", type=int, default=4)
    parser.add_argument("-n", "--n-predict", type=int, default=48)
    parser.add_argument("--draft-max", type=int, default=4)
    parser.add_argument("-c", "--ctx-size", type=int, default=2560)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    parser.add_argument("--ram", type=lambda text: text if text == "auto" else parse_size(text), default="auto")
    parser.add_argument("--policy", default="lfu")
    parser.add_argument("--prompt-tokens", type=lambda text: [int(part) for part in text.split(",")], default=[])
    parser.add_argument("--ballast", type=parse_size, default=0)
    parser.add_argument("--routing", type=Path)
    parser.add_argument("--accept", type=float, default=0.7)
    parser.add_argument("--n-before", type=int, default=32, help="tokens before an answer under recorded routing")
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.run:
        print(json.dumps(run_arm(options.run, options)))
        return
    command = f"python -m tests.benchmarks.beyond_ram {' '.join(map(_file_name, given))}"
    for arm in options.arms.split(","):
        if not re.fullmatch(r"(stock|moeedge)(-sd|-auto)?(@(t|ub)\d+)*", arm):
            parser.error(f"unknown arm {arm}")
    runs: list[dict[str, Any]] = []
    dropped = ""
    if options.out and options.out.is_file():
        kept, now = json.loads(options.out.read_text(encoding="utf-8")), asdict(_environment(options))
        names = ("version", "commit", "cpu", "model_header_sha256", "trace_sha256")
        if kept["command"] != command or any(kept["environment"][name] != now[name] for name in names):
            parser.error(f"{options.out} is the record of another command, version, machine or model")
        runs, dropped = kept["runs"], kept["page_cache"]
    done = {(run["arm"], run["round"]) for run in runs}
    with Ballast(options.ballast):
        for turn in range(options.rounds):
            for arm in rotated(options.arms.split(","), turn):
                if (arm, turn) in done:
                    continue
                dropped = drop_caches([options.model])
                runs.append(run_in_process(arm, turn, given, options))
                print(json.dumps(summary(runs[-1:])[0]), file=sys.stderr, flush=True)
                write(options, command, dropped, runs)
    record = write(options, command, dropped, runs)
    print(json.dumps({"different_answers": record["different_answers"], "summary": record["summary"]}, indent=2))


def _environment(options: argparse.Namespace) -> Provenance:
    return read_provenance(options.model, trace=options.routing)


def write(options: argparse.Namespace, command: str, dropped: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of these runs, also in the file --out."""
    record = {
        "schema": SCHEMA,
        "command": command,
        "environment": asdict(_environment(options)),
        "page_cache": dropped,
        "ballast_bytes": options.ballast,
        "model_bytes": options.model.stat().st_size,
        "different_answers": None if options.routing else check_answers(runs),
        "summary": summary(runs),
        "runs": runs,
    }
    if options.out:
        with replace_file(options.out) as path:
            path.write_text(json.dumps(record, default=str), encoding="utf-8")
    return record


if __name__ == "__main__":
    main()
