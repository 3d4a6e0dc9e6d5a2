"""Write the prompt set "toy", prompts that the bundled pair never saw: `python -m models.toy`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from models.generator import DOMAINS, held_back

N_PROMPTS = 42  # six of every domain
OUT = Path(__file__).parent.parent / "moeedge" / "data" / "toy.jsonl"


def rows() -> list[dict[str, Any]]:
    """The set in the form of docs/datasets.md; system messages are left out."""
    seen: Counter[str] = Counter()
    out = []
    for chat in sorted(held_back(N_PROMPTS, "toy"), key=lambda chat: list(DOMAINS).index(chat.domain)):
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
    OUT.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows()))
    print(f"{OUT}: {len(rows())} prompts")


if __name__ == "__main__":
    main()
