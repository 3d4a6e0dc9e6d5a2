"""Damaged inputs end in a sentence; `python -m tests.fuzz` runs many more of them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import closing, nullcontext, suppress
from importlib import import_module
from pathlib import Path

import pytest

from moeedge.errors import ModelFileError, MoeedgeError
from moeedge.llama.model import Model
from tests.conftest import TinyFactory
from tests.fuzz import gguf_header
from tests.fuzz.__main__ import KINDS
from tests.fuzz.guided import READERS


def test_a_header_is_written_as_it_was_read(tiny_moe: Path) -> None:
    data = tiny_moe.read_bytes()
    header = gguf_header.parse(data)
    assert gguf_header.written(header) == data[: header.size]


def changed(path: Path, folder: Path, key: str, value: object) -> Path:
    """The model with another value of the last key that ends so."""
    data = path.read_bytes()
    header = gguf_header.parse(data)
    [pair for pair in header.pairs if pair.name.endswith(key.encode())][-1].value = value
    start = -(-header.size // 32) * 32
    out = folder / "changed.gguf"
    out.write_bytes(gguf_header.written(header).ljust(start, b"\0") + data[start:])
    return out


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (".block_count", 513, r"assert|ASSERT"),  # more than llama.cpp has room for
        ("layer_norm_rms_epsilon", -1.0, "epsilon"),  # the first decode would assert
        ("layer_norm_rms_epsilon", float("nan"), "epsilon"),
        ("tokenizer.ggml.model", b"llama", "vocabulary"),  # a text with a byte that has no token: an exception
        ("tokenizer.ggml.model", b"rwkv", "vocabulary"),  # and a token that there is not
        ("layer_norm_rms_epsilon", 1e-5, ""),
    ],
)
def test_what_the_fuzzer_found(tiny_moe: Path, tmp_path: Path, key: str, value: object, words: str) -> None:
    """All but the last ended the process once."""
    path = changed(tiny_moe, tmp_path, key, value)
    expected = pytest.raises(ModelFileError, match=words) if words else nullcontext()
    with expected, closing(Model.load(path, header_only=True)) as model:
        model.tokenize("a \u00e9")


@pytest.mark.parametrize("n", [0, 7, 18])
def test_a_draft_head_that_cannot_rotate(tiny: TinyFactory, tmp_path: Path, n: int) -> None:
    """It is not tried by another process, as it decodes a target's states."""
    with pytest.raises(ModelFileError, match="dimension_count"):
        Model.load(changed(tiny("eagle3"), tmp_path, "rope.dimension_count", n), header_only=True).close()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("jsonl", b'{"prompt": ' + b"[" * 3000),
        ("jsonl", b'{"prompt": "\\ud800"}'),
        ("jsonl", b"\2prompt\n" + b"a" * 140_000),  # the first byte is the suffix: a field that csv refuses
        ("measurements", b'{"schema": 1, "seconds": 1' + b"0" * 400 + b"}"),  # no float holds it
        ("journal", b"9" * 5000),
        ("chat", b"[]"),
        ("schema", b'{"$ref": "#"}'),
        ("trace", b"PK\5\6" + bytes(18)),  # an archive without members
    ],
)
def test_texts_that_were_tracebacks_once(kind: str, data: bytes, tmp_path: Path) -> None:
    """Or that such ones came from: an error of ours, or none."""
    reader = READERS[kind]
    module, _, name = reader.place.partition(":")
    number = data[0] if data[0] < len(reader.suffixes) else 0
    path = tmp_path / f"case{reader.suffixes[number]}"
    path.write_bytes(data[1:] if number else data)
    with suppress(MoeedgeError):
        getattr(import_module(module), name)(str(path))


@pytest.mark.slow
def test_every_number_of_a_header_with_every_extreme(tiny_moe: Path, tmp_path: Path) -> None:
    """Each is loaded or refused with a sentence."""
    pairs = gguf_header.parse(tiny_moe.read_bytes()).pairs
    outcomes: Counter[bool] = Counter()
    for pair in pairs:
        values = gguf_header.FLOATS if pair.type in (6, 12) else gguf_header.EXTREMES
        for value in values if isinstance(pair.value, (int, float)) and not isinstance(pair.value, bool) else ():
            path = changed(tiny_moe, tmp_path, pair.name.decode(), value)
            try:
                Model.load(path, header_only=True).close()
            except ModelFileError:
                outcomes[False] += 1
            else:
                outcomes[True] += 1
    assert outcomes[False] > 50 and outcomes[True] > 10


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
