"""Traces of other tools: the real ones, small hand-written ones, and damaged ones; the figures of `lab trace info`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeedge.errors import InputError
from moeedge.lab.cli.trace import summarize_trace
from moeedge.lab.traces.importers import read_trace
from moeedge.native.abi import Phase
from moeedge.trace.format import ids_dtype
from moeedge.trace.steps import draft_stats
from tests.support.traces import make_trace, plain_text, published_trace, two_texts

ROUTE = """# route_trace v1
# model=/phone/models/tiny.gguf arch=gemma4 n_layer=3 n_expert=16 n_expert_used=2
# layer=0 expert_bytes=4336640 dense_bytes=44191236
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,5,0.75,0,1
0,0,0,0,1,3,0.25,0,1
0,0,1,0,0,15,0.5,1,0
0,0,1,0,1,0,0.5,1,0
0,0,0,2,0,7,1,0,1
0,1,2,0,0,5,0.5,0,1
0,1,2,0,1,6,0.5,0,1
0,1,2,2,0,1,0.5,0,1
"""
POSITIONS = "pos,layer,id0,id1\n0,0,1,2\n0,1,3,4\n1,0,1,5\n1,1,3,6\n0,0,2,1\n0,1,0,7\n"


def test_route_csv_by_hand(tmp_path: Path) -> None:
    (tmp_path / "route.csv").write_text(ROUTE)
    trace = read_trace(tmp_path / "route.csv")
    assert (trace.meta.model, trace.meta.architecture) == ("tiny.gguf", "gemma4")
    assert (trace.meta.n_layers, trace.meta.n_experts, trace.meta.n_expert_used) == (3, 16, 2)
    assert trace.phase.tolist() == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE]
    assert trace.step.tolist() == [0, 0, 1]
    assert trace.layer_ids(0).tolist() == [[5, 3], [15, 0], [5, 6]]
    assert trace.layer_ids(1).tolist() == [[-1, -1]] * 3
    assert trace.layer_ids(2).tolist() == [[7, -1], [-1, -1], [1, -1]]
    assert trace.expert_bytes().tolist() == [4336640, 0, 0]
    assert trace.weights[0, 0].tolist() == [0.75, 0.25] and np.isnan(trace.weights[0, 1]).all()


def test_position_csv_by_hand(tmp_path: Path) -> None:
    (tmp_path / "positions.csv").write_text(POSITIONS)
    trace = read_trace(tmp_path / "positions.csv")
    assert (trace.meta.n_layers, trace.meta.n_experts, trace.meta.n_expert_used) == (2, 8, 2)
    assert trace.sequence.tolist() == [0, 0, 1]
    assert trace.position.tolist() == [0, 1, 0]
    assert trace.layer_ids(1).tolist() == [[3, 4], [3, 6], [0, 7]]
    assert read_trace(tmp_path / "positions.csv", n_experts=64).meta.n_experts == 64


def test_position_csv_by_layer(tmp_path: Path) -> None:
    """All rows of one layer before the next layer's; each layer has the same texts."""
    head, *rows = POSITIONS.splitlines()
    by_layer = sorted(rows, key=lambda row: row.split(",")[1])
    (tmp_path / "layers.csv").write_text("\n".join([head, *by_layer]))
    (tmp_path / "tokens.csv").write_text("\ufeff" + POSITIONS, encoding="utf-8")  # as spreadsheets write it
    one, other = read_trace(tmp_path / "layers.csv"), read_trace(tmp_path / "tokens.csv")
    assert one.sequence.tolist() == other.sequence.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(one.ids, other.ids)


