"""Headers of models as they are published: every tensor with its shape and type, all metadata that counts, no data."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moeedge.lab.widen.random_model import model_like

Mix = Literal["Q4_K_M", "Q8_0"]


def write_qwen3_30b_a3b(path: Path, mix: Mix = "Q4_K_M", *, layers: int = 48) -> Path:
    """The header of Qwen3-30B-A3B in that mix; 18.6 GB or 32.5 GB would follow."""
    model_like("qwen3-30b-a3b", mix, layers=layers).write_header(path)
    return path
