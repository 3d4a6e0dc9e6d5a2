"""Tiny random-weight GGUF models that stock llama.cpp loads; `moeedge lab make-model` writes large ones.

Tensors are drawn one at a time and streamed to the file, quantised ones directly as random blocks. Each tensor's
numbers depend on the seed and on its name only, so that a draft made with the target's seed and width shares its
embeddings and output matrix and agrees with it now and then, as a trained draft does.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from ctypes import c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from moeedge.lab.widen.random_model import N_VOCAB, SPECIALS, add_vocabulary
from moeedge.llama import library
from tests.support.tiny_shapes import TensorSpec, TinyDims, metadata, tensors

BLOCK = 32  # weights per block of Q4_0, Q8_0 and MXFP4
# standard deviations of uniformly random codes at scale 1: 4 bits in -8..7, 8 bits in -128..127, 4 bits of E2M1 doubled
CODE_STD = {"Q4_0": 4.637, "Q8_0": 73.9, "MXFP4": 5.852}

QUANTIZED = ("IQ1_M",)  # types whose blocks need a quantizer; rows of a multiple of 256

# dimensions of each architecture where they are not those of TinyDims
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3moe": {},
    "deepseek2": {},
    "gemma4": {},
    "qwen3": {"experts": 0, "layers": 2, "residual": 0.2},  # dense: the draft
    "llama": {"experts": 8, "used": 2, "expert_type": "F32"},  # Mixtral's layout; experts=0 for a dense Llama
    "olmoe": {"heads_kv": 4, "expert_type": "Q8_0"},
    "qwen2moe": {"expert_ff": 64},
    "gpt-oss": {"expert_type": "MXFP4"},
    "llama4": {"layers": 4, "used": 1},
    "glm4moe": {"mtp": 1},
    "qwen35moe": {"mtp": 1, "layers": 4},
    "step35": {"mtp": 3},
    "mimo2": {"mtp": 3},
    "hy_v3": {"mtp": 1},
    "cohere2moe": {"mtp": 1},
    # two experts of a group make a token use that group's expert twice, which ggml's repacked kernels compute wrongly
    "grovemoe": {"expert_type": "F32"},
    "granitehybrid": {"residual": 14.0, "logit_std": 24.0},
    "nemotron_h_moe": {"layers": 4},
    "granitemoe": {"residual": 14.0, "logit_std": 24.0},  # what its scales leave of them: as in the others
    "eagle3": {"experts": 0, "layers": 1, "heads_kv": 4},
    "dflash": {"experts": 0, "layers": 2, "heads_kv": 4},
}
ARCHITECTURES = tuple(DEFAULTS)


# files of one type, and mixes, as llama.cpp makes them: its file type, and whether all matrices get one type
QUANTS = {
    "Q2_K": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K, True),
    "Q3_K": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_S, True),
    "Q4_K": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S, True),
    "Q5_K": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_S, True),
    "Q6_K": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K, True),
    "IQ4_XS": (llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS, True),
    "Q3_K_M": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_M, False),
    "Q4_K_M": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, False),
    "Q5_K_M": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M, False),
}


def make_tiny(arch: str, folder: Path, *, seed: int = 0, quant: str = "", **overrides: Any) -> Path:
    """Writes a tiny random-weight model of architecture `arch` into `folder`; `overrides` are fields of TinyDims.

    quant: one of QUANTS, to which llama.cpp's quantizer brings a model of float32.
    """
    if quant:
        plain = make_tiny(arch, folder, seed=seed, **(overrides | {"expert_type": "F32"}))
        path = plain.with_name(f"{plain.stem}-{quant}.gguf")
        quantize_file(plain, path, quant)
        plain.unlink()
        return path
    if arch not in ARCHITECTURES:
        raise ValueError(f"no tiny model of architecture {arch!r}; there are {', '.join(ARCHITECTURES)}")
    dims = TinyDims(**(DEFAULTS[arch] | overrides))
    marks = "".join(f"-{key}={value}" for key, value in sorted(overrides.items()))
    path = folder / f"tiny-{arch}-{seed}{marks}.gguf"
    write_model(path, arch, dims, seed=seed)
    return path


def tiny_factory(folder: Path) -> Callable[..., Path]:
    """`make_tiny` with that folder, which writes each model once."""
    made: dict[tuple[object, ...], Path] = {}

    def make(arch: str, *, seed: int = 0, **overrides: Any) -> Path:
        key = (arch, seed, *sorted(overrides.items()))
        if key not in made:
            made[key] = make_tiny(arch, folder, seed=seed, **overrides)
        return made[key]

    return make


def quantize_file(plain: Path, path: Path, quant: str) -> None:
    """Writes the model as llama-quantize does."""
    library.start()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.pure = QUANTS[quant]
    parameters.nthread = 2
    code = llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), ctypes.byref(parameters))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")


def write_model(path: Path, arch: str, dims: TinyDims, *, seed: int) -> None:
    """Streams the model to `path`, one tensor in memory at a time."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(f"tiny {arch}, random weights, seed {seed}")
    for key, value in metadata(arch, dims).items():
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"{arch}.{key}", value, kind)
    add_vocabulary(writer, dims.vocab, mask=dims.mask if arch == "dflash" else -1)
    specs = list(tensors(arch, dims))
    for spec in specs:
        type_ = gguf.GGMLQuantizationType[spec.type]
        writer.add_tensor_info(spec.name, spec.shape, np.dtype(np.float32), _n_bytes(spec), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for spec in specs:
        writer.write_tensor_data(draw_tensor(spec, seed))
    writer.close()


def moe_dims(embd: int, **dims: Any) -> TinyDims:
    """Dimensions in which heads fill the width, in groups of 8, 8 of 128 experts are used, and matrices are Q8_0."""
    head_dim = 128 if embd >= 1024 else 16
    heads = {"heads": embd // head_dim, "heads_kv": max(1, embd // head_dim // 8), "head_dim": head_dim}
    return TinyDims(embd=embd, **(heads | {"experts": 128, "used": 8, "dense_type": "Q8_0"} | dims))


def draw_tensor(spec: TensorSpec, seed: int) -> np.ndarray:
    """The tensor's bytes: float32 or float16 of `spec.shape`, or uint8 blocks [n_blocks, block bytes]."""
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    if spec.type == "I64":
        return np.sort(rng.choice(N_VOCAB, spec.shape, replace=False)).astype(np.int64)
    if spec.type in QUANTIZED:
        return quantized(rng, spec)
    if spec.type in CODE_STD:
        if spec.shape[-1] % BLOCK:
            raise ValueError(f"{spec.name}: rows of {spec.shape[-1]} weights are no multiple of {BLOCK}")
        return draw_blocks(rng, spec)
    values = rng.standard_normal(spec.shape, dtype=np.float32) * np.float32(spec.std) + np.float32(spec.mean)
    if spec.identity:
        np.fill_diagonal(values, np.diagonal(values) + np.float32(spec.identity))
    if spec.zero_row >= 0:
        values[spec.zero_row] = 0
    if spec.name == "output.weight" and len(values) >= N_VOCAB:
        values[N_VOCAB - len(SPECIALS) : N_VOCAB] = 0  # logit 0: an answer hardly ever ends by itself
    return values.astype(np.float16) if spec.type == "F16" else values


def quantized(rng: np.random.Generator, spec: TensorSpec) -> np.ndarray:
    """Normal values as llama.cpp's quantizer writes them: uint8 [n_bytes]."""
    library.start()
    columns = spec.shape[-1]
    values = rng.standard_normal(spec.shape, dtype=np.float32) * np.float32(spec.std)
    importance = np.ones(columns, np.float32)
    out = np.zeros(_n_bytes(spec), np.uint8)
    quantize = library.ggml_function(
        "ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p
    )
    type_ = int(gguf.GGMLQuantizationType[spec.type])
    addresses = [array.ctypes.data for array in (values, out, importance)]
    quantize(type_, addresses[0], addresses[1], 0, values.size // columns, columns, addresses[2])
    return out


def draw_blocks(rng: np.random.Generator, spec: TensorSpec) -> np.ndarray:
    """Random codes under scales that differ from block to block: uint8 [n_blocks, block bytes]."""
    n_blocks = int(np.prod(spec.shape)) // BLOCK
    blocks = np.frombuffer(rng.bytes(_n_bytes(spec)), np.uint8).reshape(n_blocks, -1).copy()
    scale = spec.std / CODE_STD[spec.type]
    if spec.type == "MXFP4":  # a power of two, biased by 128 because the codes count halves
        blocks[:, 0] = 128 + np.rint(np.log2(scale)).astype(int) + rng.integers(-1, 2, n_blocks)
    else:
        scales = (scale * rng.uniform(0.5, 1.5, n_blocks)).astype("<f2")
        blocks[:, :2] = scales.view(np.uint8).reshape(n_blocks, 2)
    return blocks


def _n_bytes(spec: TensorSpec) -> int:
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[spec.type]]
    return int(np.prod(spec.shape)) // block * n_bytes
