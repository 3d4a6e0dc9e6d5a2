"""Recorded routing fitted to models of the same and of other shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.errors import InputError
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.routing import read_routing
from tests.support.traces import make_trace

ROWS = [(Phase.PREFILL, 0, 0, True), *[(Phase.VERIFY, s, 1, True) for s in (0, 1, 2) for _ in range(40)]]


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Trace]:
    """121 tokens of 3 sequences, 4 layers, 8 experts, 2 per token; and a rejected draft, which is left out."""
    trace = make_trace([*ROWS, (Phase.VERIFY, 2, 1, False)], n_layers=4)
    trace.save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz", trace


def test_the_own_shape_keeps_every_id(recorded: tuple[Path, Trace]) -> None:
    path, trace = recorded
    routing = read_routing(path, n_layers=4, n_experts=8, used_per_layer=(2, 2, 2, 2))
    assert routing.scaling == ""
    assert routing.ids.dtype == np.int32 and np.array_equal(routing.ids, trace.ids[:-1])
    assert routing.starts.tolist() == [0, 41, 81]
    assert routing.boundaries(30, 60) == [11, 51]
    assert routing.boundaries(100, 30) == [21]  # the sequences begin anew
    rows = routing.rows(np.array([3, 121, 5]), np.array([False, False, True]))
    assert np.array_equal(rows, routing.ids[[3, 0, 65]])


def test_dense_layers_between_get_no_row(recorded: tuple[Path, Trace]) -> None:
    path, trace = recorded
    routing = read_routing(path, n_layers=5, n_experts=8, used_per_layer=(0, 2, 2, 2, 2))
    assert routing.scaling == "" and np.array_equal(routing.ids[:, 1:], trace.ids[:-1])


@pytest.mark.parametrize(
    ("n_layers", "n_experts", "used"),
    [(6, 32, 4), (2, 8, 2), (4, 8, 4), (4, 4, 2), (4, 12, 2), (4, 16, 2), (4, 32, 8), (4, 128, 1)],
)
def test_other_shapes_have_distinct_experts_in_range(
    recorded: tuple[Path, Trace], n_layers: int, n_experts: int, used: int
) -> None:
    path, _ = recorded
    routing = read_routing(path, n_layers=n_layers, n_experts=n_experts, used_per_layer=(used,) * n_layers)
    assert routing.scaling
    assert routing.ids.shape == (121, n_layers, used)
    assert routing.ids.min() >= 0 and routing.ids.max() < n_experts
    assert all(len(set(ids)) == used for token in routing.ids.tolist() for ids in token)
    again = read_routing(path, n_layers=n_layers, n_experts=n_experts, used_per_layer=(used,) * n_layers)
    assert np.array_equal(again.ids, routing.ids)


def test_scaling_keeps_what_neighbouring_tokens_share(recorded: tuple[Path, Trace]) -> None:
    path, trace = recorded
    wide = read_routing(path, n_layers=4, n_experts=32, used_per_layer=(4,) * 4).ids
    narrow = trace.ids[:-1]
    for token in range(50, 75):  # of one sequence
        for layer in range(4):
            shared = len(set(narrow[token, layer]) & set(narrow[token + 1, layer]))
            assert len(set(wide[token, layer]) & set(wide[token + 1, layer])) == 2 * shared


def test_a_dense_model_and_a_trace_without_text_are_refused(recorded: tuple[Path, Trace], tmp_path: Path) -> None:
    path, _ = recorded
    with pytest.raises(InputError, match="no experts"):
        read_routing(path, n_layers=2, n_experts=0, used_per_layer=(0, 0))
    make_trace([(Phase.DRAFT, 0, 0, True)]).save(tmp_path / "drafts.npz")
    with pytest.raises(InputError, match="no token"):
        read_routing(tmp_path / "drafts.npz", n_layers=2, n_experts=8, used_per_layer=(2, 2))


def test_gpt_oss_has_its_own_shape(data_folder: Path, tmp_path: Path) -> None:
    """The recorded ids of gpt-oss-20b, on its own 24 layers with 32 experts, are used as they are."""
    from moeedge.lab.traces.importers import read_trace

    source = data_folder / "traces" / "gptoss20b_decode.npz"
    if not source.is_file():
        pytest.skip(f"{source} is absent")
    read_trace(source, 32).save(tmp_path / "gptoss.npz")
    routing = read_routing(tmp_path / "gptoss.npz", n_layers=24, n_experts=32, used_per_layer=(4,) * 24)
    with np.load(source) as raw:
        assert routing.scaling == "" and np.array_equal(routing.ids, raw["ids"])
        assert len(routing.starts) == len(raw["lengths"])