def test_foreign_npz_by_hand(tmp_path: Path) -> None:
    ids = np.arange(24).reshape(6, 2, 2) % 8
    np.savez(tmp_path / "lengths.npz", ids=ids.astype(np.uint8), lengths=np.array([2, 0, 4]))
    trace = read_trace(tmp_path / "lengths.npz")
    assert trace.sequence.tolist() == [0, 0, 2, 2, 2, 2]
    assert trace.step.tolist() == [1, 2, 1, 2, 3, 4]
    assert trace.position.tolist() == [0, 1, 0, 1, 2, 3]
    ids[5, 1] = -1
    np.savez(tmp_path / "phase.npz", ids=ids.astype(np.int16), phase=np.array([0, 0, 1, 1, 1, 1], dtype=np.int8))
    trace = read_trace(tmp_path / "phase.npz")
    assert trace.step.tolist() == [0, 0, 1, 2, 3, 4]
    assert trace.layer_ids(1)[5].tolist() == [-1, -1]
    np.save(tmp_path / "bare.npy", ids)
    assert read_trace(tmp_path / "bare.npy").step.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "is empty"),
        ("n.csv", "# only=comments\n\n", "is empty"),
        ("b.csv", "layer,expert\n0,1\n", "first row"),
        ("c.csv", POSITIONS.replace("0,1,3,4", "0,1,3"), "row 3"),
        ("d.csv", POSITIONS.replace("0,1,3,4", "0,1,3,x"), "row 3"),
        ("e.csv", POSITIONS.replace("0,1,3,4", "0,-1,3,4"), "negative"),
        ("f.csv", POSITIONS.replace("0,1,3,4", "0,1,3,4.5"), "not an integer"),
        ("g.csv", POSITIONS.replace("0,1,3,4", "0,999999999,3,4"), "layers"),
        ("s.csv", POSITIONS.replace("0,1,3,4", "0,1,3,99999999999999999999"), "not an integer"),
        ("t.csv", ROUTE.replace("0,0,0,0,0,5", "0,0,0,0,2147483647,5"), "it names 3 tokens"),
        ("h.csv", "pos,layer,id0\n", "no rows"),
        ("m.csv", "turn,phase,step,layer,slot,expert,weight\n", "no rows"),
        ("i.csv", ROUTE.replace("0,0,0,0,0,5", "0,7,0,0,0,5"), "phase"),
        ("j.csv", ROUTE.replace("5,0.75", "99,0.75"), "expert 99"),
        ("k.csv", POSITIONS.replace("0,1,3,4", "0,1,3,nan"), "finite"),
        ("l.csv", POSITIONS.replace("0,1,3,4", "0,1,3,70000"), "expert 70000"),
        ("o.csv", POSITIONS.replace("0,1,3,4", "0,1,3,-5"), "expert -5"),
        ("p.csv", "pos,layer,id0\n0,0,-1\n", "no expert"),
        ("q.csv", ROUTE.replace("0,1,2,", "0,0,2,").replace("0,0,0,", "0,1,0,"), "follows decoded text"),
        ("r.csv", ROUTE.replace("n_expert=16", "n_expert=99999"), "99999"),
    ],
)
def test_malformed_csv(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_trace(tmp_path / name)
    assert name in caught.value.message


def test_odd_headers_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text(ROUTE.replace("n_layer=3", "n_layer=²").replace("n_expert=16", "n_expert=many"))
    meta = read_trace(tmp_path / "odd.csv").meta
    assert (meta.n_layers, meta.n_experts) == (3, 16)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00pos")
    (tmp_path / "text.npy").write_text("no array")
    np.savez(tmp_path / "other.npz", ids=np.zeros((2, 2)))
    ids = np.zeros((2, 2, 2), dtype=np.uint8)
    np.savez(tmp_path / "sum.npz", ids=ids, lengths=np.array([1, 2]))
    np.savez(tmp_path / "lengths.npz", ids=ids, lengths=np.array([-1, 3]))
    np.savez(tmp_path / "phase.npz", ids=ids, phase=np.array([0, 2]))
    np.save(tmp_path / "cut.npy", np.zeros((100, 2, 2), dtype=np.uint8))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:200])
    for name, message in (
        ("none.csv", "does not exist"),
        ("none.npy", "does not exist"),
        ("binary.csv", "not a csv file"),
        ("text.npy", "is damaged"),
        ("other.npz", "integer array ids"),
        ("sum.npz", "add up to 3"),
        ("lengths.npz", "not a list of counts"),
        ("phase.npz", "phase is not 0 or 1"),
        ("cut.npy", r"cut\.npy"),
    ):
        with pytest.raises(InputError, match=message):
            read_trace(tmp_path / name)


