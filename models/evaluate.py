"""Evaluate a pair of GGUF files on held-back prompts: `python -m models.evaluate`. Exits 1 when a bar is missed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from models.generator import DOMAINS, Chat, held_back, render_prompt, score
from models.llama_runner import RoutingTap, Runner, Speculation, speculate

BUNDLED = Path(__file__).parent / "bundled"
MIN_ACCEPTANCE = 0.5
MIN_OVERLAP = 0.125  # twice k / N = 8 / 128
MAX_ANSWER_TOKENS = 160


@dataclass
class Result:
    """All figures of one evaluation; shares lie between 0 and 1."""

    gamma: int
    prompts: int = 0
    acceptance: float = 0.0
    tokens_per_step: float = 0.0
    overlap: float = 0.0  # experts shared by adjacent answer tokens, mean over layers, as a share of k
    unique_of_4: float = 0.0  # different experts of 4 consecutive tokens, relative to uniform routing
    finished: float = 0.0  # answers that ended by themselves
    right: dict[str, float] = field(default_factory=dict)  # share of chats with every turn right
    scored: dict[str, int] = field(default_factory=dict)  # chats behind that share
    by_domain_acceptance: dict[str, float] = field(default_factory=dict)


def converse(
    target: Runner, draft: Runner, chat: Chat, gamma: int, record: Speculation
) -> tuple[bool, bool, list[int]]:
    """Hold a chat, the model's own answers staying in the context: all right, all ended, the whole last text's ids."""
    messages: list[tuple[str, str]] = [("system", chat.system)] if chat.system is not None else []
    right = ended = True
    ids: list[int] = []
    for i, turn in enumerate(chat.turns):
        messages.append(("user", turn.user))
        prompt = target.encode(render_prompt(messages))
        answer = speculate(target, draft, prompt, gamma, MAX_ANSWER_TOKENS, record)
        text = target.decode_text(answer)
        right &= score(chat, i, text)
        ended &= len(answer) < MAX_ANSWER_TOKENS
        messages.append(("assistant", text))
        ids = prompt + answer
    return right, ended, ids


def shared_experts(tables: dict[int, np.ndarray]) -> float:
    """Mean share of experts that a token has in common with the one before it. tables: layer -> (n, k) ids."""
    shares = []
    for table in tables.values():
        k = table.shape[1]
        shares += [len(set(a) & set(b)) / k for a, b in zip(table[:-1].tolist(), table[1:].tolist(), strict=True)]
    return float(np.mean(shares))


def unique_ratio(tables: dict[int, np.ndarray], n_expert: int, window: int = 4) -> float:
    """Different experts in `window` consecutive tokens, divided by what uniform routing would give."""
    k = next(iter(tables.values())).shape[1]
    uniform = n_expert * (1 - (1 - k / n_expert) ** window)
    counts = [
        len(np.unique(table[i : i + window])) for table in tables.values() for i in range(len(table) - window + 1)
    ]
    return float(np.mean(counts)) / uniform if counts else float("nan")


def evaluate(target_path: Path, draft_path: Path, gamma: int, n_prompts: int, n_scored: int) -> Result:
    """`n_prompts` mixed prompts for acceptance and overlap; `n_scored` more of each domain for the scores."""
    result = Result(gamma)
    tap = RoutingTap()
    with Runner(target_path) as target, Runner(draft_path) as draft, Runner(target_path, tap=tap) as watched:
        record = Speculation()
        overlaps, uniques, ended = [], [], []
        for chat in tqdm(held_back(n_prompts), desc="acceptance and routing"):
            _, over, ids = converse(target, draft, chat, gamma, record)
            ended.append(over)
            watched.cut(0)
            watched.eval(ids)
            answer = {layer: table[-len(record.answers[-1]) :] for layer, table in tap.ids.items()}
            if len(record.answers[-1]) > 1:
                overlaps.append(shared_experts(answer))
            if len(record.answers[-1]) >= 4:
                uniques.append(unique_ratio(answer, 128))
        result.prompts = n_prompts
        result.acceptance = record.acceptance
        result.tokens_per_step = record.tokens / max(1, record.steps)
        result.overlap, result.unique_of_4 = float(np.mean(overlaps)), float(np.mean(uniques))
        result.finished = float(np.mean(ended))
        for domain in DOMAINS:
            record = Speculation()
            answers = [
                converse(target, draft, chat, gamma, record)[0]
                for chat in tqdm(held_back(n_scored, 1, domain), desc=domain)
            ]
            result.right[domain] = float(np.mean(answers))
            result.scored[domain] = len(answers)
            result.by_domain_acceptance[domain] = record.acceptance
    return result


def table(result: Result) -> str:
    """The figures as a Markdown table, with the bars."""
    lines = [
        "| measure | value | bar |",
        "| --- | --- | --- |",
        f"| acceptance rate, gamma {result.gamma}, {result.prompts} prompts | {result.acceptance:.3f} | "
        f">= {MIN_ACCEPTANCE} |",
        f"| tokens per verification step | {result.tokens_per_step:.2f} | |",
        f"| adjacent-token expert overlap | {result.overlap:.3f} | >= {MIN_OVERLAP} |",
        f"| unique experts of 4 tokens / uniform | {result.unique_of_4:.3f} | |",
        f"| answers that ended by themselves | {result.finished:.2f} | |",
    ]
    lines += ["", "| domain | chats | every turn right | acceptance rate |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {domain} | {result.scored[domain]} | {share:.2f} | {result.by_domain_acceptance[domain]:.2f} |"
        for domain, share in result.right.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", type=Path, default=BUNDLED / "target.gguf")
    parser.add_argument("--draft", type=Path, default=BUNDLED / "draft.gguf")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=40, help="mixed held-back prompts for acceptance and overlap")
    parser.add_argument("--scored", type=int, default=100, help="held-back prompts of each domain for the scores")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    result = evaluate(args.target, args.draft, args.gamma, args.prompts, args.scored)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    missed = [
        name
        for name, value, bar in (
            ("acceptance", result.acceptance, MIN_ACCEPTANCE),
            ("overlap", result.overlap, MIN_OVERLAP),
        )
        if not value >= bar
    ]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
