"""Models of which the header is there and no more, also on a local hub before they are pulled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
import pytest

from moeedge.errors import EngineError, ModelFileError
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from moeedge.planning import headers
from moeedge.planning.headers import loadable
from moeedge.run import Run
from tests.conftest import TinyFactory
from tests.hub.conftest import BIG, SMALL, HubMachine
from tests.support.hub import local_hub


@pytest.fixture
def size(tiny_moe: Path) -> int:
    """Bytes of the header."""
    return min(tensor.offset for tensor in gguf_file.read_tensors(tiny_moe))


def cut(path: Path, folder: Path, n_bytes: int) -> Path:
    copy = folder / path.name
    copy.write_bytes(path.read_bytes()[:n_bytes])
    return copy


def test_a_complete_file_is_used_directly(tiny_moe: Path) -> None:
    with loadable(tiny_moe) as found:
        assert found.path == tiny_moe and found.missing_bytes == 0


@pytest.mark.parametrize("extra", [0, 100])
def test_a_file_truncated_in_its_data_gets_a_full_length_copy(
    tiny_moe: Path, size: int, tmp_path: Path, extra: int
) -> None:
    with loadable(cut(tiny_moe, tmp_path, size + extra)) as found:
        assert found.missing_bytes == tiny_moe.stat().st_size - size - extra
        with Model.load(found.path, header_only=True) as header, Model.load(tiny_moe, header_only=True) as entire:
            assert header.info == entire.info
        assert os.stat(found.path).st_blocks * 512 < size + 2**16  # a hole
    assert not found.path.exists()


def test_padding_may_be_missing(tmp_path: Path) -> None:
    """A header as gguf-py writes one, which ends with its last entry."""
    path = tmp_path / "header.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for i in range(3):
        writer.add_tensor_info(f"blk.{i}.x", (32,), np.dtype(np.float32), 128)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    assert path.stat().st_size % 32
    with loadable(path) as found:
        assert found.missing_bytes >= 3 * 128
        assert len(gguf_file.read_tensors(found.path)) == 3


def test_a_truncated_header_is_rejected(tiny_moe: Path, size: int, tmp_path: Path) -> None:
    for n_bytes in (10, 100, size // 2, size - 64):
        path = cut(tiny_moe, tmp_path, n_bytes)
        with pytest.raises(ModelFileError) as raised, loadable(path):
            pass
        assert str(path) in raised.value.message


def test_parts_without_data_get_full_length_copies(tiny_moe: Path, size: int, tmp_path: Path) -> None:
    entire = {tensor.name for tensor in gguf_file.read_tensors(tiny_moe)}
    first, second = (tmp_path / f"x-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(tiny_moe.read_bytes())
    second.write_bytes(tiny_moe.read_bytes()[:size])
    with loadable(first) as found:
        assert found.path.name == first.name and found.path.parent != tmp_path
        assert [part.exists() for part in gguf_file.parts(found.path)] == [True, True]
        assert {tensor.name for tensor in gguf_file.read_tensors(gguf_file.parts(found.path)[1])} == entire
    second.unlink()
    with pytest.raises(ModelFileError, match="no model"), loadable(first):
        pass


def test_no_temporary_file_is_an_error(
    tiny_moe: Path, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cut(tiny_moe, tmp_path, size)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(EngineError, match="Set TMPDIR"), loadable(path):
        pass


NAME = f"hf:{BIG[0]}:{BIG[1]}"  # of which the catalog knows nothing


@pytest.fixture
def place(tiny: TinyFactory, tmp_path: Path) -> Iterator[HubMachine]:
    """A target of 12 MiB of experts, and its draft."""
    target = tiny("qwen3moe", expert_type="F32", experts=64, layers=8).read_bytes()
    with local_hub({BIG: target, SMALL: tiny("qwen3").read_bytes()}) as hub:
        here = HubMachine(hub, tmp_path)
        here.write_catalog()
        yield here


def test_a_catalog_name_is_planned_with_its_draft_before_pull(place: HubMachine, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = place.run("plan", "-m", "big", "-c", "1024", "-o", "json", TMPDIR=str(scratch))
    found = json.loads(done.stdout)
    size = len(place.hub.files[BIG])
    assert found["model"]["file_bytes"] == size and found["model"]["missing_bytes"] >= size - 2**22
    assert found["model"]["is_here"] is False and found["draft"]["is_here"] is False
    assert found["command"] == "moeedge chat -m big -c 1024" and found["estimated"] is False
    assert any(note.startswith("moeedge pull big") for note in found["notes"]), found["notes"]
    assert "header" in done.stderr
    assert place.hub.ranges() == [None, None]  # one request each, ended early
    assert not list(scratch.iterdir()) and place.blobs(BIG[0]) == {}


def test_a_long_header_is_fetched_in_pieces(place: HubMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.environment().items():
        if name.startswith(("HF_", "MOEEDGE_")):
            monkeypatch.setenv(name, value)
    # huggingface_hub reads the variable when it is imported, which a test without network may have done
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(headers, "_FIRST_BYTES", 256)
    with ExitStack() as resources:
        path, _ = headers.locate_or_fetch(NAME, resources, Run())
        assert path.read_bytes() == place.hub.files[BIG][: path.stat().st_size]
        assert place.hub.ranges()[:3] == [None, "bytes=256-", "bytes=1024-"]
        assert path.stat().st_size <= 2**16


def test_without_network_the_list_of_what_fits_is_named(place: HubMachine) -> None:
    told = place.run("plan", "-m", "big", HF_HUB_OFFLINE="1", code=1).stderr
    assert "HF_HUB_OFFLINE" in told and "--fits" in told
    assert place.hub.ranges() == []


@pytest.mark.slow
def test_hub_errors_are_one_sentence(place: HubMachine) -> None:
    assert "'bigg'" in place.run("plan", "-m", "bigg", code=2).stderr
    assert "HF_HUB_OFFLINE" in place.run("plan", "-m", NAME, HF_HUB_OFFLINE="1", code=1).stderr
    place.hub.files[BIG] = b"no model" * 100
    done = place.run("plan", "-m", NAME, code=1)
    assert "GGUF" in done.stderr and done.stdout == ""
    place.hub.status = 503
    assert "HTTP status 503" in place.run("plan", "-m", NAME, code=1).stderr


def test_a_draft_that_cannot_be_read_is_an_error(place: HubMachine) -> None:
    place.run("pull", "big", "--no-draft")
    done = place.run("plan", "-m", "big", "-md", f"hf:{SMALL[0]}:{SMALL[1]}", HF_HUB_OFFLINE="1", code=1)
    assert "HF_HUB_OFFLINE" in done.stderr
