"""Chat turns of random length, experts on the emulated device: nothing grows, and no slot is lost."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest

from moeedge import native
from moeedge.data.datasets import load_sample, load_toy
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.scheduler.config import PlacementConfig
from tests.support.experts import assert_balanced

SECONDS = 20  # a longer run finds smaller leaks
N_CTX = 2048
RSS_LIMIT_BYTES = 64 << 20  # of growth after a third: caches of graphs and Python's own pools fill


@pytest.mark.slow
def test_nothing_grows(bundled_pair: tuple[Path, Path]) -> None:
    """Conversations of one to three turns; after each turn no transfer is in flight while the counters are read."""
    rng, process = random.Random(1), psutil.Process()
    prompts = (*load_toy().prompts, *load_sample().prompts)
    texts = [message.content for prompt in prompts for turn in prompt.turns for message in turn]
    placement = PlacementConfig(cache_ratio=0.17, calibrate=False)
    target, draft = bundled_pair
    where = {"n_threads": 1, "device": "emulated:threads=1", "placement": placement}
    config = EngineConfig(model=target, draft=draft, gamma=8, n_ctx=N_CTX, **where)  # type: ignore[arg-type]
    n_instances = native.load().moeedge_live_instances()  # contexts that other tests have abandoned
    held: list[tuple[int, int, int]] = []  # threads, open files and our instances after each conversation
    rss_bytes: list[int] = []
    with Session.open(config) as session:
        assert session.placement is not None
        cache, start_s = session.placement.cache, time.monotonic()
        while time.monotonic() < start_s + SECONDS:
            conversation = Conversation(rng.choice(("", "Answer briefly.")))
            for _ in range(rng.randint(1, 3)):
                conversation.ask("\n".join(rng.choices(texts, k=rng.choice((1, 1, 1, 2, 8)))))
                prompt = prompt_tokens(session.model, conversation)
                if len(prompt) + 64 > N_CTX:
                    break
                session.gamma = rng.choice((0, 1, 4, 8, 8, 8))
                sampling = SamplingConfig(temperature=rng.choice((0.0, 0.8)), seed=rng.randrange(1 << 30))
                answer = session.generate(prompt, n_predict=round(2 ** rng.uniform(0, 7)), sampling=sampling)
                for _piece in answer.pieces():
                    if rng.random() < 1e-3:  # Ctrl-C during an answer
                        answer.close()
                        break
                conversation.answer(answer.text)
                session.placement.wait()  # a plan that is pushed later would start transfers
                cache.drain(10.0)
                assert_balanced(cache)
                stats = cache.stats()
                assert (stats.pinned, stats.failed) == (0, 0) and stats.slots_used > 0
            session.reset()
            held.append((process.num_threads(), process.num_fds(), native.load().moeedge_live_instances()))
            rss_bytes.append(process.memory_info().rss)
    n_warm = len(held) // 3
    assert len(held) > 2 and set(held[n_warm:]) == {held[n_warm]}
    assert max(rss_bytes[n_warm:]) < rss_bytes[n_warm] + RSS_LIMIT_BYTES
    assert native.load().moeedge_live_instances() == n_instances
