"""The arguments of the views in real runs, kept so that the same rows can be shown again."""

from __future__ import annotations

import gzip
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.outputs import commands
from tests.outputs.program import run, scratch
from tests.outputs.values import hints, plain, rebuilt

FILE = Path(__file__).parent / "recorded" / "rows.json.gz"
_MOST_CALLS, _MOST_CHARACTERS = 6, 60_000
MORE = {  # formats, and screens that no other command shows
    f"bench {form}": [*commands.FAST["bench tests"], "-o", form] for form in ("text", "csv", "sql", "jsonl")
} | {
    "bench answers": [*commands.FAST["bench"], "-o", "text"],
    "validate md": ["lab", "validate", "formulas", "-o", "md"],
}


def record() -> None:
    """Runs the commands with text as their output, and keeps what their views were given."""
    from tests.outputs import walk

    kept: dict[str, list[Any]] = {}
    views: dict[Any, tuple[Any, str]] = {}
    for owner in walk.modules(walk.is_view):
        views |= {entry: (owner, f"{owner.__name__}.{name}") for name, entry in walk.functions_of(owner)}
    wrapped = {entry: _recorder(entry, owner, name, kept) for entry, (owner, name) in views.items()}
    for loaded in [each for name, each in sys.modules.items() if name.startswith("moeedge")]:
        for name, entry in list(vars(loaded).items()):
            if inspect.isfunction(entry) and entry in wrapped:
                setattr(loaded, name, wrapped[entry])
    with scratch() as folder:
        commands.write_files(folder)
        for name, arguments in {**commands.SLOW, **MORE, **commands.FAST, **commands.PLAIN}.items():
            before = {key: len(calls) for key, calls in kept.items()}
            result = run(arguments)
            shown = [key.rpartition(".")[2] for key, calls in kept.items() if len(calls) > before.get(key, 0)]
            print(f"{name}: exit {result.exit_code}, {', '.join(shown)}", flush=True)
    FILE.write_bytes(gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0))
    print(f"{len(kept)} views, {FILE.stat().st_size:,} bytes")


def _recorder(entry: Any, owner: Any, name: str, kept: dict[str, list[Any]]) -> Any:
    signature = inspect.signature(entry)

    def view(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named).arguments
        values = {key: plain(value) for key, value in bound.items() if type(value).__name__ != "Console"}
        calls = kept.setdefault(name, [])
        if len(calls) < _MOST_CALLS and values not in calls and len(json.dumps(values)) < _MOST_CHARACTERS:
            try:
                known = hints(entry, owner)
                if plain({key: rebuilt(known[key], value) for key, value in values.items()}) == values:
                    calls.append(values)
            except Exception as error:
                print(f"  {name}: {error!r}"[:200])
        return entry(*given, **named)

    return view


def calls(key: str, function: Any, owner: Any) -> Iterator[dict[str, Any]]:
    """The recorded arguments of a view."""
    known = hints(function, owner)
    for values in _load().get(key, []):
        with suppress(Exception):  # the view takes something else now: the case is missing
            yield {key: rebuilt(known[key], value) for key, value in values.items()}


@cache
def _load() -> dict[str, list[Any]]:
    return json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}  # type: ignore[no-any-return]
