"""Processor time of drawing the tokens of one verification: plain, with llama.cpp's samplers, with a grammar.

    python -m tests.benchmarks.sampler_cost [--vocab 151936] [--drafts 4] [--steps 200]

Logits are random, drafts are the tokens that the greedy sampler accepts. "refused" has rows whose likely tokens the
grammar refuses but for digits, which costs a look at the entire vocabulary; "text" refuses every second of them. Last
line: JSON, microseconds per verification.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from moeedge.engine.grammar import new_sampler
from moeedge.engine.sampling import Candidates
from moeedge.engine.types import SamplingConfig
from moeedge.llama.model import Model
from tests.support.tiny import make_tiny

TEXT = 'root ::= "[" [a-z ]* "]"'
CASES = {
    "greedy": SamplingConfig(temperature=0),
    "greedy, grammar": SamplingConfig(temperature=0, grammar=TEXT),
    "greedy, grammar, refused": SamplingConfig(temperature=0, grammar='root ::= "[" [0-9]*'),
    "greedy, grammar, text": SamplingConfig(temperature=0, grammar='root ::= "[" [^a-m]*'),
    "sampled": SamplingConfig(seed=1),
    "sampled, grammar": SamplingConfig(seed=1, grammar=TEXT),
    "sampled, grammar, refused": SamplingConfig(seed=1, grammar='root ::= "[" [0-9]*'),
    "sampled, grammar, text": SamplingConfig(seed=1, grammar='root ::= "[" [^a-m]*'),
    "sampled, typical 0.9": SamplingConfig(seed=1, typical_p=0.9),
    "sampled, dry": SamplingConfig(seed=1, dry_multiplier=0.8),
}


def main() -> None:
    """Prints a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    n = options.drafts + 1
    rows = rng.normal(0, 2, (options.steps, n, options.vocab)).astype(np.float32)
    letters = np.arange(ord("a"), ord("z") + 1)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny("qwen3moe", Path(folder), vocab=options.vocab, layers=1)
        with Model.load(path, header_only=True) as model:
            for token in letters:
                rows[:, :, token] += 12.0
            for name, config in CASES.items():
                steps = (
                    rows if name.endswith("grammar") or "grammar" not in name else rows[: max(options.steps // 10, 5)]
                )
                found[name] = _measure(model, config, steps)
                print(f"{name:28} {found[name]:10,.0f} us per verification of {n} tokens")
    print(json.dumps({"vocab": options.vocab, "n_tokens": n, "us": found}))


def _measure(model: Model, config: SamplingConfig, rows: np.ndarray) -> float:
    """Mean processor time in microseconds."""
    sampler = new_sampler(config, model)
    history = list(b"a text before the answer ") * 3
    if config.grammar:
        first = np.zeros((1, rows.shape[2]), dtype=np.float32)
        first[0, ord("[")] = 30
        history.append(sampler.accept(first, [], [], history)[1])
    total = 0.0
    for row in rows:
        drafts = row[:-1].argmax(axis=1).tolist()
        certain = [Candidates.certain(token) for token in drafts]
        start = time.process_time()
        sampler.accept(row, drafts, certain, history)
        total += time.process_time() - start
    return total / len(rows) * 1e6


if __name__ == "__main__":
    main()
