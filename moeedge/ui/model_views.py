"""The results of `moeedge list`, `pull` and `show`: tables, labels and values for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.ui.console import say, show_figures, visible
from moeedge.ui.figures import FigureRow, known_figures
from moeedge.ui.tables import Column, json_text, print_table, text_column
from moeedge.units import format_bytes, format_weights

if TYPE_CHECKING:
    from moeedge.hub.catalog import Choice, Starter
    from moeedge.hub.local import ListedModel
    from moeedge.hub.pull import WantedModel
    from moeedge.hub.remote import RemoteFile
    from moeedge.planning.estimate import FittingModel, FittingModels
    from moeedge.planning.headers import ModelCard


def _model_size(model: ListedModel) -> str | None:
    n_bytes = model.about_bytes if model.size_bytes is None else model.size_bytes
    return None if n_bytes is None else f"{'~' if model.size_bytes is None else ''}{format_bytes(n_bytes)}"


_HERE = {"complete": "yes", "partial": "", "absent": "no"}
_MODEL_COLUMNS = (
    text_column("name", lambda model: model.name if model.verified else f"{model.name}*"),
    Column("size", _model_size),
    text_column("here", lambda model: _HERE[model.state] or f"{format_bytes(model.have_bytes)} of it", fold=True),
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
    """Its place, and the share of the experts there."""
    if row.map.place == "disk" and row.map.ram_ratio < 1:
        return f"disk, RAM {row.map.ram_ratio:.0%}"
    return f"RAM + GPU {row.map.device_ratio:.0%}" if row.map.place == "GPU and RAM" else row.map.place


def print_fits(found: FittingModels, console: Console, *, everything: bool) -> None:
    """One row per model that runs; then what the places mean."""
    columns = [
        replace(each, value=partial(lambda column, row: column.read(row.model), each)) for each in _MODEL_COLUMNS[:4]
    ]
    columns.insert(3, text_column("runs in", _fit))
    memory, too_large = found.memory, "No model of this list runs with that."
    vram = f"a GPU with {format_bytes(memory.vram_bytes)} and " if memory.vram_bytes else ""
    if found.rows:
        print_table(console, columns, found.rows)
        console.print()
        too_large = f"{found.n_others} more are too large." if found.n_others > 1 else "One more is too large."
    others = f" {too_large}" if found.n_others else ""
    say(console, f"With {vram}{format_bytes(memory.ram_bytes)} of RAM free.{others}", style="")
    for place in dict.fromkeys(row.map.place for row in found.rows):
        say(console, _PLACES[place], style="")
    say(console, "Estimates for a context of 8,192 tokens; moeedge plan -m NAME is exact.", style="")
    if not everything:
        say(console, "moeedge list --all --fits SIZE includes what the catalog offers.", style="")


def fits_json(models: FittingModels) -> str:
    """A JSON list of the models that run, the best placed first; `fit` has ratios from 0 to 1."""
    names = ("place", "n_ctx", "device_ratio", "ram_ratio")
    fits = ({name: getattr(row.map, name) for name in names} | {"estimated": True} for row in models.rows)
    return json_text([asdict(row.model) | {"fit": fit} for row, fit in zip(models.rows, fits, strict=True)])


def download_lines(wanted: Sequence[WantedModel], missing: Sequence[RemoteFile]) -> Iterator[str]:
    """A sentence per model: its name, its licence, and how much of it is downloaded."""
    for model in wanted:
        licence = f", licence {model.licence}" if model.licence else ""
        if model.local is not None:
            yield f"{model.role} {model.name}{licence}: here already."
            continue
        files = _missing_files(model, missing)
        total, have = sum(file.size_bytes for file in files), sum(file.have_bytes for file in files)
        rest = f", {format_bytes(have)} of it here" if have else ""
        yield f"{model.role} {model.name}{licence}: {format_bytes(total)} from {model.variant.repo}{rest}."
        if not model.variant.verified:
            facts = "the catalog's facts about these files are not confirmed"
            yield f"{model.name}: {facts}; only the hub's hash counts."
        if any(file.sha256 is None for file in files):
            yield f"{model.name}: the hub names no SHA-256; only the size can be checked."


def print_files(wanted: Sequence[WantedModel], missing: Sequence[RemoteFile], console: Console) -> None:
    """The path of each model, or the files that a download would bring."""
    for model in wanted:
        if model.local is not None:
            console.print(f"{model.role} {model.local}", soft_wrap=True)
            continue
        for file in _missing_files(model, missing):
            have = f", {format_bytes(file.have_bytes)} here" if file.have_bytes else ""
            what = f"{model.role} hf:{file.repo}:{file.path} {format_bytes(file.size_bytes)}{have}"
            console.print(what, soft_wrap=True)


def files_json(wanted: Sequence[WantedModel], missing: Sequence[RemoteFile]) -> str:
    """A JSON list with one object per model."""
    rows = []
    for model in wanted:
        names, files = ("commit", "size_bytes", "sha256", "have_bytes"), _missing_files(model, missing)
        rows.append(
            {name: getattr(model, name) for name in ("role", "name", "licence")}
            | {name: getattr(model.variant, name) for name in ("repo", "revision")}
            | {"path": None if model.local is None else str(model.local)}
            | {"missing": [{"file": file.path} | {name: getattr(file, name) for name in names} for file in files]}
        )
    return json_text(rows)


def _missing_files(model: WantedModel, missing: Sequence[RemoteFile]) -> list[RemoteFile]:
    names = set() if model.local is not None else {(model.variant.repo, file.path) for file in model.variant.files}
    return [file for file in missing if (file.repo, file.path) in names]


def card_rows(card: ModelCard) -> list[FigureRow]:
    """Everything that is known, in words."""
    facts = card.facts
    experts = (
        f"{facts.n_experts} per layer in {facts.n_expert_layers} layers, {facts.experts_per_token}; "
        f"{format_bytes(facts.expert_bytes)} each, {format_bytes(facts.experts_bytes)} together"
    )
    source = " (by the catalog)" if card.licence_source == "catalog" else ""
    return known_figures(
        {
            "file": visible(facts.file),
            "name": visible(card.name),
            "architecture": facts.architecture,
            "weights": f"{format_weights(facts.n_weights)}, {format_bytes(facts.file_bytes)}",
            "quantization": f"{card.quantization}, {facts.bits_per_weight:.2f} bits per weight",
            "context": f"{facts.n_ctx_train:,} tokens at most",
            "layers": f"{facts.n_layers}, {card.n_embd:,} values wide",
            "experts": experts if facts.n_experts else "none: a dense model",
            "read per token": format_bytes(facts.active_bytes),
            "memory": facts.memory,
            "drafts": ", ".join([*(["its own head (-md mtp)"] if card.has_head else []), *card.drafts]),
            "chat template": f"{len(card.template):,} characters (--template)" if card.template else "none",
            "licence": visible(card.licence) + source if card.licence else "not named in the file",
        }
    )


def print_card(card: ModelCard, console: Console) -> None:
    """A line per fact."""
    show_figures(console, card_rows(card))
    if card.facts.missing_bytes:
        console.print(f"Incomplete here: {format_bytes(card.facts.missing_bytes)} of its weights are missing.")


def card_json(card: ModelCard) -> str:
    """One object; sizes in bytes."""
    return json_text(asdict(card) | {"bits_per_weight": card.facts.bits_per_weight})


def print_entry(choice: Choice, reason: str, console: Console) -> None:
    """The catalog's facts about a model whose header cannot be read. reason: why not."""
    entry, variant, shape = choice.entry, choice.variant, choice.entry.shape
    size = variant.size_bytes or variant.about_bytes
    console.print(f"{visible(reason)} From the catalog:")
    rows = {
        "name": choice.name,
        "about": visible(entry.about),
        "file": f"hf:{variant.repo}:{variant.files[0].path}" if variant.files else str(variant.local),
        "size": "" if size is None else f"{'' if variant.size_bytes else 'about '}{format_bytes(size)}",
        "weights": "" if shape is None else format_weights(shape.weights),
        "context": "" if shape is None or shape.context is None else f"{shape.context:,} tokens at most",
        "drafts": ", ".join(entry.drafts),
        "note": visible(entry.note),
        "licence": visible(entry.licence),
    }
    show_figures(console, known_figures(rows))


def entry_json(choice: Choice, reason: str) -> str:
    """One object of the catalog's facts, with the reason why there is no header."""
    entry = asdict(choice.entry)
    del entry["variants"]
    variant = asdict(choice.variant) | {"size_bytes": choice.variant.size_bytes}
    variant["local"] = None if choice.variant.local is None else str(choice.variant.local)
    return json_text({"from_catalog": True, "reason": reason, **entry, "variant": variant})
