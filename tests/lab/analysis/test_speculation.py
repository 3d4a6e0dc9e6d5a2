"""Formulas of speculative decoding, and the papers' figures that follow from inputs that they print."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge import speculation
from moeedge.analysis import routing_curves
from moeedge.errors import InputError
from moeedge.lab.analysis import published
from moeedge.lab.analysis.draft_surface import read_points


def test_expected_tokens_are_those_of_the_paper() -> None:
    """MoE-SpAc, Eq. 1, and its limit, Eq. 18."""
    assert speculation.expected_tokens(8, 0.8) == pytest.approx((1 - 0.8**9) / (1 - 0.8))
    assert speculation.expected_tokens(4, 1.0) == 5
    assert speculation.expected_tokens(400, 0.8) == pytest.approx(1 / (1 - 0.8))


@given(gamma=st.integers(1, 16), acceptance=st.floats(0, 1))
def test_acceptance_is_found_from_its_tokens(gamma: int, acceptance: float) -> None:
    n_tokens = speculation.expected_tokens(gamma, acceptance)
    found = speculation.acceptance_for(gamma, n_tokens)
    assert speculation.expected_tokens(gamma, found) == pytest.approx(n_tokens)


@given(
    gamma=st.integers(1, 8),
    acceptance=st.floats(0, 1),
    target_s=st.floats(0.01, 1),
    growth=st.floats(1, 4),
    draft_s=st.floats(0.0, 0.5),
)
def test_speed_up_is_the_ratio_of_times_per_token(
    gamma: int, acceptance: float, target_s: float, growth: float, draft_s: float
) -> None:
    """MoESD, Eq. 2 and 3: R rounds give S tokens; plain decoding takes S steps."""
    verify_s, reject_s = target_s * growth, 0.001
    tokens_of_round = speculation.sigma(gamma, acceptance) * (gamma + 1)
    rounds = 1000 / tokens_of_round
    speculative_s = rounds * (gamma * draft_s + verify_s + reject_s)
    found = speculation.speed_up(
        tokens_of_round, gamma, target_s=target_s, verify_s=verify_s, draft_s=draft_s, reject_s=reject_s
    )
    assert found == pytest.approx(1000 * target_s / speculative_s)
    assert speculation.target_efficiency(target_s, verify_s) == pytest.approx(1 / growth)


def test_the_two_papers_agree_where_a_verification_costs_a_plain_step() -> None:
    by_cost = speculation.speed_up_by_cost(4, 0.8, 0.1)
    found = speculation.speed_up(
        speculation.expected_tokens(4, 0.8), 4, target_s=2.0, verify_s=2.0, draft_s=0.2, reject_s=0.0
    )
    assert found == pytest.approx(by_cost)


@given(share=st.floats(0.05, 1), expert_ratio=st.floats(1.1, 8))
def test_amdahl_share_is_found_from_its_ratio(share: float, expert_ratio: float) -> None:
    ratio = speculation.verification_ratio(share, expert_ratio)
    assert speculation.expert_share_for(ratio, expert_ratio) == pytest.approx(share)


def test_formulas_by_hand() -> None:
    assert speculation.arithmetic_intensity(16, 8, 128) == 1.0
    assert speculation.arithmetic_intensity(16, 8, 128, n_shared=2) == pytest.approx(160 / 130)
    # ln 0.05 / ln(1 - 8/64) = 22.4, ln 0.05 / ln(1 - 8/128) = 46.4; a dense model needs one token
    assert [published.full_activation_tokens(n_experts, 8) for n_experts in (64, 128, 8)] == [23, 47, 1]
    with pytest.raises(ValueError, match="share"):
        speculation.expert_share_for(1.0, 1.0)


@given(n_experts=st.integers(2, 256), data=st.data(), share=st.floats(0.1, 0.99))
def test_full_activation_threshold_is_the_first_that_suffices(
    n_experts: int, data: st.DataObject, share: float
) -> None:
    """MoESD, Eq. 9."""
    n_used = data.draw(st.integers(1, n_experts))
    threshold = published.full_activation_tokens(n_experts, n_used, share)

    def reached(n_tokens: int) -> float:
        return routing_curves.uniform_unique(n_experts, n_used, n_tokens) / n_experts

    assert reached(threshold) >= share - 1e-9
    assert threshold == 1 or reached(threshold - 1) <= share + 1e-9


@given(n_tokens=st.integers(1, 200))
def test_sparser_models_have_fewer_tokens_per_expert(n_tokens: int) -> None:
    """MoESD, Appendix A: the mean rises with rho; Eq. 10 in its other form."""
    means = [routing_curves.tokens_per_expert(64, n_used, n_tokens) for n_used in (1, 2, 4, 8, 16, 32, 64)]
    assert means == sorted(means)
    rho = 8 / 64
    assert means[3] == pytest.approx(rho * n_tokens / (1 - (1 - rho) ** n_tokens))
    assert means[-1] == pytest.approx(n_tokens)


def test_figures_follow_from_the_inputs_printed_with_them() -> None:
    """Every row but those that take alpha from a run with another gamma, whose acceptance differs."""
    others = [row for row in published.reproduced() if "sigma by the alpha of" in row.figure]
    assert [row for row in published.reproduced() if not row.agrees and row not in others] == []
    assert len(others) == 16 and sum(row.agrees for row in others) == 9
    assert max(abs(row.computed - row.published) for row in others) < 0.07


def test_document_counts_the_figures_of_the_command() -> None:
    document = Path(__file__).parents[3] / "docs" / "lab" / "speed-model.md"
    figures = published.reproduced()
    for source in {figure.source for figure in figures}:
        own = [figure for figure in figures if figure.source == source]
        row = f"| {source} | {len(own)} | {sum(not figure.agrees for figure in own)} |"
        assert row in document.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["no JSON", '{"rows": 1}', "[1]", '[{"acceptance": 0.5}]', "null"])
def test_files_that_are_no_records_of_bench(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(InputError, match=r"Cannot use .*moeedge bench"):
        read_points(tmp_path / "record.json")
    with pytest.raises(InputError, match="No such file"):
        read_points(tmp_path / "absent.json")
