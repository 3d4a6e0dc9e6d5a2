"""Costs of machines that `moeedge calibrate` measured, and the shapes of model files."""

from __future__ import annotations

import ctypes
from collections import Counter
from pathlib import Path

from moeedge.errors import InputError
from moeedge.lab.sim.model_shape import ModelShape, read_json
from moeedge.lab.sim.step_costs import StepCosts, measured_costs
from moeedge.llama import gguf_file
from moeedge.llama.gguf_file import expert_tensors
from moeedge.llama.library import ggml_function
from moeedge.native.cache import ExpertTensor
from moeedge.scheduler.calibration import Calibration
from moeedge.scheduler.measurement import measurement_files

_EXPERT_WEIGHTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_gate_up_exps.weight")


def calibration_file(hardware: str, model: str) -> Path | None:
    """The calibration that `--hardware` asks for, None where it asks for other hardware.

    "this" is the newest calibration kept for a model file of this name; any other is named by its file. Raises
    InputError where "this" has none.
    """
    if hardware != "this":
        path = Path(hardware)
        return path if path.suffix == ".json" and path.exists() and "units" in read_json(path) else None
    files = measurement_files(model)
    if not files:
        raise InputError(f"No calibration is kept for {model}.", f"Run moeedge calibrate -m {model} first.")
    return files[-1]


def read_calibration(path: Path) -> StepCosts:
    """The costs in a kept calibration. Raises InputError for a file without unit times."""
    try:
        calibration = Calibration.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a calibration: {error}.", "Write one with moeedge calibrate.") from None
    if calibration.units is None:
        raise InputError(
            f"{path} has no times of experts, because no layer was shared between CPU and device.",
            "Run moeedge calibrate with a larger --cache-ratio.",
        )
    return measured_costs(calibration.units)


def shape_of_file(path: Path, k: int) -> ModelShape:
    """The sizes of a GGUF file's tensors, those of experts as means of the layers; `k` as in its trace.

    A step reads all tensors but the experts and the input embedding once. Raises ModelFileError for a file that is not
    GGUF, InputError for a model without experts.
    """
    of_experts, files = expert_tensors(path)
    if not any(tensor.role in _EXPERT_WEIGHTS for tensor in of_experts):
        raise InputError(f"{path} has no experts.", "Give a Mixture-of-Experts model.")
    layers = sorted({tensor.layer for tensor in of_experts})
    tensors = [tensor for file in files for tensor in gguf_file.read_tensors(file)]
    dense = [tensor for tensor in tensors if tensor.name.startswith("blk.") and "_exps." not in tensor.name]
    n_layers = 1 + max(int(tensor.name.split(".")[1]) for tensor in dense)
    sizes = {tensor.name: tensor.size_bytes for tensor in tensors}
    head_bytes = sizes.get("output.weight", sizes.get("token_embd.weight", 0))  # some models tie the two
    return ModelShape(
        name=path.stem,
        n_layers=n_layers,
        n_expert_layers=len(layers),
        n_experts=of_experts[0].n_experts,
        k=k,
        expert_bytes=sum(tensor.stride for tensor in of_experts) / len(layers),
        expert_flops=sum(2 * tensor.ne0 * tensor.ne1 for tensor in of_experts if tensor.role in _EXPERT_WEIGHTS)
        / len(layers),
        dense_layer_bytes=sum(tensor.size_bytes for tensor in dense) / n_layers,
        head_bytes=float(head_bytes),
        quant=_quant([tensor for tensor in of_experts if tensor.role in _EXPERT_WEIGHTS]),
    )


def _quant(tensors: list[ExpertTensor]) -> str:
    """The types of experts, the most frequent first: "Q4_K+Q6_K"."""
    type_name = ggml_function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    types = Counter(tensor.type for tensor in tensors)
    return "+".join(type_name(each).decode().upper() for each, _ in types.most_common())
