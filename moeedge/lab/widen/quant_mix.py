"""The tensor types that a file of a quantization mixes, by the rules of llama.cpp's quantizer.

Source: `llama_tensor_get_type` and `tensor_allows_quantization` of src/llama-quant.cpp in the pinned llama.cpp, for a
source of floats, without an importance matrix or the user's own types. Published files may differ: those of gpt-oss in
k-quants keep the experts in MXFP4, while these rules give their rows of 2,880 the types that rows of other lengths than
multiples of 256 fall back to.
"""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, LlamaFileType
from gguf import GGMLQuantizationType as GgmlType

from moeedge.lab.widen.architectures import Dims

QUANTS: dict[str, tuple[GgmlType, LlamaFileType]] = {
    "q4_k_m": (GgmlType.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "q5_k_m": (GgmlType.Q5_K, LlamaFileType.MOSTLY_Q5_K_M),
    "q3_k_m": (GgmlType.Q3_K, LlamaFileType.MOSTLY_Q3_K_M),
    "iq4_xs": (GgmlType.IQ4_XS, LlamaFileType.MOSTLY_IQ4_XS),
    "mxfp4": (GgmlType.MXFP4, LlamaFileType.MOSTLY_MXFP4_MOE),
    "q8_0": (GgmlType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GgmlType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q6_k": (GgmlType.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "bf16": (GgmlType.BF16, LlamaFileType.MOSTLY_BF16),
    "f16": (GgmlType.F16, LlamaFileType.MOSTLY_F16),
}
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d")  # in 32 bits
_VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")  # one of them in each layer
_FALLBACKS = {  # for rows that blocks of 256 do not divide
    GgmlType.Q3_K: GgmlType.Q4_0,
    GgmlType.Q4_K: GgmlType.Q5_0,
    GgmlType.Q5_K: GgmlType.Q5_1,
    GgmlType.Q6_K: GgmlType.Q8_0,
    GgmlType.IQ4_XS: GgmlType.IQ4_NL,
}


def mixed_type(quant: str, name: str, shape: tuple[int, ...], model: Dims) -> GgmlType:
    """Returns the type of a tensor in a file of `quant`, a key of QUANTS. shape: the slowest dimension first."""
    base = QUANTS[quant][0]
    if len(shape) < 2 or not name.endswith("weight") or any(part in name for part in _KEPT):
        return GgmlType.F32
    if base in (GgmlType.F16, GgmlType.BF16):
        return base
    chosen = _chosen(quant, base, name, shape, model)
    if not _fits(chosen, shape):
        chosen = _FALLBACKS.get(chosen, chosen)
    return chosen if _fits(chosen, shape) else GgmlType.F16


def _fits(type_: GgmlType, shape: tuple[int, ...]) -> bool:
    return shape[-1] % int(GGML_QUANT_SIZES[type_][0]) == 0


def _chosen(quant: str, base: GgmlType, name: str, shape: tuple[int, ...], model: Dims) -> GgmlType:
    """Returns the type before rows are looked at."""
    if name == "output.weight" or (model.tied and name == "token_embd.weight"):
        wide = quant == "mxfp4" or base == GgmlType.Q8_0 or not _fits(base, shape)
        return GgmlType.Q8_0 if wide else GgmlType.Q6_K
    if quant == "mxfp4":
        return base if len(shape) == 3 else GgmlType.Q8_0
    if not name.startswith("blk."):
        return base
    layer, n = int(name.split(".")[1]), model.layers
    wants_more = layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2
    more = {"q4_k_m": GgmlType.Q6_K, "q5_k_m": GgmlType.Q6_K} if wants_more else {}
    if name.endswith(_VALUES):
        if model.experts == 8:
            return GgmlType.Q8_0
        more["q3_k_m"] = GgmlType.Q5_K if layer < 2 else GgmlType.Q4_K
        if model.heads // model.heads_kv >= 4:
            more["iq4_xs"] = GgmlType.Q5_K
    elif "ffn_down" in name:
        more["q3_k_m"] = GgmlType.Q5_K if layer < n // 16 else GgmlType.Q4_K
        if layer < n // 8:
            more["iq4_xs"] = GgmlType.Q5_K
    elif name.endswith("attn_k.weight"):
        return GgmlType.Q8_0 if model.experts == 8 else base
    elif name.endswith("attn_output.weight"):
        if model.experts == 8:
            more = dict.fromkeys(("q3_k_m", "q4_k_m", "iq4_xs"), GgmlType.Q5_K)
        else:
            more = {"q3_k_m": GgmlType.Q4_K}
    else:
        more = {}
    return more.get(quant, base)
