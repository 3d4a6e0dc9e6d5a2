"""The files that -m and -md name: on this machine, or downloaded from the hub where they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from moeedge import paths
from moeedge.engine.types import DEFAULT_GAMMA, DraftWord
from moeedge.errors import ModelNameError
from moeedge.hub.catalog import find, load_catalog
from moeedge.hub.local import LocalModel, chat_draft, find_variant, locate
from moeedge.hub.remote import RemoteFile, WantedModel, check_room, fetch_file, is_offline, missing_files, want_pair

if TYPE_CHECKING:
    from moeedge.ui.console import PullProgress

Fetch = Callable[[str, bool], LocalModel]  # brings a model by its name, with its draft or without


@dataclass(frozen=True)
class ModelFiles:
    """A target and where its drafts come from."""

    target: Path
    draft: Path | DraftWord | None
    draft_max: int = DEFAULT_GAMMA  # suits the two


def resolve_models(model: Path | None, draft: str | None, *, fetch: Fetch | None = None) -> ModelFiles:
    """The files of -m and -md, where a path that exists comes before a name; notes on standard error name them.

    Without -m it is the bundled target. Without -md the bundled target gets the bundled draft, a model of the catalog
    the best of its drafts that is on this machine, and any other model none. "auto" prefers the head in the model's own
    file, and takes n-grams where there would be none. fetch: brings what is not here, a target with the catalog's draft
    where -md is not given. Raises ModelFileError, ModelNameError for a name whose files are not here, DownloadError.
    """
    if model is None or (str(model).lower() == "bundled" and not model.exists()):
        model = paths.bundled_target()
    source: Path | DraftWord | None = None
    if draft in get_args(DraftWord):
        source = draft  # type: ignore[assignment]
    elif draft not in (None, "auto", "none"):
        source = _locate(str(draft), fetch).path
    if paths.is_bundled(model):
        if draft in (None, "auto") and model.name == "target.gguf":
            source = paths.bundled_draft()
        return ModelFiles(model, "ngram" if draft == "auto" and source is None else source)
    target = _locate(str(model), fetch, with_draft=draft in (None, "auto"))
    if draft == "auto" and drafts_for_itself(target.path):
        return ModelFiles(target.path, "mtp")
    entry = None if target.choice is None else target.choice.entry
    if target.choice is not None and draft in (None, "auto") and target.choice.entry.drafts:
        catalog = load_catalog()
        listed, drafts = chat_draft(catalog, target.choice), catalog.drafts(target.choice)
        if listed is None and drafts:
            name = drafts[0].name
            without = "" if draft == "auto" else ": no drafts"
            notify(f"The model's draft {name} is not on this machine{without}. Download it with moeedge pull {name}.")
        elif listed is not None and (source := find_variant(listed.variant)) is None:
            source = _locate(listed.name, fetch).path  # next to a target of which the header alone was fetched
        elif listed is not None:
            notify(f"The draft is {listed.name}, as the catalog says: {source}")
    if draft == "auto" and source is None:
        notify(
            "No draft model found: drafts come from repeated phrases of the text (n-grams). "
            "-md FILE names one, -md none switches drafts off."
        )
        return ModelFiles(target.path, "ngram")
    if source is None or source == "mtp" or entry is None or entry.draft_max is None:
        return ModelFiles(target.path, source)
    return ModelFiles(target.path, source, entry.draft_max)


def drafts_for_itself(path: Path) -> bool:
    """Whether the model has a head of its own, which is reported; of the file only the header may be here."""
    from moeedge.engine import loading
    from moeedge.planning.headers import loadable

    with loadable(path) as file:
        has_head = loading.drafts_for_itself(file.path)
    if has_head:
        notify("Drafts come from a part of the model's own file that predicts further tokens (MTP head).")
    return has_head


def _locate(text: str, fetch: Fetch | None, *, with_draft: bool = False) -> LocalModel:
    try:
        model = locate(text)
    except ModelNameError:
        find(load_catalog(), text)  # raises for an unknown name
        if fetch is None:
            raise
        model = fetch(text, with_draft)
    if model.name:
        notify(f"{model.name} is {model.path}")
    return model


def fetch_model(text: str, with_draft: bool) -> LocalModel:
    """Downloads a model, unless --offline forbids it. Raises ModelNameError where it is not here then."""
    if not is_offline():
        from moeedge.ui.console import PullProgress

        progress = PullProgress()
        progress.note(f"{text} is not on this machine and is downloaded now (not with --offline).")
        download(want_pair(load_catalog(), text, no_draft=not with_draft), progress)
    return locate(text)


def download(wanted: Sequence[WantedModel], progress: PullProgress, *, dry_run: bool = False) -> list[RemoteFile]:
    """Fetches the missing files of these models. Returns those that are missing then. Raises DownloadError."""
    from moeedge.ui.model_views import download_lines

    missing = missing_files(wanted)
    for line in download_lines(wanted, missing):
        progress.note(line)
    if dry_run:
        return missing
    check_room(missing)
    try:
        with progress:
            for file in missing:
                fetch_file(file, progress.file)
    except KeyboardInterrupt:
        progress.note("Stopped; the same command continues from here.")
        raise
    return []


def notify(text: str) -> None:
    from moeedge.ui.console import note, stderr_console

    note(stderr_console(), text)
