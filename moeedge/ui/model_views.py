"""The results of `moeedge list`, `pull` and `show`: tables, labels and values for people, JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeedge.ui.console import say, show_figures, visible
from moeedge.ui.figures import Figure
from moeedge.ui.tables import Column, json_text, print_table, text_column
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.hub.catalog import Choice, Starter
    from moeedge.hub.local import ListedModel
    from moeedge.hub.pull import MissingFile, WantedModel
    from moeedge.planning.estimate import FittingModel, FittingModels
    from moeedge.planning.model_card import ModelCard


def _model_size(model: ListedModel) -> str | None:
    if model.size_bytes is not None:
        return format_bytes(model.size_bytes)
    return None if model.about_bytes is None else f"~{format_bytes(model.about_bytes)}"


def _model_state(model: ListedModel) -> str:
    if model.state == "complete":
        return "yes"
    return f"{format_bytes(model.have_bytes)} of it" if model.state == "partial" else "no"


_MODEL_COLUMNS = (
    text_column("name", lambda model: model.name if model.verified else f"{model.name}*"),
    Column("size", _model_size),
    text_column("here", _model_state, fold=True),
    text_column("licence", "licence", fold=True),
    text_column("drafts", lambda model: ", ".join(model.drafts) or ("is a draft" if model.draft_of else ""), fold=True),
)


def print_models(
    models: list[ListedModel], folder: Path, console: Console, *, everything: bool, starter: Starter | None = None
) -> None:
    """One row per model, then the notes on single models. starter: to be offered where no real model is here."""
    print_table(console, _MODEL_COLUMNS, models)
    console.print()
    if everything:
        notes = {model.note: model.name for model in reversed(models) if model.note}  # once for all its types
        for note, name in reversed(notes.items()):
            console.print(f"{name}: {note}", soft_wrap=not console.is_terminal)
    if any(not model.verified for model in models):
        console.print("*: the file's name could not be confirmed when the catalog was written.")
    console.print(f"Downloads are stored in {folder}.", soft_wrap=True)
    if not everything:
        console.print("moeedge list --all shows what the catalog offers; moeedge pull NAME downloads it.")
    if starter is not None and len(models) <= 1:  # the toy pair
        size = "" if starter.size_bytes is None else f", {format_bytes(starter.size_bytes)}"
        console.print(f"A first real model{size}: {starter.command}", soft_wrap=True)


_PLACES = {
    "GPU": "GPU: entirely on the GPU.",
    "GPU and RAM": "RAM + GPU: experts in RAM, that share of them on the GPU as well; all other weights on the GPU.",
    "RAM": "RAM: in RAM, computed by the CPU.",
    "disk": "disk: larger than RAM; experts are read from the file as needed, slower the fewer have room in RAM.",
}


def _fit(row: FittingModel) -> str:
    if row.map.place == "GPU and RAM":
        return f"RAM + GPU {row.map.device_ratio:.0%}"
    if row.map.place == "disk" and row.map.ram_ratio < 1:
        return f"disk, RAM {row.map.ram_ratio:.0%}"
    return row.map.place


def print_fits(found: FittingModels, console: Console, *, everything: bool) -> None:
    """One row per model that runs; then what the places mean."""
    name, size, here, licence = (_of_model(column) for column in _MODEL_COLUMNS[:4])
    columns = [name, size, here, text_column("runs in", _fit), licence]
    if found.rows:
        print_table(console, columns, found.rows)
        console.print()
    vram = f"a GPU with {format_bytes(found.memory.vram_bytes)} and " if found.memory.vram_bytes else ""
    ram = f"{format_bytes(found.memory.ram_bytes)} of RAM free"
    say(console, f"With {vram}{ram}.{_left_out(found)}", style="")
    for place in dict.fromkeys(row.map.place for row in found.rows):
        say(console, _PLACES[place], style="")
    say(console, "Estimates for a context of 8,192 tokens; moeedge plan -m NAME is exact.", style="")
    if not everything:
        say(console, "moeedge list --all --fits SIZE includes what the catalog offers.", style="")


def _of_model(column: Column) -> Column:
    """A column of the list's rows for the rows of --fits."""
    return replace(column, value=lambda row: column.read(row.model))


def _left_out(found: FittingModels) -> str:
    if not found.rows and found.n_others:
        return " No model of this list runs with that."
    one = " One more is too large." * found.n_others
    return f" {found.n_others} more are too large." if found.n_others > 1 else one


def fits_json(found: FittingModels) -> str:
    """A JSON list of the models that run, the best placed first; `fit` has ratios from 0 to 1."""
    rows = []
    for row in found.rows:
        fit: dict[str, Any] = {"place": row.map.place, "n_ctx": row.map.n_ctx, "estimated": True}
        fit |= {"device_ratio": row.map.device_ratio, "ram_ratio": row.map.ram_ratio}
        rows.append(dataclasses.asdict(row.model) | {"fit": fit})
    return json_text(rows)


def notify_downloads(
    wanted: Sequence[WantedModel], missing: Sequence[MissingFile], notify: Callable[[str], None]
) -> None:
    """A sentence per model: its name, its licence, and how much of it is downloaded."""
    for model in wanted:
        licence = f", licence {model.licence}" if model.licence else ""
        if model.local is not None:
            notify(f"{model.role} {model.name}{licence}: here already.")
            continue
        files = _missing_files(model, missing)
        total, have = sum(file.file.size_bytes for file in files), sum(file.have_bytes for file in files)
        rest = f", {format_bytes(have)} of it here" if have else ""
        notify(f"{model.role} {model.name}{licence}: {format_bytes(total)} from {model.repo}{rest}.")
        if not model.verified:
            notify(
                f"{model.name}: the catalog's facts about these files are not confirmed; only the hub's hash counts."
            )
        if any(file.file.sha256 is None and file.sha256 is None for file in files):
            notify(f"{model.name}: the hub names no SHA-256; only the size can be checked.")


