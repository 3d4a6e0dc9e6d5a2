"""The shape of a model, the shapes of known models, and which wider shape keeps a model's function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moeedge.errors import InputError
from moeedge.lab.widen.architectures import MODELS
from moeedge.lab.widen.maps import GroupedHeads

BLOCK = 32  # weights per block of Q4_0 and Q8_0; widths are multiples
ARCHITECTURES = ("qwen3moe", "qwen3")
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_WIDTH = 2**17  # twice that of the widest models; catches mistyped sizes


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer; experts and used are 0 for a dense one."""

    embd: int
    ff: int  # of one expert, or of the dense feed-forward block
    heads: int
    heads_kv: int
    head_dim: int
    layers: int
    experts: int
    used: int  # experts per token
    vocab: int


def _known(name: str) -> Shape:
    d = MODELS[name][1]
    return Shape(d.embd, d.expert_ff or d.ff, d.heads, d.heads_kv, d.head_dim, d.layers, d.experts, d.used, d.vocab)


KNOWN: Mapping[str, Shape] = {
    name: _known(name) for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-0.6b", "qwen3-4b")
}

SIZE_NAMES = {
    "embd": "embedding width",
    "ff": "feed-forward width",
    "heads": "heads",
    "heads_kv": "KV heads",
    "head_dim": "head size",
    "layers": "layers",
    "experts": "experts",
    "used": "experts per token",
    "vocab": "vocabulary",
}


@dataclass(frozen=True)
class RequestedSizes:
    """Sizes given by the user; None: as in the shape of --like, else as in the source."""

    embd: int | None = None
    ff: int | None = None
    heads: int | None = None
    heads_kv: int | None = None
    head_dim: int | None = None
    layers: int | None = None


