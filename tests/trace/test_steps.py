"""Cutting traces into steps: as recorded, one token at a time, and into simulated verification windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.native.abi import Phase
from moeedge.trace.steps import activation_counts, recorded_steps, simulated_steps, text_steps
from tests.support.traces import make_trace, plain_text, two_texts


def test_recorded_steps_by_hand() -> None:
    steps = recorded_steps(two_texts())
    assert steps.rows.tolist() == [
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
        [14, 15, 16],
        [17, 18, 19],
        [20, -1, -1],
    ]
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


def test_counts_sum_to_k_per_token() -> None:
    trace = two_texts()
    steps = recorded_steps(trace)
    counts = activation_counts(trace, steps, [0, 1])
    np.testing.assert_array_equal(counts.sum(axis=2), np.repeat(steps.n_tokens[:, None] * 2, 2, axis=1))


def test_simulation_accepts_all_or_nothing() -> None:
    trace = plain_text(20)
    rng = np.random.default_rng(0)
    everything = simulated_steps(trace, gamma=3, acceptance_chance=1.0, rejected_token_model="optimistic", rng=rng)
    assert everything.rows[:, 0].tolist() == [0, 4, 8, 12, 16]
    assert everything.n_text.tolist() == [4] * 5
    nothing = simulated_steps(trace, gamma=3, acceptance_chance=0.0, rejected_token_model="optimistic", rng=rng)
    assert nothing.rows[:, 0].tolist() == list(range(17))
    assert nothing.n_text.tolist() == [1] * 17


def test_simulated_windows_advance_by_what_was_accepted() -> None:
    trace = plain_text(400)
    for rejected_token_model in ("optimistic", "pessimistic"):
        steps = simulated_steps(
            trace,
            gamma=4,
            acceptance_chance=0.7,
            rejected_token_model=rejected_token_model,
            rng=np.random.default_rng(3),
        )  # type: ignore[arg-type]
        np.testing.assert_array_equal(np.diff(steps.rows[:, 0]), steps.n_text[:-1])
        for rows, n_text in zip(steps.rows, steps.n_text, strict=True):
            assert rows[:n_text].tolist() == list(range(rows[0], rows[0] + n_text))
    omega = (1 - 0.7**5) / (1 - 0.7)  # expected tokens per step
    assert float(steps.n_text.mean()) == pytest.approx(omega, abs=0.3)


def test_simulated_windows_stay_in_their_text() -> None:
    trace = make_trace([(2, text, step, True) for text in range(3) for step in range(1, 8)], gamma=0)
    steps = simulated_steps(
        trace, gamma=3, acceptance_chance=0.5, rejected_token_model="pessimistic", rng=np.random.default_rng(0)
    )
    assert (trace.sequence[steps.rows] == steps.sequence[:, None]).all()
    assert set(steps.sequence.tolist()) == {0, 1, 2}
    assert (
        len(
            simulated_steps(
                trace, gamma=8, acceptance_chance=0.5, rejected_token_model="pessimistic", rng=np.random.default_rng(0)
            )
        )
        == 0
    )


@pytest.mark.parametrize(("gamma", "acceptance"), [(0, 0.5), (2, 1.5)])
def test_impossible_simulations(gamma: int, acceptance: float) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="must be"):
        simulated_steps(
            plain_text(9), gamma=gamma, acceptance_chance=acceptance, rejected_token_model="pessimistic", rng=rng
        )
