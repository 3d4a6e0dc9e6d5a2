"""What `moeedge pull` says: what will come before it starts, and where the files lie after it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from moeedge.hardware.size import format_bytes
from moeedge.hub.pull import Missing, Wanted
from moeedge.ui.console import stdout_console


def tell_plan(wanted: Sequence[Wanted], missing: Sequence[Missing], tell: Callable[[str], None]) -> None:
    """A line per model: what it is, under which licence, and how much of it has to come."""
    for model in wanted:
        licence = f", licence {model.licence}" if model.licence else ""
        if model.local is not None:
            tell(f"{model.role} {model.name}{licence}: here already.")
            continue
        total, have = _amounts(model, missing)
        rest = f", {format_bytes(have)} of it here" if have else ""
        tell(f"{model.role} {model.name}{licence}: {format_bytes(total)} from {model.repo}{rest}.")
        if not model.verified:
            tell(f"{model.name}: the catalog's facts about these files are not confirmed; only the hub's hash counts.")
        if any(one.file.sha256 is None and one.sha256 is None for one in _of(model, missing)):
            tell(f"{model.name}: the hub names no SHA-256; only the size can be checked.")


def print_files(wanted: Sequence[Wanted], missing: Sequence[Missing]) -> None:
    """On standard output: the path of each model, or what would be downloaded for it."""
    console = stdout_console()
    for model in wanted:
        if model.local is not None:
            console.print(f"{model.role} {model.local}", soft_wrap=True)
            continue
        for one in _of(model, missing):
            size = format_bytes(one.file.size_bytes)
            have = f", {format_bytes(one.have_bytes)} here" if one.have_bytes else ""
            console.print(f"{model.role} hf:{one.file.repo}:{one.file.path} {size}{have}", soft_wrap=True)


def print_files_json(wanted: Sequence[Wanted], missing: Sequence[Missing]) -> None:
    """A JSON list on standard output: one object for each model."""
    models = []
    for model in wanted:
        files = [
            {
                "file": one.file.path,
                "commit": one.file.commit,
                "size_bytes": one.file.size_bytes,
                "sha256": one.file.sha256 or one.sha256,
                "have_bytes": one.have_bytes,
            }
            for one in _of(model, missing)
        ]
        models.append(
            {
                "role": model.role,
                "name": model.name,
                "licence": model.licence,
                "repo": model.repo,
                "revision": model.revision,
                "path": None if model.local is None else str(model.local),
                "missing": files,
            }
        )
    json.dump(models, sys.stdout, ensure_ascii=False, indent=2)
    sys.stdout.write("\n")


def _of(model: Wanted, missing: Sequence[Missing]) -> list[Missing]:
    names = {file.path for file in model.files}
    return [one for one in missing if one.file.repo == model.repo and one.file.path in names and model.local is None]


def _amounts(model: Wanted, missing: Sequence[Missing]) -> tuple[int, int]:
    """Bytes of the model, and how many of them are here."""
    parts = _of(model, missing)
    return sum(one.file.size_bytes for one in parts), sum(one.have_bytes for one in parts)
