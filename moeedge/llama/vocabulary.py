"""Can a draft model's tokens be verified by the target? The rules are those of llama.cpp's speculative programs.

Bytes of tokens to text, without ever splitting a character.
"""

from __future__ import annotations

import codecs

import llama_cpp.llama_cpp as lib

from moeedge.errors import VocabularyMismatchError
from moeedge.llama.model import Model

_MAX_SIZE_DIFFERENCE = 128  # tokens; padding differs between models of a family (llama.cpp, common/speculative.cpp)
_FIRST_COMPARED_TOKEN = 5  # the special tokens at the start may be spelled differently (same source)
_SHOWN_DIFFERENCES = 3
_HINT = "Choose a draft of the same model family, or none."


def check_compatible(target: Model, draft: Model) -> int:
    """Returns the number of token ids that both have; raises VocabularyMismatchError naming what differs."""
    names = f"The draft {draft.path.name} does not share the vocabulary of {target.path.name}"
    kinds = lib.llama_vocab_type(target.vocab), lib.llama_vocab_type(draft.vocab)
    if kinds[0] != kinds[1]:
        raise VocabularyMismatchError(f"{names}: the tokenizers are of types {kinds[1]} and {kinds[0]}.", _HINT)
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
        raise VocabularyMismatchError(f"{names}: {'; '.join(differing)}.", _HINT)
    return n_common


def _check_special(names: str, kind: str, target: Model, draft: Model, adds: object, token_of: object) -> None:
    """The special token matters where the tokenizer adds it."""
    assert callable(adds) and callable(token_of)
    ours = token_of(target.vocab) if adds(target.vocab) else None
    theirs = token_of(draft.vocab) if adds(draft.vocab) else None
    if ours != theirs:
        raise VocabularyMismatchError(
            f"{names}: {kind} is {_say(draft, theirs)} there and {_say(target, ours)} here.", _HINT
        )


def _say(model: Model, token: int | None) -> str:
    return "not added" if token is None else f"token {token} ({model.token_text(token)!r})"


class StreamDecoder:
    """Bytes in, complete UTF-8 text out; bytes that are no UTF-8 become U+FFFD.

    A token may end in the middle of a character (emoji, CJK): its first bytes wait here until the rest has come.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """The text that is complete after `data`; may be empty."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end of an answer; the decoder is then as new."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
