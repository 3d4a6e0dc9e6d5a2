"""The table of expert tensors agrees with what gguf-py reads, for every layout of experts."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from moeedge.errors import ModelFileError
from moeedge.llama.gguf_file import expert_bytes, expert_tensors, n_groups, read_summary, scratch_bytes
from moeedge.native.cache import ExpertTensor
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES

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
    arch, options = MOE_CASES[case]
    path = tiny(arch, **options)
    found, files = expert_tensors(path)
    assert files == [path]
    assert {tensor.layer for tensor in found} == set(read_summary(path).expert_layers)
    _check_against_gguf(found, files)


def test_biases_have_one_row(tiny: TinyFactory) -> None:
    biases = [tensor for tensor in expert_tensors(tiny("gpt-oss"))[0] if tensor.name.endswith("bias")]
    assert biases
    assert all(tensor.ne1 == 1 and tensor.stride == 4 * tensor.ne0 for tensor in biases)


def test_bundled_target(bundled_pair: tuple[Path, Path]) -> None:
    found, files = expert_tensors(bundled_pair[0])
    assert len({tensor.layer for tensor in found}) == 48
    assert expert_bytes(found) == sum(tensor.stride for tensor in found) * 128
    _check_against_gguf(found, files)


def test_a_dense_model_has_none(tiny_draft: Path) -> None:
    assert expert_tensors(tiny_draft) == ([], [tiny_draft])


def test_layers_after_the_last_are_left_out(tiny_moe: Path) -> None:
    found, _ = expert_tensors(tiny_moe, n_layers=2)
    assert {tensor.layer for tensor in found} == {0, 1}


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


def test_bad_files_raise_model_file_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="There is no model file"):
        expert_tensors(tmp_path / "none.gguf")


def test_groups_as_the_cache_makes_them(tiny: TinyFactory) -> None:
    def tensor(layer: int, role: str, kind: int) -> ExpertTensor:
        return ExpertTensor(layer, kind, 64, 32, 8, 0, 0, 1024, f"blk.{layer}.{role}")

    alike = [tensor(layer, role, 2) for layer in range(3) for role in ("ffn_up_exps.weight", "ffn_down_exps.weight")]
    assert n_groups(alike) == 1
    assert n_groups([*alike[:-1], tensor(2, "ffn_up_exps.weight", 8)]) == 2  # llama.cpp's mixed quantisations
    assert n_groups([]) == 0


def test_scratch_holds_the_columns_of_every_matrix(tiny: TinyFactory) -> None:
    found = expert_tensors(tiny("qwen3moe"))[0]
    up = next(tensor for tensor in found if tensor.role == "ffn_up_exps.weight")
    # an input, up, gate, their product and an output
    needed = 4 * (2 * up.ne0 + 3 * up.ne1)
    assert 7 * needed <= scratch_bytes(found, 7) <= 2 * 7 * needed
    assert scratch_bytes([], 7) == 0
