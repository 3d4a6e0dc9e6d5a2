"""Rankings of experts: the figures against plain Python, the file against damage, and the fit against every choice."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeedge.analysis.expert_ranking import (
    ExpertRanking,
    fit_layers,
    lost_curve,
    rank_experts,
    read_ranking,
    write_ranking,
)
from moeedge.errors import InputError
from moeedge.policies.expert_budget import static_order
from moeedge.trace.format import Trace
from moeedge.trace.steps import recorded_steps
from tests.support.traces import plain_text, two_texts

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_steps_without_mass_say_nothing() -> None:
    assert lost_curve(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist() == [1.0, 0.25, 0.0]
    assert lost_curve(np.zeros((2, 3))).tolist() == [0.0] * 4


def ranking_of(lost: list[list[float]], k: int) -> ExpertRanking:
    n_layers, n_experts = len(lost), len(lost[0]) - 1
    frequency = np.arange(n_layers * n_experts, dtype=np.int64).reshape(n_layers, n_experts)
    return ExpertRanking(
        model="model.gguf",
        architecture="qwen3moe",
        n_expert_used=k,
        expert_layers=tuple(range(n_layers)),
        order=static_order(frequency),
        frequency=frequency,
        lost=np.array(lost),
        measured="weights",
        n_steps=7,
        tokens_per_step=9.0,
        source={"dataset": "toy"},
    )


@pytest.mark.parametrize("weights", [False, True])
def test_figures_are_those_of_the_verifications(weights: bool) -> None:
    trace = two_texts(weights=weights)
    ranking = rank_experts(trace)
    assert ranking.measured == ("weights" if weights else "picks")
    steps = [[int(row) for row in rows if row >= 0] for rows in recorded_steps(trace).rows]
    for layer in range(trace.meta.n_layers):
        counts: Counter[int] = Counter()
        for budget in range(trace.meta.n_experts + 1):
            lost = []
            for rows in steps:
                mass: Counter[int] = Counter()
                for row, place in itertools.product(rows, range(2)):
                    value = 1.0 if trace.weights is None else float(trace.weights[row, layer, place])
                    mass[int(trace.ids[row, layer, place])] += value  # type: ignore[assignment]
                best = sorted(mass.values(), reverse=True)[:budget]
                lost.append(1.0 - sum(best) / sum(mass.values()))
            assert ranking.lost[layer, budget] == pytest.approx(np.mean(lost), abs=1e-9)
        for rows in steps:
            counts.update(trace.ids[rows, layer].ravel().tolist())
        assert ranking.frequency[layer].tolist() == [counts[expert] for expert in range(8)]
        assert (np.diff(ranking.frequency[layer][ranking.order[layer]]) <= 0).all()


def test_a_text_without_drafts_is_cut_into_verifications() -> None:
    ranking = rank_experts(plain_text(40))
    assert ranking.tokens_per_step == 9.0 and ranking.n_steps > 0
    with pytest.raises(InputError):
        rank_experts(plain_text(3))


def test_layers_without_experts_have_no_entry(tmp_path: Path) -> None:
    trace = two_texts()
    ids = trace.ids.copy()
    ids[:, 0] = trace.sentinel
    sparse: Trace = replace(trace, ids=ids)
    ranking = rank_experts(sparse)
    assert ranking.expert_layers == (1,)
    assert fit_layers(ranking, 4)[0] == 0 and fit_layers(ranking, 4)[1] == 4
    write_ranking(ranking, tmp_path / "ranking.json")
    assert [entry["layer"] for entry in json.loads((tmp_path / "ranking.json").read_text())["layers"]] == [1]
    assert read_ranking(tmp_path / "ranking.json").expert_layers == (1,)


def test_a_file_gives_the_ranking_back(tmp_path: Path) -> None:
    ranking = rank_experts(two_texts(weights=True), sensitivity=np.array([0.25, 3e-9]))
    write_ranking(ranking, tmp_path / "ranking.json")
    found = read_ranking(tmp_path / "ranking.json")
    np.testing.assert_array_equal(found.order, ranking.order)
    np.testing.assert_array_equal(found.frequency, ranking.frequency)
    assert found.sensitivity is not None and found.sensitivity.tolist() == [0.25, 3e-9]
    assert found.lost == pytest.approx(ranking.lost, abs=1e-6)
    for name in ("model", "architecture", "n_expert_used", "expert_layers", "measured", "n_steps", "source"):
        assert getattr(found, name) == getattr(ranking, name)


@FEW
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 5), st.data())
def test_no_other_budgets_of_the_same_sum_lose_less(
    seed: int, n_layers: int, n_experts: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    k = data.draw(st.integers(1, n_experts))
    ranking = ranking_of([lost_curve(rng.random((3, n_experts)) ** 3).tolist() for _ in range(n_layers)], k)
    if data.draw(st.booleans()):
        ranking = replace(ranking, sensitivity=rng.random(n_layers) * rng.integers(0, 2, n_layers))
    mean = data.draw(st.floats(k, n_experts))
    fitted = fit_layers(ranking, mean)
    assert sum(fitted) == round(mean * n_layers) and min(fitted) >= k and max(fitted) <= n_experts

    def loss(budgets: tuple[int, ...]) -> float:
        least, weights = ranking.lost[:, k], ranking.sensitivity
        shares = [1.0 if weights is None else weights[i] / max(least[i], 1e-300) for i in range(n_layers)]
        return sum(float(ranking.lost[layer, budget]) * shares[layer] for layer, budget in enumerate(budgets))

    choices = itertools.product(range(k, n_experts + 1), repeat=n_layers)
    assert loss(fitted) <= min(loss(choice) for choice in choices if sum(choice) == sum(fitted)) + 1e-12


def test_sensitive_layers_get_the_experts() -> None:
    curve = [1.0, 0.5, 0.2, 0.1, 0.0]
    even = ranking_of([curve] * 2, 1)
    assert fit_layers(even, 2.5) == (3, 2)
    assert fit_layers(replace(even, sensitivity=np.array([0.01, 1.0])), 2.5) == (1, 4)


def test_layers_that_lose_nothing_share_evenly() -> None:
    assert fit_layers(ranking_of([[1.0, 0.0, 0.0, 0.0, 0.0]] * 3, 1), 2.0) == (2, 2, 2)
    assert fit_layers(ranking_of([[0.0] * 5] * 3, 1), 99.0) == (4, 4, 4)


@pytest.mark.parametrize("mean", [0.0, 1.9, -1.0, float("nan"), float("inf")])
def test_means_below_k_are_refused(mean: float) -> None:
    with pytest.raises(InputError):
        fit_layers(ranking_of([[1.0, 0.5, 0.2, 0.0]], 2), mean)


def document(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "ranking.json"
    ranking = ranking_of([[1.0, 0.5, 0.2, 0.0], [1.0, 0.4, 0.1, 0.0]], 2)
    write_ranking(replace(ranking, sensitivity=np.array([0.5, 0.0])), path)
    return path, json.loads(path.read_text())


VALUES: list[Any] = [None, True, -1, 0.5, 1e999, float("nan"), 10**400, "x", [], {}, [None], [[]], 2**31, 2**63]


def test_any_other_value_is_refused_or_read(tmp_path: Path) -> None:
    """Every value of the document is replaced in turn; the reader answers with a ranking or with one sentence."""
    path, good = document(tmp_path)
    n_refused = 0
    places: list[tuple[Any, ...]] = [(key,) for key in good] + [("layers", 1, key) for key in good["layers"][1]]
    places += [("layers", 1, key, 1) for key in ("order", "frequency", "lost")] + [("layers", 0)]
    for place, value in itertools.product(places, [*VALUES, "missing"]):
        changed = json.loads(json.dumps(good))
        holder = changed
        for key in place[:-1]:
            holder = holder[key]
        if value == "missing":
            del holder[place[-1]]
        else:
            holder[place[-1]] = value
        path.write_text(json.dumps(changed))
        try:
            found = read_ranking(path)
        except InputError:
            n_refused += 1
        else:
            assert found.lost.max() <= 1.0 and sum(fit_layers(found, found.n_expert_used)) > 0
            assert sorted(found.order[0].tolist()) == list(range(found.n_experts))
    assert n_refused > 0.7 * len(places) * (len(VALUES) + 1)


@FEW
@given(st.binary(max_size=40), st.integers(0, 1000), st.integers(0, 60))
def test_damaged_bytes_are_refused_or_read(tmp_path: Path, junk: bytes, place: int, cut: int) -> None:
    path, _ = document(tmp_path)
    data = path.read_bytes()
    place %= len(data)
    path.write_bytes(data[:place] + junk + data[place + cut :])
    try:
        read_ranking(path)
    except InputError as error:
        assert str(path) in error.message


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "{}", "[]", "null", '{"schema": 1}', '{"schema": "moeedge-expert-ranking-2"}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    for path in (tmp_path / "other.json", tmp_path / "absent.json", tmp_path):
        with pytest.raises(InputError):
            read_ranking(path)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_ranking(ranking_of([[1.0, 0.0]], 1), tmp_path / "absent" / "ranking.json")
