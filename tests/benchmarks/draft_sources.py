"""What sources of drafts bring and cost, side by side: tokens per step, and processor time per step and per token.

    python -m tests.benchmarks.draft_sources none models/bundled/draft.gguf HEAD.gguf --gamma 2,4,8 -o record.json

Greedy answers of the bundled target to prompts of its own kind, on one thread; sources and lengths take turns at every
prompt. Processor time does not depend on what else the machine does, but for what others leave in the caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moeedge import paths
from moeedge.data.datasets import load_dataset
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama.model import Model

SCHEMA = "moeedge-draft-sources-1"
GREEDY = SamplingConfig(temperature=0)


def measure(session: Session, prompt: list[int], gamma: int, n_predict: int) -> dict[str, Any]:
    """One answer. The first step, which reads the prompt as well, counts in prompt_s."""
    session.reset()
    session.gamma = gamma
    generation = session.generate(prompt, n_predict=n_predict, sampling=GREEDY)
    start = time.process_time()
    records = iter(generation)
    next(records, None)
    begun = time.process_time()
    steps = [len(record.tokens) for record in records]
    ended = time.process_time()
    return {
        "gamma": gamma,
        "tokens": sum(steps),
        "steps": len(steps),
        "drafted": generation.stats.drafted,
        "accepted": generation.stats.accepted,
        "prompt_s": begun - start,
        "decode_s": ended - begun,
        "answer": generation.tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="none, ngram, mtp or files")
    parser.add_argument("--model", type=Path, default=paths.bundled_target())
    parser.add_argument("--gamma", default="4,8", help="draft lengths")
    parser.add_argument("--limit", type=int, default=28, help="prompts of the toy set")
    parser.add_argument("-n", type=int, default=96, help="tokens of an answer")
    parser.add_argument("-o", type=Path, help="write all answers as JSON")
    args = parser.parse_args()
    gammas = [int(number) for number in args.gamma.split(",")]
    dataset = load_dataset("toy")
    prompts = dataset.prompts[:: max(1, len(dataset.prompts) // args.limit)][: args.limit]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        model = stack.enter_context(Model.load(args.model))
        sessions = {}
        for source in args.sources:
            draft = None if source == "none" else source if source in ("ngram", "mtp") else Path(source)
            config = EngineConfig(
                model=args.model, draft=draft, gamma=max(gammas), n_ctx=1024, n_threads=1, device="none"
            )
            sessions[source] = stack.enter_context(Session.open(config, model=model if draft != "mtp" else None))
        for prompt in prompts:
            messages = prompt.messages(0)
            tokens = model.tokenize(model.render_chat(messages))
            for source, session in sessions.items():
                for gamma in gammas if source != "none" else [0]:
                    row = measure(session, tokens, gamma, args.n)
                    rows.append({"source": Path(source).name, "category": prompt.category, **row})
    print(f"{'source':>16} gamma  accepted  tokens/step  ms/step  ms/token  prompt ms")
    for source, gamma in dict.fromkeys((row["source"], row["gamma"]) for row in rows):
        of = [row for row in rows if (row["source"], row["gamma"]) == (source, gamma)]
        total = {key: sum(row[key] for row in of) for key in ("tokens", "steps", "drafted", "accepted", "decode_s")}
        per_token_ms = 1e3 * total["decode_s"] / total["tokens"]
        print(
            f"{source:>16} {gamma:5}  {total['accepted'] / max(1, total['drafted']):8.3f}  "
            f"{total['tokens'] / total['steps']:11.2f}  {1e3 * total['decode_s'] / total['steps']:7.3f}  "
            f"{per_token_ms:8.4f}  {1e3 * statistics.median(row['prompt_s'] for row in of):9.2f}"
        )
    if args.o:
        args.o.write_text(json.dumps({"schema": SCHEMA, "model": args.model.name, "rows": rows}))


if __name__ == "__main__":
    main()
