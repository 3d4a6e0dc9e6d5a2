"""Loading a model without reading its experts, also where its other weights go to a GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.errors import ModelFileError
from moeedge.hardware.devices import Storage
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.dense_weights import SplitWeights
from moeedge.llama.gguf_file import GgufTensor
from moeedge.llama.model import Model
from moeedge.native import mapping
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.counting import CountingDevice
from tests.support.machine import Here
from tests.support.split_files import split

PAGE = mmap.PAGESIZE
TOKENS = list(range(65, 80))
CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU

on_linux = pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/self/maps")


@pytest.fixture(scope="module")
def wide(tiny: TinyFactory) -> Path:
    """Its experts take many pages."""
    return tiny("qwen3moe", layers=4, embd=256, experts=64, expert_ff=256)


def numa_answer() -> int:
    """The address that llama.cpp asks whether there are several NUMA nodes."""
    library.start()
    device = library.ggml_function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)(CPU)
    registry = library.ggml_function("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(device)
    look_up = library.ggml_function(
        "ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
    )
    assert look_up(registry, b"ggml_backend_set_n_threads")
    return int(look_up(registry, b"ggml_backend_cpu_is_numa"))


def resident_pages(path: Path) -> NDArray[np.bool_]:
    """Which pages of a file are in memory."""
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
    found = np.zeros(-(-len(content) // PAGE), dtype=np.uint8)
    assert mincore(content.ctypes.data, len(content), found.ctypes.data) == 0
    return (found & 1).astype(np.bool_)


def memory_lock_limit() -> int:
    """Bytes of this file that may surely be locked: all, or none."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return 2**62 if limit == resource.RLIM_INFINITY or limit >= 8 * 2**20 else 0


