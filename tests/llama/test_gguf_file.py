"""Model files: unusable ones raise ModelFileError; expert tables agree with gguf-py, whole layers with llama.cpp."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from moeedge.errors import ModelFileError
from moeedge.llama import gguf_file
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import (
    expert_bytes,
    expert_tensors,
    most_whole_layers,
    n_groups,
    scratch_bytes,
    whole_layers,
)
from moeedge.llama.model import Model
from moeedge.native.backends import DRY_RUN_GPU
from moeedge.native.cache import ExpertTensor
from moeedge.paths import is_bundled
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES, case_model

_EMPTY_HEADER = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)  # version 3, no tensors, no keys


def test_unusable_files(tmp_path: Path) -> None:
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, message in (("loop", "no model file"), ("pipe", "no regular file")):
        assert not is_bundled(tmp_path / f"{name}.gguf")
        with pytest.raises(ModelFileError, match=message):
            Model.load(tmp_path / f"{name}.gguf")
    with pytest.raises(ModelFileError, match="is a folder"):
        Model.load(tmp_path)
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelFileError, match="There is no model file"):
        Model.load(path)
    for content, message in (
        (b"", "is empty"),
        (b"\x10\x00\x00\x00{}" * 100, "is not a GGUF file"),
        (_EMPTY_HEADER, r"llama\.cpp cannot load"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=message):
            Model.load(path)
    path.write_bytes(_EMPTY_HEADER.replace(b"\3", b"\x63", 1))
    with pytest.raises(ModelFileError, match="version") as caught:
        gguf_file.read_summary(path)
    assert "truncated" not in caught.value.hint


def test_truncated_files(tiny_moe: Path, tmp_path: Path) -> None:
    content = tiny_moe.read_bytes()
    path = tmp_path / "cut.gguf"
    has = rf"truncated: it has {len(content) - 1000:,} of the {len(content):,} bytes"
    for size, message in ((-1000, has), *((n, "truncated") for n in (4, 10, 24, 200, 3000))):  # weights, header
        path.write_bytes(content[:size])
        with pytest.raises(ModelFileError, match=message):
            Model.load(path)


def test_split_models(tiny_moe: Path, tmp_path: Path) -> None:
    first, second = (tmp_path / f"big-0000{part}-of-00002.gguf" for part in (1, 2))
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
    layers = [gguf_file.read_summary(tiny(arch)).expert_layers for arch in ("qwen3moe", "deepseek2", "qwen3")]
    assert layers == [(0, 1, 2), (1, 2), ()]  # all, all but the first, none


def test_a_changed_file_is_read_again(tiny: TinyFactory, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for arch in ("qwen3moe", "olmoe"):
        source = tiny(arch)
        path.write_bytes(source.read_bytes())
        assert gguf_file.read_tensors(path) == gguf_file.read_tensors(source)
        gguf_file.read_tensors(path).clear()
        assert gguf_file.read_tensors(path), "a caller's list is its own"


_EXPERTS = re.compile(r"blk\.\d+\..*_exps\.")


def _check_against_gguf(found: list[ExpertTensor], files: list[Path]) -> None:
    """Names, types, shapes and the bytes of the first, second and last expert are those that gguf-py gives."""
    readers = [gguf.GGUFReader(path) for path in files]
    listed = {tensor.name: tensor for reader in readers for tensor in reader.tensors if _EXPERTS.match(tensor.name)}
    assert sorted(tensor.name for tensor in found) == sorted(listed)
    for tensor in found:
        theirs = listed[tensor.name]
        shape = [int(n) for n in theirs.shape]  # as ggml counts: innermost first
        assert tensor.type == theirs.tensor_type
        assert tensor.name == f"blk.{tensor.layer}.{tensor.role}"
        assert tensor.n_experts == shape[-1]
        assert [tensor.ne0, tensor.ne1] == [*shape[:-1], 1, 1][:2]
        assert tensor.stride * tensor.n_experts == theirs.n_bytes
        data = np.asarray(theirs.data).reshape(tensor.n_experts, -1)  # experts are outermost
        with files[tensor.file].open("rb") as file:
            for expert in {0, 1, tensor.n_experts - 1}:
                file.seek(tensor.offset + expert * tensor.stride)
                assert file.read(tensor.stride) == data[expert].tobytes()


@pytest.mark.parametrize("case", MOE_CASES)
def test_every_architecture(case: str, tiny: TinyFactory) -> None:
    path = case_model(tiny, case)
    found, files = expert_tensors(path)
    assert files == [path]
    assert {tensor.layer for tensor in found} == set(gguf_file.read_summary(path).expert_layers)
    _check_against_gguf(found, files)


def test_what_is_listed(tiny: TinyFactory, tiny_moe: Path, tiny_draft: Path, tmp_path: Path) -> None:
    assert expert_tensors(tiny_draft) == ([], [tiny_draft])  # a dense model has none
    assert {tensor.layer for tensor in expert_tensors(tiny_moe, n_layers=2)[0]} == {0, 1}
    biases = [tensor for tensor in expert_tensors(tiny("gpt-oss"))[0] if tensor.name.endswith("bias")]
    assert biases
    assert all(tensor.ne1 == 1 and tensor.stride == 4 * tensor.ne0 for tensor in biases)
    with pytest.raises(ModelFileError, match="There is no model file"):
        expert_tensors(tmp_path / "none.gguf")


def _write_part(path: Path, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_split_files_scales_and_unlike_shapes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    files = [tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    _write_part(
        files[0],
        {
            "blk.0.ffn_up_exps.weight": values(4, 32, 64),
            "blk.0.ffn_up_exps.scale": values(4),
            "blk.0.ffn_up_shexp.weight": values(32, 64),
            "token_embd.weight": values(8, 64),
        },
    )
    _write_part(
        files[1],
        {
            "blk.1.ffn_up_exps.weight": values(4, 16, 64).astype(np.float16),
            "blk.1.ffn_down_exps.weight": values(4, 64, 16),
            "blk.1.ffn_down_exps.bias": values(4, 64),
        },
    )
    found, listed_files = expert_tensors(files[0])
    assert listed_files == files
    assert [(tensor.name, tensor.file) for tensor in found] == [
        ("blk.0.ffn_up_exps.scale", 0),
        ("blk.0.ffn_up_exps.weight", 0),
        ("blk.1.ffn_down_exps.bias", 1),
        ("blk.1.ffn_down_exps.weight", 1),
        ("blk.1.ffn_up_exps.weight", 1),
    ]
    assert (found[0].ne0, found[0].ne1, found[0].stride) == (1, 1, 4)
    _check_against_gguf(found, files)


def _tensor(layer: int, stride: int, role: str = "ffn_up_exps.weight", kind: int = 2) -> ExpertTensor:
    return ExpertTensor(layer, kind, 64, 32, 4, 0, 0, stride, f"blk.{layer}.{role}")


def test_groups_as_the_cache_makes_them() -> None:
    roles = ("ffn_up_exps.weight", "ffn_down_exps.weight")
    alike = [_tensor(layer, 1024, role) for layer in range(3) for role in roles]
    assert n_groups(alike) == 1
    assert n_groups([*alike[:-1], _tensor(2, 1024, kind=8)]) == 2  # llama.cpp's mixed quantisations
    assert n_groups([]) == 0


def test_scratch_holds_the_columns_of_every_matrix(tiny_moe: Path) -> None:
    found = expert_tensors(tiny_moe)[0]
    up = next(tensor for tensor in found if tensor.role == "ffn_up_exps.weight")
    # an input, up, gate, their product and an output
    needed = 4 * (2 * up.ne0 + 3 * up.ne1)
    assert 7 * needed <= scratch_bytes(found, 7) <= 2 * 7 * needed
    assert scratch_bytes([], 7) == 0


def test_as_many_whole_layers_as_fit_from_the_last_one() -> None:
    """Layer 0 is dense, and the last layer has larger experts."""
    tensors = [_tensor(layer, stride) for layer, stride in ((1, 10), (2, 10), (3, 10), (4, 20))]
    found = [whole_layers(tensors, 5, n) for n in (0, 2, 4, 9)]
    assert [(each.n_cpu_moe, each.expert_bytes) for each in found[:2]] == [(5, 0), (3, 120)]
    assert found[2] == found[3]
    n_bytes = (0, 79, 80, 119, 120, 200, 999)
    assert [most_whole_layers(tensors, 5, n).n_whole for n in n_bytes] == [0, 0, 1, 1, 2, 4, 4]
    assert {most_whole_layers([], 5, n).n_whole for n in n_bytes} == {0}


def _weights_on_gpu(path: Path, n_cpu_moe: int | None) -> int:
    how = {"n_gpu_layers": -1, "device": DRY_RUN_GPU, "experts_on_cpu": True, "header_only": True}
    with Model.load(path, n_cpu_moe=n_cpu_moe, **how) as model, Context(model, n_ctx=256, n_threads=1) as context:
        return sum(use.weights_bytes for use in context.memory_uses() if use.on_gpu)


def test_llama_cpp_stores_them_there(tiny_moe: Path) -> None:
    n_layers = 3
    tensors, _ = expert_tensors(tiny_moe)
    dense = _weights_on_gpu(tiny_moe, None)
    for n_whole in range(n_layers + 1):
        chosen = whole_layers(tensors, n_layers, n_whole)
        padding = _weights_on_gpu(tiny_moe, chosen.n_cpu_moe) - dense - chosen.expert_bytes
        assert 0 <= padding <= 1024 * n_whole  # llama.cpp aligns each tensor
    assert chosen.expert_bytes == expert_bytes(tensors)