def print_files(wanted: Sequence[WantedModel], missing: Sequence[MissingFile], console: Console) -> None:
    """The path of each model, or the files that a download would bring."""
    for model in wanted:
        if model.local is not None:
            console.print(f"{model.role} {model.local}", soft_wrap=True)
            continue
        for file in _missing_files(model, missing):
            have = f", {format_bytes(file.have_bytes)} here" if file.have_bytes else ""
            place = f"hf:{file.file.repo}:{file.file.path}"
            console.print(f"{model.role} {place} {format_bytes(file.file.size_bytes)}{have}", soft_wrap=True)


def files_json(wanted: Sequence[WantedModel], missing: Sequence[MissingFile]) -> str:
    """A JSON list with one object per model."""
    return json_text(
        [
            {
                "role": model.role,
                "name": model.name,
                "licence": model.licence,
                "repo": model.repo,
                "revision": model.revision,
                "path": None if model.local is None else str(model.local),
                "missing": [
                    {
                        "file": file.file.path,
                        "commit": file.file.commit,
                        "size_bytes": file.file.size_bytes,
                        "sha256": file.file.sha256 or file.sha256,
                        "have_bytes": file.have_bytes,
                    }
                    for file in _missing_files(model, missing)
                ],
            }
            for model in wanted
        ]
    )


def _missing_files(model: WantedModel, missing: Sequence[MissingFile]) -> list[MissingFile]:
    if model.local is not None:
        return []
    paths = {file.path for file in model.files}
    return [file for file in missing if file.file.repo == model.repo and file.file.path in paths]


def card_rows(card: ModelCard) -> list[Figure]:
    """Everything that is known, in words."""
    facts = card.facts
    rows = [
        Figure("file", visible(facts.file)),
        Figure("name", visible(card.name)),
        Figure("architecture", facts.architecture),
        Figure("weights", f"{_count(facts.n_weights)}, {format_bytes(facts.file_bytes)}"),
        Figure("quantization", f"{card.quantization}, {facts.bits_per_weight:.2f} bits per weight"),
        Figure("context", f"{facts.n_ctx_train:,} tokens at most"),
        Figure("layers", f"{facts.n_layers}, {card.n_embd:,} values wide"),
        Figure("experts", _experts(card)),
        Figure("read per token", format_bytes(facts.active_bytes)),
        Figure("memory", facts.memory),
        Figure("drafts", _drafts(card)),
        Figure("chat template", f"{len(card.template):,} characters (--template)" if card.template else "none"),
        Figure("licence", _licence(card)),
    ]
    return [row for row in rows if row.value]


def print_card(card: ModelCard, console: Console) -> None:
    """A line per fact."""
    show_figures(console, card_rows(card))
    if card.facts.missing_bytes:
        console.print(f"Incomplete here: {format_bytes(card.facts.missing_bytes)} of its weights are missing.")


def card_json(card: ModelCard) -> str:
    """One object; sizes in bytes."""
    return json_text(dataclasses.asdict(card) | {"bits_per_weight": card.facts.bits_per_weight})


def print_entry(choice: Choice, reason: str, console: Console) -> None:
    """What the catalog knows of a model whose header cannot be read. reason: why not."""
    entry, variant, shape = choice.entry, choice.variant, choice.entry.shape
    size = variant.size_bytes or variant.about_bytes
    console.print(f"{visible(reason)} From the catalog:")
    rows = [
        Figure("name", choice.name),
        Figure("about", visible(entry.about)),
        Figure("file", f"hf:{variant.repo}:{variant.files[0].path}" if variant.files else str(variant.local)),
        Figure("size", "" if size is None else f"{'' if variant.size_bytes else 'about '}{format_bytes(size)}"),
        Figure("weights", "" if shape is None else _count(shape.weights)),
        Figure("context", "" if shape is None or shape.context is None else f"{shape.context:,} tokens at most"),
        Figure("drafts", ", ".join(entry.drafts)),
        Figure("note", visible(entry.note)),
        Figure("licence", visible(entry.licence)),
    ]
    show_figures(console, [row for row in rows if row.value])


def entry_json(choice: Choice, reason: str) -> str:
    """One object of the catalog's facts, with the reason why there is no header."""
    entry = dataclasses.asdict(choice.entry)
    del entry["variants"]
    variant = dataclasses.asdict(choice.variant) | {"size_bytes": choice.variant.size_bytes}
    variant["local"] = None if choice.variant.local is None else str(choice.variant.local)
    return json_text({"from_catalog": True, "reason": reason, **entry, "variant": variant})


def _experts(card: ModelCard) -> str:
    facts = card.facts
    if not facts.n_experts:
        return "none: a dense model"
    size = format_bytes(facts.expert_bytes)
    return (
        f"{facts.n_experts} per layer in {facts.n_expert_layers} layers, {facts.experts_per_token}; {size} each, "
        f"{format_bytes(facts.experts_bytes)} together"
    )


def _drafts(card: ModelCard) -> str:
    found = ["its own head (-md mtp)"] if card.has_head else []
    return ", ".join([*found, *card.drafts])


def _licence(card: ModelCard) -> str:
    if not card.licence:
        return "not named in the file"
    return visible(card.licence) + (" (by the catalog)" if card.licence_source == "catalog" else "")


def _count(n: int) -> str:
    """A number of weights as models are named: 30.5 billion."""
    for factor, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if n >= factor:
            return f"{n / factor:.4g} {word}"
    return f"{n:,}"
