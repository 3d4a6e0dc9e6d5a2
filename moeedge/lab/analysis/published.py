"""Figures that the papers print, and what their formulas give for the inputs that they print next to them.

Only rows whose inputs are printed are computed. Where a paper prints a figure whose inputs it keeps, such as the
popularity of experts behind the production study's column "Empirical", no row exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from moeedge import speculation
from moeedge.analysis import routing_curves
from moeedge.errors import require

_SPAC = "MoE-SpAc"
_MOESD = "MoESD"
_STUDY = "production study"

# MoE-SpAc, Figure 7(a): gamma and a/b on Qwen3-235B-A22B
EXPERT_RATIOS = {3: 2.24, 4: 2.72, 5: 3.20, 6: 3.52, 7: 3.80, 8: 4.13, 9: 4.50, 10: 4.83, 11: 5.90, 12: 6.32}
_FIGURE_7_ACCEPTANCE = 0.8
_FIGURE_7_PAYS = range(3, 9)  # "the advantage becomes more pronounced when gamma in {2} u [3, 8]"

# MoESD, Table 1: gammas (their row of the header), then device, data set, temperature, and per gamma T_AR, T_SD, sigma
# and the speed-up
TABLE_1_GAMMAS = (2, 3, 4)
_Cell = tuple[float, float, float, float]
TABLE_1: dict[tuple[str, str, float], tuple[_Cell, _Cell, _Cell]] = {
    ("A", "humaneval", 0.0): ((18.89, 11.61, 0.94, 1.63), (15.93, 8.11, 0.93, 1.96), (15.93, 7.31, 0.91, 2.18)),
    ("A", "humaneval", 1.0): ((19.13, 12.93, 0.83, 1.48), (21.20, 14.09, 0.73, 1.50), (19.13, 11.14, 0.67, 1.72)),
    ("A", "mtbench", 0.0): ((20.92, 16.70, 0.71, 1.25), (16.00, 12.43, 0.62, 1.29), (20.92, 17.53, 0.55, 1.19)),
    ("A", "mtbench", 1.0): ((21.15, 17.33, 0.68, 1.22), (19.09, 14.83, 0.57, 1.29), (19.09, 15.93, 0.48, 1.20)),
    ("B", "humaneval", 0.0): ((15.96, 9.34, 0.95, 1.71), (15.96, 7.95, 0.93, 2.01), (15.96, 6.96, 0.90, 2.29)),
    ("B", "humaneval", 1.0): ((17.39, 12.82, 0.82, 1.36), (13.20, 8.98, 0.74, 1.47), (13.20, 7.17, 0.75, 1.84)),
    ("B", "mtbench", 0.0): ((24.42, 16.74, 0.71, 1.46), (24.42, 16.84, 0.62, 1.45), (24.42, 17.05, 0.54, 1.43)),
    ("B", "mtbench", 1.0): ((18.24, 14.38, 0.67, 1.27), (16.25, 13.28, 0.56, 1.22), (16.25, 13.76, 0.48, 1.18)),
}

# MoESD, Appendix B: 228 measurements: 6 numbers of active experts, 2 draft lengths and, innermost, these batch sizes.
# Table 2: strides, and of each the number of measurements and the batch sizes that these lack
BATCH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 80, 100)
_N_MEASURED = 6 * 2 * len(BATCH_SIZES)
TABLE_2: dict[int, tuple[int, tuple[int, ...]]] = {
    25: (10, (2, 4, 8, 24, 28, 32, 48, 52, 56)), 22: (11, (2, 12, 24, 36, 48, 52, 60, 80)),
    20: (12, (44, 48, 52, 56, 60, 80, 100)), 18: (13, (2, 4, 8, 12, 16, 20)), 17: (14, (4, 12, 20, 28, 36)),
    16: (15, (8, 20, 32, 44)), 15: (16, (12, 28, 44)), 14: (17, (16, 36)), 13: (18, (20,)), 12: (19, ()), 11: (21, ()),
    10: (23, ()), 9: (26, ()), 8: (29, ()), 7: (33, ()), 6: (38, ()), 5: (46, ()), 4: (57, ()), 3: (76, ()),
    2: (114, ()), 1: (228, ()),
}  # fmt: skip

# the production study: tokens of a batch, and the columns Empirical, Uniform and Ratio
ACTIVE_EXPERTS = {
    1: (8.0, 8.0, 1.00),
    2: (14.7, 15.5, 0.95),
    4: (25.4, 29.1, 0.87),
    8: (40.6, 51.6, 0.79),
    16: (59.3, 82.4, 0.72),
    32: (78.8, 111.8, 0.71),
    64: (96.1, 125.9, 0.76),
}
_STUDY_EXPERTS, _STUDY_USED = 128, 8
_STUDY_OVERLAP = {1: 0.381, 2: 0.329, 3: 0.301, 4: 0.299}  # by distance of the tokens
_STUDY_INDEPENDENT = 0.118  # the same of independent tokens
_STUDY_VERIFIED = 20.36  # unique experts of four tokens
_STUDY_SHARE = 0.30  # f
_STUDY_LENGTH = 2.73  # AL, tokens per step
_STUDY_EFFICIENCY = 0.80  # T(1) / T(4), measured


@dataclass(frozen=True)
class Reproduced:
    """One printed figure and the same computed."""

    source: str
    figure: str
    published: float | bool
    computed: float | bool
    digits: int = 2  # printed after the point
    input_error: float = 0.0  # of the computed figure, because its inputs are printed rounded

    @property
    def agrees(self) -> bool:
        """Whether the figures are equal as far as both are printed."""
        if isinstance(self.published, bool):
            return self.published == self.computed
        return abs(self.computed - self.published) <= 0.5 * 10.0**-self.digits + self.input_error + 1e-9


def reproduced() -> list[Reproduced]:
    """All rows, in the order of the papers."""
    return [*_expert_reuse(), *_table_1(), *_table_2(), *_active_experts(), *_amdahl()]


def _expert_reuse() -> Iterator[Reproduced]:
    for gamma, ratio in EXPERT_RATIOS.items():
        pays = speculation.speculation_pays(ratio, gamma, _FIGURE_7_ACCEPTANCE)
        omega = speculation.expected_tokens(gamma, _FIGURE_7_ACCEPTANCE)
        what = f"Figure 7, Eq. 17: a/b = {ratio:.2f} < Omega({gamma}, 0.8) = {omega:.2f}"
        yield Reproduced(_SPAC, what, gamma in _FIGURE_7_PAYS, pays)


def _table_1() -> Iterator[Reproduced]:
    for (device, dataset, temperature), cells in TABLE_1.items():
        for gamma, (plain, speculative, _, printed) in zip(TABLE_1_GAMMAS, cells, strict=True):
            where = f"Table 1: 2x GPU {device}, {dataset}, T {temperature:g}, gamma {gamma}"
            ratio = plain / speculative
            error = ratio * 0.005 * (1 / plain + 1 / speculative)
            yield Reproduced(_MOESD, f"{where}, speed-up", printed, ratio, input_error=error)
        # other runs than those of the first gamma, whose acceptance differs
        first = TABLE_1_GAMMAS[0]
        for gamma, (_, _, printed, _) in zip(TABLE_1_GAMMAS[1:], cells[1:], strict=True):
            low, middle, high = (
                speculation.sigma(gamma, speculation.acceptance_for(first, (cells[0][2] + error) * (first + 1)))
                for error in (-0.005, 0.0, 0.005)
            )
            where = f"Table 1: 2x GPU {device}, {dataset}, T {temperature:g}, gamma {gamma}"
            what = f"{where}, Eq. 5: sigma by the alpha of gamma {first}"
            yield Reproduced(_MOESD, what, printed, middle, input_error=(high - low) / 2)


def _table_2() -> Iterator[Reproduced]:
    for stride, (n_measurements, absent) in TABLE_2.items():
        chosen = strided(_N_MEASURED, stride)
        where = f"Table 2 (Appendix B.2): stride {stride}"
        yield Reproduced(_MOESD, f"{where}, measurements", n_measurements, len(chosen), digits=0)
        involved = {BATCH_SIZES[place % len(BATCH_SIZES)] for place in chosen}
        yield Reproduced(_MOESD, f"{where}, batch sizes", True, involved == set(BATCH_SIZES) - set(absent))


def _active_experts() -> Iterator[Reproduced]:
    for n_tokens, (empirical, uniform, ratio) in ACTIVE_EXPERTS.items():
        computed = routing_curves.uniform_unique(_STUDY_EXPERTS, _STUDY_USED, n_tokens)
        yield Reproduced(_STUDY, f"active experts, uniform, {n_tokens} tokens", uniform, computed, digits=1)
        error = ratio * (0.05 / empirical + 0.05 / uniform)
        what = f"active experts, empirical over uniform, {n_tokens} tokens"
        yield Reproduced(_STUDY, what, ratio, empirical / computed, input_error=error)


def _amdahl() -> Iterator[Reproduced]:
    printed = partial(Reproduced, _STUDY)
    empirical, uniform, _ = ACTIVE_EXPERTS[4]
    expert_ratio, shared = _STUDY_VERIFIED / _STUDY_USED, _STUDY_OVERLAP[1] * _STUDY_USED
    ratio = speculation.verification_ratio(_STUDY_SHARE, expert_ratio)
    yield printed("unique(4) / k", 2.55, expert_ratio, input_error=0.005 / _STUDY_USED)
    yield printed("Amdahl: T(4) / T(1)", 1.46, ratio)
    yield printed("measured: T(4) / T(1)", 1.25, 1 / _STUDY_EFFICIENCY)
    yield printed("Amdahl: implied speed-up", 1.87, _STUDY_LENGTH / ratio, input_error=0.005 / ratio)
    yield printed("measured: implied speed-up", 2.18, _STUDY_LENGTH * _STUDY_EFFICIENCY, input_error=0.005)
    yield printed("unique(4) / k, uniform", 3.6, uniform / _STUDY_USED, digits=1)
    yield printed("unique(4) / k, independence", 3.2, empirical / _STUDY_USED, digits=1)
    yield printed("overlap, uniform", 0.063, routing_curves.uniform_overlap(128, 8), digits=3)
    input_error = 0.0005 * _STUDY_USED
    yield printed("shared experts of adjacent tokens", 3.0, shared, digits=1, input_error=input_error)
    # a token shares at least what it shares with one before it: 25.4 are no neighbours (Hunter's bound)
    most, n_pairs = 4 * _STUDY_USED - 3 * shared, 6  # of four tokens
    yield printed("unique(4) = 20.36 is possible for neighbours that share 0.381", True, most >= _STUDY_VERIFIED)
    yield printed("unique(4) = 25.4 is not", True, most < empirical)
    least = 4 * _STUDY_USED - n_pairs * _STUDY_INDEPENDENT * _STUDY_USED  # Bonferroni's
    yield printed("nor for tokens that share 0.118 in pairs", True, least > empirical)
    fewer, over = 1 - _STUDY_VERIFIED / empirical, ratio * _STUDY_EFFICIENCY - 1
    yield printed("unique(4), fewer than by independence", 0.20, fewer, input_error=0.002)
    yield printed("Amdahl: T(4) / T(1) over the measured, minus 1", 0.17, over, input_error=0.005 * ratio)
    times_independent = _STUDY_OVERLAP[4] / _STUDY_INDEPENDENT
    yield printed("overlap of step 4, at least 2 times independence", True, times_independent >= 2)
    yield printed("overlap of step 4, at most 4 times independence", True, times_independent <= 4)


def strided(n_measurements: int, stride: int) -> range:
    """The measurements that Appendix B selects of a sorted series, df[begin:end:stride]: n / stride, rounded up."""
    return range(0, n_measurements, stride)


def full_activation_tokens(n_experts: int, n_used: int, share: float = 0.95) -> int:
    """The fewest tokens that use `share` of all experts: log_{1-rho}(1-tau) rounded up, rho = K/E (MoESD, Eq. 9).

    Raises ValueError unless 0 < K <= E and 0 <= share < 1.
    """
    require(0 <= share < 1, f"share must be in [0, 1), not {share}")
    if routing_curves.uniform_overlap(n_experts, n_used) == 1:
        return 1
    return max(1, math.ceil(math.log(1 - share) / math.log(1 - n_used / n_experts)))
