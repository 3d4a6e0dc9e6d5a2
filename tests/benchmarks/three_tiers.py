"""Experts on a device, in RAM and in the file: bytes read if RAM also keeps what is on the device, and if it does not.

    python -m tests.benchmarks.three_tiers --out RECORD.json

The bundled pair on the emulated device, greedy, with an empty cache first; counts only, so that no other work on the
machine changes them, except for the moment at which an upload arrives. `inclusive`: the order of eviction in RAM is the
policy's alone. `exclusive`, the engine's: experts on the device go first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moeedge import paths
from moeedge.data.datasets import load_toy
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.hardware.provenance import read_provenance
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.ram_tier import Tier

SCHEMA = "moeedge-three-tiers-1"
SIZES = ((0.2, 0.3), (0.2, 0.6), (0.4, 0.4))  # shares of the experts: device, RAM
GREEDY = SamplingConfig(temperature=0.0, seed=0)


@contextmanager
def order_of(tiers: str) -> Iterator[None]:
    """Lets RAM evict as `tiers` says."""
    exclusive = Tier.observe

    def observe(self: Tier, observations: Any, tokens: Any, _on_device: Any = None) -> None:
        exclusive(self, observations, tokens)

    if tiers == "inclusive":
        Tier.observe = observe  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tier.observe = exclusive  # type: ignore[method-assign]


def count(device_ratio: float, ram_ratio: float, gamma: int, tiers: str, n_prompts: int) -> dict[str, Any]:
    """The counts of one session."""
    target = paths.bundled_target()
    tensors, _ = expert_tensors(target)
    config = EngineConfig(
        model=target,
        draft=paths.bundled_draft() if gamma else None,
        gamma=gamma,
        n_ctx=1024,
        n_threads=1,
        device="emulated:threads=1",
        ram=int(ram_ratio * expert_bytes(tensors)),
        placement=PlacementConfig(cache_ratio=device_ratio, calibrate=False, warm_start=False),
    )
    with order_of(tiers), Session.open(config) as session:
        for prompt in load_toy().prompts[:n_prompts]:
            session.reset()
            conversation = Conversation(system="")
            conversation.ask(prompt.turns[0][-1].content)
            tokens = prompt_tokens(session.model, conversation)
            for _ in session.generate(tokens, n_predict=48, sampling=GREEDY, ignore_eos=True):
                pass
        stats = session.placement_stats()
        assert stats is not None and stats.ram is not None and session.placement is not None
        assert session.placement.ram is not None
        return {
            "gamma": gamma,
            "device_ratio": device_ratio,
            "ram_ratio": ram_ratio,
            "tiers": tiers,
            "device_hit_rate": stats.hit_rate_pairs,
            "ram_hit_rate": stats.ram.hit_rate_pairs,
            "device_uploads": stats.uploads,
            "ram_loads": stats.ram.uploads,
            "file_bytes": session.placement.ram.cache.reader().bytes_read,
            "tokens": stats.tokens,
        }


def main() -> None:
    """Writes the record and prints a line per session."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for gamma in (0, 4):
        for sizes in SIZES:
            for tiers in ("exclusive", "inclusive"):
                rows.append(count(*sizes, gamma, tiers, options.prompts))
                print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        record = {"schema": SCHEMA, "environment": asdict(read_provenance()), "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