def read_shape(keys: Mapping[str, Any], name: str) -> Shape:
    """Reads the shape from a file's metadata. Raises InputError for another architecture and for missing keys."""
    arch = keys.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise InputError(
            f"{name} has the architecture {arch}; only {' and '.join(ARCHITECTURES)} can be widened.",
            "Choose the bundled pair, or a model of these architectures.",
        )
    lists = [key for key in keys if key.startswith(f"{arch}.") and isinstance(keys[key], list)]
    if lists:
        raise InputError(f"{name} has a number for each layer in {lists[0]}, which cannot be widened.")
    try:
        embd, heads = int(keys[f"{arch}.embedding_length"]), int(keys[f"{arch}.attention.head_count"])
        experts = int(keys.get(f"{arch}.expert_count", 0))
        ff = f"{arch}.expert_feed_forward_length" if experts else f"{arch}.feed_forward_length"
        shape = Shape(
            embd=embd,
            ff=int(keys[ff]),
            heads=heads,
            heads_kv=int(keys.get(f"{arch}.attention.head_count_kv", heads)),
            head_dim=int(keys.get(f"{arch}.attention.key_length", embd // heads)),
            layers=int(keys[f"{arch}.block_count"]),
            experts=experts,
            used=int(keys.get(f"{arch}.expert_used_count", 0)),
            vocab=len(keys["tokenizer.ggml.tokens"]),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"The metadata of {name} lacks its shape ({error}).", "Use another file.") from None
    if keys.get(f"{arch}.attention.value_length", shape.head_dim) != shape.head_dim:
        raise InputError(f"{name} has keys and values of different sizes, which cannot be widened.")
    return shape


def wider_shape(source: Shape, requested: RequestedSizes, like: str | None = None) -> tuple[Shape, list[str]]:
    """Returns the shape to write, and notes for the user.

    Sizes in `requested` must be possible; sizes of the known shape `like` are taken if possible. Raises InputError.
    """
    named = {
        field.name: getattr(requested, field.name) for field in fields(requested) if getattr(requested, field.name)
    }
    _check_named(source, named)
    wide, notes = source, list[str]()
    if like is not None:
        wide, notes = _like(source, like, named)
    wide = replace(wide, **named)
    heads = GroupedHeads(source.heads, source.heads_kv, wide.heads, wide.heads_kv)
    if not heads.fits():
        raise InputError(
            f"{source.heads} heads over {source.heads_kv} KV heads do not fit {wide.heads} over {wide.heads_kv}.",
            "Make --heads a multiple of --heads-kv, and give at least as many KV heads as the source has.",
        )
    widest = max(wide.embd, wide.ff, wide.heads * wide.head_dim)
    if widest > _MAX_WIDTH:
        raise InputError(f"A width of {widest:,} is too large.", f"Give at most {_MAX_WIDTH:,}.")
    if wide.layers > MAX_LAYERS:
        raise InputError(f"llama.cpp cannot load {wide.layers:,} layers.", f"Give at most {MAX_LAYERS}.")
    if wide.head_dim != source.head_dim:
        notes.append(
            f"Heads grow from {source.head_dim} to {wide.head_dim}: attention sums in another order, and logits differ "
            f"by rounding. --head-dim {source.head_dim} keeps them bit for bit."
        )
    return wide, notes


def _check_named(source: Shape, named: Mapping[str, int]) -> None:
    options = {"heads_kv": "--heads-kv", "head_dim": "--head-dim"}
    for name, size in named.items():
        option, minimum = options.get(name, f"--{name}"), getattr(source, name)
        if size < minimum:
            raise InputError(
                f"{option} {size} is less than the source's {minimum}.", "Give a size that is not smaller."
            )
        if name in ("embd", "ff") and size % BLOCK:
            raise InputError(
                f"{option} {size} is not a multiple of {BLOCK}.",
                "Choose a multiple: weights are packed in blocks of 32.",
            )
        if name == "head_dim" and size % minimum:
            raise InputError(
                f"{option} {size} is not a multiple of the source's {minimum}.",
                "Choose a multiple: positions rotate pairs of a head's values.",
            )


def _like(source: Shape, like: str, named: Mapping[str, int]) -> tuple[Shape, list[str]]:
    """Returns the source with every size of `like` that keeps the function, and notes on the others."""
    shape = KNOWN.get(like)
    if shape is None:
        raise InputError(f"Unknown shape '{like}'.", f"Choose from: {', '.join(KNOWN)}.")
    if bool(shape.experts) != bool(source.experts):
        fitting = [name for name, other in KNOWN.items() if bool(other.experts) == bool(source.experts)]
        kind = "experts" if source.experts else "no experts"
        raise InputError(f"The source has {kind}, unlike {like}.", f"Choose from: {', '.join(fitting)}.")
    notes = []
    wide, kept = source, []
    for name in ("embd", "ff", "layers"):
        if name in named or getattr(shape, name) >= getattr(source, name):
            wide = replace(wide, **{name: getattr(shape, name)})
        else:
            kept.append(name)
    head_dim = named.get("head_dim", shape.head_dim)
    if head_dim % source.head_dim:
        head_dim = source.head_dim
        kept.append("head_dim")
    # more, smaller heads keep the size of matrices and KV cache
    more = shape.head_dim // head_dim if shape.head_dim % head_dim == 0 else 1
    heads = GroupedHeads(source.heads, source.heads_kv, shape.heads * more, shape.heads_kv * more)
    wide = replace(wide, head_dim=head_dim)
    if heads.fits():
        wide = replace(wide, heads=heads.wide_heads, heads_kv=heads.wide_heads_kv)
    else:
        kept += [name for name in ("heads", "heads_kv") if name not in named]
    kept += [name for name in ("experts", "used", "vocab") if getattr(shape, name) != getattr(source, name)]
    if kept:
        listed = ", ".join(f"{SIZE_NAMES[name]} {getattr(source, name)} ({getattr(shape, name)})" for name in kept)
        notes.append(f"Kept from the source instead of {like} (in brackets), to keep the function: {listed}.")
    return wide, notes
