"""Where concepts are defined or computed: python -m tests.outputs places [ROOT]

Each concept has a pattern of the lines that define or compute it, in any version of the tree; lines that only read it
are none. A second place of a concept is worth a look.
"""

from __future__ import annotations

import re
from pathlib import Path

CONCEPTS = {
    "acceptance_rate, accepted over drafted tokens": (
        r"(?<!un)accepted[\w.()\[\]\" ]*\)? / (int\()?[\w.()]*drafted"
        r"|quotient\(\"accepted\", \"drafted\"|quotient\(sum\(s\.accepted"
    ),
    "the option --draft-max": r"^\s*\"--draft-max,|^\s*\"?(\* )?--draft-max, ",
    "the option --draft-max where a command has another default, or a list": (
        r"^\s*\"?(\* )?--draft-max [A-Z]+  Tokens per draft|parse_numbers\(.*--draft-max"
    ),
    "the range of --draft-max": (
        r"raise ValueError\(f?\"(gamma \()?--draft-max|require\(.*--draft-max|--draft-max\", least"
        r"|\(self\.gamma >= 0|gamma \(--draft-max\) must"
    ),
    "pair hits, pairs that the device computed over all pairs": (
        r"pairs_hit(\.sum\(\)\))? / |pairs_hit for .*\) / |quotient\([^)]*\"pairs_hit\"|sums\.pairs_hit / "
    ),
    "whether a whole model fits": (
        r"def (model_fits|fit_whole|layers_fit|_fits_whole)\("
        r"|on_gpu = .*<=|weights\w* \+ .*kv\w* .*<=|_bytes \+ \w+_bytes( \+ \w+_bytes)* <= "
    ),
    "colours of plots": r"\"#[0-9a-f]{6}\", \"#|\(\"#[0-9a-f]{6}\", \"|_SD, _AR|\"tab:\w+\"|: \"#[0-9a-f]{6}\"",
}


def main(root: Path) -> int:
    """Prints the places of each concept."""
    paths = sorted((root / "moeedge").rglob("*.py"))
    for name, pattern in CONCEPTS.items():
        found = [
            f"  {path.relative_to(root)}:{number}: {line.strip()}"
            for path in paths
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if re.search(pattern, line)
        ]
        print(f"{name}: {len(found)}", *found, sep="\n")
    return 0
