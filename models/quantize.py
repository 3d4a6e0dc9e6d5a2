"""llama.cpp's own quantizer: experts in the wanted type, all other matrices in Q8_0, routers and norms in float32."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import llama_cpp
from gguf import GGMLQuantizationType as Q

# llama.cpp says of no MoE router that it may be quantized: routing must not drift.
FILE_TYPES = {
    "q8_0": (Q.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Q.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """llama.cpp names every tensor: dropped; a failure arrives as return code."""


def quantize(source: Path, out: Path, kind: str) -> None:
    """Write the float32 GGUF `source` as `out`. kind: type of the experts, or of all matrices of a dense model."""
    expert_type, file_type = FILE_TYPES[kind]
    overrides = (llama_cpp.llama_model_tensor_override * 3)(
        (rb"ffn_(gate|up|down)_exps", int(expert_type)),
        (rb"attn_(q|k|v|output)\.weight", int(Q.Q8_0)),
        (None, 0),
    )
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.token_embedding_type = params.output_tensor_type = int(Q.Q8_0)
    params.tt_overrides = overrides
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params))
    if code:
        raise OSError(f"llama.cpp's quantizer returned {code} for {source.name}")
