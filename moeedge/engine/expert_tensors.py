"""The expert tensors of a model file: which slice of which file is expert e of layer l.

llama.cpp may keep experts repacked for the CPU, from which they cannot be read back; uploads to a device therefore take
the original bytes from the GGUF file, at the places listed here.
"""

from __future__ import annotations

import re
from pathlib import Path

from moeedge.engine import gguf_file
from moeedge.native.expert_tensor import ExpertTensor

# shared experts (_shexp) and the norm in front of the experts (ffn_norm_exps) are not chosen by a router
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(?:gate|up|gate_up|down)_exps\.(?P<part>weight|bias|scale|input_scale)$")
_EXPERT_DIMENSION = {"weight": 2, "bias": 1, "scale": 0, "input_scale": 0}


def expert_tensors(path: Path, *, n_layers: int | None = None) -> tuple[list[ExpertTensor], list[Path]]:
    """All expert tensors of the model at `path` in layer order, and the files that `ExpertTensor.file` counts.

    n_layers: leave out what lies behind that many layers (those of multi-token prediction do not run here).
    Raises ModelFileError as gguf_file.summarize does.
    """
    files = gguf_file.parts(path)
    found = []
    for index, part in enumerate(files):
        for tensor in gguf_file.read_tensors(part):
            match = _EXPERTS.match(tensor.name)
            if match is None or (n_layers is not None and int(match[1]) >= n_layers):
                continue
            dimension = _EXPERT_DIMENSION[match["part"]]
            n_experts = max(tensor.shape[dimension], 1)  # a malformed header may say 0
            found.append(
                ExpertTensor(
                    layer=int(match[1]),
                    type=tensor.type,
                    ne0=tensor.shape[0] if dimension > 0 else 1,
                    ne1=tensor.shape[1] if dimension > 1 else 1,
                    n_experts=n_experts,
                    file=index,
                    offset=tensor.offset,
                    stride=tensor.size_bytes // n_experts,
                    name=tensor.name,
                )
            )
    return sorted(found, key=lambda tensor: (tensor.layer, tensor.name)), files


def expert_bytes(tensors: list[ExpertTensor]) -> int:
    """Bytes of all experts together: what a cache ratio of 1 would hold."""
    return sum(tensor.stride * tensor.n_experts for tensor in tensors)


def expert_bytes_by_layer(tensors: list[ExpertTensor], n_layers: int) -> list[int]:
    """Bytes of one expert of each layer, [n_layers]; 0 for a layer without experts."""
    sizes = [0] * n_layers
    for tensor in tensors:
        if tensor.layer < n_layers:
            sizes[tensor.layer] += tensor.stride
    return sizes


def n_groups(tensors: list[ExpertTensor]) -> int:
    """Groups of layers whose experts have the same tensors; a cache has staging slots for each of them."""
    layers: dict[int, set[tuple[str, int, int, int]]] = {}
    for tensor in tensors:
        layers.setdefault(tensor.layer, set()).add((tensor.role, tensor.type, tensor.ne0, tensor.ne1))
    return len({frozenset(roles) for roles in layers.values()})


def scratch_bytes(tensors: list[ExpertTensor], n_pairs: int) -> int:
    """Bytes of float32 for the columns of `n_pairs` (token, expert) pairs in the widest layer, on the safe side.

    Every matrix has an input and an output column; one that two matrices share is counted twice.
    """
    values: dict[int, int] = {}
    for tensor in tensors:
        values[tensor.layer] = values.get(tensor.layer, 0) + (tensor.ne0 + tensor.ne1 if tensor.ne1 > 1 else 0)
    return 4 * n_pairs * max(values.values(), default=0)
