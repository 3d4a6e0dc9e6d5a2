"""`moeedge lab widen` from the command line: valid and invalid use, and that failures leave no file."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gguf
import pytest
from typer.testing import Result

from moeedge.llama.gguf_file import read_summary
from tests.conftest import TinyFactory
from tests.support.commands import SIGNALS, refused, run, run_json
from tests.support.machine import Here, files_of_at_most

LIKE = ("--like", "qwen3-30b-a3b", "--dry-run")


def widen(*arguments: object) -> Result:
    return run("lab", "widen", *arguments)


def start(*arguments: object) -> subprocess.Popen[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "moeedge", "lab", "widen", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_shape_is_like_qwen3_30b(bundled_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Nothing is written; the experts have the size that the real model's have in Q4_0."""
    output = run_json("lab", "widen", tmp_path / "wide.gguf", *LIKE)
    assert list(tmp_path.iterdir()) == [] and output["out"] is None
    wanted = {"embd": 2048, "ff": 768, "heads": 32, "heads_kv": 4, "head_dim": 128, "layers": 48, "experts": 128}
    assert wanted.items() <= output["shape"].items()
    assert output["expert_bytes"] == 48 * 128 * 3 * 2048 * 768 // 32 * 18
    assert "vocabulary 2048 (151936)" in output["notes"][0]
    assert "bit for bit" in output["notes"][1]
    smaller = run_json("lab", "widen", tmp_path / "wide.gguf", *LIKE, "--head-dim", 32)
    assert smaller["bytes"] == pytest.approx(output["bytes"], rel=1e-5)  # more heads instead: the same matrices
    assert (smaller["shape"]["heads"], smaller["shape"]["heads_kv"], len(smaller["notes"])) == (128, 16, 1)
    uneven = widen(tmp_path / "wide.gguf", *LIKE, "--ff", 1408, "--type", "q4_k")  # rows that blocks do not divide
    assert uneven.exit_code == 0, uneven.output
    assert all(text in uneven.stdout for text in ("1,408", "Q4_K", "Q5_0"))


