"""The check that a draft shares the target's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import llama_cpp.llama_cpp as lib

from moeedge.errors import VocabularyMismatchError
from moeedge.llama.model import Model

# the rules of llama.cpp's speculative programs (common/speculative.cpp)
_MAX_SIZE_DIFFERENCE = 128  # tokens; padding differs between models of a family
_FIRST_COMPARED_TOKEN = 5  # special tokens at the start may be spelled differently
_SHOWN_DIFFERENCES = 3
_HINT = "Choose a draft of the same model family, -md ngram, or -md none."


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
