"""The draft length auto next to fixed ones: tokens/s, interleaved within one session.

    python -m tests.benchmarks.draft_length --out RECORD.json
    moeedge lab widen WIDE.gguf --embd 512 --ff 192 --type q8_0
    python -m tests.benchmarks.draft_length -m WIDE.gguf --ram 1GiB --disk-rate 300MB/s --out RECORD.json

Each prompt of the data set `toy` is answered greedily with every length, in an order that rotates from prompt to
prompt, so that drift of the machine and what the expert cache holds affect all alike. An answer per length comes before
them and is not counted. auto keeps what it has learned from answer to answer, as in a chat. --ram loads the experts
from the file, --disk-rate limits how fast: what loading costs is then far above the noise of the machine. --cpu-time
counts the process's processor time instead of the time of day, for auto as well: for busy machines, with -t 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from moeedge import paths
from moeedge.data.datasets import load_toy
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.hardware.provenance import read_provenance
from moeedge.native.cache import CacheConfig
from moeedge.scheduler import opening
from moeedge.scheduler.config import PlacementConfig
from moeedge.units import parse_rate, parse_size

SCHEMA = "moeedge-draft-length-1"
GREEDY = SamplingConfig(temperature=0.0, seed=0)
Length = int | Literal["auto"]


def answer(session: Session, length: Length, text: str, n_predict: int) -> dict[str, Any]:
    """One answer from an empty context, with its figures."""
    conversation = Conversation(system="")
    conversation.ask(text)
    session.reset()
    session.gamma, governor = (16, session.governor) if length == "auto" else (length, None)
    kept, session.governor = session.governor, governor
    generation = session.generate(
        prompt_tokens(session.model, conversation, raw=False), n_predict=n_predict, sampling=GREEDY, ignore_eos=True
    )
    for _ in generation:
        pass
    session.governor = kept
    stats = generation.stats
    return {
        "length": length,
        "tokens": generation.tokens,
        "decode_tokens": stats.generated_tokens - 1,
        "decode_s": stats.decode_s,
        "drafts_per_step": stats.drafts_per_step,
        "acceptance_rate": stats.acceptance_rate,
        "choice": None if stats.choice is None else asdict(stats.choice),
    }


def summary(answers: list[dict[str, Any]], reference: Length = "auto") -> list[dict[str, Any]]:
    """Per length: tokens/s over all answers, and the median over the prompts of auto's speed over it."""
    by_length: dict[Length, list[dict[str, Any]]] = {}
    for found in answers:
        by_length.setdefault(found["length"], []).append(found)
    rows = []
    for length, mine in by_length.items():
        ratios = [
            (auto["decode_tokens"] / auto["decode_s"]) / (other["decode_tokens"] / other["decode_s"])
            for auto, other in zip(by_length[reference], mine, strict=False)
        ]
        rows.append(
            {
                "length": length,
                "tg_ts": sum(a["decode_tokens"] for a in mine) / sum(a["decode_s"] for a in mine),
                "auto_over_it": statistics.median(ratios),
                "drafts_per_step": statistics.mean(a["drafts_per_step"] for a in mine),
            }
        )
    return rows


def regret(rows: list[dict[str, Any]]) -> float:
    """By which auto takes longer for all answers than the best of the fixed lengths in hindsight."""
    speeds = {row["length"]: row["tg_ts"] for row in rows}
    return float(max(speed for length, speed in speeds.items() if length != "auto") / speeds["auto"] - 1)


def main() -> None:
    """Measures and prints the table; --out also keeps the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=paths.bundled_target())
    parser.add_argument("-md", "--draft", type=Path, default=paths.bundled_draft())
    parser.add_argument("--lengths", default="0,1,2,4,8,auto")
    parser.add_argument("--n-prompts", type=int, default=7)
    parser.add_argument("-n", "--n-predict", type=int, default=96)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--ram", type=parse_size)
    parser.add_argument("--disk-rate", type=parse_rate, default=0.0)
    parser.add_argument("--policy", default="lfu")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.cpu_time:
        time.perf_counter = time.process_time
    lengths: list[Length] = [part if part == "auto" else int(part) for part in options.lengths.split(",")]
    if options.disk_rate:
        opening.CacheConfig = partial(CacheConfig, disk_bytes_per_s=options.disk_rate)  # type: ignore[misc]
    config = EngineConfig(
        model=options.model,
        draft=options.draft,
        auto_gamma=True,
        n_ctx=1024,
        n_threads=options.threads,
        device="none",
        ram=options.ram or "off",
        placement=PlacementConfig(policy=options.policy, calibrate=False),
    )
    prompts = load_toy().prompts
    texts = [prompt.turns[0][-1].content for prompt in prompts[:: max(1, len(prompts) // options.n_prompts)]]
    answers: list[dict[str, Any]] = []
    with Session.open(config) as session:
        for length in lengths:
            answer(session, length, texts[-1], options.n_predict)
        for i, text in enumerate(texts[: options.n_prompts]):
            turn = i % len(lengths)
            for length in [*lengths[turn:], *lengths[:turn]]:
                answers.append(answer(session, length, text, options.n_predict))
                found = answers[-1]
                print(i, length, f"{found['decode_tokens'] / found['decode_s']:.2f}", found["choice"], flush=True)
        notes = session.info.notes
    differ = sum(a["tokens"] != answers[i - i % len(lengths)]["tokens"] for i, a in enumerate(answers))
    rows = summary(answers)
    for row in rows:
        print(json.dumps(row))
    print("answers that differ:", differ, "regret:", regret(rows))
    if options.out:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_provenance()),
            "model": options.model.name,
            "ram_bytes": options.ram,
            "disk_bytes_per_s": options.disk_rate or None,
            "notes": notes,
            "different_answers": differ,
            "cpu_time": options.cpu_time,
            "regret": regret(rows),
            "summary": rows,
            "answers": answers,
        }
        options.out.write_text(json.dumps(record, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
