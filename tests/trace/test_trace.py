"""The trace format: what is written is what is read, and nothing malformed gets through."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.errors import InputError
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace, TraceMeta
from tests.support.traces import make_trace, plain_text, two_texts

ARRAYS = ("ids", "phase", "sequence", "step", "accepted", "token", "position")


def test_phases_of_the_file_format() -> None:
    """The values that docs/lab/traces.md states, whatever the native library counts."""
    assert [Phase.PREFILL, Phase.DECODE, Phase.DRAFT, Phase.VERIFY] == [1, 2, 3, 4]


@pytest.mark.parametrize("n_experts", [8, 255, 256, 512])
@pytest.mark.parametrize("weights", [False, True])
def test_round_trip(tmp_path: Path, n_experts: int, weights: bool) -> None:
    trace = two_texts(n_experts=n_experts, weights=weights, draft="small", parameters={"seed": 7, "dataset": "é"})
    trace.save(tmp_path / "trace")
    loaded = Trace.load(tmp_path / "trace")
    assert loaded.meta == trace.meta
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trace, name))
    assert (loaded.weights is None) == (not weights)
    if weights:
        np.testing.assert_array_equal(loaded.weights, trace.weights)
    assert loaded.ids.dtype == (np.uint8 if n_experts <= 255 else np.uint16)


def test_layer_ids_are_negative_where_not_recorded() -> None:
    trace = plain_text(3)
    trace.ids[1, 0] = trace.sentinel
    trace.ids[:, 1] = trace.sentinel
    assert trace.layer_ids(0)[1].tolist() == [-1, -1]
    assert trace.layer_ids(0).dtype == np.int32
    assert trace.expert_layers() == [0]


@pytest.mark.parametrize(
    ("known", "expected"),
    [(7, [7, 7]), ([1, 2], [1, 2]), ([1], None), ("7", None), (True, None), ([1, -2], None), (None, None)],
)
def test_expert_sizes_of_the_metadata(known: object, expected: list[int] | None) -> None:
    sizes = make_trace([(Phase.DECODE, 0, 1, True)], parameters={"expert_bytes": known}).expert_bytes()
    assert (None if sizes is None else sizes.tolist()) == expected


def test_empty_trace(tmp_path: Path) -> None:
    make_trace([]).save(tmp_path / "empty.npz")
    loaded = Trace.load(tmp_path / "empty.npz")
    assert loaded.n_tokens == 0 and loaded.expert_layers() == [] and loaded.text_rows().size == 0


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.npz"
    two_texts().save(file)
    before = file.read_bytes()

    def interrupted(stream: Any, **_arrays: Any) -> None:
        stream.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        two_texts().save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(KeyboardInterrupt):
        two_texts().save(tmp_path / "other.npz")
    assert list(tmp_path.iterdir()) == [file]


def test_hidden_states_are_kept_with_their_rows(tmp_path: Path) -> None:
    hidden_states = np.random.default_rng(0).random((30, 5)).astype(np.float16)
    hidden_states[::3] = np.nan
    trace = two_texts()
    trace = replace(trace, hidden_states=hidden_states[: trace.n_tokens])
    trace.save(tmp_path / "t.npz")
    loaded = Trace.load(tmp_path / "t.npz")
    np.testing.assert_array_equal(loaded.hidden_states, trace.hidden_states)
    with np.load(tmp_path / "t.npz") as arrays:
        assert "states" in arrays.files and '"n_experts_used"' in str(arrays["meta"])  # the names of docs/lab/traces.md
    second = loaded.rows_of(loaded.sequence == 1)
    np.testing.assert_array_equal(second.hidden_states, hidden_states[: trace.n_tokens][trace.sequence == 1])
    np.testing.assert_array_equal(second.ids, trace.ids[trace.sequence == 1])
    assert second.weights is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": np.zeros(18, dtype=np.uint8)}, "phase"),
        ({"phase": np.full(18, 5, dtype=np.uint8)}, "phase"),
        ({"step": np.arange(18, dtype=np.int32)[::-1].copy()}, "step"),
        ({"step": np.zeros(17, dtype=np.int32)}, "step must be int32"),
        ({"sequence": np.arange(18, dtype=np.int32)[::-1].copy()}, "sequence"),
        ({"accepted": np.zeros(18, dtype=np.uint8)}, "accepted must be bool"),
        ({"ids": np.full((18, 2, 2), 8, dtype=np.uint8)}, "below n_experts"),
        ({"ids": np.zeros((18, 2, 2), dtype=np.uint16)}, "ids must be uint8"),
        ({"ids": np.zeros((18, 3, 2), dtype=np.uint8)}, "ids must be uint8"),
        ({"weights": np.zeros((18, 2, 2), dtype=np.float32)}, "weights"),
        ({"hidden_states": np.zeros((17, 3), dtype=np.float16)}, "states"),
        ({"hidden_states": np.zeros((18, 3), dtype=np.float32)}, "states"),
        ({"hidden_states": np.zeros(18, dtype=np.float16)}, "states"),
        ({"hidden_states": np.zeros((18, 0), dtype=np.float16)}, "states"),
    ],
)
def test_inconsistent_arrays_are_refused(change: dict[str, Any], message: str) -> None:
    trace = make_trace([(Phase.DECODE, 0, step, True) for step in range(18)])
    with pytest.raises(ValueError, match=message):
        replace(trace, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"n_layers": 0}, {"n_experts": 0}, {"n_experts": 70000}, {"n_expert_used": 9}, {"n_expert_used": True},
        {"gamma": -1}, {"gamma": 1.5}, {"model": None}, {"parameters": []},
    ],
)  # fmt: skip
def test_impossible_metadata_is_refused(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"model": "m", "n_layers": 1, "n_experts": 8, "n_expert_used": 2}
    with pytest.raises(ValueError):
        TraceMeta(**(good | change))


def _meta(**change: Any) -> str:
    good = {"format": "moeedge.trace", "schema": 1, "model": "m", "n_layers": 2, "n_experts": 8, "n_experts_used": 2}
    return json.dumps(good | {"gamma": 2} | change)


def _save(path: Path, **change: Any) -> Path:
    trace = two_texts()
    arrays: dict[str, Any] = {name: getattr(trace, name) for name in ARRAYS} | {"meta": np.array(_meta())}
    arrays |= change
    with path.open("wb") as file:
        np.savez(file, **{name: value for name, value in arrays.items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"meta": None}, "no metadata"),
        ({"meta": np.array("{")}, "not JSON"),
        ({"meta": np.array("[" * 100000)}, "not JSON"),
        ({"meta": np.array("[]")}, "another format"),
        ({"meta": np.array(_meta(format="other"))}, "another format"),
        ({"meta": np.array(_meta(schema=2))}, "schema is 2"),
        ({"meta": np.array(_meta(n_experts="many"))}, "n_experts"),
        ({"meta": np.array(_meta(n_layers=3))}, "ids must be"),
        ({"meta": np.array('{"format": "moeedge.trace", "schema": 1}')}, "incomplete"),
        ({"meta": np.arange(3)}, "not JSON|another format"),
        ({"ids": None}, "'ids' is missing"),
        ({"token": None}, "'token' is missing"),
        ({"step": np.array([{}], dtype=object)}, "not an .npz file"),
        ({"position": np.zeros(3)}, "position must be"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _save(tmp_path / "bad.npz", **change)
    with pytest.raises(InputError, match=message) as caught:
        Trace.load(path)
    assert "bad.npz" in caught.value.message and caught.value.hint


def test_unknown_keys_of_later_writers_are_ignored(tmp_path: Path) -> None:
    loaded = Trace.load(_save(tmp_path / "later.npz", meta=np.array(_meta(colour="blue"))))
    assert (loaded.n_tokens, loaded.meta.n_experts) == (two_texts().n_tokens, 8)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"GGUF", b"\x93NUMPY", b"hello\n" * 100])
def test_files_of_other_formats_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.npz").write_bytes(content)
    with pytest.raises(InputError, match="not a usable routing trace"):
        Trace.load(tmp_path / "other.npz")


def test_missing_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        Trace.load(tmp_path / "none.npz")
    with pytest.raises(InputError, match="directory"):
        Trace.load(tmp_path)
    with pytest.raises(InputError, match="Cannot write"):
        two_texts().save(tmp_path / "no" / "folder.npz")


def test_a_header_that_promises_terabytes_is_refused(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (999999999999, 2, 2), }".ljust(117) + b"\n"
    path = tmp_path / "huge.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ids.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"data")
    with pytest.raises(InputError, match=r"not an \.npz file"):
        Trace.load(path)
