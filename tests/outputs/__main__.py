"""Behaviour of two versions of moeedge side by side.

    python -m tests.outputs record [--tree ROOT] [--part NAME] [FOLDER]     records the program of a tree
    python -m tests.outputs compare [--part NAME] [OLD [NEW]]              two records, or a record and this program
    python -m tests.outputs speed OLD_PYTHON NEW_PYTHON [PAIRS]            decoding speed, interleaved

`recorded/` holds the behaviour of 0.21.0; changes.py lists what has changed on purpose since. Where that list is long,
record anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> int:
    """Runs a command; exit code 1 where two records differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.outputs", usage=__doc__)
    parser.add_argument("command", choices=("record", "compare", "speed"))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--tree", type=Path, help="the folder whose moeedge runs")
    parser.add_argument("--part", action="append", help="a part of the record; may be repeated")
    given = parser.parse_intermixed_args()
    if given.command == "speed":
        from tests.outputs import speed

        return speed.main(given.words)
    if given.tree is not None:  # before anything of moeedge is imported
        sys.path.insert(0, str(given.tree.resolve()))
    from tests.outputs import compare

    folders = [Path(word) for word in given.words]
    parts = given.part or list(compare.PARTS)
    if given.command == "record":
        if "rows" in parts:  # of real runs, for the screens
            from tests.outputs import rows

            rows.record()
        for part in [part for part in parts if part != "rows"]:
            begin = time.perf_counter()
            cases = compare.compute(part)
            size = compare.save(folders[0] if folders else compare.RECORDED, part, cases)
            print(f"{part}: {len(cases):,} cases, {size:,} bytes, {time.perf_counter() - begin:.0f} s", flush=True)
        return 0
    comparison, n_found = compare.Comparison(), 0
    if not compare.rounds_as_recorded():
        print("This processor rounds otherwise than the recordings' (AVX2): a model's values are compared by type.")
    for part in parts:
        old = compare.load(folders[0] if folders else compare.RECORDED, part)
        new = compare.load(folders[1], part) if len(folders) > 1 else compare.compute(part, old)
        found = list(comparison.differences(part, old, new))
        n_found += len(found)
        by_case: dict[str, list[str]] = {}
        for line in found:
            by_case.setdefault(": ".join(line.split(": ", 2)[:2]), []).append(line)
        differ = f"{len(found):,} differences in {len(by_case):,} cases"
        print(f"{part}: {differ if found else 'equal'}", flush=True)
        for lines in by_case.values():
            print(f"  {len(lines):4} {lines[0]}")
    if given.part is None and (unused := comparison.unused()):
        print("Rules of changes.py that nothing needed:", *unused, sep="\n  ")
    return 1 if n_found else 0


if __name__ == "__main__":
    sys.exit(main())
