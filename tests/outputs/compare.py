"""Recordings of two versions side by side, place by place, but for what changes.py lists."""

from __future__ import annotations

import gzip
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.outputs import changes, choices, commands, options, tokens, walk
from tests.outputs.values import flat

RECORDED = Path(__file__).parent / "recorded"
# name -> its cases in the default suite, and those of -m slow; None: the same
PARTS: dict[str, Any] = {
    "screens": walk.screens,
    "views": walk.views,
    "functions": walk.functions,
    "choices": choices.cases,
    "tokens": tokens.fast,
    "tokens-slow": tokens.slow,
    "commands": commands.fast,
    "options": options.fast,
    "options-slow": options.slow,
    "commands-slow": commands.slow,
}
SOFT = ("views", "functions")  # parts of which only results of equal arguments are compared
# measured, of this machine, or a wording: compared by their types alone
_MEASURED = re.compile(
    r"(.*\.)?(\w*(_s|_ts|_us|_ns|_ms|_per_s|_share|_median|_stddev|_samples|_low|_high|hit|_rate_pairs|_rate_experts)|"
    r"(\w*load|best_stock|ratio|speed_up|uploads|evictions|hit_rate|limit|steps_us|spread|partition|transfer|pairs|wait|read_bytes)\w*|"
    r"n_samples\w*|speed|seconds|started|date|time|commit|dirty|version|llama_cpp_version|cpu|os|python|build|environment|where|path|"
    r"seed|advice|notes?|remark|others|disturbed|scatter|total_bytes|"
    r"free_bytes|used_bytes|\w*vram\w*_bytes|bytes_moved|bytes_per_token|"
    r"cancelled|blocks|slots_used|tau|lookahead(_gain)?|draft_choice|cache_choice|samples)(\..*)?|"
    r"(contexts\.\d+|plan)\.places\.1\..*bytes"
)
_VERSION = re.compile(r"\b0\.\d+\.\d+\b")
_TOLERANCE = 1e-6  # relative, of floats: compilers and processors add in other orders


def load(folder: Path, part: str) -> dict[str, Any]:
    """The cases of a part. Raises FileNotFoundError."""
    return dict(json.loads(gzip.decompress((folder / f"{part}.json.gz").read_bytes())))


def save(folder: Path, part: str, cases: dict[str, Any]) -> int:
    """Writes the cases of a part; returns the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(json.dumps(cases, separators=(",", ":")).encode(), mtime=0)
    (folder / f"{part}.json.gz").write_bytes(packed)
    return len(packed)


def compute(part: str, recorded: Iterable[str] | None = None) -> dict[str, Any]:
    """The cases of a part by the present program; recorded: the names that there are."""
    with warnings.catch_warnings():  # of divisions by zero, which a test suite may take for errors
        warnings.simplefilter("ignore")
        names = None if recorded is None else set(recorded)
        cases = dict(PARTS[part](names) if part.startswith((*SOFT, "options")) else PARTS[part]())
    return json.loads(json.dumps(cases))  # type: ignore[no-any-return]


def rounds_as_recorded() -> bool:
    """Whether this processor's kernels round as those of the recordings, which were made with AVX2."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return False
    return "avx2" in flags and "avx512f" not in flags


_OF_THE_CATALOG = "commands: list"  # no model runs: the same with all kernels


class Comparison:
    """Compares parts, and counts which rules of changes.py were needed.

    Where kernels round otherwise than in the recordings, a model's tokens and what follows from them are compared by
    their types alone.
    """

    def __init__(self) -> None:
        self.used: set[str] = set()
        self._rounds_alike = rounds_as_recorded()

    def differences(self, part: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
        """A line for each place that is missing or new, and for each value that differs."""
        if part in SOFT:
            both = {case: old[case].keys() & new[case].keys() for case in old.keys() & new.keys()}
            old, new = ({case: {key: cases[case][key] for key in both[case]} for case in both} for cases in (old, new))
        before, after = ({f"{part}: {key}": value for key, value in _places(cases).items()} for cases in (old, new))
        is_of_model = part.startswith(("commands", "tokens"))
        is_measured = {
            place: (is_of_model and not self._rounds_alike and not place.startswith(_OF_THE_CATALOG))
            or (part.startswith("commands") and _is_measured(place))
            for place in before
        }
        for place in sorted(before.keys() | after.keys()):
            if place not in after:
                what = f"{before[place]!r} is missing"
            elif place not in before:
                what = f"{after[place]!r} is new"
            elif not _equal(before[place], after[place], measured=is_measured[place]):
                what = f"{before[place]!r} became {after[place]!r}"
            else:
                continue
            if not self._is_listed(place):
                yield f"{place}: {what[:200]}"

    def unused(self) -> list[str]:
        """The rules that no difference needed."""
        return [pattern for pattern, _ in changes.REMOVED if pattern not in self.used]

    def _is_listed(self, place: str) -> bool:
        for pattern, _ in changes.REMOVED:
            if re.match(pattern, place):
                self.used.add(pattern)
                return True
        return False


def _places(cases: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}: {key}": value for name, case in cases.items() for key, value in flat(case).items()}


def _is_measured(place: str) -> bool:
    return _MEASURED.fullmatch(place.rsplit(": ", 1)[1]) is not None


def _equal(old: Any, new: Any, *, measured: bool) -> bool:
    if isinstance(old, (int, float)) and isinstance(new, (int, float)) and not isinstance(old, bool):
        return measured or math.isclose(old, new, rel_tol=_TOLERANCE, abs_tol=1e-12)
    if measured:
        return type(old) is type(new) or None in (old, new)
    if isinstance(old, str) and isinstance(new, str):
        old, new = _VERSION.sub("", old), _VERSION.sub("", new)
    return bool(old == new)
