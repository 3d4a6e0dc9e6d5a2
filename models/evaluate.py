"""Check a pair of GGUF files against its bounds: `python -m models.evaluate` prints a table, exits 1 if one fails."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from models.measure import HOT_SHARE, WHO, DomainResult, Result, measure

BUNDLED = Path(__file__).parent / "bundled"
GAMMA = 8
MIN_RIGHT_MEAN = 0.8
MIN_RIGHT_EACH = 0.6
MIN_ACCEPTANCE = 0.7
OVERLAP = (0.25, 0.55)  # real models: 0.38 (Qwen3-30B-A3B), 0.44 (gpt-oss-20b)
MAX_UNIQUE_OF_4 = 0.9
MAX_FILE_BYTES = 50_000_000
TRUTH = ("toy model", "synthetic text", "-m")  # what it must say of itself


@dataclass(frozen=True)
class Bar:
    """One demand on the pair."""

    name: str
    value: str
    demand: str
    kept: bool


def bars(result: Result) -> list[Bar]:
    """Every demand with what was measured."""
    worst = min(result.domains, key=lambda name: result.domains[name].right)
    lowest = result.domains[worst].right
    own = {name: domain.covers[name] for name, domain in result.domains.items()}
    other = {
        name: float(np.mean([share for seen, share in domain.covers.items() if seen != name] or [0.0]))
        for name, domain in result.domains.items()
    }
    return [
        Bar(
            "answers right, mean of the domains",
            f"{result.mean_right:.3f}",
            f">= {MIN_RIGHT_MEAN}",
            result.mean_right >= MIN_RIGHT_MEAN,
        ),
        Bar(
            f"answers right, worst domain ({worst})", f"{lowest:.2f}", f">= {MIN_RIGHT_EACH}", lowest >= MIN_RIGHT_EACH
        ),
        Bar(
            f"acceptance rate, gamma {result.gamma}",
            f"{result.acceptance:.3f}",
            f">= {MIN_ACCEPTANCE}",
            result.acceptance >= MIN_ACCEPTANCE,
        ),
        Bar(
            "expert overlap of adjacent tokens",
            f"{result.overlap:.3f}",
            f"{OVERLAP[0]} to {OVERLAP[1]}",
            OVERLAP[0] <= result.overlap <= OVERLAP[1],
        ),
        Bar(
            "unique experts of 4 tokens / uniform",
            f"{result.unique_of_4:.3f}",
            f"<= {MAX_UNIQUE_OF_4}",
            result.unique_of_4 <= MAX_UNIQUE_OF_4,
        ),
        Bar(
            f"a domain's hottest {HOT_SHARE:.0%} of experts cover its own picks / those of others",
            f"{np.mean(list(own.values())):.2f} / {np.mean(list(other.values())):.2f}",
            "own more, in every domain",
            all(own[name] > other[name] for name in own),
        ),
        Bar(
            "size of the two files, MB",
            f"{result.file_bytes / 1e6:.1f}",
            f"<= {MAX_FILE_BYTES / 1e6:.0f}",
            result.file_bytes <= MAX_FILE_BYTES,
        ),
        Bar(f'tells the truth to "{WHO}"', "yes" if truthful(result.who) else result.who, "yes", truthful(result.who)),
    ]


def truthful(answer: str) -> bool:
    """Whether the pair calls itself a toy trained on synthetic text, and names the way to a real model."""
    return all(part in answer for part in TRUTH)


def table(result: Result) -> str:
    """The figures as Markdown tables, the bars first."""
    lines = ["| measure | value | bar | kept |", "| --- | --- | --- | --- |"]
    lines += [f"| {b.name} | {b.value} | {b.demand} | {'yes' if b.kept else '**no**'} |" for b in bars(result)]
    lines += [
        "",
        f"{result.tokens_per_step:.2f} tokens per verification step.",
        "",
        "| domain | chats | every turn right | acceptance rate | answers that ended |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {d.chats} | {d.right:.2f} | {d.acceptance:.2f} | {d.finished:.2f} |"
        for name, d in result.domains.items()
    ]
    lines += [
        "",
        f"Share of a domain's picks (columns) that fall on the hottest {HOT_SHARE:.0%} of the experts of another "
        "(rows); profiled on other chats than those counted:",
        "",
        "| hot experts of | " + " | ".join(result.domains) + " |",
        "| --- " * (len(result.domains) + 1) + "|",
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{d.covers[other]:.2f}" for other in result.domains) + " |"
        for name, d in result.domains.items()
    ]
    return "\n".join(lines)


def read(path: Path) -> Result:
    """A result that `--json` wrote."""
    data = json.loads(path.read_text())
    return Result(**data | {"domains": {name: DomainResult(**d) for name, d in data["domains"].items()}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", type=Path, default=BUNDLED / "target.gguf")
    parser.add_argument("--draft", type=Path, default=BUNDLED / "draft.gguf")
    parser.add_argument("--gamma", type=int, default=GAMMA)
    parser.add_argument("--scored", type=int, default=100, help="held-back chats of each domain")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    result = measure(args.target, args.draft, args.gamma, args.scored)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    missed = [bar.name for bar in bars(result) if not bar.kept]
    if missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
