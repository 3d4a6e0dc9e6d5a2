"""Bytes of tokens to text, without ever splitting a character."""

from __future__ import annotations

import codecs


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
