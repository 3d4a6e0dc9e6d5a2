"""`moeedge lab trace` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.trace.format import Trace
from tests.support.commands import refused, run, run_json
from tests.support.traces import two_texts


@pytest.fixture
def own(tmp_path: Path) -> Path:
    two_texts(weights=True).save(tmp_path / "own.npz")
    return tmp_path / "own.npz"


def test_info(own: Path) -> None:
    result = run("lab", "trace", "info", own)
    assert result.exit_code == 0, result.output
    for part in (
        "8 per layer, 2 per token",
        "10 decoded text",
        "up to 2 tokens, acceptance rate 0.400",
        "vocabulary ids",
    ):
        assert part in result.stdout
    found = run_json("lab", "trace", "info", own)
    assert found["acceptance_chance"] == 0.5
    assert (found["model"], found["n_experts"], found["gamma"], found["acceptance_rate"]) == ("random", 8, 2, 0.4)


def test_there_and_back(own: Path, tmp_path: Path) -> None:
    csv, back = tmp_path / "text.csv", tmp_path / "back.npz"
    result = run("lab", "trace", "convert", own, csv)
    assert result.exit_code == 0 and result.stdout == "" and "10 tokens" in result.stderr
    result = run("lab", "trace", "import", csv, back, "--n-experts", 16, "--model", "mine", "--expert-bytes", 4096)
    assert result.exit_code == 0, result.output
    trace = Trace.load(back)
    sizes = trace.expert_bytes()
    assert (trace.meta.model, trace.meta.n_experts, trace.n_tokens) == ("mine", 16, 10)
    assert sizes is not None and sizes.tolist() == [4096, 4096]
    assert trace.meta.source.endswith("text.csv")
    assert run("lab", "trace", "convert", own, tmp_path / "r", "--to", "route").exit_code == 0
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
@pytest.mark.parametrize(
    "command", [["lab", "trace", "info"], ["lab", "trace", "convert"], ["lab", "replay"]], ids=" ".join
)
def test_broken_files_end_with_one_sentence(name: str, command: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    more = [str(tmp_path / "out.npz")] if command[-1] == "convert" else []
    message = refused(*command, tmp_path / name, *more)
    assert message.startswith("error: ") and name in message and "trace" in message
    assert not (tmp_path / "out.npz").exists()
