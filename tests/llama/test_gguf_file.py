"""Unusable model files raise ModelFileError with the reason before llama.cpp loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from moeedge.errors import ModelFileError
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from tests.conftest import TinyFactory

_EMPTY_HEADER = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)  # version 3, no tensors, no keys


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no model file"),
        (b"", "is empty"),
        (b"\x10\x00\x00\x00{}" * 100, "is not a GGUF file"),
        (_EMPTY_HEADER, r"llama\.cpp cannot load"),
    ],
)
def test_unusable_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        Model.load(path)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a folder"):
        Model.load(tmp_path)


def test_truncated_in_the_weights(tiny_moe: Path, tmp_path: Path) -> None:
    content = tiny_moe.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:-1000])
    with pytest.raises(
        ModelFileError, match=rf"truncated: it has {len(content) - 1000:,} of the {len(content):,} bytes"
    ):
        Model.load(path)


@pytest.mark.parametrize("size", [4, 10, 24, 200, 3000])
def test_truncated_in_the_header(tiny_moe: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_moe.read_bytes()[:size])
    with pytest.raises(ModelFileError, match="truncated"):
        Model.load(path)


def test_split_models(tiny_moe: Path, tmp_path: Path) -> None:
    first = tmp_path / "big-00001-of-00002.gguf"
    second = tmp_path / "big-00002-of-00002.gguf"
    first.write_bytes(tiny_moe.read_bytes())
    with pytest.raises(ModelFileError, match=r"no model file .*00002-of-00002"):
        Model.load(first)
    second.write_bytes(tiny_moe.read_bytes())
    with pytest.raises(ModelFileError, match="part 2 of 2"):
        Model.load(second)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"add_uint32": 4}, [4]),
        ({"add_array": [0, 4, 0, 3]}, [0, 4, 0, 3]),
        ({}, []),
        ({"add_float32": 4.0}, None),
        ({"add_int32": 4}, None),  # llama.cpp takes no other type, either
        ({"add_string": "4"}, None),
        ({"add_array": [4.0, 3.0]}, None),
        ({"add_array": ["4", "3"]}, None),
    ],
)
def test_experts_per_token_of_any_type(values: dict[str, Any], expected: list[int] | None, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "nemotron_h_moe")
    for method, value in values.items():
        getattr(writer, method)("nemotron_h_moe.expert_used_count", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    if expected is None:
        with pytest.raises(ModelFileError):
            gguf_file.read_experts_used(path)
    else:
        assert gguf_file.read_experts_used(path) == ("nemotron_h_moe.expert_used_count", expected)


def test_layers_with_experts_come_from_the_tensors(tiny: TinyFactory) -> None:
    assert gguf_file.read_summary(tiny("qwen3moe")).expert_layers == (0, 1, 2)
    assert gguf_file.read_summary(tiny("deepseek2")).expert_layers == (1, 2)  # the first layer is dense
    assert gguf_file.read_summary(tiny("qwen3")).expert_layers == ()


def test_a_changed_file_is_read_again(tiny: TinyFactory, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for arch in ("qwen3moe", "olmoe"):
        source = tiny(arch)
        path.write_bytes(source.read_bytes())
        assert gguf_file.read_tensors(path) == gguf_file.read_tensors(source)
        found = gguf_file.read_tensors(path)
        found.clear()
        assert gguf_file.read_tensors(path), "a caller's list is its own"
