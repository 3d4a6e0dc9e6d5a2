"""Traces cut into steps, recorded and simulated; recorded routing fitted to models of the same and of other shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.errors import InputError
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.steps import (
    RejectedTokenModel,
    Steps,
    activation_counts,
    read_routing,
    recorded_steps,
    simulated_steps,
    text_steps,
)
from tests.support.traces import make_trace, plain_text, two_texts


def test_recorded_steps_by_hand() -> None:
    steps = recorded_steps(two_texts())
    assert steps.rows[:3].tolist() == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert steps.rows[3:].tolist() == [[14, 15, 16], [17, 18, 19], [20, -1, -1]]
    assert steps.n_text.tolist() == [1, 3, 2, 1, 2, 1]
    assert steps.n_tokens.tolist() == [3, 3, 3, 3, 3, 1]
    assert steps.sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert steps.is_first().tolist() == [True, False, False, True, False, False]


def test_text_steps_are_the_accepted_rows() -> None:
    steps = text_steps(two_texts())
    assert steps.rows[:, 0].tolist() == [3, 6, 7, 8, 9, 10, 14, 17, 18, 20]
    assert steps.n_text.tolist() == [1] * 10


def test_prefill_alone_has_no_steps() -> None:
    trace = make_trace([(Phase.PREFILL, 0, 0, True)] * 4)
    for steps in (recorded_steps(trace), text_steps(trace)):
        assert len(steps) == 0 and steps.is_first().size == 0
        assert activation_counts(trace, steps, [0, 1]).shape == (0, 2, 8)


@given(seed=st.integers(0, 1000))
def test_counts_equal_a_literal_loop(seed: int) -> None:
    trace = two_texts(seed=seed)
    trace.ids[7, 1] = trace.sentinel  # one token that layer 1 did not record
    steps = recorded_steps(trace)
    counts = activation_counts(trace, steps, [1, 0])
    for step, rows in enumerate(steps.rows):
        for column, layer in enumerate((1, 0)):
            expected = [0] * 8
            for row in rows[rows >= 0]:
                for expert in trace.layer_ids(layer)[row]:
                    if expert >= 0:
                        expected[expert] += 1
            assert counts[step, column].tolist() == expected


def simulated(trace: Trace, gamma: int, chance: float, model: RejectedTokenModel = "pessimistic") -> Steps:
    rng = np.random.default_rng(3)
    return simulated_steps(trace, gamma=gamma, acceptance_chance=chance, rejected_token_model=model, rng=rng)


def test_simulation_accepts_all_or_nothing() -> None:
    everything, nothing = (simulated(plain_text(20), 3, chance, "optimistic") for chance in (1.0, 0.0))
    assert everything.rows[:, 0].tolist() == [0, 4, 8, 12, 16] and everything.n_text.tolist() == [4] * 5
    assert nothing.rows[:, 0].tolist() == list(range(17)) and nothing.n_text.tolist() == [1] * 17


def test_simulated_windows_advance_by_what_was_accepted() -> None:
    """Both models accept the same drafts; what follows them differs."""
    optimistic, pessimistic = (simulated(plain_text(400), 4, 0.7, model) for model in ("optimistic", "pessimistic"))
    for steps in (optimistic, pessimistic):
        np.testing.assert_array_equal(np.diff(steps.rows[:, 0]), steps.n_text[:-1])
        for rows, n_text in zip(steps.rows, steps.n_text, strict=True):
            assert rows[:n_text].tolist() == list(range(rows[0], rows[0] + n_text))
    assert optimistic.n_text.tolist() == pessimistic.n_text.tolist()
    assert optimistic.rows.tolist() != pessimistic.rows.tolist()
    omega = (1 - 0.7**5) / (1 - 0.7)  # expected tokens per step
    assert float(optimistic.n_text.mean()) == pytest.approx(omega, abs=0.3)


def test_simulated_windows_stay_in_their_text() -> None:
    trace = make_trace([(Phase.DECODE, text, step, True) for text in range(3) for step in range(1, 8)], gamma=0)
    steps = simulated(trace, 3, 0.5)
    assert (trace.sequence[steps.rows] == steps.sequence[:, None]).all()
    assert set(steps.sequence.tolist()) == {0, 1, 2}
    assert len(simulated(trace, 8, 0.5)) == 0


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
