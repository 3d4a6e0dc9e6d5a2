"""Machines from what `moeedge calibrate` measured and kept, and the shapes of model files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeedge import paths
from moeedge.errors import InputError
from moeedge.llama import gguf_file
from moeedge.llama.gguf_file import expert_tensors
from moeedge.scheduler.calibration import Calibration
from moeedge.sim.machine import Machine, from_units
from moeedge.sim.model_shape import ModelShape, read_json

_EXPERT_WEIGHTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_gate_up_exps.weight")


@dataclass(frozen=True)
class CaptureFlags:
    """One measurement and the file that holds it."""

    machine: Machine
    calibration: Calibration
    file: Path


def is_calibration(path: Path) -> bool:
    """Whether a JSON file is one that calibrate kept; other files describe hardware."""
    return path.suffix == ".json" and path.exists() and "units" in read_json(path)


def read_calibration(path: Path) -> CaptureFlags:
    """The machine of one kept file. Raises InputError for a file that holds no unit times."""
    try:
        calibration = Calibration.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no calibration: {error}.", "Write one with moeedge calibrate.") from None
    if calibration.units is None:
        raise InputError(f"{path} holds no unit times.", "The backend split no block: use a larger --cache-ratio.")
    return CaptureFlags(from_units(calibration.units), calibration, path)


def newest_calibration(model: str) -> CaptureFlags:
    """The newest measurement kept for a model file of this name. Raises InputError where there is none."""
    folder = paths.cache_dir() / "calibration"
    found = sorted(folder.glob(f"{model}-*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    if not found:
        raise InputError(f"Nothing was measured for {model}.", f"Run moeedge calibrate -m {model} first.")
    return read_calibration(found[-1])


def shape_of_file(path: Path, k: int) -> ModelShape:
    """Sizes of a GGUF file's tensors; a step reads all but the experts and the input embedding once. k as in its trace.

    Raises ModelFileError for a file that is none, InputError for a model without experts.
    """
    tensors, files = expert_tensors(path)
    weights = [one for one in tensors if one.role in _EXPERT_WEIGHTS]
    if not weights:
        raise InputError(f"{path} has no experts.", "Name a Mixture-of-Experts model.")
    layers = sorted({one.layer for one in tensors})
    of_layer = [one for one in tensors if one.layer == layers[0]]
    every = [one for file in files for one in gguf_file.read_tensors(file)]
    blocks = [one for one in every if one.name.startswith("blk.") and "_exps." not in one.name]
    n_layers = 1 + max(int(one.name.split(".")[1]) for one in blocks)
    heads = [one for one in every if one.name == "output.weight"] or [
        one for one in every if one.name == "token_embd.weight"
    ]
    return ModelShape(
        name=path.stem,
        n_layers=n_layers,
        n_expert_layers=len(layers),
        n_experts=of_layer[0].n_experts,
        k=k,
        expert_bytes=float(sum(one.stride for one in of_layer)),
        expert_flops=float(sum(2 * one.ne0 * one.ne1 for one in of_layer if one.role in _EXPERT_WEIGHTS)),
        dense_layer_bytes=sum(one.size_bytes for one in blocks) / n_layers,
        head_bytes=float(sum(one.size_bytes for one in heads)),
    )


def hardware_named(text: str) -> bool:
    """Whether the user asks for a machine that was measured."""
    return text == "this" or (text.endswith(".json") and is_calibration(Path(text)))
