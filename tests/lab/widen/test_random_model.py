"""`moeedge lab make-model`: real sizes and types, models that stock llama.cpp runs, routing and answers that vary."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType

from moeedge.hub.catalog import load_catalog
from moeedge.lab.widen.architectures import MODELS
from moeedge.lab.widen.quant_mix import QUANTS
from moeedge.lab.widen.random_model import (
    ENDOFTEXT,
    IM_END,
    TYPES,
    RandomModel,
    draw,
    model_like,
    model_of,
)
from moeedge.llama import library
from moeedge.llama.gguf_file import read_tensors
from tests.support.commands import refused, run, run_json
from tests.support.machine import Here
from tests.support.stock import tap_context

TOKENS = np.random.default_rng(8).integers(0, 256, 96).tolist()
SMALL: dict[str, Any] = {
    "layers": 2, "embd": 256, "heads": 8, "heads_kv": 2, "head_dim": 64, "ff": 512, "vocab": 3000, "window": 64,
    "expert_ff": 256, "ctx": 4096,
}  # fmt: skip
UNLIKE: dict[str, dict[str, Any]] = {  # by architecture
    "gpt-oss": {"embd": 288, "expert_ff": 288},  # as 2,880, no multiple of 256
    "deepseek2": {"heads_kv": 1, "expert_ff": 352, "shared_ff": 704, "kv_rank": 128, "rope_dim": 32},
    "qwen3next": {"layers": 4, "shared_ff": 256, "state_heads_k": 2, "state_heads": 4, "state_dim": 64},
    "olmoe": {"heads": 4, "heads_kv": 4},
}
# a quantization for each name, and each quantization of one
CASES = list(zip(MODELS, [*QUANTS] * 2, strict=False))
ALL_CASES = [
    *(pytest.param(name, quant) for name, quant in CASES),
    *(pytest.param("qwen3-30b-a3b", quant, marks=pytest.mark.slow) for quant in list(QUANTS)[1:]),
]


def small(name: str, quant: str, **sizes: Any) -> RandomModel:
    """The model with its own structure and small sizes."""
    arch, dims, keys = MODELS[name]
    experts = {"experts": min(dims.experts, 32), "used": min(dims.used, 4)} if dims.experts else {}
    if arch == "granitemoe":  # its router chooses 8 of 32
        experts["used"] = 8
    own = {"rope.dimension_count": 16} if arch == "qwen3next" else {}
    return model_of(name, arch, replace(dims, **(SMALL | experts | UNLIKE.get(arch, {}) | sizes)), keys | own, quant)


class Sizes(NamedTuple):
    """Published file sizes."""

    name: str
    quant: str
    n_bytes: float


@cache
def published() -> list[Sizes]:
    """Those of the catalog, and others of their pages on the hub."""
    found = [
        Sizes("qwen3-30b-a3b", "q8_0", 32.48e9),
        Sizes("qwen3-235b-a22b", "q4_k_m", 142.2e9),
        Sizes("mixtral-8x7b", "q4_k_m", 28.45e9),
    ]
    for name, entry in load_catalog().entries.items():
        for variant in entry.variants if name in MODELS else ():
            n_bytes = variant.size_bytes or variant.about_bytes
            if n_bytes and variant.quant.lower() in QUANTS:
                found.append(Sizes(name, variant.quant.lower(), n_bytes))
    return found


def test_sizes_are_those_of_published_files() -> None:
    assert {size.name for size in published()} == set(MODELS)
    for name, quant, n_bytes in published():
        assert model_like(name, quant).data_bytes == pytest.approx(n_bytes, rel=0.012), (name, quant)


def test_shapes_are_those_of_the_catalog() -> None:
    for name, entry in load_catalog().entries.items():
        if name not in MODELS or entry.shape is None:
            continue
        dims, shape = MODELS[name][1], entry.shape
        assert (dims.vocab, dims.ctx) == (shape.vocabulary, shape.context), name
        n_weights = sum(int(np.prod(tensor.shape)) for tensor in model_like(name, "f16").tensors)
        assert n_weights == pytest.approx(shape.weights, rel=0.02), name


def test_the_mix_of_qwen3_30b() -> None:
    """As llama.cpp printed it: 241 tensors F32, 289 Q4_K, 49 Q6_K (ggml-org/llama.cpp issue 14235)."""
    types = [tensor.type.name for tensor in model_like("qwen3-30b-a3b", "q4_k_m").tensors]
    assert (types.count("F32"), types.count("Q4_K"), types.count("Q6_K")) == (241, 289, 49)


_SLOW_MIXES = (
    *(("qwen3-30b-a3b", "q3_k_m"), ("qwen3-30b-a3b", "iq4_xs"), ("gpt-oss-20b", "q3_k_m"), ("qwen3-0.6b", "iq4_xs")),
    *(("mixtral-8x7b", "q3_k_m"), ("mixtral-8x7b", "q4_k_m"), ("deepseek-v2-lite", "q4_k_m")),
)


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        *(("qwen3-30b-a3b", "q4_k_m"), ("gpt-oss-20b", "q5_k_m")),
        *(pytest.param(*mix, marks=pytest.mark.slow) for mix in _SLOW_MIXES),
    ],
)
def test_the_mix_is_that_of_llama_quantize(name: str, quant: str, tmp_path: Path) -> None:
    """llama.cpp quantizes the model in 16 bits; of 17 layers some get more bits."""
    narrow = {"layers": 17, "embd": 256, "heads": 4, "heads_kv": 1, "ff": 256, "expert_ff": 256, "vocab": 304}
    if MODELS[name][1].experts:
        narrow |= {"experts": 8 if name == "mixtral-8x7b" else 2, "used": 2}
    if name == "deepseek-v2-lite":  # which llama.cpp knows by its number of layers
        narrow |= {"layers": 26, "shared_ff": 288, "expert_ff": 288, "kv_rank": 64, "rope_dim": 32}
    if name == "gpt-oss-20b":
        narrow |= {"embd": 288}
    plain, path = tmp_path / "plain.gguf", tmp_path / "quantized.gguf"
    small(name, "f16", **narrow).write(plain)
    library.start()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = int(QUANTS[quant][1]), 2
    assert llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), ctypes.byref(parameters)) == 0
    expected = {tensor.name: GgmlType(tensor.type).name for tensor in read_tensors(path)}
    assert {tensor.name: tensor.type.name for tensor in small(name, quant, **narrow).tensors} == expected


@pytest.mark.parametrize("type_", sorted(TYPES), ids=lambda type_: GgmlType(type_).name)
def test_weights_of_each_type(type_: GgmlType) -> None:
    blocks = draw(np.random.default_rng(3), type_, 400_000 // gguf.GGML_QUANT_SIZES[type_][0], 0.02)
    values = blocks.view("<f4") if type_ == GgmlType.F32 else gguf.quants.dequantize(blocks, type_)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(0.02, rel=0.03)
    assert abs(values.mean()) < 0.02 * 0.03


@pytest.mark.parametrize(("name", "quant"), ALL_CASES)
def test_stock_llama_cpp_runs_it(name: str, quant: str, tmp_path: Path) -> None:
    model, path = small(name, quant), tmp_path / "model.gguf"
    model.write(path)
    reader = gguf.GGUFReader(path)
    written = {tensor.name: (tensor.tensor_type, tensor.n_bytes) for tensor in reader.tensors}
    assert written == {tensor.name: (tensor.type, tensor.n_bytes) for tensor in model.tensors}
    assert b"\0" * 64 not in path.read_bytes()[reader.data_offset :]
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    library.start()
    context, tap = tap_context(path)
    with context:
        logits = context.decode(TOKENS)
        assert context.n_vocab == 3000
        assert np.isfinite(logits).all()
        assert 2.5 < logits.std() < 6
        assert len(set(logits.argmax(axis=1).tolist())) > 40
        for layer, ids in tap.ids.items():
            assert len({tuple(sorted(row)) for row in ids.tolist()}) > min(24, 2 * ids.shape[1] ** 2), (
                f"layer {layer} routes alike"
            )
            n_experts = MODELS[name][1].experts
            assert len(np.unique(ids)) > 0.6 * min(n_experts, 32), f"layer {layer} leaves experts unused"
        answer, _ = context.greedy(TOKENS[:9], 60)
    assert bool(tap.ids) == bool(MODELS[name][1].experts)
    assert not {IM_END, ENDOFTEXT} & set(answer)


def test_tensors_of_a_file_differ(tmp_path: Path) -> None:
    """Blocks repeat, tensors do not: neither layers, nor gate and up, nor tokens are equal."""
    path = tmp_path / "model.gguf"
    small("qwen3-30b-a3b", "q4_0").write(path)
    data = [tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors]
    assert len(set(data)) == len(data)
    rows = next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == "output.weight")
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_the_command(tmp_path: Path) -> None:
    """A layer of the smallest model; a draft for gpt-oss has its vocabulary."""
    out = tmp_path / "g.gguf"
    arguments = ("lab", "make-model", out, "--like", "granite-3.1-1b-a400m", "--quant", "Q4_K_M", "--layers", 1)
    made = run_json(*arguments, "--vocab", 400)
    assert made["bytes"] == out.stat().st_size and made["vocabulary"] == 400 and made["layers"] == 1
    assert set(made["types"]) == {"Q4_K", "Q6_K", "F32"} and made["architecture"] == "granitemoe"
    assert "exists" in refused(*arguments)
    result = run(*arguments, "--vocab", 400, "--force")
    assert result.exit_code == 0 and "is written" in result.stdout and "Q6_K" in result.stdout
    shown = run_json(
        "lab", "make-model", "x", "--like", "qwen3-0.6b", "--quant", "q8_0", "--vocab", 201088, "--dry-run"
    )
    assert shown["out"] is None and shown["bytes"] > 0.68e9
    assert [path.name for path in tmp_path.iterdir()] == ["g.gguf"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "either --like NAME or --header FILE"),
        (["--like", "gpt-5"], "qwen3-30b-a3b"),
        (["--like", "qwen3-0.6b", "--quant", "q9"], "q4_k_m"),
        (["--like", "qwen3-0.6b", "--vocab", "300"], "304 or more"),
        (["--like", "qwen3-0.6b", "--layers", "0"], "1 or more"),
        (["--header", "missing.gguf"], "missing.gguf"),
        (["--header", "missing.gguf", "--quant", "q8_0"], "--header"),
    ],
)
def test_impossible_models(arguments: list[str], reason: str, tmp_path: Path) -> None:
    assert reason in refused("lab", "make-model", tmp_path / "m.gguf", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_header_alone(tmp_path: Path) -> None:
    """Its tensors, types, metadata and tokenizer; the file ends after the header."""
    header, source = tmp_path / "header.gguf", tmp_path / "source.gguf"
    small("qwen3-30b-a3b", "q5_k_m").write(source)
    reader = gguf.GGUFReader(source)
    header.write_bytes(source.read_bytes()[: reader.data_offset + 100])
    out = tmp_path / "out.gguf"
    made = run_json("lab", "make-model", out, "--header", header)
    assert made["architecture"] == "qwen3moe" and made["vocabulary"] == 3000
    again = gguf.GGUFReader(out)
    assert [(t.name, t.tensor_type, t.n_bytes) for t in again.tensors] == [
        (t.name, t.tensor_type, t.n_bytes) for t in reader.tensors
    ]
    for key, field in reader.fields.items():
        if key not in ("general.name", "GGUF.kv_count"):
            assert again.fields[key].contents() == field.contents(), key
    for n_bytes in (reader.data_offset - 300, 3000):
        header.write_bytes(header.read_bytes()[:n_bytes])
        assert "truncated" in refused("lab", "make-model", tmp_path / "m.gguf", "--header", header)
    context, tap = tap_context(out)
    with context:
        logits = context.decode(TOKENS)
        assert np.isfinite(logits).all() and 2.5 < logits.std() < 6
        answer, _ = context.greedy(TOKENS[:9], 40)
    assert tap.ids and not {IM_END, ENDOFTEXT} & set(answer)


def test_no_room(tmp_path: Path, here: Here) -> None:
    here.set_disk(10**9)
    result = run("lab", "make-model", tmp_path / "m.gguf", "--like", "gpt-oss-120b", "--quant", "mxfp4")
    assert result.exit_code == 1 and "59.0 GiB" in result.stderr
    assert list(tmp_path.iterdir()) == []
