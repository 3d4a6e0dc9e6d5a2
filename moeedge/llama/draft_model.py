"""Draft models: the check that a draft shares the target's vocabulary, and a draft made by quantizing the target.

A low-bit copy of the target has the same layers, the same hidden size and nearly the same hidden states, which is what
SP-MoE's predictor relies on (the paper's pair DeepSeek-Lite and DeepSeek-Lite-AWQ is of that kind).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib

from moeedge import paths
from moeedge.errors import EngineError, InputError, VocabularyMismatchError
from moeedge.llama import gguf_file, library
from moeedge.llama.model import Model
from moeedge.paths import replace_file

# the rules of llama.cpp's speculative programs (common/speculative.cpp)
_MAX_SIZE_DIFFERENCE = 128  # tokens; padding differs between models of a family
_FIRST_COMPARED_TOKEN = 5  # special tokens at the start may be spelled differently
_SHOWN_DIFFERENCES = 3
_HINT = "Choose a draft of the same model family, -md ngram, or -md none."

# name -> enum llama_ftype of llama.h; rows that a type's blocks do not divide get llama.cpp's fallback type
TYPES = {"q2_k": 10, "q3_k": 12, "q4_0": 2, "q4_k": 15, "iq4_nl": 25, "q5_0": 8, "q8_0": 7}


def check_compatible(target: Model, draft: Model) -> int:
    """Returns the number of token ids that both models have; raises VocabularyMismatchError naming the differences."""
    names = f"The draft {draft.path.name} does not share the vocabulary of {target.path.name}"
    kinds = lib.llama_vocab_type(target.vocab), lib.llama_vocab_type(draft.vocab)
    if kinds[0] != kinds[1]:
        raise VocabularyMismatchError(f"{names}: the tokenizers are of types {kinds[1]} and {kinds[0]}.", _HINT)
    _check_special(names, "BOS", target, draft, lib.llama_vocab_get_add_bos, lib.llama_vocab_bos)
    _check_special(names, "EOS", target, draft, lib.llama_vocab_get_add_eos, lib.llama_vocab_eos)

    sizes = target.info.n_vocab, draft.info.n_vocab
    n_common = min(sizes)
    differences: list[str] = []
    if abs(sizes[0] - sizes[1]) > _MAX_SIZE_DIFFERENCE:
        differences.append(f"it has {sizes[1]:,} tokens instead of {sizes[0]:,}")
    tokens = range(_FIRST_COMPARED_TOKEN, n_common)
    of_target, of_draft = (map(lib.llama_vocab_get_text, repeat(model.vocab), tokens) for model in (target, draft))
    differing = (token for token, one, other in zip(tokens, of_target, of_draft, strict=True) if one != other)
    for token, _ in zip(differing, range(_SHOWN_DIFFERENCES), strict=False):
        differences.append(
            f"token {token} is {draft.token_text(token)!r} in the draft and {target.token_text(token)!r} in the model"
        )
    if differences:
        raise VocabularyMismatchError(f"{names}: {'; '.join(differences)}.", _HINT)
    return n_common


def _check_special(
    names: str,
    kind: str,
    target: Model,
    draft: Model,
    adds: Callable[[Any], bool],
    token_of: Callable[[Any], int],
) -> None:
    """Compares a special token, which matters only if the tokenizer adds it."""
    target_token = token_of(target.vocab) if adds(target.vocab) else None
    draft_token = token_of(draft.vocab) if adds(draft.vocab) else None
    if target_token != draft_token:
        raise VocabularyMismatchError(
            f"{names}: {kind} is {_describe(draft, draft_token)} in the draft and "
            f"{_describe(target, target_token)} in the model.",
            _HINT,
        )


def _describe(model: Model, token: int | None) -> str:
    return "not added" if token is None else f"token {token} ({model.token_text(token)!r})"


def quantized(model: Path, type_name: str = "q4_0") -> Path:
    """Returns the path of `model` quantized to `type_name`, kept in the cache folder and made on first use.

    Raises ModelFileError for an unusable model, InputError for an unknown type or a cache that cannot be written,
    EngineError when llama.cpp fails.
    """
    gguf_file.read_summary(model)
    if type_name not in TYPES:
        raise InputError(f"Unknown type '{type_name}' for a draft.", f"Choose from: {', '.join(TYPES)}.")
    status = model.stat()
    identity = f"{model.resolve()}|{status.st_size}|{status.st_mtime_ns}|{type_name}"
    name = f"{model.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}-{type_name}.gguf"
    try:
        file = paths.cache_dir() / "drafts" / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(file) as temporary:
                _quantize(model, temporary, TYPES[type_name])
    except OSError as error:
        raise InputError(
            f"Cannot write the draft to the folder of what moeedge keeps: {error.strerror}.",
            "Set MOEEDGE_CACHE to a folder that you may write, or give a draft with -md FILE.",
        ) from None
    return file


def _quantize(model: Path, out: Path, file_type: int) -> None:
    library.start()
    library.clear_errors()
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = file_type
    parameters.nthread = library.physical_cores()
    parameters.allow_requantize = True  # requantizing a quantized model loses little more
    if lib.llama_model_quantize(os.fsencode(model), os.fsencode(out), ctypes.byref(parameters)) != 0:
        raise EngineError(f"llama.cpp cannot quantize {model}: {library.first_error()}.")
