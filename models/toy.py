"""Write the prompt set "toy", prompts that the bundled pair never saw: `python -m models.toy`.

`python -m models.toy --prompts 630 --seed more --in-turn -o more.jsonl` makes another, for longer measurements.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from models.generator import DOMAINS, held_back

N_PROMPTS = 42  # six of every domain
OUT = Path(__file__).parent.parent / "moeedge" / "data" / "toy.jsonl"


def rows(n_prompts: int = N_PROMPTS, seed: str = "toy", *, in_turn: bool = False) -> list[dict[str, Any]]:
    """The set in the form of docs/datasets.md, domain by domain or in turn; system messages are left out."""
    seen: Counter[str] = Counter()
    out = []
    chats = held_back(n_prompts, seed)
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts that the bundled pair never saw.")
    parser.add_argument("--prompts", type=int, default=N_PROMPTS, help="how many, of all domains in turn")
    parser.add_argument("--seed", default="toy", help="another text makes other prompts")
    parser.add_argument("-o", "--out", type=Path, default=OUT)
    parser.add_argument("--in-turn", action="store_true", help="domains take turns, not one after the other")
    options = parser.parse_args()
    made = rows(options.prompts, options.seed, in_turn=options.in_turn)
    options.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made))
    print(f"{options.out}: {len(made)} prompts")


if __name__ == "__main__":
    main()
