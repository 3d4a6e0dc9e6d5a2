"""Bad model files: each gets a sentence that says what is wrong with it, before llama.cpp gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.errors import ModelFileError
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from tests.conftest import TinyFactory


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="There is no model file"):
        Model.load(tmp_path / "none.gguf")


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a folder"):
        Model.load(tmp_path)


def test_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    with pytest.raises(ModelFileError, match="is empty"):
        Model.load(path)


def test_another_format(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\x00\x00\x00{}" * 100)
    with pytest.raises(ModelFileError, match="is not a GGUF file"):
        Model.load(path)


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


def test_a_header_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "header.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))  # version 3, no tensors, no keys
    with pytest.raises(ModelFileError, match=r"llama\.cpp cannot load"):
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


def test_layers_with_experts_come_from_the_tensors(tiny: TinyFactory) -> None:
    assert gguf_file.read_summary(tiny("qwen3moe")).expert_layers == (0, 1, 2)
    assert gguf_file.read_summary(tiny("deepseek2")).expert_layers == (1, 2)  # the first layer is dense
    assert gguf_file.read_summary(tiny("qwen3")).expert_layers == ()
