"""The result of `moeedge show`: labels and values for people, one JSON object for programs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.ui.console import show_figures, visible
from moeedge.ui.figures import Figure
from moeedge.ui.tables import json_text
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.hub.catalog import Choice
    from moeedge.planning.model_card import ModelCard


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
