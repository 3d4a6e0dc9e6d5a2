"""Speed of this version next to an earlier one, on a model that fits the memory: what did not change must not cost.

    git worktree add OLD COMMIT   # and build its native library: CONTRIBUTING.md
    python -m tests.benchmarks.two_versions OLD -m MODEL.gguf --out RECORD.json

A process of each version has the model open. They take turns, the first one changing: a prompt of `--prompt-tokens`
tokens, then answers to prompts of the data set `toy`, greedily. The figures are medians over all turns of the ratio
to the other version's turn right before or after it. Answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moeedge import paths
from moeedge.hardware.provenance import read_provenance

SCHEMA = "moeedge-two-versions-1"
HERE = Path(__file__).resolve().parents[2]

# runs in either version, with what both have
_WORKER = """
import json, sys, time
from pathlib import Path
from moeedge.data.datasets import load_toy
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.native.abi import Phase

model, draft, gamma, n_prefill, n_predict = sys.argv[1:]
config = EngineConfig(model=Path(model), draft=Path(draft) if draft else None, gamma=int(gamma), n_ctx=4096)
texts = [turn[-1].content for prompt in load_toy().prompts for turn in prompt.turns]
with Session.open(config) as session:
    tokens = session.model.tokenize(" ".join(texts))
    tokens = (tokens * (1 + int(n_prefill) // len(tokens)))[: int(n_prefill)]
    print(json.dumps(session.info.notes), flush=True)
    for line in sys.stdin:
        session.reset()
        start_s = time.perf_counter()
        session.target.sequences[0].prefill(tokens, logits="last")
        prefill_s = time.perf_counter() - start_s
        session.reset()
        conversation = Conversation(system="")
        conversation.ask(texts[int(line)])
        generation = session.generate(
            prompt_tokens(session.model, conversation, raw=False), n_predict=int(n_predict),
            sampling=SamplingConfig(temperature=0.0, seed=0), ignore_eos=True)
        for step in generation:
            pass
        stats = generation.stats
        found = {"prefill_s": prefill_s, "decode_s": stats.decode_s, "tokens": list(generation.tokens)}
        print(json.dumps(found), flush=True)
"""


class Version:
    """A process of one version; line by line it takes the number of a prompt and gives what it measured."""

    def __init__(self, checkout: Path, options: argparse.Namespace) -> None:
        library = checkout / "build" / "native" / "libmoeedge.so"
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        if library.exists():
            environment["MOEEDGE_LIBRARY"] = str(library)
        arguments = [
            options.model.resolve(),
            options.draft.resolve() if options.draft else "",
            options.draft_max,
            options.prompt_tokens,
            options.n_predict,
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=checkout,
        )
        self.notes = self._read()

    def turn(self, i_prompt: int) -> dict[str, Any]:
        """One prompt and one answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{i_prompt}\n")
        self._process.stdin.flush()
        return dict(self._read())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("A version ended; its message is above.")
        return json.loads(line)


def main() -> None:
    """Measures; exit code 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path, default=paths.bundled_draft())
    parser.add_argument("--draft-max", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("-n", "--n-predict", type=int, default=32)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    versions = [Version(options.old.resolve(), options), Version(HERE, options)]
    turns: list[list[dict[str, Any]]] = []
    try:
        for version in versions:
            version.turn(0)  # warms up
        for i_turn in range(options.turns):
            order = (0, 1) if i_turn % 2 == 0 else (1, 0)
            found = {index: versions[index].turn(i_turn) for index in order}
            turns.append([found[0], found[1]])
    finally:
        for version in versions:
            version.close()
    record = {
        "schema": SCHEMA,
        "environment": asdict(read_provenance()),
        "notes": [version.notes for version in versions],
        "different_answers": sum(old["tokens"] != new["tokens"] for old, new in turns),
        # speed of this version / speed of the earlier one
        "prefill_ratio": statistics.median(old["prefill_s"] / new["prefill_s"] for old, new in turns),
        "decode_ratio": statistics.median(old["decode_s"] / new["decode_s"] for old, new in turns),
        "turns": turns,
    }
    if options.out:
        options.out.write_text(json.dumps(record), encoding="utf-8")
    print(json.dumps({key: record[key] for key in ("different_answers", "prefill_ratio", "decode_ratio")}))
    raise SystemExit(1 if record["different_answers"] else 0)


if __name__ == "__main__":
    main()
