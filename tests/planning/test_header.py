"""Models of which the header is there and no more."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from moeedge.errors import EngineError, ModelFileError
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from moeedge.planning.headers import loadable


def data_offset(path: Path) -> int:
    return min(tensor.offset for tensor in gguf_file.read_tensors(path))


def cut(path: Path, folder: Path, n_bytes: int) -> Path:
    copy = folder / path.name
    copy.write_bytes(path.read_bytes()[:n_bytes])
    return copy


def test_a_complete_file_is_used_directly(tiny_moe: Path) -> None:
    with loadable(tiny_moe) as found:
        assert found.path == tiny_moe and found.missing_bytes == 0


@pytest.mark.parametrize("extra", [0, 100])
def test_a_file_truncated_in_its_data_gets_a_full_length_copy(tiny_moe: Path, tmp_path: Path, extra: int) -> None:
    size = data_offset(tiny_moe) + extra
    with loadable(cut(tiny_moe, tmp_path, size)) as found:
        assert found.missing_bytes == tiny_moe.stat().st_size - size
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


def test_a_truncated_header_is_rejected(tiny_moe: Path, tmp_path: Path) -> None:
    offset = data_offset(tiny_moe)
    for size in (10, 100, offset // 2, offset - 64):
        path = cut(tiny_moe, tmp_path, size)
        with pytest.raises(ModelFileError) as raised, loadable(path):
            pass
        assert str(path) in raised.value.message


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b"hello world", "GGUF")])
def test_a_file_that_is_no_model_is_rejected(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=words), loadable(path):
        pass


def test_parts_without_data_get_full_length_copies(tiny_moe: Path, tmp_path: Path) -> None:
    entire = {tensor.name for tensor in gguf_file.read_tensors(tiny_moe)}
    first, second = (tmp_path / f"x-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(tiny_moe.read_bytes())
    second.write_bytes(tiny_moe.read_bytes()[: data_offset(tiny_moe)])
    with loadable(first) as found:
        assert found.path.name == first.name and found.path.parent != tmp_path
        assert [part.exists() for part in gguf_file.parts(found.path)] == [True, True]
        assert {tensor.name for tensor in gguf_file.read_tensors(gguf_file.parts(found.path)[1])} == entire
    second.unlink()
    with pytest.raises(ModelFileError, match="no model"), loadable(first):
        pass


def test_no_temporary_file_is_an_error(tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cut(tiny_moe, tmp_path, data_offset(tiny_moe))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(EngineError, match="Set TMPDIR"), loadable(path):
        pass
