"""Where the bytes of one expert tensor lie in its GGUF file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertTensor:
    """struct moeedge_expert_tensor: a tensor that holds one slice for each expert of a layer."""

    layer: int
    type: int  # enum ggml_type
    ne0: int  # of one expert's slice; 1 for a scale
    ne1: int  # 1 for biases and scales
    n_experts: int
    file: int  # index into the parts of a split model
    offset: int  # bytes from the start of the file to expert 0
    stride: int  # bytes from one expert to the next
    name: str  # in the GGUF file: blk.3.ffn_up_exps.weight

    @property
    def role(self) -> str:
        """The name without its layer: ffn_up_exps.weight."""
        return self.name.split(".", 2)[2]
