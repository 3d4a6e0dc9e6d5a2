"""Write the prompt set "toy", prompts that the bundled pair never saw: `python -m models.toy`.

`python -m models.toy --prompts 630 --seed more -o more.jsonl` makes another, for longer measurements.
`python -m models.toy --calibration` writes the set by which expert budgets are chosen; it has no prompt of "toy", and
`--without FILE` keeps its prompts out of other sets. `--text` writes the text "toy", complete chats for perplexity.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from models.generator import DOMAINS, Chat, held_back, render_chat

N_PROMPTS = 42  # six of every domain
DATA = Path(__file__).parent.parent / "moeedge" / "data"
OUT = DATA / "toy.jsonl"
CALIBRATION = DATA / "calibration.jsonl"
N_CALIBRATION = 72  # twelve of every domain but code, whose answers are programs to run
CALIBRATION_SEED = "calibration"
TEXT_OUT = OUT.with_suffix(".txt")
N_TEXT_CHATS = 28  # four of every domain

Turns = tuple[str, ...]  # what the user says in a chat


def rows(n_prompts: int = N_PROMPTS, seed: str = "toy") -> list[dict[str, Any]]:
    """The set in the form of docs/datasets.md, domain by domain; system messages are left out."""
    return rows_of(held_back(n_prompts, seed), in_turn=False)


def calibration_rows() -> list[dict[str, Any]]:
    """The calibration set: domains in turn, no programs, and no prompt of the set "toy"."""
    known = prompts_in([OUT])
    domains = [domain for domain in DOMAINS if domain != "code"]
    fresh = (fresh_chats(N_CALIBRATION // len(domains), CALIBRATION_SEED, known, domain) for domain in domains)
    return rows_of([chat for group in zip(*fresh, strict=True) for chat in group], in_turn=True)


def fresh_chats(n: int, seed: str, known: Collection[Turns], domain: str | None = None) -> list[Chat]:
    """`n` held-back chats whose prompts are not in `known`; fewer where a domain has no more."""
    chats = held_back(n + len(known), seed, domain)
    return [chat for chat in chats if tuple(turn.user for turn in chat.turns) not in known][:n]


def rows_of(chats: Iterable[Chat], *, in_turn: bool) -> list[dict[str, Any]]:
    """A row per chat, as in `rows`."""
    seen: Counter[str] = Counter()
    out = []
    for chat in chats if in_turn else sorted(chats, key=lambda chat: list(DOMAINS).index(chat.domain)):
        seen[chat.domain] += 1
        out.append(
            {
                "id": f"{chat.domain}-{seen[chat.domain]}",
                "category": chat.domain,
                "turns": [turn.user for turn in chat.turns],
                "references": [turn.reference.to_row() for turn in chat.turns],
            }
        )
    return out


def prompts_in(files: Iterable[Path]) -> set[Turns]:
    """What the user says in each chat of these sets."""
    return {tuple(json.loads(line)["turns"]) for file in files for line in file.read_text().splitlines()}


def text(n_chats: int = N_TEXT_CHATS, seed: str = "toy-text") -> str:
    """Complete chats with the right answers, domains in turn: the text on which perplexity is measured."""
    return "".join(render_chat(chat) for chat in held_back(n_chats, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts that the bundled pair never saw.")
    parser.add_argument("--prompts", type=int, default=N_PROMPTS, help="how many, of all domains in turn")
    parser.add_argument("--seed", default="toy", help="another text makes other prompts")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--without", type=Path, action="append", default=[], help="a set whose prompts are left out")
    parser.add_argument("--calibration", action="store_true", help="the set by which expert budgets are chosen")
    parser.add_argument("--text", action="store_true", help=f"write {TEXT_OUT.name}, complete chats")
    options = parser.parse_args()
    if options.text:
        (options.out or TEXT_OUT).write_text(text())
        return
    if options.calibration:
        out, made = options.out or CALIBRATION, calibration_rows()
    else:
        chats = fresh_chats(options.prompts, options.seed, prompts_in(options.without))
        out, made = options.out or OUT, rows_of(chats, in_turn=False)
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made))
    print(f"{out}: {len(made)} prompts")


if __name__ == "__main__":
    main()