@pytest.mark.parametrize("kind", ["u1", "i2", "u4", "i8", "u8", ">u8"])
def test_integers_of_any_type_are_ids_and_lengths(tmp_path: Path, kind: str) -> None:
    ids = (np.arange(24).reshape(6, 2, 2) % 8).astype(kind)
    np.savez(tmp_path / "any.npz", ids=ids, lengths=np.array([2, 4], dtype=kind))
    assert read_trace(tmp_path / "any.npz").sequence.tolist() == [0, 0, 1, 1, 1, 1]
    largest = int(np.iinfo(ids.dtype).max)
    ids[0, 0, 0] = largest
    np.savez(tmp_path / "large.npz", ids=ids)
    if largest < 65535:
        assert read_trace(tmp_path / "large.npz").meta.n_experts == largest + 1
    else:
        with pytest.raises(InputError, match=f"expert {largest}"):
            read_trace(tmp_path / "large.npz")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=250, deadline=None)
@given(data=st.data())
def test_damaged_files_never_show_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed or cut off, of every layout, compressed and not; what is read is a trace."""
    ids = np.arange(24).reshape(6, 2, 2) % 8
    intact = tmp_path / data.draw(st.sampled_from(["own.npz", "plain.npz", "bare.npy", "route.csv", "positions.csv"]))
    if not intact.exists():
        two_texts(weights=True).save(tmp_path / "own.npz")
        np.savez(tmp_path / "plain.npz", ids=ids, lengths=np.array([2, 4]))
        np.save(tmp_path / "bare.npy", ids)
        (tmp_path / "route.csv").write_text(ROUTE)
        (tmp_path / "positions.csv").write_text(POSITIONS)
    content = bytearray(intact.read_bytes())
    byte = st.sampled_from(b'0123456789,-.e"\n#x=\x00') if intact.suffix == ".csv" else st.integers(0, 255)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(byte)
    bad = tmp_path / f"bad{intact.suffix}"
    bad.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    try:
        trace = read_trace(bad)
    except InputError as error:
        assert bad.name in error.message
    else:
        assert trace.ids.dtype == ids_dtype(trace.meta.n_experts)


@pytest.mark.parametrize(
    ("name", "shape", "n_sequences", "n_prefill"),
    [
        ("gptoss20b_decode.npz", (94366, 24, 4, 32), 307, 0),
        ("bigmoeonedge_gemma.npz", (157, 30, 6, 128), 1, 29),
        ("bigmoeonedge_gptoss.npz", (149, 36, 2, 128), 1, 85),
        ("gemma.route.csv", (157, 30, 6, 128), 1, 29),
    ],
)
def test_real_traces(
    data_folder: Path, name: str, shape: tuple[int, int, int, int], n_sequences: int, n_prefill: int
) -> None:
    trace = read_trace(published_trace(data_folder, name))
    meta = trace.meta
    assert (trace.n_tokens, meta.n_layers, meta.n_expert_used, meta.n_experts) == shape
    assert int(trace.sequence[-1]) + 1 == n_sequences
    assert int((trace.phase == Phase.PREFILL).sum()) == n_prefill


def test_the_real_csv_and_npz_agree(data_folder: Path) -> None:
    names = ("gemma.route.csv", "bigmoeonedge_gemma.npz")
    csv, npz = (read_trace(published_trace(data_folder, name)) for name in names)
    for name in ("ids", "phase", "step", "position"):
        np.testing.assert_array_equal(getattr(csv, name), getattr(npz, name))


def test_summary_by_hand() -> None:
    one = summarize_trace(two_texts(weights=True))
    assert (one.tokens, one.prefill_tokens, one.text_tokens, one.rejected_tokens) == (21, 5, 10, 6)
    assert (one.sequences, one.steps, one.gamma) == (2, 6, 2)
    # accepted 0, 2, 1 and 0, 1 of two drafts each: judged were 1, 2, 2, 1 and 2
    assert one.acceptance_rate == pytest.approx(4 / 10)
    assert one.acceptance_chance == pytest.approx(4 / 8)
    assert one.tokens_per_step == pytest.approx(10 / 6)
    assert one.has_weights and one.has_tokens and one.not_recorded == 0.0
    constant = two_texts()
    constant.ids[:] = np.array([3, 5], dtype=np.uint8)
    assert summarize_trace(constant).has_weights is False and summarize_trace(constant).overlap == 1.0


def test_plain_decoding_has_no_drafts() -> None:
    assert draft_stats(plain_text(5)) is None
    assert summarize_trace(plain_text(5)).tokens_per_step == 1.0
    empty = summarize_trace(make_trace([(Phase.PREFILL, 0, 0, True)]))
    assert (empty.steps, empty.tokens_per_step, empty.overlap) == (0, None, None)
