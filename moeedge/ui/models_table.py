"""What `moeedge list` prints: a table for people, a list of objects for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from rich.table import Table

from moeedge.hardware.size import format_bytes
from moeedge.hub.listing import Listed
from moeedge.ui.console import stdout_console


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
