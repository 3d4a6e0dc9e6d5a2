"""Estimates from the catalog's facts, against the plans that headers give and against sizes that are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.hub.catalog import Choice, HubFile, ModelEntry, Variant, load_catalog
from moeedge.hub.local import list_models
from moeedge.llama.model_memory import ModelMemory
from moeedge.planning.estimate import Memory, estimate, known_file, known_model, known_row
from moeedge.planning.memory_map import KERNEL_BYTES
from moeedge.scheduler.sizing import default_reserve
from tests.conftest import TinyFactory
from tests.support.machine import GIB

ORDER = ["nowhere", "disk", "RAM", "GPU and RAM", "GPU"]


def named(name: str) -> ModelMemory:
    return known_model(load_catalog().find(name))


def memory(vram_gib: float, ram_gib: float = 32) -> Memory:
    return Memory(ram_bytes=round(ram_gib * GIB), vram_bytes=round(vram_gib * GIB))


def test_qwen3_as_its_header_says_and_granite_as_its_tensors_are() -> None:
    """docs/plan.md: a GPU of 8 GiB, 32 GiB of RAM, 8,192 tokens; 16,740 MiB of experts, 31.2 % of them on the GPU."""
    model = named("qwen3-30b-a3b")
    assert model.experts_bytes / 2**20 == pytest.approx(16740, rel=0.01)
    assert model.kv_bytes(8192) / 2**20 == 768
    found = estimate(model, memory(8))
    assert found.place == "GPU and RAM"
    assert found.device_ratio == pytest.approx(0.312, abs=0.01)
    assert named("granite-3.1-1b-a400m").experts_bytes / 1e6 == pytest.approx(731.4, rel=0.03)


@pytest.mark.parametrize(
    ("vram_gib", "ram_gib", "place"),
    [
        (24, 32, "GPU"),
        (12, 32, "GPU and RAM"),
        (2, 32, "RAM"),  # the dense weights do not fit the GPU
        (0, 32, "RAM"),
        (0, 8, "disk"),
        (8, 8, "disk"),
        (0, 1, "nowhere"),
    ],
)
def test_places_of_qwen3(vram_gib: float, ram_gib: float, place: str) -> None:
    assert estimate(named("qwen3-30b-a3b"), memory(vram_gib, ram_gib)).place == place


def test_a_dense_model_is_in_one_place() -> None:
    model = named("qwen3-4b")
    assert model.experts_bytes == 0
    assert [estimate(model, memory(vram)).place for vram in (8, 3, 0)] == ["GPU", "RAM", "RAM"]


@pytest.mark.parametrize("draft", [None, "qwen3-0.6b"])
def test_what_is_on_the_gpu_fits_it(draft: str | None) -> None:
    """Next to a reserve; a draft takes its share: weights, keys and values of the same context, buffers."""
    drafts = None if draft is None else named(draft)
    for name in load_catalog().entries:
        model = named(name)
        for vram in (4, 6, 8, 12, 16, 24):
            found = estimate(model, memory(vram, 128), drafts)
            on_gpu = model.context_bytes() + found.device_ratio * model.experts_bytes + model.dense_bytes
            on_gpu += drafts.weights_bytes + drafts.context_bytes() if drafts else 0
            fits = on_gpu <= vram * GIB - default_reserve(vram * GIB) - KERNEL_BYTES + 1
            assert fits or found.place == "RAM" or found.place == "disk", (name, vram)
            assert 0 <= found.device_ratio <= 1
            assert found.place != "GPU" or found.device_ratio == 1, (name, vram)


def test_more_memory_is_never_worse() -> None:
    sizes = ((1, 2), (4, 8), (8, 16), (16, 32), (24, 64), (80, 128))
    for name in load_catalog().entries:
        ranks = [ORDER.index(estimate(named(name), memory(*size)).place) for size in sizes]
        assert ranks == sorted(ranks), name


def test_the_gpu_lacks_its_kernels_and_reserve_and_a_window_costs_once() -> None:
    model = ModelMemory(GIB, None, 1000)
    needed = GIB + KERNEL_BYTES + 256 * 2**20 + model.context_bytes()
    sizes = [Memory(ram_bytes=GIB * 8, vram_bytes=vram_bytes) for vram_bytes in (needed, needed - 1)]
    assert [estimate(model, size).place for size in sizes] == ["GPU", "RAM"]
    windowed = ModelMemory(10**6, None, 10, window_bytes=5000)
    assert windowed.kv_bytes(100) == 6000 and windowed.kv_bytes(200) == 7000


def test_files_that_the_catalog_does_not_have(tiny: TinyFactory, tmp_path: Path) -> None:
    path = tiny("qwen3moe")
    model = known_file(path, path.stat().st_size)
    assert (model.n_expert_layers, model.n_experts) == (3, 16) and 0 < model.experts_bytes < model.weights_bytes
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert known_file(tmp_path / "x.gguf", 4).experts_bytes == 0
    variant = Variant("Q4_0", repo="a/b", files=(HubFile("x.gguf"),))
    assert known_model(Choice(ModelEntry("x", "", "", (variant,)), variant)) is None, "a size that nobody knows"


def test_rows_of_the_list() -> None:
    catalog = load_catalog()
    rows = list_models(catalog, everything=True)
    found = {row.name: known for row in rows if (known := known_row(row, catalog.find(row.name))) is not None}
    assert found.keys() == {row.name for row in rows}  # a size is known of each
    assert found["bundled"].experts_bytes > 2**24  # by its header
    assert found["deepseek-v2-lite:Q8_0"].weights_bytes > found["deepseek-v2-lite"].weights_bytes
