"""First contact with a model file, in a process that may crash or hang in this one's place."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from moeedge.engine import probe as probing
from moeedge.engine.probe import probe, take_notes
from moeedge.errors import ModelFileError
from moeedge.run import is_warning
from tests.fuzz import gguf_header


@pytest.fixture(autouse=True)
def is_on(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    monkeypatch.delenv("MOEEDGE_NO_PROBE")
    monkeypatch.setattr(probing, "_tried", set())
    monkeypatch.setattr(probing, "_took_s", {})


def kept(folder: Path) -> list[Path]:
    return [*(folder / "cache").rglob("*.json")]


@pytest.mark.parametrize("forgets", [True, False])
def test_a_sound_file_is_tried_once(
    tiny_moe: Path, tmp_path: Path, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this process, and by later ones."""
    probe(tiny_moe)
    assert len(kept(tmp_path)) == 1
    (note,) = take_notes([tiny_moe])
    assert tiny_moe.name in note and not is_warning(note)
    monkeypatch.setattr(subprocess, "run", None)
    if forgets:
        monkeypatch.setattr(probing, "_tried", set())
    else:
        kept(tmp_path)[0].unlink()
    probe(tiny_moe)
    assert not take_notes([tiny_moe])


def test_modules_of_the_current_folder_are_not_run(
    tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "resource.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    probe(tiny_moe)
    assert len(kept(tmp_path)) == 1 and not (tmp_path / "ran").exists()


def test_a_file_that_llama_cpp_refuses_is_left_to_the_loader(tiny_moe: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_moe.read_bytes()[:5000])
    probe(cut)
    probe(tmp_path / "none.gguf")
    assert kept(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="weights are replaced by zeros on Linux alone")
def test_a_file_that_loads_and_cannot_be_decoded(tiny_moe: Path, tmp_path: Path) -> None:
    """ggml has no product with a matrix of integers, and does not ask."""
    data = tiny_moe.read_bytes()
    header = gguf_header.parse(data)
    next(tensor for tensor in header.tensors if tensor.name == b"blk.0.attn_q.weight").type = 26  # GGML_TYPE_I32
    path = tmp_path / "integers.gguf"
    path.write_bytes(gguf_header.written(header) + data[header.size :])
    with pytest.raises(ModelFileError, match="SIGSEGV"):
        probe(path)


def ended(code: int, errors: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.CompletedProcess((), code, stderr=errors)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (ended(-11, b"loading\nGGML_ASSERT(n < 3) failed\nmore\n"), "SIGSEGV: GGML"),
        (ended(-24), "end with it"),
        (ended(-9), ""),  # by the system, which lacks memory
        (ended(1, b"ImportError"), ""),
        (subprocess.TimeoutExpired((), 120), ""),  # a disk that does not answer
    ],
)
def test_a_crash_or_a_hang_is_an_error(
    outcome: Any, words: str, tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What says nothing about the file is none."""

    def run(*_arguments: object, **_options: object) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelFileError, match=words) if words else nullcontext() as caught:
        probe(tiny_moe)
    assert kept(tmp_path) == [] and (not words or caught.value.exit_code == 2)
    monkeypatch.setenv("MOEEDGE_NO_PROBE", "1")
    probe(tiny_moe)
