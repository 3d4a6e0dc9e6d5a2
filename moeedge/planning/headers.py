"""Headers of models, all that `plan` and `show` need: of incomplete files, of files on the hub, and the facts in them.

llama.cpp rejects a file that is shorter than its header says. For such a file it gets a copy of the header in a
temporary folder, extended to full length by a hole that takes no room on the disk.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from moeedge.engine.probe import probe
from moeedge.errors import DownloadError, EngineError, ModelFileError, ModelNameError
from moeedge.hub.catalog import Choice, find, load_catalog
from moeedge.hub.local import locate
from moeedge.hub.remote import RemoteFile, ask_file, fetch_start, hub_endpoint, is_offline, want
from moeedge.llama import gguf_file
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.native.cache import ExpertTensor
from moeedge.records import derived, figure, filled
from moeedge.run import Run

_ALIGNMENT = 32  # bytes; the data section starts at a multiple of it
_FIRST_BYTES = 2**22  # of a header on the hub; enough for most vocabularies
_HEADER_MAX_BYTES = 2**28


@dataclass(frozen=True)
class LoadableModel:
    """A path that llama.cpp accepts for the model, and the bytes that the original lacks."""

    path: Path
    original: Path
    missing_bytes: int = 0  # of all parts


@contextmanager
def loadable(path: Path) -> Iterator[LoadableModel]:
    """Yields the model at `path`, or full-length copies of its headers if a file is incomplete.

    Raises ModelFileError for an incomplete header, EngineError if no temporary file can be written.
    """
    with ExitStack() as stack:
        make_folder = cache(lambda: Path(stack.enter_context(TemporaryDirectory(prefix="moeedge-plan-"))))
        try:
            model = _prepare(path, make_folder)
        except OSError as error:
            text = f"Cannot copy the header of {path} to a temporary file: {error.strerror or error}."
            raise EngineError(text, "Set TMPDIR to a folder with room and support for sparse files.") from error
        yield model


def _prepare(path: Path, folder: Callable[[], Path]) -> LoadableModel:
    files = gguf_file.parts(path)
    read, missing = [], 0
    for file in files:
        try:
            tensors = gguf_file.read_tensors(file)
        except ModelFileError:
            if not file.is_file() or not 0 < file.stat().st_size <= _HEADER_MAX_BYTES:
                raise
            tensors = _read_padded(file, folder() / file.name)
        promised = gguf_file.promised_bytes(tensors)
        read.append((min((tensor.offset for tensor in tensors), default=promised), promised))
        missing += max(0, promised - file.stat().st_size)
    if not missing:
        return LoadableModel(path, path)
    for file, (data_offset, promised) in zip(files, read, strict=True):
        copy = folder() / file.name
        if file.stat().st_size >= promised:
            copy.symlink_to(file.resolve())
            continue
        with file.open("rb") as source, copy.open("wb") as target:
            target.write(source.read(data_offset))
            target.truncate(promised)  # a hole: it takes no room on the disk
    return LoadableModel(folder() / files[0].name, path, missing)


def _read_padded(file: Path, copy: Path) -> list[gguf_file.GgufTensor]:
    """Returns the tensors of a header that lacks the padding before the data."""
    shutil.copyfile(file, copy)
    os.truncate(copy, -(-file.stat().st_size // _ALIGNMENT) * _ALIGNMENT)
    try:
        return gguf_file.read_tensors(copy)
    except ModelFileError:
        gguf_file.read_tensors(file)  # raises an error about the original file
        raise


def locate_or_fetch(text: str, resources: ExitStack, run: Run) -> tuple[Path, str]:
    """Returns the model that `text` means, or its header from the hub, until `resources` end, and its pull name.

    Raises ModelNameError for an unknown name, DownloadError if the hub does not answer.
    """
    with suppress(ModelNameError):
        return locate(text).path, ""
    wanted = want(load_catalog(), text, "target")
    if wanted.local is not None:
        return wanted.local, ""
    if not is_offline():
        run.say(f"{wanted.name} is not on this machine: its header is read from {hub_endpoint()}.")
    variant, folder = wanted.variant, Path(resources.enter_context(TemporaryDirectory(prefix="moeedge-header-")))
    paths = [_fetch_header(ask_file(variant.repo, file.path, variant.revision), folder) for file in variant.files]
    return paths[0], wanted.name


def _fetch_header(file: RemoteFile, folder: Path) -> Path:
    """Fetches the start of `file` into `folder`, growing until its header is complete."""
    target = folder / PurePosixPath(file.path).name
    n_bytes = _FIRST_BYTES
    while True:
        fetch_start(file, target, min(n_bytes, file.size_bytes))
        try:
            gguf_file.read_tensors(target)
            return target
        except ModelFileError as error:
            is_gguf = target.read_bytes().startswith(gguf_file.MAGIC)
            if not is_gguf or n_bytes >= min(file.size_bytes, _HEADER_MAX_BYTES):
                raise DownloadError(f"{file.path} of {file.repo} has no GGUF header.", "Name another file.") from error
        n_bytes *= 4


@dataclass(frozen=True)
class ModelFacts:
    file: str = figure("The file, or its name for moeedge pull")
    is_here: bool = figure("Whether it is on this machine, possibly incomplete")
    description: str = figure("llama.cpp's description")
    architecture: str = figure("llama.cpp's name of the architecture")
    n_layers: int = figure("Layers")
    n_expert_layers: int = figure("Layers with experts")
    n_experts: int = figure("Experts of a layer; 0: dense")
    n_expert_used: int = figure("Experts that a token uses in a layer", key="n_experts_used")
    n_expert_used_by_layer: tuple[int, ...] = figure(
        "The same by layer; empty: as many in all", key="n_experts_used_by_layer"
    )
    n_ctx_train: int = figure("Context that it was trained with, in tokens")
    n_vocab: int = figure("Tokens of the vocabulary")
    n_weights: int = figure("Weights")
    file_bytes: int = figure("The file", "bytes")
    missing_bytes: int = figure("Weights that the file lacks; a plan needs its header only", "bytes")
    experts_bytes: int = figure("All experts", "bytes")
    expert_bytes: int = figure("An expert, on average", "bytes")
    dense_bytes: int = figure("Everything else", "bytes")
    active_bytes: int = figure("Read per token", "bytes")
    memory: str = figure("Kind of its memory in words; empty: a plain KV cache")

    @property
    def experts_per_token(self) -> str:
        """In words: "8 per token", "4 to 8 per token, by layer"."""
        least = min(filter(None, self.n_expert_used_by_layer), default=self.n_expert_used)
        most = f"{self.n_expert_used} per token"
        return most if least == self.n_expert_used else f"{least} to {most}, by layer"

    @derived("Bits per weight")
    def bits_per_weight(self) -> float:
        return 8 * (self.experts_bytes + self.dense_bytes) / max(1, self.n_weights)


def read_facts(model: Model, file: LoadableModel, names: Mapping[Path, str]) -> tuple[ModelFacts, list[ExpertTensor]]:
    """Returns the facts and the expert tensors for the cache; names: pull names of models not on this machine."""
    info, name = model.info, names.get(file.original)
    tensors = gguf_file.read_all_tensors(file.path)
    experts, _ = expert_tensors(file.path, n_layers=info.n_layers)
    routed = expert_bytes(experts)
    facts = filled(
        ModelFacts,
        info,
        file=name or str(file.original),
        is_here=name is None,
        n_weights=sum(math.prod(tensor.shape) for tensor in tensors),
        file_bytes=info.size_bytes,
        missing_bytes=file.missing_bytes,
        experts_bytes=routed,
        expert_bytes=routed // max(1, info.n_expert_layers * info.n_experts),
        dense_bytes=sum(tensor.size_bytes for tensor in tensors) - routed,
        active_bytes=gguf_file.bytes_per_token(tensors, experts, info.used_per_layer),
        memory=_memory(model),
    )
    return facts, experts


def _memory(model: Model) -> str:
    kinds = []
    if model.metadata(f"{model.info.architecture}.attention.key_length_mla"):
        kinds.append("latent attention: one compressed vector per token and layer")
    if model.info.n_swa:
        kinds.append(f"sliding window: some layers keep {model.info.n_swa:,} tokens only")
    if not model.can_roll_back:
        limit = "" if model.can_reject_drafts else ", so that drafts are impossible"
        kinds.append(f"recurrent: some layers keep a state of fixed size{limit}")
    return "; ".join(kinds)


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


def read_card(text: str, run: Run) -> ModelCard:
    """Reads the header of the model that `text` means; from the hub where it is not on this machine.

    Raises ModelNameError for an unknown name, ModelFileError for an unreadable file, DownloadError.
    """
    with ExitStack() as resources:
        path, name = locate_or_fetch(text, resources, run)
        file = resources.enter_context(loadable(path))
        probe(file.path)
        model = resources.enter_context(Model.load(file.path, device="none", header_only=True))
        facts, _ = read_facts(model, file, {path: name} if name else {})
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
