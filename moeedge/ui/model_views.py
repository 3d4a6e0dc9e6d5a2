"""What `moeedge list` prints: a table for people, a list of objects for programs.

What `moeedge pull` says: what will come before it starts, and where the files lie after it.

What `moeedge devices` prints: a table for people, a list of objects for programs.

What `moeedge widen` shows: a progress bar, and the shape before and after.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import progress
from rich.console import Console
from rich.table import Table

from moeedge.hardware.devices import Entry
from moeedge.hub.listing import Listed
from moeedge.hub.pull import Missing, Wanted
from moeedge.ui.console import say, stderr_console, stdout_console, visible
from moeedge.ui.progress import Bar
from moeedge.units import format_bytes
from moeedge.widen.layout import Plan
from moeedge.widen.shape import SIZE_NAMES


def print_models(models: list[Listed], folder: Path, *, everything: bool) -> None:
    """One row per model on standard output, then what has to be known about single ones."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("here", overflow="fold")
    table.add_column("licence", overflow="fold")
    table.add_column("drafts", overflow="fold")
    for model in models:
        drafts = ", ".join(model.drafts) or ("is a draft" if model.draft_of else "")
        table.add_row(_name(model), _size(model), _here(model), model.licence, drafts)
    console = stdout_console()
    console.print(table)
    console.print()
    if everything:
        notes = {model.note: model.name for model in reversed(models) if model.note}  # once for all its types
        for note, name in reversed(notes.items()):
            console.print(f"{name}: {note}", soft_wrap=not console.is_terminal)
    if any(not model.verified for model in models):
        console.print("*: the file's name could not be confirmed when the catalog was written.")
    console.print(f"Downloads lie in {folder}.", soft_wrap=True)
    if not everything:
        console.print("moeedge list --all shows what the catalog offers; moeedge pull NAME downloads it.")


def print_models_json(models: list[Listed]) -> None:
    """A JSON list on standard output; sizes in bytes, null where not known."""
    json.dump([dataclasses.asdict(model) for model in models], sys.stdout, ensure_ascii=False, indent=2)
    sys.stdout.write("\n")


def _name(model: Listed) -> str:
    return model.name if model.verified else f"{model.name}*"


def _size(model: Listed) -> str:
    if model.size_bytes is not None:
        return format_bytes(model.size_bytes)
    return "-" if model.about_bytes is None else f"~{format_bytes(model.about_bytes)}"


def _here(model: Listed) -> str:
    if model.state == "complete":
        return "yes"
    return f"{format_bytes(model.have_bytes)} of it" if model.state == "partial" else "no"


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


_MIB = 1024 * 1024
_WIDE = 72  # columns from which there is room for all that is known of a device


def print_devices(entries: list[Entry]) -> None:
    """One row per device on standard output, then a line for each that says what it is for or why it cannot be used."""
    console = Console(highlight=False, markup=False, emoji=False)  # names and descriptions are the driver's: no markup
    wide = console.width >= _WIDE
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "type", "description") if wide else ("name",):
        table.add_column(column, overflow="fold")
    for column in ("free MiB", "total MiB") if wide else ("free MiB",):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("holds experts", no_wrap=True)
    for entry in entries:
        holds = "yes" if entry.usable else "the rest" if entry.kind == "CPU" else "no"
        about = (entry.kind, entry.description) if wide else ()
        memory = (entry.free_bytes, entry.total_bytes) if wide else (entry.free_bytes,)
        table.add_row(entry.name, *about, *map(_mib, memory), holds)
    console.print(table)
    console.print()
    for entry in entries:
        what = f"{entry.description}; " if not wide and entry.description else ""
        console.print(f"{entry.name}: {what}{entry.remark}", soft_wrap=True)  # commands in it can be copied


def print_devices_json(entries: list[Entry]) -> None:
    """A JSON list on standard output; sizes in bytes, null where not known."""
    json.dump([dataclasses.asdict(entry) for entry in entries], sys.stdout, ensure_ascii=False, indent=2)
    sys.stdout.write("\n")


def _mib(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / _MIB:.0f}"


class WidenProgress(Bar):
    """`step` fits `write`'s on_bytes."""

    def __init__(self, plan: Plan, console: Console) -> None:
        columns = (progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn())
        super().__init__("widening", (*columns, progress.TimeRemainingColumn()), console, plan.data_bytes)

    def step(self, n_bytes: int) -> None:
        """So many more bytes are written."""
        self._update(advance=n_bytes)


def print_plan(plan: Plan, out: Path | None) -> None:
    """The table on standard output, notes on standard error; out: the written file, None where nothing was written."""
    err = stderr_console()
    for note in plan.notes:
        say(err, note)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("source", "widened"):
        table.add_column(heading, justify="right", no_wrap=True)
    before, after = dataclasses.asdict(plan.source_shape), dataclasses.asdict(plan.shape)
    for name, label in SIZE_NAMES.items():
        if before[name]:
            table.add_row(label, f"{before[name]:,}", f"{after[name]:,}")
    table.add_row("feed-forward types", ", ".join(plan.source_types), ", ".join(plan.types))
    if plan.expert_bytes:
        table.add_row("bytes of experts", format_bytes(plan.source_expert_bytes), format_bytes(plan.expert_bytes))
    table.add_row("file", format_bytes(plan.source.stat().st_size), format_bytes(_file_bytes(plan, out)))
    console = stdout_console()
    console.print(table)
    console.print(visible(f"{out} is written." if out else "Nothing was written (--dry-run)."), soft_wrap=True)


def print_plan_json(plan: Plan, out: Path | None) -> None:
    """One JSON object on standard output; sizes in bytes."""
    about = {
        "source": str(plan.source),
        "out": None if out is None else str(out),
        "bytes": _file_bytes(plan, out),
        "expert_bytes": plan.expert_bytes,
        "types": plan.types,
        "source_shape": dataclasses.asdict(plan.source_shape),
        "shape": dataclasses.asdict(plan.shape),
        "notes": plan.notes,
    }
    sys.stdout.write(json.dumps(about) + "\n")


def _file_bytes(plan: Plan, out: Path | None) -> int:
    """Of the written file, or as far as its tensors tell."""
    return plan.data_bytes if out is None else out.stat().st_size
