"""Texts that end an answer: found among its tokens, and kept out of what is shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Looks for texts in a stream of bytes; they may begin and end within tokens."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text.encode() for text in texts]
        self.n_longest = max(map(len, self._texts), default=0)  # bytes
        self._tail = b""

    def find(self, data: bytes) -> bool:
        """Whether `data` completes one of the texts."""
        if not self.n_longest:
            return False
        seen = self._tail + data
        self._tail = seen[-self.n_longest + 1 :] if self.n_longest > 1 else b""
        return any(text in seen for text in self._texts)


class StopFilter:
    """Passes text on up to the first of the stop texts, and holds back what may be the beginning of one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self._stopped = False

    def feed(self, piece: str, *, last: bool = False) -> str:
        """What can be shown after `piece`; last: no more text comes."""
        if not self._texts:
            return piece
        if self._stopped:
            return ""
        text = self._held + piece
        places = [place for place in (text.find(stop) for stop in self._texts) if place >= 0]
        if places:
            self._stopped, self._held = True, ""
            return text[: min(places)]
        n_held = 0 if last else max(_n_begun(text, stop) for stop in self._texts)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


def _n_begun(text: str, stop: str) -> int:
    """The length of the longest beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
