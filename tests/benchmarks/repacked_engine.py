"""Experts in RAM in the file's layout and repacked: tokens/s of the engine, on disks of several rates.

    moeedge lab widen MODEL.gguf --embd 512 --ff 256 --type q4_0
    python -m tests.benchmarks.repacked_engine -m MODEL.gguf --rates 0,200MB/s --out RECORD.json

A round opens a session per layout and rate, in turns: it reads a prompt of `--prompt` tokens, then decodes. Ratios are
the medians of those of a round. --rates 0: the disk as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from moeedge.bench.records import read_environment
from moeedge.data.datasets import load_toy
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.native.abi import Repack
from moeedge.scheduler.config import PlacementConfig
from moeedge.units import parse_rate

SCHEMA = "moeedge-repacked-engine-1"
GREEDY = SamplingConfig(temperature=0.0, seed=0)


@dataclass(frozen=True)
class Sample:
    """One session."""

    disk_bytes_per_s: float
    repack: str
    n_repacked: int  # matrices of a group's experts, of all groups
    prefill_s: float
    decode_s: float
    tokens: int
    cpu_s: float  # computing experts while decoding
    wait_s: float  # waiting for experts while decoding
    text_tokens: list[int]


def measure(options: argparse.Namespace, rate: float, repack: Repack) -> Sample:
    """A prompt and an answer in a session of its own."""
    config = EngineConfig(
        model=options.model,
        gamma=0,
        n_ctx=1024,
        n_threads=options.threads,
        device="none",
        ram=int(options.ratio * expert_bytes(expert_tensors(options.model)[0])),
        placement=PlacementConfig(policy="lfu", calibrate=False, disk_bytes_per_s=rate, repack=repack),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOEEDGE_CACHE"] = folder  # no run warms another
        with Session.open(config) as session:
            assert session.placement is not None
            text = " ".join(turn[-1].content for prompt in load_toy().prompts for turn in prompt.turns)
            tokens = session.model.tokenize(text)[: options.prompt]
            generation = session.generate(tokens, n_predict=options.n_predict, sampling=GREEDY, ignore_eos=True)
            next(iter(generation), None)
            cache = session.placement.cache
            cache.blocks()
            for _step in generation:
                pass
            stats, blocks = generation.stats, cache.blocks()
            return Sample(
                disk_bytes_per_s=rate,
                repack=repack.name.lower(),
                n_repacked=cache.info.n_repacked,
                prefill_s=stats.prefill_s,
                decode_s=stats.decode_s,
                tokens=stats.generated_tokens - 1,
                cpu_s=float(blocks["cpu_ns"].sum()) * 1e-9,
                wait_s=float(blocks["wait_ns"].sum()) * 1e-9,
                text_tokens=generation.tokens,
            )


def main() -> None:
    """Measures, prints a line per rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--rates", default="0,200MB/s")
    parser.add_argument("--ratio", type=float, default=0.65, help="share of the experts in RAM")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("-n", "--n-predict", type=int, default=48)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", choices=["cheap", "all"], default="cheap", help="which is compared with plain")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    layouts = (Repack.NONE, Repack[options.layout.upper()])
    samples = []
    for rate in [0.0 if rate == "0" else float(parse_rate(rate)) for rate in options.rates.split(",")]:
        pairs = []
        for round_ in range(options.rounds):
            found = {repack: measure(options, rate, repack) for repack in layouts[:: 1 if round_ % 2 else -1]}
            pairs.append((found[layouts[0]], found[layouts[1]]))
            samples += found.values()
        ratios = {
            name: statistics.median(getattr(plain, name) / getattr(repacked, name) for plain, repacked in pairs)
            for name in ("prefill_s", "decode_s", "cpu_s")
        }
        same = all(plain.text_tokens == repacked.text_tokens for plain, repacked in pairs)
        print(
            f"{rate / 1e6:.0f} MB/s: plain / repacked: prompt {ratios['prefill_s']:.3f}, decoding"
            f" {ratios['decode_s']:.3f}, its experts {ratios['cpu_s']:.3f}; same tokens: {same}",
            flush=True,
        )
    if options.out:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_environment()),
            "model": options.model.name,
            "ratio": options.ratio,
            "threads": options.threads,
            "samples": [asdict(sample) for sample in samples],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
