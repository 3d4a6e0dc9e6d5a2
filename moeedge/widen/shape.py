"""What shape a model has, the shapes of known models, and which wider shape keeps its function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moeedge.errors import InputError
from moeedge.widen.maps import GroupedHeads

BLOCK = 32  # weights of a block of Q4_0 and Q8_0: no width may cut one
ARCHITECTURES = ("qwen3moe", "qwen3")
_MOST_LAYERS = 512  # llama.cpp loads no more (LLAMA_MAX_LAYERS)
_WIDEST = 2**17  # of any matrix: twice that of the widest models, and what a slip of the keyboard exceeds


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer; experts and used are 0 where it is dense."""

    embd: int
    ff: int  # of one expert, or of the dense feed-forward block
    heads: int
    heads_kv: int
    head_dim: int
    layers: int
    experts: int
    used: int  # experts per token
    vocab: int


@dataclass(frozen=True)
class KnownShape:
    """A model of which people know the size; where it lies is where its config.json was read."""

    shape: Shape
    repo: str
    architecture: str


KNOWN: Mapping[str, KnownShape] = {
    "qwen3-30b-a3b": KnownShape(Shape(2048, 768, 32, 4, 128, 48, 128, 8, 151936), "Qwen/Qwen3-30B-A3B", "qwen3moe"),
    "qwen3-235b-a22b": KnownShape(
        Shape(4096, 1536, 64, 4, 128, 94, 128, 8, 151936), "Qwen/Qwen3-235B-A22B", "qwen3moe"
    ),
    # its attention has 16 heads, whose keys and values are unpacked from one latent vector: 16 of each
    "deepseek-v2-lite": KnownShape(
        Shape(2048, 1408, 16, 16, 128, 27, 64, 6, 102400), "deepseek-ai/DeepSeek-V2-Lite", "deepseek2"
    ),
    "olmoe-1b-7b": KnownShape(Shape(2048, 1024, 16, 16, 128, 16, 64, 8, 50304), "allenai/OLMoE-1B-7B-0924", "olmoe"),
    "qwen3-0.6b": KnownShape(Shape(1024, 3072, 16, 8, 128, 28, 0, 0, 151936), "Qwen/Qwen3-0.6B", "qwen3"),
    "qwen3-1.7b": KnownShape(Shape(2048, 6144, 16, 8, 128, 28, 0, 0, 151936), "Qwen/Qwen3-1.7B", "qwen3"),
    "qwen3-4b": KnownShape(Shape(2560, 9728, 32, 8, 128, 36, 0, 0, 151936), "Qwen/Qwen3-4B", "qwen3"),
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
    """The sizes that a user named; None: as in the shape to be like, or as in the source."""

    embd: int | None = None
    ff: int | None = None
    heads: int | None = None
    heads_kv: int | None = None
    head_dim: int | None = None
    layers: int | None = None


def read_shape(keys: Mapping[str, Any], name: str) -> Shape:
    """The shape that a file's metadata names; raises InputError where it is of another architecture."""
    arch = keys.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise InputError(
            f"{name} has the architecture {arch}; only {' and '.join(ARCHITECTURES)} can be widened.",
            "Widen the bundled pair, or a model of those.",
        )
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
        raise InputError(f"{name} does not say its shape ({error}).", "Use another file.") from None
    if keys.get(f"{arch}.attention.value_length", shape.head_dim) != shape.head_dim:
        raise InputError(f"{name} has keys and values of different sizes, which cannot be widened.")
    return shape


def wider_shape(source: Shape, asked: RequestedSizes, like: str | None = None) -> tuple[Shape, list[str]]:
    """The shape to write, and what a person should know about it.

    What `asked` names must be possible; of `like` is taken what is. Raises InputError.
    """
    named = {field.name: getattr(asked, field.name) for field in fields(asked) if getattr(asked, field.name)}
    _check_named(source, named)
    wide, notes = source, list[str]()
    if like is not None:
        wide, notes = _like(source, like, named)
    wide = replace(wide, **named)
    heads = GroupedHeads(source.heads, source.heads_kv, wide.heads, wide.heads_kv)
    if not heads.fit():
        raise InputError(
            f"{source.heads} heads over {source.heads_kv} KV heads do not fit {wide.heads} over {wide.heads_kv}.",
            "Give --heads a multiple of --heads-kv, and as many KV heads as the source at least.",
        )
    widest = max(wide.embd, wide.ff, wide.heads * wide.head_dim)
    if widest > _WIDEST:
        raise InputError(f"A width of {widest:,} is more than any model has.", f"{_WIDEST:,} is the most.")
    if wide.layers > _MOST_LAYERS:
        raise InputError(f"llama.cpp loads no {wide.layers:,} layers.", f"{_MOST_LAYERS} is the most.")
    if wide.head_dim != source.head_dim:
        notes.append(
            f"Heads grow from {source.head_dim} to {wide.head_dim}: attention adds up in another order, and logits "
            f"differ by rounding. --head-dim {source.head_dim} keeps them to the bit."
        )
    return wide, notes


def _check_named(source: Shape, named: Mapping[str, int]) -> None:
    options = {"heads_kv": "--heads-kv", "head_dim": "--head-dim"}
    for name, size in named.items():
        option, least = options.get(name, f"--{name}"), getattr(source, name)
        if size < least:
            raise InputError(f"{option} {size} is less than the source's {least}.", "A model can only become wider.")
        if name in ("embd", "ff") and size % BLOCK:
            raise InputError(f"{option} {size} is no multiple of {BLOCK}.", "Weights are packed in blocks of 32.")
        if name == "head_dim" and size % least:
            raise InputError(
                f"{option} {size} is no multiple of the source's {least}.", "Positions turn pairs of a head's values."
            )


def _like(source: Shape, like: str, named: Mapping[str, int]) -> tuple[Shape, list[str]]:
    """The source with every size of `like` that keeps the function, and what could not be taken over."""
    known = KNOWN.get(like)
    if known is None:
        raise InputError(f'No shape "{like}" is known.', f"Known: {', '.join(KNOWN)}.")
    shape = known.shape
    if bool(shape.experts) != bool(source.experts):
        fitting = [name for name, one in KNOWN.items() if bool(one.shape.experts) == bool(source.experts)]
        kind = "experts" if source.experts else "no experts"
        raise InputError(f"The source has {kind}, unlike {like}.", f"Take one of {', '.join(fitting)}.")
    notes = []
    if known.architecture != ("qwen3moe" if source.experts else "qwen3"):
        notes.append(
            f"{like} is of the architecture {known.architecture}, which computes something else: "
            "its sizes are taken, the source's architecture stays."
        )
    wide, stays = source, []
    for name in ("embd", "ff", "layers"):
        if name in named or getattr(shape, name) >= getattr(source, name):
            wide = replace(wide, **{name: getattr(shape, name)})
        else:
            stays.append(name)
    head_dim = named.get("head_dim", shape.head_dim)
    if head_dim % source.head_dim:
        head_dim = source.head_dim
        stays.append("head_dim")
    # smaller heads, but more of them: matrices and KV cache have the same size
    more = shape.head_dim // head_dim if shape.head_dim % head_dim == 0 else 1
    heads = GroupedHeads(source.heads, source.heads_kv, shape.heads * more, shape.heads_kv * more)
    wide = replace(wide, head_dim=head_dim)
    if heads.fit():
        wide = replace(wide, heads=heads.wide_heads, heads_kv=heads.wide_heads_kv)
    else:
        stays += [name for name in ("heads", "heads_kv") if name not in named]
    stays += [name for name in ("experts", "used", "vocab") if getattr(shape, name) != getattr(source, name)]
    if stays:
        listed = ", ".join(f"{SIZE_NAMES[name]} {getattr(source, name)} ({getattr(shape, name)})" for name in stays)
        notes.append(f"As in the source, not as in {like} (in brackets), or the function would change: {listed}.")
    return wide, notes
