"""Algorithm 1 against a literal transcription in exact arithmetic, and its published properties."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moeedge.policies import utility
from moeedge.policies.base import CacheShape
from moeedge.policies.utility import Boundaries, ExpectedWorkload, UtilityConfig, _affine
from tests.support.costs import cost_model


@dataclass
class LiteralExpert:
    """Algorithm 1 for one expert, line by line, in fractions; fixed boundaries are those of Table 4."""

    gamma: int
    cap: int
    forgetting: Fraction
    boundaries: Boundaries
    s: int = 0
    f: int = 0
    up: Fraction = field(init=False)
    down: Fraction = field(init=False)
    has_moved: bool = False  # one of its boundaries

    def __post_init__(self) -> None:
        start = Fraction(self.gamma // 2)
        self.up, self.down = (Fraction(3), Fraction(1)) if self.boundaries == "fixed" else (start, start)

    def step(self, f: int) -> None:
        d = f - self.f
        self.f = f
        if d >= self.up:
            self.s = min(self.cap, self.s + 1)
        elif -d >= self.down:
            self.s = max(0, self.s - 1)
        if self.boundaries == "fixed":
            return
        if d > 0:
            self.up = self._move(self.up, d)
        elif d < 0:
            self.down = self._move(self.down, -d)

    def _move(self, boundary: Fraction, size: int) -> Fraction:
        self.has_moved = True
        moved = (1 - self.forgetting) * boundary + self.forgetting * size
        return Fraction(math.floor(moved)) if self.boundaries == "floor" else moved


@given(
    frames=st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), min_size=1, max_size=25),
    boundaries=st.sampled_from(["floor", "float", "fixed"]),
    gamma=st.integers(0, 16),
    cap=st.integers(1, 8),
    tenths=st.integers(0, 10),
)
@example(frames=[[0] * 6, [3] * 6, [6] * 6], boundaries="float", gamma=6, cap=2, tenths=2)  # 0.8 * 3 + 0.2 * 3 is not 3
def test_arrays_equal_the_literal_loop(
    frames: list[list[int]], boundaries: Boundaries, gamma: int, cap: int, tenths: int
) -> None:
    config = UtilityConfig(gamma=gamma, cap=cap, forgetting=tenths / 10, boundaries=boundaries)
    literal = [LiteralExpert(gamma, cap, Fraction(tenths, 10), boundaries) for _ in range(6)]
    state = utility.initial_state((2, 3), config)
    for frame in frames:
        # in "float", a boundary that rounding moves across an integer may go either way: not compared
        if boundaries == "float" and any(_near_tie(expert, f) for expert, f in zip(literal, frame, strict=True)):
            return
        state = utility.observe(state, np.array(frame).reshape(2, 3), config)
        for expert, f in zip(literal, frame, strict=True):
            expert.step(f)
        assert state.utility.ravel().tolist() == [expert.s for expert in literal]
        np.testing.assert_allclose(state.up.ravel(), [float(expert.up) for expert in literal], atol=1e-9)
        np.testing.assert_allclose(state.down.ravel(), [float(expert.down) for expert in literal], atol=1e-9)


def _near_tie(expert: LiteralExpert, f: int) -> bool:
    """Whether a moved boundary is exactly met: rounding may put its float on either side."""
    return expert.has_moved and f - expert.f in (expert.up, -expert.down)


def test_printed_boundaries_only_fall() -> None:
    """With lambda = 0.1 a boundary b rises only at d >= 10 + b, but gamma = 8 allows 9 at most."""
    config = UtilityConfig()
    boundary, change = np.meshgrid(np.arange(1, 10), np.arange(1, 10), indexing="ij")
    state = utility.UtilityState(
        utility=np.zeros(boundary.shape, dtype=np.int16),
        up=boundary.astype(float),
        down=boundary.astype(float),
        counts=np.zeros(boundary.shape, dtype=np.int32),
    )
    after = utility.observe(state, change, config)
    assert (after.up <= boundary).all()
    assert (after.up[change >= boundary] == boundary[change >= boundary]).all()
    assert (after.up[change < boundary] == boundary[change < boundary] - 1).all()
    assert (after.up >= 1).all()


def test_observe_leaves_its_arguments_alone_and_refuses_other_shapes() -> None:
    config = UtilityConfig()
    state = utility.initial_state((2, 2), config)
    counts = np.array([[9, 0], [4, 1]], dtype=np.uint32)
    later = utility.observe(state, counts, config)
    assert (state.utility == 0).all() and (state.counts == 0).all() and (state.up == 4).all()
    counts[:] = 0
    assert later.counts.tolist() == [[9, 0], [4, 1]]
    with pytest.raises(ValueError, match="shape"):
        utility.observe(state, np.zeros((3, 2), dtype=int), config)


def test_layers_without_experts_leave_the_workload_alone() -> None:
    """They have no pairs that the CPU could compute, so no more uploads fit the time of a step."""
    costs = cost_model(1e-3, 1e-4, 5e-3, draft_token_s=0.0)
    score = np.random.default_rng(0).uniform(0.2, 1.5, (4, 8)).astype(np.float32)

    def solved(group: list[int]) -> int | None:
        shape = CacheShape(len(group), 8, np.array(group, dtype=np.int32), np.array([16], dtype=np.int32))
        padded = np.zeros((len(group), 8), dtype=np.float32)
        padded[np.array(group) >= 0] = score
        return ExpectedWorkload(shape, 4, costs, 4).solve(padded, padded, 8.0)[1]

    assert solved([0, 0, 0, 0]) == solved([-1, 0, -1, 0, 0, -1, 0])


def test_the_line_of_a_convex_curve_is_the_best_through_zero() -> None:
    tokens = np.arange(1, 10.0)
    fixed, slope = _affine(np.r_[0.0, tokens**2])
    errors = [float(np.square(tokens**2 - trial * tokens).sum()) for trial in (slope * 0.99, slope, slope * 1.01)]
    assert fixed == 0.0 and errors[1] == min(errors)
