"""The exit code of `moeedge bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeedge.cli.common import EXIT_FAILURE, print_error

if TYPE_CHECKING:
    from moeedge.bench.records import BenchRow


def exit_code(rows: Sequence[BenchRow]) -> int:
    """1, and a message on standard error, if a mode's output differs from the reference by more than a near-tie."""
    wrong = [row for row in rows if row.output is not None and not row.output.passed]
    if not wrong:
        return 0
    names = ", ".join(dict.fromkeys(row.label for row in wrong))
    n = sum(len(row.output.different) for row in wrong if row.output is not None)
    print_error(f"The output of {names} differs from stock-ar's at {n} position(s) by more than a near-tie.")
    return EXIT_FAILURE
