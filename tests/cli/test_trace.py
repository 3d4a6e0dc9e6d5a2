"""`moeedge trace` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moeedge.cli.app import app
from moeedge.trace.format import Trace
from tests.support.traces import two_texts


def _trace(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


@pytest.fixture
def own(tmp_path: Path) -> Path:
    two_texts(weights=True).save(tmp_path / "own.npz")
    return tmp_path / "own.npz"


def test_info(own: Path) -> None:
    result = _trace("info", own)
    assert result.exit_code == 0, result.output
    for part in ("8 per layer, 2 per token", "10 decoded text", "up to 2 tokens, acceptance 0.500", "vocabulary ids"):
        assert part in result.stdout
    found = json.loads(_trace("info", own, "-o", "json").stdout)
    assert (found["model"], found["n_experts"], found["gamma"], found["acceptance"]) == ("random", 8, 2, 0.5)


def test_there_and_back(own: Path, tmp_path: Path) -> None:
    csv, back = tmp_path / "text.csv", tmp_path / "back.npz"
    result = _trace("convert", own, csv)
    assert result.exit_code == 0 and result.stdout == "" and "10 tokens" in result.stderr
    result = _trace("import", csv, back, "--n-experts", 16, "--model", "mine", "--expert-bytes", 4096)
    assert result.exit_code == 0, result.output
    trace = Trace.load(back)
    sizes = trace.expert_bytes()
    assert (trace.meta.model, trace.meta.n_experts, trace.n_tokens) == ("mine", 16, 10)
    assert sizes is not None and sizes.tolist() == [4096, 4096]
    assert trace.meta.source == "imported from text.csv"
    assert _trace("convert", own, tmp_path / "r", "--to", "route").exit_code == 0
    assert (tmp_path / "r").read_text().startswith("# route_trace v1\n")


BROKEN = {
    "empty.csv": b"",
    "empty.npz": b"",
    "empty.npy": b"",
    "text.npz": b"hello",
    "text.csv": b"hello\n",
    "bytes.csv": b"\xff\xfe\x00",
    "huge.csv": b"pos,layer,id0\n0,0,99999999999999999999\n",
    "layers.csv": b"pos,layer,id0\n0,2147483647,1\n",
    "negative.csv": b"pos,layer,id0\n0,0,-7\n",
    "slots.csv": b"turn,phase,step,layer,slot,expert,weight\n0,1,0,0,2147483647,1,0.5\n",
    "experts.csv": b"# n_expert=999999999\nturn,phase,step,layer,slot,expert,weight\n0,1,0,0,0,1,0.5\n",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("command", [["trace", "info"], ["trace", "convert"], ["replay"]], ids=" ".join)
def test_broken_files_end_with_one_sentence(name: str, command: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    more = [str(tmp_path / "out.npz")] if command[-1] == "convert" else []
    result = CliRunner().invoke(app, [*command, str(tmp_path / name), *more])
    assert result.exit_code == 2 and result.stdout == ""
    said = " ".join(result.stderr.split())
    assert said.startswith("error: ") and f"{name} is not a usable routing trace: " in said and "Traceback" not in said
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "none.npz"], "does not exist"),
        (["convert", "own.npz", "out.txt"], "--to"),
        (["convert", "own.npz", "own.npz"], "is the trace that is read"),
        (["import", "own.npz", "nowhere/out.npz"], "Cannot write"),
        (["import", "own.npz", "out.npz", "--expert-bytes", "0"], "--expert-bytes"),
        (["import", "own.npz", "out.csv"], "does not end in .npz"),
        (["convert", "own.npz", "-", "--to", "positions"], "not to standard output"),
        (["info", "own.npz", "--n-experts", "0"], "number of experts"),
    ],
)
def test_mistakes(own: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(own.parent)
    result = _trace(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert words in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
