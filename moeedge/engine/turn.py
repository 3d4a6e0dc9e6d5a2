"""One turn of a chat: conversation to prompt tokens, the engine's tokens to text that can be shown at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from moeedge.engine.text import StreamDecoder

if TYPE_CHECKING:
    from moeedge.engine.conversation import Conversation
    from moeedge.engine.llama import Model
    from moeedge.engine.session import Session
    from moeedge.engine.types import GenerationStats, SamplingConfig, StopReason


def prompt_tokens(model: Model, conversation: Conversation, *, raw: bool = False) -> list[int]:
    """The token ids that ask for the next answer: through the model's chat template, or the bare text with `raw`."""
    text = conversation.raw_text() if raw else model.render_chat(conversation.chat_messages())
    return model.tokenize(text)


class Answer:
    """One answer while it is generated. Iterate over it for the text, in pieces that never split a character.

    `text` grows with the pieces; `tokens`, `stats` and `stop_reason` are those of the engine's generation.
    """

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        *,
        n_predict: int,
        sampling: SamplingConfig,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self._model = session.model
        self._generation = session.generate(prompt, n_predict=n_predict, sampling=sampling, cancel=cancel)
        self.text = ""

    @property
    def stats(self) -> GenerationStats:
        """The sums so far."""
        return self._generation.stats

    @property
    def tokens(self) -> list[int]:
        """The ids generated so far."""
        return self._generation.tokens

    @property
    def notes(self) -> list[str]:
        """A sentence for each thing that the user should be told: context full, context shifted."""
        return self._generation.notes

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it ended; None while it runs."""
        return self._generation.stop_reason

    def close(self) -> None:
        """End the answer here; what was said stays."""
        self._generation.close()

    def __iter__(self) -> Iterator[str]:
        decoder = StreamDecoder()
        for step in self._generation:
            piece = decoder.feed(b"".join(self._model.piece(token) for token in step.tokens))
            if piece:
                self.text += piece
                yield piece
        rest = decoder.flush()
        if rest:
            self.text += rest
            yield rest
