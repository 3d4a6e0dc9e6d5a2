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


def test_import(tmp_path: Path) -> None:
    csv, back = tmp_path / "text.csv", tmp_path / "back.npz"
    csv.write_text("pos,layer,id0,id1\n0,0,1,2\n0,1,3,4\n1,0,1,5\n1,1,3,6\n")
    result = run("lab", "trace", "import", csv, back, "--n-experts", 16, "--model", "mine", "--expert-bytes", 4096)
    assert result.exit_code == 0 and result.stdout == "" and "2 tokens" in result.stderr
    trace = Trace.load(back)
    sizes = trace.expert_bytes()
    assert (trace.meta.model, trace.meta.n_experts, trace.n_tokens) == ("mine", 16, 2)
    assert sizes is not None and sizes.tolist() == [4096, 4096]
    assert trace.meta.source.endswith("text.csv")
    assert "trace that is read" in refused("lab", "trace", "import", back, back)
    assert ".npz" in refused("lab", "trace", "import", csv, tmp_path / "back.csv")


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
    "command", [["lab", "trace", "info"], ["lab", "trace", "import"], ["lab", "replay"]], ids=" ".join
)
def test_broken_files_end_with_one_sentence(name: str, command: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    more = [str(tmp_path / "out.npz")] if command[-1] == "import" else []
    message = refused(*command, tmp_path / name, *more)
    assert message.startswith("error: ") and name in message and "trace" in message
    assert not (tmp_path / "out.npz").exists()
