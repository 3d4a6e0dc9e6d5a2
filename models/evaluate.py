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


def _within(name: str, value: float, least: float | None, most: float | None, spec: str) -> Bar:
    """The demand that a figure is in a range; None: no limit. spec: how the figure is written."""
    limits = f"{least:g} to {most:g}" if least is not None and most is not None else ""
    demand = limits or (f"<= {most:g}" if least is None else f">= {least:g}")
    kept = (least is None or value >= least) and (most is None or value <= most)
    return Bar(name, format(value, spec), demand, kept)


def bars(result: Result) -> list[Bar]:
    """Every demand with what was measured."""
    worst = min(result.domains, key=lambda name: result.domains[name].right)
    own = {name: domain.covers[name] for name, domain in result.domains.items()}
    other = {
        name: float(np.mean([share for seen, share in domain.covers.items() if seen != name] or [0.0]))
        for name, domain in result.domains.items()
    }
    covers = f"{np.mean(list(own.values())):.2f} / {np.mean(list(other.values())):.2f}"
    told = truthful(result.who)
    hot = f"a domain's hottest {HOT_SHARE:.0%} of experts cover its own picks / those of others"
    return [
        _within("answers right, mean of the domains", result.mean_right, MIN_RIGHT_MEAN, None, ".3f"),
        _within(f"answers right, worst domain ({worst})", result.domains[worst].right, MIN_RIGHT_EACH, None, ".2f"),
        _within(f"acceptance rate, gamma {result.gamma}", result.acceptance, MIN_ACCEPTANCE, None, ".3f"),
        _within("expert overlap of adjacent tokens", result.overlap, *OVERLAP, ".3f"),
        _within("unique experts of 4 tokens / uniform", result.unique_of_4, None, MAX_UNIQUE_OF_4, ".3f"),
        Bar(hot, covers, "own more, in every domain", all(own[name] > other[name] for name in own)),
        _within("size of the two files, MB", result.file_bytes / 1e6, None, MAX_FILE_BYTES / 1e6, ".1f"),
        Bar(f'tells the truth to "{WHO}"', "yes" if told else result.who, "yes", told),
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