def pages_of(tensors: Sequence[GgufTensor], n_pages: int) -> NDArray[np.bool_]:
    """Pages of a file that hold a part of any of the tensors."""
    found = np.zeros(n_pages, dtype=np.bool_)
    for tensor in tensors:
        found[tensor.offset // PAGE : -(-(tensor.offset + tensor.size_bytes) // PAGE)] = True
    return found


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def dropped(wide: Path) -> Path:
    """`wide`, of which nothing is in the page cache."""
    drop_from_page_cache(wide)
    if resident_pages(wide).mean() > 0.02:
        pytest.skip("the file system keeps its files in memory")
    return wide


def logits_of(path: Path, storage: Storage) -> NDArray[np.float32]:
    with Model.load(path, storage=storage) as model, Context(model, n_ctx=64, n_threads=2) as context:
        return np.array(context.decode(TOKENS, phase=Phase.VERIFY, logits="all"))


def test_outputs_are_the_same(wide: Path) -> None:
    assert np.array_equal(logits_of(wide, "on demand"), logits_of(wide, "mapped"))


def test_only_the_thread_that_loads_gets_the_other_answer() -> None:
    before = numa_answer()
    others: list[int] = []
    with mapping.map_lazily():
        assert numa_answer() != before
        thread = threading.Thread(target=lambda: others.append(numa_answer()))
        thread.start()
        thread.join()
    assert [numa_answer(), *others] == [before, before]
    with pytest.raises(RuntimeError), mapping.map_lazily():
        raise RuntimeError
    assert numa_answer() == before


@on_linux
@pytest.mark.parametrize("is_lazy", [True, False])
def test_experts_are_not_read(dropped: Path, is_lazy: bool) -> None:
    """mincore of llama.cpp's mapping, the file's pages dropped before."""
    weights = SplitWeights.read(dropped)
    with Model.load(dropped, storage="on demand" if is_lazy else "mapped") as model:
        resident = resident_pages(dropped)
        in_dense = pages_of(weights.dense, len(resident))
        in_experts = pages_of(weights.experts, len(resident)) & ~in_dense
        assert in_experts.sum() > 4000
        if is_lazy:
            assert resident[in_dense | in_experts].mean() < 0.02, "nor are the other weights in the page cache"
            assert model.dense.n_bytes == sum(tensor.size_bytes for tensor in weights.dense)
            assert model.dense.own_bytes == model.dense.host_bytes == in_dense.sum() * PAGE
            assert model.dense.locked_bytes >= min(model.dense.n_bytes, memory_lock_limit())  # entire pages
        else:
            assert resident[in_dense | in_experts].all()
            assert model.dense is None
    assert mapping.mapped(dropped) == []


@on_linux
def test_without_memory_of_their_own_dense_weights_are_in_the_page_cache(dropped: Path, here: Here) -> None:
    here.set_memory(0)
    weights = SplitWeights.read(dropped)
    for _ in range(3):  # the kernel may drop pages that are not locked, and keep those that another core has just read
        drop_from_page_cache(dropped)
        with Model.load(dropped, storage="on demand") as model:
            resident = resident_pages(dropped)
            assert model.dense.own_bytes == 0
            assert model.dense.locked_bytes >= min(model.dense.n_bytes, memory_lock_limit())
        in_dense = pages_of(weights.dense, len(resident))
        in_experts = pages_of(weights.experts, len(resident)) & ~in_dense
        if resident[in_dense].all() and resident[in_experts].mean() < 0.02:
            break
    assert resident[in_dense].all()
    assert resident[in_experts].mean() < 0.02  # the kernel drops no large page that holds dense weights too


@on_linux
def test_split_files(dropped: Path, tmp_path: Path) -> None:
    files = split(dropped, tmp_path)
    assert len(files) == 3
    for file in files:
        drop_from_page_cache(file)
    weights = SplitWeights.read(files[0])
    n_dense_pages = 0
    with Model.load(files[0], storage="on demand") as model:
        for file in files:
            resident = resident_pages(file)
            in_dense = pages_of([tensor for tensor in weights.dense if tensor.file == file], len(resident))
            in_experts = pages_of([tensor for tensor in weights.experts if tensor.file == file], len(resident))
            assert resident[in_dense | in_experts].mean() < 0.02
            n_dense_pages += int(in_dense.sum())
        assert model.dense.own_bytes == n_dense_pages * PAGE
    assert np.array_equal(logits_of(files[0], "on demand"), logits_of(dropped, "mapped"))


@on_linux
@pytest.mark.parametrize("n_pages", [0, 5])
def test_a_small_limit_of_locked_memory_is_used_up(wide: Path, here: Here, n_pages: int) -> None:
    here.limit_locks(n_pages * PAGE)
    with Model.load(wide, storage="on demand") as model:
        assert (n_pages - 1) * PAGE < model.dense.locked_bytes <= n_pages * PAGE < model.dense.n_bytes


@pytest.mark.parametrize("has_room", [True, False])
def test_a_file_that_cannot_be_read_is_named(wide: Path, here: Here, has_room: bool) -> None:
    here.set_memory(2**40 if has_room else 0)
    here.fail_reads()
    with pytest.raises(ModelFileError, match=wide.name):
        Model.load(wide, storage="on demand")
    assert mapping.mapped(wide) == []


@on_linux
def test_no_thread_reads_into_memory_that_was_freed(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first piece cannot be read while others are under way."""
    file, n_bytes = tmp_path / "file", 4 * mapping.PIECE_BYTES
    file.write_bytes(bytes(n_bytes))
    events: list[str] = []

    def read(_file: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0:
            raise OSError(5, "Input/output error")
        time.sleep(0.1)
        events.append("read")
        return len(buffers[0])

    here.read_by(read)
    monkeypatch.setattr(mapping.libc(), "munmap", lambda *_memory: events.append("freed"))
    with pytest.raises(OSError, match="Input/output"):
        mapping.give_own_memory(file, mapping.FileVersion.of(file), [mapping.Mapped(0, 0, n_bytes)])
    assert events.count("freed") == 1 and events[-1] == "freed"


@on_linux
def test_only_weights_in_host_memory_are_copied(wide: Path) -> None:
    weights = SplitWeights.read(wide)
    with wide.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        dense = weights.keep_dense(frozenset(), n_host_layers=1)
    n_bytes = sum(t.size_bytes for t in weights.dense if t.name.startswith(("token_embd.", "blk.0.")))
    assert n_bytes <= dense.own_bytes == dense.host_bytes < n_bytes + 10 * PAGE
    assert dense.n_bytes > 2 * n_bytes


@on_linux
def test_a_mapping_that_was_there_before_stays_one(wide: Path) -> None:
    with Model.load(wide, storage="mapped"), Model.load(wide, storage="on demand") as model:
        assert sum(each.n_bytes for each in mapping.mapped(wide)) >= wide.stat().st_size
        assert model.dense.own_bytes == model.dense.host_bytes


def overwrite(path: Path, tensors: Sequence[GgufTensor]) -> None:
    with path.open("r+b") as file:
        for tensor in tensors:
            file.seek(tensor.offset)
            file.write(bytes(tensor.size_bytes))


@on_linux
def test_a_file_that_is_overwritten_afterwards_changes_no_answer(wide: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(wide, tmp_path / "copy.gguf"))
    weights = SplitWeights.read(copy)
    with Model.load(copy, storage="on demand") as model, Context(model, n_ctx=64, n_threads=2) as context:
        overwrite(copy, weights.dense)
        found = np.array(context.decode(TOKENS, phase=Phase.VERIFY, logits="all"))
        with pytest.raises(ModelFileError, match="changed"):
            model.dense.check_files()
    assert np.array_equal(found, logits_of(wide, "mapped"))


@on_linux
def test_a_file_that_changes_after_its_header_was_read_is_refused(wide: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(wide, tmp_path / "copy.gguf"))
    weights = SplitWeights.read(copy)
    overwrite(copy, weights.dense[:1])
    with copy.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        with pytest.raises(ModelFileError, match="changed"):
            weights.keep_dense(frozenset(), n_host_layers=None)
        os.truncate(copy, weights.dense[-1].offset)
        with pytest.raises(ModelFileError):
            weights.keep_dense(frozenset(), n_host_layers=None)


@on_linux
def test_what_was_copied_leaves_the_page_cache(tmp_path: Path) -> None:
    """Otherwise the weights would take their memory twice."""
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * (4 * PAGE // 256))
    drop_from_page_cache(file)
    if resident_pages(file).any():
        pytest.skip("this file system is in memory")
    own = mmap.mmap(-1, 4 * PAGE)
    content = np.frombuffer(own, dtype=np.uint8)
    with file.open("rb") as opened:
        opened.read()
    assert resident_pages(file).all()
    pages = [mapping.Mapped(content.ctypes.data, 0, 4 * PAGE)]
    assert mapping.give_own_memory(file, mapping.FileVersion.of(file), pages) == 4 * PAGE
    assert not resident_pages(file).any()
    assert content.tobytes() == bytes(range(256)) * (4 * PAGE // 256)


@on_linux
def test_dense_weights_reach_the_gpu_and_only_the_embeddings_are_kept(counting: CountingDevice, wide: Path) -> None:
    weights = SplitWeights.read(wide)
    embeddings = sum(tensor.size_bytes for tensor in weights.dense if tensor.name == "token_embd.weight")
    logits = []
    for storage in ("mapped", "on demand"):
        drop_from_page_cache(wide)
        with (
            Model.load(wide, n_gpu_layers=-1, experts_on_cpu=True, storage=storage) as model,
            Context(model, n_ctx=64, n_threads=2) as context,
        ):
            assert model.uses_gpu
            if storage == "on demand":
                resident = resident_pages(wide)
                in_dense = pages_of(weights.dense, len(resident))
                assert resident[pages_of(weights.experts, len(resident)) & ~in_dense].mean() < 0.02
                assert embeddings <= model.dense.own_bytes == model.dense.host_bytes < embeddings + 2 * 4096
                assert model.dense.host_bytes < model.dense.n_bytes
            logits.append(np.array(context.decode(TOKENS, phase=Phase.VERIFY, logits="all")))
    assert np.array_equal(*logits)


@on_linux
def test_without_layers_on_the_gpu_all_dense_weights_are_kept(counting: CountingDevice, tiny: TinyFactory) -> None:
    """The output is then in host memory, too, although a GPU is listed."""
    path = tiny("qwen3moe", layers=4, embd=256)
    assert any(tensor.name == "output.weight" for tensor in SplitWeights.read(path).dense)
    with Model.load(path, n_gpu_layers=0, storage="on demand") as model:
        assert model.uses_gpu and model.host_expert_layers == (0, 1, 2, 3)
        assert model.dense.n_bytes <= model.dense.own_bytes == model.dense.host_bytes


@on_linux
@pytest.mark.parametrize("experts_on_cpu", [False, True])
def test_experts_that_go_to_the_gpu_are_read_ahead(
    counting: CountingDevice, tiny: TinyFactory, here: Here, experts_on_cpu: bool
) -> None:
    """Those of the last layers, and no others."""
    path = tiny("qwen3moe", layers=4, embd=256, experts=16)
    ahead = here.seen_reads()
    with Model.load(path, n_gpu_layers=3, experts_on_cpu=experts_on_cpu, storage="on demand") as model:
        assert model.host_expert_layers == ((0, 1, 2, 3) if experts_on_cpu else (0, 1))
    for tensor in SplitWeights.read(path).experts:
        middle = tensor.offset + tensor.size_bytes // 2
        is_ahead = any(offset <= middle < offset + n_bytes for offset, n_bytes in ahead)
        assert is_ahead == (not experts_on_cpu and tensor.name.startswith(("blk.2.", "blk.3."))), tensor.name
