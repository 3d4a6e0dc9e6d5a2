"""The expert cache on a device with memory of its own and queues that execute late: uploads, pools, short memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.errors import EngineError
from moeedge.hardware import devices
from moeedge.hardware.spec import DeviceSpec
from moeedge.native.cache import ExpertCache
from moeedge.scheduler.slot_memory import MemoryWatch
from tests.support.answers import assert_equal_answers
from tests.support.counting import DEVICE, CountingDevice, Kind
from tests.support.experts import (
    ExpertFile,
    assert_balanced,
    assert_bytes,
    carry_out,
    resident,
    write_experts,
)
from tests.support.hybrid import RandomPlans, hybrid_config, hybrid_context, random_prompt
from tests.support.sessions import GREEDY
from tests.support.stock import StockContext

PIECE_BYTES = 256 << 10  # native/src/expert-uploader.cpp
PROMPT = random_prompt(24, 5)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    """Experts of 2 MiB and a bias: more than a chunk of the uploader."""
    return write_experts(tmp_path_factory.mktemp("large") / "large.bin", n_layers=2, n_experts=4, width=512)


@pytest.mark.parametrize("n_readers", [1, 3])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_uploads_arrive_in_small_pieces(
    n_readers: int, batch: int, large: ExpertFile, counting: CountingDevice
) -> None:
    everything = large.everything
    with counting.late(), ExpertCache(large.config(0.5, device=DEVICE)) as cache:
        cache.set_readers(n_readers)
        cache.set_batch(batch)
        counting.reset()
        for uploads, victims in ((everything[:4], []), (everything[4:], everything[:4]), (everything[:3], everything)):
            carry_out(cache, uploads, victims=victims)
            assert set(uploads) <= resident(cache)
        timeline = counting.timeline()
        assert assert_bytes(cache, large) == 4
        assert_balanced(cache)
        sets = timeline[timeline["kind"] == Kind.SET_ASYNC]
        assert sets["bytes"].max() == PIECE_BYTES
        assert sets["bytes"].sum() == cache.stats().bytes_moved == 11 * sum(t.stride for t in large.tensors[:3])
        n_chunks = int(np.count_nonzero(timeline["kind"] == Kind.EVENT_RECORD))
        assert n_chunks <= 11 * 2, "an expert is a chunk and a bit"


def test_a_file_that_ends_early_fails_its_uploads_only(tmp_path: Path, counting: CountingDevice) -> None:
    model = write_experts(tmp_path / "model.bin", n_layers=2, n_experts=4, width=256)
    with ExpertCache(model.config(1.0, device=DEVICE)) as cache:
        cache.set_readers(2)
        end = model.tensors[-2].offset + model.tensors[-2].stride  # of layer 1's second role: one expert is left
        with model.path.open("r+b") as file:
            file.truncate(end)
        carry_out(cache, [(1, 1), (0, 0), (0, 1)])
        assert resident(cache) == {(0, 0), (0, 1)}
        assert cache.stats().failed == 1
        assert assert_bytes(cache, model) == 2


def test_pools_are_no_larger_than_the_largest_buffer(large: ExpertFile, counting: CountingDevice) -> None:
    slot_bytes = large.tensors[0].stride
    counting.set("max_buffer_bytes", 5 * slot_bytes)
    with ExpertCache(large.config(1.0, device=DEVICE)) as cache:
        assert cache.info.n_slots == cache.info.slots_wanted == 8
        assert cache.groups()[1].tolist() == [4, 4]
        carry_out(cache, large.everything)
        assert assert_bytes(cache, large) == 8
    counting.set("max_buffer_bytes", slot_bytes // 2)
    with pytest.raises(EngineError, match="no memory for even one expert"):
        ExpertCache(large.config(1.0, device=DEVICE))
    counting.set("max_buffer_bytes", 1 << 62)


def test_short_memory_gives_fewer_slots(large: ExpertFile, counting: CountingDevice) -> None:
    counting.set("other_bytes", (8 << 30) - counting.allocated_bytes - 5 * large.expert_bytes)
    with ExpertCache(large.config(1.0, device=DEVICE)) as cache:
        assert 1 <= cache.info.n_slots <= 5 < cache.info.slots_wanted == 8
        carry_out(cache, large.everything)
        assert assert_bytes(cache, large) == cache.info.n_slots
    counting.set("other_bytes", 0)


def test_blocks_are_computed_on_the_cpu_while_the_device_has_no_memory_for_them(
    tiny_moe: Path, counting: CountingDevice
) -> None:
    with StockContext(tiny_moe) as stock:
        expected = stock.decode(PROMPT)
    with hybrid_context(tiny_moe, 1.0, device=DEVICE) as (context, cache):
        RandomPlans(cache, 0).fill()
        counting.set("other_bytes", counting_free_bytes())
        before = cache.stats()
        logits = context.decode(PROMPT)
        after = cache.stats()
        assert after.blocks_unknown > before.blocks_unknown
        assert after.pairs_hit == before.pairs_hit
        assert np.abs(logits - expected).max() <= 5e-3 * np.abs(expected).max()
        counting.set("other_bytes", 0)
        context.trim(0)
        context.decode(PROMPT)
        assert cache.stats().pairs_hit > after.pairs_hit
    counting.check()


def counting_free_bytes() -> int:
    reading = devices.read_memory(devices.resolve(DeviceSpec.parse(DEVICE), bundled=False))
    assert reading is not None
    return reading.free_bytes


def test_the_cache_shrinks_when_another_program_takes_memory(
    tiny_moe: Path, tiny_draft: Path, counting: CountingDevice
) -> None:
    with StockContext(tiny_moe) as stock:
        expected = stock.greedy(PROMPT, 24)[0]
    with Session.open(hybrid_config(tiny_moe, tiny_draft, 0.75, gamma=4, device=DEVICE)) as session:
        manager = session.placement
        assert manager is not None
        before = manager.cache.info
        slot_bytes = int(manager.cache.groups()[2].max())
        now_s = 0.0
        (tier,) = manager.tiers
        tier.watch = MemoryWatch(10 * slot_bytes, partial(devices.read_memory, tier.device), clock=lambda: now_s)
        generation = session.generate(PROMPT, n_predict=24, sampling=GREEDY, ignore_eos=True)
        for step, _ in enumerate(generation):
            now_s += 1.0
            if step == 3:
                counting.set("other_bytes", counting_free_bytes() - 2 * slot_bytes)
        assert_equal_answers(session, PROMPT, expected, generation.tokens)
        assert manager.cache.info.n_slots == before.n_slots - 8
        assert counting_free_bytes() >= 9 * slot_bytes  # what the subgraphs take comes and goes
    counting.set("other_bytes", 0)
