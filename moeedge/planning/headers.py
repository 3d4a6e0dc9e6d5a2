"""Models of which only the header is there: a plan needs no more.

llama.cpp refuses a file that is shorter than its header says. It gets a stand-in then: a copy of the header in a
temporary folder, as long as the whole file but with a hole where the weights would be, which takes no room on the disk.

What a model is, for a plan: all of it from its header.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from moeedge.errors import EngineError, ModelFileError
from moeedge.llama import gguf_file
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.native.cache import ExpertTensor

_ALIGNMENT = 32  # bytes; the data section begins at a multiple of it, and nothing may be missing up to there
_HEADER_MAX_BYTES = 2**28


@dataclass(frozen=True)
class Loadable:
    """A path that llama.cpp takes for the model, and what the file there lacks."""

    path: Path
    original: Path
    missing_bytes: int = 0  # of all parts


@contextmanager
def loadable(path: Path) -> Iterator[Loadable]:
    """The model at `path`, or stand-ins for its files where one ends before its header says.

    Raises ModelFileError for what has no whole header, EngineError where no temporary file can be had.
    """
    with ExitStack() as stack:
        try:
            found = _prepare(path, lambda: Path(stack.enter_context(TemporaryDirectory(prefix="moeedge-plan-"))))
        except OSError as error:
            raise EngineError(
                f"The header of {path} cannot be copied to a temporary file: {error.strerror or error}.",
                "Set TMPDIR to a folder that has room and takes files with holes.",
            ) from error
        yield found


def _prepare(path: Path, make_folder: Callable[[], Path]) -> Loadable:
    files = gguf_file.parts(path)
    folder: Path | None = None
    read, missing = [], 0
    for file in files:
        try:
            tensors = gguf_file.read_tensors(file)
        except ModelFileError:
            if not file.is_file() or not 0 < file.stat().st_size <= _HEADER_MAX_BYTES:
                raise
            folder = folder or make_folder()
            tensors = _read_padded(file, folder / file.name)
        promised = gguf_file.promised_bytes(tensors)
        read.append((min((tensor.offset for tensor in tensors), default=promised), promised))
        missing += max(0, promised - file.stat().st_size)
    if not missing:
        return Loadable(path, path)
    folder = folder or make_folder()
    for file, (data_offset, promised) in zip(files, read, strict=True):
        copy = folder / file.name
        if file.stat().st_size >= promised:
            copy.symlink_to(file.resolve())
            continue
        with file.open("rb") as source, copy.open("wb") as target:
            target.write(source.read(data_offset))
            target.truncate(promised)  # a hole: it takes no room on the disk
    return Loadable(folder / files[0].name, path, missing)


def _read_padded(file: Path, copy: Path) -> list[gguf_file.GgufTensor]:
    """The tensors of a header that ends where its last entry does, without the padding before the data."""
    shutil.copyfile(file, copy)
    os.truncate(copy, -(-file.stat().st_size // _ALIGNMENT) * _ALIGNMENT)
    try:
        return gguf_file.read_tensors(copy)
    except ModelFileError:
        gguf_file.read_tensors(file)  # speaks of the file itself
        raise


@dataclass(frozen=True)
class ModelFacts:
    """A model's shape and sizes in bytes."""

    file: str  # or what pull takes for it
    is_here: bool  # on this machine, perhaps in part
    description: str
    architecture: str
    n_layers: int
    n_expert_layers: int
    n_experts: int  # per layer; 0: dense
    n_expert_used: int
    n_ctx_train: int
    n_vocab: int
    n_weights: int
    file_bytes: int
    missing_bytes: int  # what the file lacks: only its header counts
    experts_bytes: int  # all of them
    expert_bytes: int  # one, on average
    dense_bytes: int  # everything else
    active_bytes: int  # that one token reads
    memory: str  # what its memory of the text is, in words; empty: a plain KV cache

    @property
    def bits_per_weight(self) -> float:
        return 8 * (self.experts_bytes + self.dense_bytes) / max(1, self.n_weights)


def read_facts(model: Model, file: Loadable, names: Mapping[Path, str]) -> tuple[ModelFacts, list[ExpertTensor]]:
    """The facts, and the expert tensors that the cache would hold; names: of files that are elsewhere."""
    info = model.info
    tensors = [tensor for part in gguf_file.parts(file.path) for tensor in gguf_file.read_tensors(part)]
    experts, _ = expert_tensors(file.path, n_layers=info.n_layers)
    total = sum(tensor.size_bytes for tensor in tensors)
    routed = expert_bytes(experts)
    has_output = any(tensor.name == "output.weight" for tensor in tensors)
    # of an embedding matrix that is not the output matrix too, one row is read
    rows = sum(t.size_bytes for t in tensors if t.name == "token_embd.weight" and has_output)
    share = info.n_expert_used / info.n_experts if info.n_experts else 0.0
    facts = ModelFacts(
        file=names.get(file.original, str(file.original)),
        is_here=file.original not in names,
        description=info.description,
        architecture=info.architecture,
        n_layers=info.n_layers,
        n_expert_layers=info.n_expert_layers,
        n_experts=info.n_experts,
        n_expert_used=info.n_expert_used,
        n_ctx_train=info.n_ctx_train,
        n_vocab=info.n_vocab,
        n_weights=sum(math.prod(tensor.shape) for tensor in tensors),
        file_bytes=info.size_bytes,
        missing_bytes=file.missing_bytes,
        experts_bytes=routed,
        expert_bytes=routed // max(1, info.n_expert_layers * info.n_experts),
        dense_bytes=total - routed,
        active_bytes=total - routed - rows + round(routed * share),
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
        kinds.append("recurrent: some layers keep a state of fixed size, so that drafts cannot be used")
    return "; ".join(kinds)
