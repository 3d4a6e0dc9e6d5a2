"""Can a draft model's tokens be verified by the target? The rules are those of llama.cpp's speculative programs."""

from __future__ import annotations

import llama_cpp.llama_cpp as lib

from moeedge.engine.model import Model
from moeedge.errors import VocabularyMismatchError

_MAX_SIZE_DIFFERENCE = 128  # tokens; padding differs between models of a family (llama.cpp, common/speculative.cpp)
_FIRST_COMPARED_TOKEN = 5  # the special tokens at the start may be spelled differently (same source)
_SHOWN_DIFFERENCES = 3
_MEND = "Choose a draft of the same model family, or none."


def check_compatible(target: Model, draft: Model) -> int:
    """Returns the number of token ids that both have; raises VocabularyMismatchError naming what differs."""
    names = f"The draft {draft.path.name} does not share the vocabulary of {target.path.name}"
    kinds = lib.llama_vocab_type(target.vocab), lib.llama_vocab_type(draft.vocab)
    if kinds[0] != kinds[1]:
        raise VocabularyMismatchError(f"{names}: the tokenizers are of types {kinds[1]} and {kinds[0]}.", _MEND)
    _check_special(names, "BOS", target, draft, lib.llama_vocab_get_add_bos, lib.llama_vocab_bos)
    _check_special(names, "EOS", target, draft, lib.llama_vocab_get_add_eos, lib.llama_vocab_eos)

    sizes = target.info.n_vocab, draft.info.n_vocab
    n_common = min(sizes)
    differing: list[str] = []
    for token in range(_FIRST_COMPARED_TOKEN, n_common):
        theirs, ours = lib.llama_vocab_get_text(draft.vocab, token), lib.llama_vocab_get_text(target.vocab, token)
        if theirs != ours:
            there, here = draft.token_text(token), target.token_text(token)
            differing.append(f"token {token} is {there!r} there and {here!r} here")
            if len(differing) == _SHOWN_DIFFERENCES:
                break
    if abs(sizes[0] - sizes[1]) > _MAX_SIZE_DIFFERENCE:
        differing.insert(0, f"it has {sizes[1]:,} tokens instead of {sizes[0]:,}")
    if differing:
        raise VocabularyMismatchError(f"{names}: {'; '.join(differing)}.", _MEND)
    return n_common


def _check_special(names: str, kind: str, target: Model, draft: Model, adds: object, token_of: object) -> None:
    """The special token matters where the tokenizer adds it."""
    assert callable(adds) and callable(token_of)
    ours = token_of(target.vocab) if adds(target.vocab) else None
    theirs = token_of(draft.vocab) if adds(draft.vocab) else None
    if ours != theirs:
        raise VocabularyMismatchError(
            f"{names}: {kind} is {_say(draft, theirs)} there and {_say(target, ours)} here.", _MEND
        )


def _say(model: Model, token: int | None) -> str:
    return "not added" if token is None else f"token {token} ({model.token_text(token)!r})"
