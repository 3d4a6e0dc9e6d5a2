"""A chat whose context is full, and /set ctx, /set context_shift."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.engine.types import EngineConfig
from moeedge.llama import model_memory
from moeedge.run import Run
from moeedge.ui.chat.session import FULL, ModelSwitch
from tests.conftest import TinyFactory
from tests.support.stock import StockContext
from tests.ui.test_repl import GREEDY, Line, Talk

N_CTX = 256
LONG = "tell me " * 20
SHORT = replace(GREEDY, n_predict=20)


@pytest.fixture
def switch(tiny: TinyFactory) -> Iterator[ModelSwitch]:
    config = EngineConfig(
        model=tiny("qwen3moe"), draft=tiny("qwen3"), n_threads=1, n_ctx=N_CTX, gamma=2, auto_gamma=False
    )

    with ModelSwitch(config, lambda name: replace(config, model=Path(name)), Run()) as found:
        yield found


def talk(switch: ModelSwitch, lines: list[Line], folder: Path) -> Talk:
    return Talk(switch.session, lines, folder, settings=replace(SHORT, gamma=2), switch=switch)


def test_a_full_context_says_what_helps(switch: ModelSwitch, tmp_path: Path) -> None:
    found = talk(switch, [LONG, "/set n -1", "and?", "and more?"], tmp_path)
    assert found.repl.turns[1].stop_reason == "context"
    assert found.err.count(FULL) == 2  # after that answer, and for the message that no longer fits
    for word in ("/clear", "/set ctx", "/set context_shift on"):
        assert word in FULL


def test_a_larger_context_reads_the_conversation_again(switch: ModelSwitch, tmp_path: Path) -> None:
    first = switch.session
    lines: list[Line] = ["tell me", "/set gamma 1", "/set temp 0", "/set ctx 512", "and?", "/set"]
    found = talk(switch, lines, tmp_path)
    assert first.target.is_closed and switch.session.info.n_ctx == 512
    assert found.repl.session is switch.session and switch.session.gamma == 1
    assert found.repl.settings.ctx == 512
    stats = found.repl.turns[1].stats
    assert (stats.cached_tokens, stats.prefill_tokens) == (0, stats.prompt_tokens)
    assert len(found.messages) == 4
    with StockContext(switch.session.model.path, n_ctx=512) as stock:
        prompt = switch.session.model.render_chat(
            [{"role": message.role, "content": message.content} for message in found.messages[:3]]
        )
        expected, _ = stock.greedy(switch.session.model.tokenize(prompt), 20)
    assert found.messages[3].content.startswith(
        b"".join(switch.session.model.piece(token) for token in expected[:5]).decode("utf-8", "replace")[:3]
    )


@pytest.mark.parametrize("value", ["x", "-1", "999999999999"])
def test_sizes_that_a_context_cannot_have(value: str, switch: ModelSwitch, tmp_path: Path) -> None:
    session = switch.session
    found = talk(switch, [f"/set ctx {value}", "tell me"], tmp_path)
    assert switch.session is session and found.repl.settings.ctx == N_CTX
    assert len(found.messages) == 2


def test_the_old_context_stays_where_a_new_one_has_no_memory(
    switch: ModelSwitch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_memory, "available_memory", lambda: 1 << 20)
    found = talk(switch, ["tell me", "/set gamma 1", "/set ctx 16000", "and?"], tmp_path)
    assert switch.session.info.n_ctx == N_CTX == found.repl.settings.ctx
    assert found.repl.session is switch.session and switch.session.gamma == 1
    assert len(found.messages) == 4
    assert "keeps 256 tokens" in found.err


def test_a_shift_drops_the_oldest_messages(switch: ModelSwitch, tmp_path: Path) -> None:
    lines: list[Line] = ["/set context_shift on", *[f"{number} {LONG[:60]}" for number in range(12)]]
    found = talk(switch, lines, tmp_path)
    assert len(found.messages) == 24, "every message is answered"
    assert [turn.stop_reason for turn in found.repl.turns] == ["length"] * 12
    assert "no longer sees the oldest" in found.err
    assert max(turn.stats.prompt_tokens for turn in found.repl.turns) < N_CTX
    cached = [turn.stats.cached_tokens for turn in found.repl.turns]
    assert sum(count > 0 for count in cached) >= 6, "between two shifts the KV cache stays useful"


def test_without_a_shift_a_long_conversation_is_refused(switch: ModelSwitch, tmp_path: Path) -> None:
    found = talk(switch, ["/set context_shift on", "/set context_shift off", *[LONG] * 3], tmp_path)
    assert FULL in found.err and len(found.messages) < 6
