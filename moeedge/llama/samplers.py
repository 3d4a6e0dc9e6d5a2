"""llama.cpp's samplers as typed objects: filters of a row of logits, and grammars.

A sampler keeps the tokens that it has accepted. `clone` goes on from there: one for each path that may be taken.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.llama import library

if TYPE_CHECKING:
    from typing_extensions import Self

_TOKEN = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # struct llama_token_data
_ROOT = b"root"
# with a larger minimum llama.cpp's parser would fill the memory
_BOUNDS = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*|\{\s*(\d+)\s*,\s*(\d+)\s*\}')
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*')
_ZEROS = np.zeros(64, dtype=np.float32)
_PARSE_ERROR = "error parsing grammar: "

FloatRow = NDArray[np.float32]  # [n_vocab]
IntRow = NDArray[np.int32]
TokenIds = Sequence[int] | NDArray[np.signedinteger[Any]]


class TokenArray:
    """Tokens with their logits as samplers take them: llama_token_data_array, whose memory is allocated once."""

    def __init__(self, n_max: int) -> None:
        self._data = np.zeros(n_max, dtype=_TOKEN)
        self._start = self._data.ctypes.data
        self._first = ctypes.cast(self._start, ctypes.POINTER(lib.llama_token_data))
        self._ids = np.arange(n_max, dtype=np.int32)
        self.array = lib.llama_token_data_array()
        self.reference = ctypes.byref(self.array)

    def fill(self, logits: Any, ids: Any = None) -> None:
        """Sets `ids` (default: those of a vocabulary) with their logits, none selected."""
        n = len(logits)
        self._data["id"][:n] = self._ids[:n] if ids is None else ids
        self._data["logit"][:n] = logits
        self.array.data, self.array.size, self.array.selected, self.array.sorted = self._first, n, -1, False

    def drop_excluded(self) -> None:
        """Leaves out tokens of -inf, with which some filters compute 0 log 0; of sorted ones the first may stay."""
        ids, logits = self.read()
        is_possible = logits > -np.inf
        if self.array.sorted and len(logits) and not np.isfinite(logits[0]):
            is_possible[:], is_possible[0] = False, True
            logits[0] = 0
        n = int(np.count_nonzero(is_possible))
        if n < len(logits):
            self._data["id"][:n], self._data["logit"][:n] = ids[is_possible], logits[is_possible]
            self.array.data, self.array.size, self.array.selected = self._first, n, -1

    def read(self) -> tuple[IntRow, FloatRow]:
        """Ids and logits of the tokens that are left; views until the next `fill`."""
        first = (ctypes.addressof(self.array.data.contents) - self._start) // _TOKEN.itemsize
        left = self._data[first : first + self.array.size]
        return left["id"], left["logit"]


class NativeSampler:
    """One llama_sampler, freed with this object."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self._pointer, token)

    def apply(self, tokens: TokenArray) -> None:
        lib.llama_sampler_apply(self._pointer, tokens.reference)

    def clone(self) -> Self:
        """A copy with the tokens accepted so far."""
        return type(self)(lib.llama_sampler_clone(self._pointer))

    def __del__(self) -> None:
        if not sys.is_finalizing():
            lib.llama_sampler_free(self._pointer)


class Grammar(NativeSampler):
    """A GBNF grammar and the tokens that it has accepted; at others than `allowed` llama.cpp ends the process."""

    @classmethod
    def parse(cls, text: str, vocab: Any = None) -> Grammar:
        """The grammar of a text; without `vocab` (llama_vocab *) only for a check. Raises InputError with a place."""
        if not text.strip():
            raise InputError("The grammar is empty.", "It needs at least a rule for root.")
        for match in _BOUNDS.finditer(text):
            if match[1] and int(match[1]) > int(match[2]):
                raise InputError(f"The grammar is wrong: {match[0]} repeats no times{_place(text, match.start())}.")
        library.clear_errors()
        with _standard_error() as printed:
            pointer = lib.llama_sampler_init_grammar(vocab, text.encode(), _ROOT)
        if not pointer:
            raise InputError(f"The grammar is wrong: {_reason(text, printed[0])}.")
        return cls(pointer)

    def allowed(self, tokens: TokenArray, ids: TokenIds) -> NDArray[np.bool_]:
        """Whether each of `ids` may come next, bool [n]; `tokens` is memory to work in."""
        tokens.fill(_ZEROS[: len(ids)] if len(ids) <= len(_ZEROS) else np.zeros(len(ids), dtype=np.float32), ids)
        self.apply(tokens)
        is_allowed: NDArray[np.bool_] = np.isfinite(tokens.read()[1])
        return is_allowed


def check_grammar(text: str) -> None:
    """Raises InputError for a wrong grammar, before a model is loaded. Names of tokens need the model's vocabulary."""
    if "<" not in _QUOTED.sub("", text):
        Grammar.parse(text)


def make_filter(name: str, vocab: Any, *values: Any) -> NativeSampler:
    """llama.cpp's filter of that name (llama_sampler_init_NAME) with its parameters; dry and infill read `vocab`."""
    init = getattr(lib, f"llama_sampler_init_{name}")
    if name == "dry":
        *numbers, breakers = values
        texts = [text.encode() for text in breakers]
        return NativeSampler(init(vocab, *numbers, (ctypes.c_char_p * len(texts))(*texts), len(texts)))
    return NativeSampler(init(vocab) if name == "infill" else init(*values))


@contextmanager
def _standard_error() -> Iterator[list[str]]:
    """Collects what native code prints on standard error within; llama.cpp's parser does not log its errors."""
    printed: list[str] = []
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            printed.append(file.read().decode("utf-8", "replace"))


def _reason(text: str, printed: str) -> str:
    """Why llama.cpp refused the grammar `text`, with the place where it stopped reading."""
    _, marker, reason = printed.partition(_PARSE_ERROR)
    if not marker:  # logged: printed, before llama.cpp was started
        logged = printed.strip().split("\n")[0].rpartition("init_impl: ")[2]
        return library.first_error(logged or "llama.cpp refuses it")
    reason = reason.split("\n\n" + text)[0].strip()
    what, at, rest = (reason + " ").partition(" at ")
    rest = rest.strip()
    if at and text.rstrip().endswith(rest):
        return f"{what}{_place(text, len(text.rstrip()) - len(rest))}"
    if symbol := re.search(r"'([\w-]+)'", reason):
        used = re.search(rf"(?<![\w-]){re.escape(symbol[1])}(?![\w-])", text)
        return reason + (_place(text, used.start()) if used else "")
    return reason + (_place(text, len(text.rstrip())) if "end of input" in reason else "")


def _place(text: str, index: int) -> str:
    """Line and column of a character, from 1, and what stands there."""
    before = text[:index]
    line, column = before.count("\n") + 1, index - before.rfind("\n")
    there = text[index:].split("\n")[0].strip()
    return f" in line {line}, column {column}" + (f", at {there[:30]}" if there else "")
