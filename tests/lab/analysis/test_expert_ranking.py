"""Rankings of experts: the figures against plain Python and two contexts, and the file against damage."""

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

from moeedge.errors import InputError
from moeedge.lab.analysis.expert_ranking import (
    lost_curve,
    measure_sensitivity,
    rank_experts,
    read_order,
    write_ranking,
)
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.sequence import Logits
from moeedge.native.abi import BudgetCoverage, BudgetRanking, Phase
from moeedge.trace.steps import recorded_steps
from tests.conftest import TinyFactory
from tests.support.traces import plain_text, two_texts

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_steps_without_mass_say_nothing() -> None:
    assert lost_curve(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist() == [1.0, 0.25, 0.0]
    assert lost_curve(np.zeros((2, 3))).tolist() == [0.0] * 4


@pytest.mark.parametrize("weights", [False, True])
def test_figures_are_those_of_the_verifications(weights: bool) -> None:
    trace = two_texts(weights=weights)
    ranking = rank_experts(trace)
    assert ranking["measured"] == ("weights" if weights else "picks")
    steps = [[int(row) for row in rows if row >= 0] for rows in recorded_steps(trace).rows]
    for layer, found in enumerate(ranking["layers"]):
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
            assert found["lost"][budget] == pytest.approx(np.mean(lost), abs=1e-6)
        for rows in steps:
            counts.update(trace.ids[rows, layer].ravel().tolist())
        assert found["frequency"] == [counts[expert] for expert in range(8)]
        assert (np.diff(np.array(found["frequency"])[found["order"]]) <= 0).all()


def test_a_text_without_drafts_is_cut_into_verifications() -> None:
    ranking = rank_experts(plain_text(40))
    assert ranking["tokens_per_step"] == 9.0 and ranking["n_steps"] > 0
    with pytest.raises(InputError):
        rank_experts(plain_text(3))


def test_layers_without_experts_have_no_entry() -> None:
    trace = two_texts()
    ids = trace.ids.copy()
    ids[:, 0] = trace.sentinel
    assert [entry["layer"] for entry in rank_experts(replace(trace, ids=ids))["layers"]] == [1]


def test_the_file_gives_the_order_back(tmp_path: Path) -> None:
    ranking = rank_experts(two_texts(), np.array([0.5, 0.0, 0.25]))
    write_ranking(ranking, tmp_path / "ranking.json")
    assert read_order(tmp_path / "ranking.json").tolist() == [layer["order"] for layer in ranking["layers"]]
    assert json.loads((tmp_path / "ranking.json").read_text()) == ranking


def document(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "ranking.json"
    ranking = rank_experts(two_texts())
    write_ranking(ranking, path)
    return path, ranking


_READ = ("schema", "n_layers", "n_experts", "layers", "layer", "order")
VALUES: list[Any] = [None, True, -1, 0.5, 1e999, float("nan"), 10**400, "x", [], {}, [None], [[]], 2**31, 2**63]


def test_any_other_value_is_refused_or_read(tmp_path: Path) -> None:
    """Every value of the document is replaced in turn; the reader answers with a ranking or with one sentence."""
    path, good = document(tmp_path)
    n_refused = 0
    places: list[tuple[Any, ...]] = [(key,) for key in good] + [("layers", 1, key) for key in good["layers"][1]]
    places = [place for place in places if place[-1] in _READ] + [("layers", 1, "order", 1), ("layers", 0)]
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
            found = read_order(path)
        except InputError:
            n_refused += 1
        else:
            assert all(sorted(order) == list(range(len(order))) for order in found.tolist())
    assert n_refused > 0.7 * len(places) * (len(VALUES) + 1)


@FEW
@given(st.binary(max_size=40), st.integers(0, 1000), st.integers(0, 60))
def test_damaged_bytes_are_refused_or_read(tmp_path: Path, junk: bytes, place: int, cut: int) -> None:
    path, _ = document(tmp_path)
    data = path.read_bytes()
    place %= len(data)
    path.write_bytes(data[:place] + junk + data[place + cut :])
    try:
        read_order(path)
    except InputError as error:
        assert str(path) in error.message


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "{}", "[]", "null", '{"schema": 1}', '{"schema": "moeedge-expert-ranking-2"}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    for path in (tmp_path / "other.json", tmp_path / "absent.json", tmp_path):
        with pytest.raises(InputError):
            read_order(path)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_ranking({}, tmp_path / "absent" / "ranking.json")


TEXT = np.random.default_rng(2).integers(0, 256, 20).tolist()


def probabilities(logits: Logits) -> np.ndarray:
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(wide / wide.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2"])
def test_divergence_is_that_of_two_contexts(arch: str, tiny: TinyFactory) -> None:
    library.start()
    seen: list[int] = []
    with Model.load(tiny(arch)) as model:
        found = measure_sensitivity(model, [[1], TEXT], gamma=4, n_threads=1, on_layer=seen.append)
        info = model.info
        assert found is not None and len(seen) == len(info.expert_layers)
        with Context(model, n_ctx=64, n_threads=1, has_budget=True) as context:
            for layer in range(info.n_layers):
                if layer not in info.expert_layers:
                    assert found[layer] == 0.0
                    continue
                both = []
                assert context.budget is not None
                native = context.budget.native
                for limit in (info.n_experts, info.n_expert_used):
                    budgets = np.full(info.n_layers, info.n_experts, dtype=np.int32)
                    budgets[layer] = limit
                    native.configure(budgets, ranking=BudgetRanking.PICKS, coverage=BudgetCoverage.SUBSTITUTION)
                    native.set_active(True)
                    context.clear()
                    parts = [TEXT[start : start + 5] for start in range(0, len(TEXT), 5)]
                    both.append(
                        np.concatenate(
                            [probabilities(context.decode(part, phase=Phase.VERIFY, logits="all")) for part in parts]
                        )
                    )
                divergence = (both[0] * np.log(both[0] / both[1])).sum(axis=1).mean()
                assert found[layer] == pytest.approx(divergence, rel=1e-3, abs=1e-6) and found[layer] > 0


def test_no_text_and_a_cancellation_give_none(tiny: TinyFactory) -> None:
    library.start()
    with Model.load(tiny("qwen3moe")) as model:
        assert measure_sensitivity(model, [[1]], gamma=4, n_threads=1) is None
        assert measure_sensitivity(model, [TEXT], gamma=4, n_threads=1, cancel=lambda: True) is None
