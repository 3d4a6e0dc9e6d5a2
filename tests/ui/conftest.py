"""The session on which the tests of the chat talk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moeedge.engine.session import Session
from moeedge.llama.reasoning import TemplateChoice
from tests.conftest import TinyFactory
from tests.support.sessions import plain_config


@pytest.fixture(scope="package")
def opened(tiny: TinyFactory) -> Iterator[Session]:
    with Session.open(plain_config(tiny("qwen3moe"), tiny("qwen3"))) as session:
        yield session


@pytest.fixture
def session(opened: Session) -> Iterator[Session]:
    """A tiny target with a draft, as after its opening."""
    opened.set_draft_length(4)
    opened.template = TemplateChoice()
    yield opened
    opened.observers.clear()
    opened.reset()
