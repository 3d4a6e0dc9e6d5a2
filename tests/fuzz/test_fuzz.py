"""Damaged inputs end in a sentence; `python -m tests.fuzz` runs many more of them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from moeedge.errors import ModelFileError
from moeedge.llama.model import Model
from tests.fuzz import gguf_header
from tests.fuzz.__main__ import KINDS


def test_a_header_is_written_as_it_was_read(tiny_moe: Path) -> None:
    data = tiny_moe.read_bytes()
    header = gguf_header.parse(data)
    assert gguf_header.written(header) == data[: header.size]


def test_an_assertion_of_llama_cpp_is_an_error(tiny_moe: Path, tmp_path: Path) -> None:
    """More layers than llama.cpp has room for: it asserts, which would end this process."""
    data = tiny_moe.read_bytes()
    header = gguf_header.parse(data)
    next(pair for pair in header.pairs if pair.name.endswith(b".block_count")).value = 513
    path = tmp_path / "many.gguf"
    start = -(-header.size // 32) * 32
    path.write_bytes(gguf_header.written(header).ljust(start, b"\0") + data[start:])
    with pytest.raises(ModelFileError, match=r"assert|ASSERT"):
        Model.load(path, header_only=True)


@pytest.mark.parametrize(("value", "is_refused"), [(-1.0, True), (float("nan"), True), (1e-5, False)])
def test_an_epsilon_that_ggml_asserts_against(tiny_moe: Path, tmp_path: Path, value: float, is_refused: bool) -> None:
    """It would end the process at the first decode."""
    data = tiny_moe.read_bytes()
    header = gguf_header.parse(data)
    next(pair for pair in header.pairs if pair.name.endswith(b"layer_norm_rms_epsilon")).value = value
    path = tmp_path / "epsilon.gguf"
    path.write_bytes(gguf_header.written(header) + data[header.size :])
    with pytest.raises(ModelFileError, match="epsilon") if is_refused else nullcontext():
        Model.load(path, header_only=True).close()


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        ("gguf", 4),
        ("jsonl", 20),
        *(pytest.param(kind, 25, marks=pytest.mark.slow) for kind in (*KINDS, "cli")),
        pytest.param("fault", 4, marks=pytest.mark.slow),
    ],
)
def test_damaged_inputs(kind: str, n: int) -> None:
    """In a process of their own, whose children inherit no thread."""
    command = [sys.executable, "-m", "tests.fuzz", kind, "--n", str(n), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