def test_header_and_metadata(tiny_moe: Path, tmp_path: Path) -> None:
    out = tmp_path / "wide.gguf"
    sizes = ("--embd", 256, "--ff", 64, "--head-dim", 32, "--type", "q8_0")
    output = run_json("lab", "widen", out, "-m", tiny_moe, *sizes)
    assert output["bytes"] == out.stat().st_size == read_summary(out).size_bytes
    before, after = (gguf.GGUFReader(path).fields for path in (tiny_moe, out))
    assert set(before) <= set(after)
    kept = [name for name in before if name.startswith("tokenizer.")]
    assert kept and all(before[name].contents() == after[name].contents() for name in kept)
    assert all(before[name].types == after[name].types for name in before if not name.startswith("GGUF."))
    assert after["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    assert after["qwen3moe.attention.key_length"].contents() == 32
    eps = "qwen3moe.attention.layer_norm_rms_epsilon"
    assert after[eps].contents() == pytest.approx(before[eps].contents() / 2)
    types = {tensor.name.split(".")[-2]: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert types["ffn_up_exps"] == types["ffn_down_exps"] == "Q8_0" and types["ffn_gate_inp"] == "F32"


def test_sparse_reads_the_same(tiny_moe: Path, tmp_path: Path) -> None:
    full, sparse = tmp_path / "full.gguf", tmp_path / "sparse.gguf"
    sizes = ["-m", tiny_moe, "--embd", 256, "--ff", 1024, "--head-dim", 64]
    assert widen(full, *sizes).exit_code == widen(sparse, *sizes, "--sparse").exit_code == 0
    assert full.read_bytes() == sparse.read_bytes()
    assert sparse.stat().st_blocks < full.stat().st_blocks / 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "shape of the source"),
        (["--embd", "100"], "100 is not a multiple of 32"),
        (["--embd", "32"], "32 is less than the source's 64"),
        (["--embd", "19999968"], "19,999,968 is too large"),
        (["--heads", "99998"], "too large"),
        (["--layers", "9999999"], "at most 512"),
        (["--head-dim", "24"], "24 is not a multiple of the source's 16"),
        (["--heads", "8", "--heads-kv", "3"], "do not fit 8 over 3"),
        (["--like", "gpt-5"], "Choose from: qwen3-30b-a3b"),
        (["--like", "qwen3-0.6b"], "unlike qwen3-0.6b. Choose from: qwen3-30b-a3b"),
        (["--embd", "96", "--type", "q4_k"], "multiple of 256"),
        (["--embd", "128", "--type", "q2_k"], "q4_0, q4_k, q8_0"),
    ],
)
def test_impossible_shapes(arguments: list[str], reason: str, tiny_moe: Path, tmp_path: Path) -> None:
    assert reason in refused("lab", "widen", tmp_path / "wide.gguf", "-m", tiny_moe, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_unusable_sources(tiny: TinyFactory, tmp_path: Path) -> None:
    short, text = tmp_path / "short.gguf", tmp_path / "text.gguf"
    short.write_bytes(tiny("qwen3moe").read_bytes()[:-5000])
    text.write_text("no model")
    cases = [(short, "truncated"), (text, "not a GGUF"), (tmp_path / "x.gguf", "x.gguf"), (tiny("olmoe"), "olmoe")]
    for source, reason in cases:
        assert reason in refused("lab", "widen", tmp_path / "wide.gguf", "-m", source, "--embd", 128)
    assert not (tmp_path / "wide.gguf").exists()


def test_unusable_targets(tiny_moe: Path, tmp_path: Path) -> None:
    mine, source = tmp_path / "mine.gguf", tmp_path / "source.gguf"
    mine.write_text("precious")
    shutil.copy(tiny_moe, source)
    cases = [
        (mine, "--force"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "wide.gguf", "no folder"),
        (source, "is the source"),
        (Path("/dev/null"), "not a regular file"),
    ]
    for out, reason in cases:
        assert reason in refused("lab", "widen", out, "-m", source, "--embd", 128)
    assert mine.read_text() == "precious"
    assert widen(mine, "-m", source, "--embd", 128, "--force").exit_code == 0
    assert read_summary(mine).expert_layers == (0, 1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.gguf", "source.gguf"]


def test_two_at_once(tiny_moe: Path, tmp_path: Path) -> None:
    out, part = tmp_path / "wide.gguf", tmp_path / "wide.gguf.part"
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another process" in refused("lab", "widen", out, "-m", tiny_moe, "--embd", 128)
    assert part.exists()
    assert widen(out, "-m", tiny_moe, "--embd", 128).exit_code == 0  # a leftover is no obstacle
    assert list(tmp_path.iterdir()) == [out]


def test_not_enough_disk_space(tiny_moe: Path, tmp_path: Path, here: Here) -> None:
    """Before the write, and where the system refuses in the middle, as a full disk does."""
    arguments = (tmp_path / "wide.gguf", "-m", tiny_moe, "--embd", 2048, "--ff", 768)
    with files_of_at_most(5 * 2**20):
        result = widen(*arguments)
    assert result.exit_code == 1 and "error: " in result.stderr and "file too large" in result.stderr
    assert list(tmp_path.iterdir()) == []
    here.set_disk(10 * 2**20)
    result = widen(*arguments)
    assert result.exit_code == 1 and "10 MiB" in result.stderr and "--sparse" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_interrupted_write(signum: int, code: int, tiny_moe: Path, tmp_path: Path) -> None:
    part = tmp_path / "wide.gguf.part"
    process = start(tmp_path / "wide.gguf", "-m", tiny_moe, "--embd", 4096, "--ff", 8192)
    deadline_s = time.monotonic() + 60
    while not part.exists() or part.stat().st_size < 10**6:
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.005)
    process.send_signal(signum)
    _, output = process.communicate(timeout=60)
    assert (process.returncode, output) == (code, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_a_quota_leave_no_file(number: int, tiny_moe: Path, tmp_path: Path, here: Here) -> None:
    here.fill_disk(number)
    result = widen(tmp_path / "wide.gguf", "-m", tiny_moe, "--embd", 128)
    assert result.exit_code == 1 and os.strerror(number).lower() in " ".join(result.stderr.split())
    assert "Free some space" in result.stderr
    assert list(tmp_path.iterdir()) == []
