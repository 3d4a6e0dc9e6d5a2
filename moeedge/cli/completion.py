"""Values that a shell completes. A key press waits for these functions: they load neither llama.cpp nor NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Complete = Callable[[str], list[str]]


def completer_of(metavar: str) -> Complete | None:
    """Completes the values that a metavar lists, as in "auto|on|off"; None where it lists none."""
    words = [word for word in metavar.split("|") if word == word.lower() and "://" not in word]
    return completer(lambda: words) if "|" in metavar and words else None


def completer(names: Callable[[], Iterable[str]]) -> Complete:
    """A function for Typer that completes one of these names, in a list the last."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        try:
            return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]
        except Exception:  # a broken catalog, an unreadable folder: a key press is no place for errors
            return []

    return complete


def models() -> list[str]:
    """Names for -m: the catalog's, and of the hub what is on this machine."""
    from moeedge.hub.catalog import load_catalog  # --help and the names of options do not wait for them
    from moeedge.hub.local import list_models

    return [model.name for model in list_models(load_catalog(), everything=True)]


def drafts() -> list[str]:
    """Values for -md."""
    return ["auto", "mtp", "ngram", "none", *models()]


def datasets() -> list[str]:
    """Names for --dataset."""
    from moeedge.data.datasets import CATALOG, SAMPLE, TOY

    return [*CATALOG, SAMPLE, TOY]


def devices() -> list[str]:
    """Values for -dev; which of the cards llama.cpp can use is not asked."""
    from moeedge.hardware.nvidia import cards

    return ["auto", "none", "emulated", *(f"CUDA{i}" for i in range(len(cards())))]
