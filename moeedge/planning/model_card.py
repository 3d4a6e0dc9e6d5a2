"""What one model is, as `moeedge show` prints it: the facts of its header and what its file says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from moeedge.hub.catalog import Choice, load_catalog
from moeedge.hub.names import find
from moeedge.llama.model import Model
from moeedge.notifications import Notification, Notify
from moeedge.planning.headers import ModelFacts, loadable, locate_or_fetch, read_facts


@dataclass(frozen=True)
class ModelCard:
    """One model. Texts are empty where neither file nor catalog has them."""

    facts: ModelFacts
    name: str  # general.name of the file
    quantization: str  # of most weights, as "Q4_K - Medium"
    n_embd: int
    licence: str
    licence_source: str  # "file" or "catalog"
    template: str  # the chat template's source
    drafts: tuple[str, ...]  # the catalog's
    has_head: bool  # predicts further tokens itself (-md mtp)


def read_card(text: str, notify: Notify) -> ModelCard:
    """Reads the header of the model that `text` means; from the hub where it is not on this machine.

    Raises ModelNameError for an unknown name, ModelFileError for an unreadable file, DownloadError.
    """
    with TemporaryDirectory(prefix="moeedge-show-") as folder:
        path, name = locate_or_fetch(text, Path(folder), lambda line: notify(Notification(line)))
        with loadable(path) as file:
            names = {path: name} if name else {}
            with Model.load(file.path, device="none", header_only=True) as model:
                facts, _ = read_facts(model, file, names)
                choice = None if Path(text).exists() else find(load_catalog(), text)
                entry = choice.entry if isinstance(choice, Choice) else None
                in_file = model.metadata("general.license") or ""
                return ModelCard(
                    facts=facts,
                    name=model.metadata("general.name") or "",
                    quantization=facts.description.removeprefix(facts.architecture).strip(),
                    n_embd=model.info.n_embd,
                    licence=in_file or (entry.licence if entry else ""),
                    licence_source="file" if in_file else "catalog" if entry else "",
                    template=model.metadata("tokenizer.chat_template") or "",
                    drafts=entry.drafts if entry else (),
                    has_head=model.info.n_head_layers > 0,
                )
