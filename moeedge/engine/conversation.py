"""A conversation as data: messages, saved and loaded, and the prompt tokens that ask for the next answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from moeedge.errors import EmptyPromptError, InputError
from moeedge.llama.reasoning import MODEL_TEMPLATE, ReasoningTags, TemplateChoice, split_reasoning
from moeedge.paths import read_text, write_file
from moeedge.schemas import read_json

if TYPE_CHECKING:
    from moeedge.llama.model import Model


SCHEMA = "moeedge.conversation"
VERSION = 1

Role = Literal["user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One message; `content` is the text as typed or generated, without the tokens of the template."""

    role: Role
    content: str


@dataclass
class Conversation:
    """A system prompt and messages that alternate user, assistant, user, ...; the last may be an open question."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)
    budgets: list[str] = field(default_factory=list)  # expert budgets under which there were answers, in words

    @property
    def has_question(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "user"

    def ask(self, text: str) -> None:
        """Append a question. Raises EmptyPromptError for blank text."""
        if not text.strip():
            raise EmptyPromptError("The prompt is empty.", "Give some text to answer.")
        self._expect("assistant")
        self.messages.append(Message("user", text))

    def answer(self, text: str) -> None:
        self._expect("user")
        self.messages.append(Message("assistant", text))

    def take_back(self) -> str | None:
        """Remove the open question and return its text; None when there is none."""
        return self.messages.pop().content if self.has_question else None

    def reopen(self) -> str:
        """Remove the last answer, whose question is open again, and return it. Raises InputError when there is none."""
        if not self.messages or self.has_question:
            raise InputError("There is no answer to generate again.")
        return self.messages.pop().content

    def undo(self) -> Message:
        """Remove the last question and its answer; returns the question. Raises InputError when there is none."""
        if not self.messages or self.has_question:
            raise InputError("There is no message to take back.")
        self.messages.pop()
        return self.messages.pop()

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages.clear()
        self.budgets.clear()

    def add_budget(self, label: str) -> None:
        """Remember that an answer begins under an expert budget; an empty label: without one."""
        if label and label not in self.budgets:
            self.budgets.append(label)

    def chat_messages(self, tags: ReasoningTags | None = None) -> list[dict[str, str]]:
        """The messages as a chat template takes them: the system prompt first, reasoning (`tags`) apart."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for message in self.messages:
            messages.append(vars(message).copy())
            if message.role == "assistant":
                reasoning, messages[-1]["content"] = split_reasoning(message.content, tags)
                if reasoning:  # two keys are in use
                    messages[-1] |= {"reasoning_content": reasoning, "thinking": reasoning}
        return messages

    def to_json(self, *, model: str = "") -> str:
        """The conversation as a JSON document. model: the file name of the model that answered."""
        messages = [vars(message) for message in self.messages]
        document = {"schema": SCHEMA, "version": VERSION, "model": model, "budgets": self.budgets}
        document |= {"system": self.system, "messages": messages}
        return json.dumps(document, ensure_ascii=False, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        """Read what `to_json` wrote. Raises InputError for any other text."""
        try:
            document = read_json(text)
        except ValueError as error:
            raise InputError(f"This is not a saved conversation: it is not JSON ({error}).") from None
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise InputError("This is not a saved conversation.", "/save FILE writes one.")
        if document.get("version") != VERSION:
            raise InputError(f"The conversation has version {document.get('version')}, this program reads {VERSION}.")
        system = document.get("system", "")
        items = document.get("messages")
        if not isinstance(system, str) or not isinstance(items, list):
            raise InputError('The conversation lacks "system" (text) or "messages" (a list).')
        budgets = document.get("budgets", [])
        if not isinstance(budgets, list) or not all(isinstance(label, str) for label in budgets):
            raise InputError('"budgets" of the conversation is not a list of texts.')
        return cls(system, [read_message(item, index) for index, item in enumerate(items)], budgets)

    def save(self, path: Path, *, model: str = "") -> None:
        """Write the conversation to `path`; a failure leaves an old file as it is. Raises InputError then."""
        with write_file(path, "conversation") as new_file:
            new_file.write_text(self.to_json(model=model), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read a conversation from `path`. Raises InputError that names the file."""
        try:
            return cls.from_json(read_text(path))
        except InputError as error:
            message = error.message if str(path) in error.message else f"{path}: {error.message}"
            raise InputError(message, error.hint) from None

    def _expect(self, last: Role) -> None:
        """Checks that the last message is of `last`; an empty conversation expects a question."""
        before = self.messages[-1].role if self.messages else "assistant"
        if before != last:
            raise ValueError(f"the last message is the {before}'s, expected the {last}'s")


def read_message(item: Any, index: int) -> Message:
    """Message number `index` of a document. Raises InputError unless user and assistant take turns, user first."""
    expected: Role = "assistant" if index % 2 else "user"
    if not isinstance(item, dict) or item.get("role") != expected or not isinstance(item.get("content"), str):
        raise InputError(f'Message {index + 1} is not {{"role": "{expected}", "content": text}}.')
    return Message(expected, cast(str, item["content"]))


def prompt_tokens(
    model: Model, conversation: Conversation, *, raw: bool = False, template: TemplateChoice = MODEL_TEMPLATE
) -> list[int]:
    """The token ids that ask for the next answer: through a chat template, or the bare text with `raw`."""
    if raw:
        return model.tokenize("".join(message.content for message in conversation.messages))
    messages = conversation.chat_messages(model.reasoning_tags(template))
    return model.chat_tokens(messages, template=template)
