"""Two profiles compared, and profiles that were saved as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.analysis.comparison import Comparison, popularity_shared, routing_agreement
from moeedge.analysis.model_profile import profile_model
from moeedge.analysis.profile_json import LAYER_KEYS, complete_report, layer_report, model_report, run_facts
from moeedge.analysis.saved_profile import read_profile
from moeedge.engine.pair_similarity import PairSimilarity
from moeedge.errors import InputError
from moeedge.ui.profile_pictures import profile_pictures
from tests.support.traces import plain_text, two_texts

PAIR = PairSimilarity("draft.gguf", 10, [0, 1], [0.9, 0.8], [[0.5, 0.4], [0.6, 0.5]], [1.0, 1.1], [1.2, 1.3])


def test_agreement_of_two_traces() -> None:
    first, second = plain_text(6), plain_text(6)
    assert routing_agreement(first, second) == 1.0
    second.ids[3] = (second.ids[3] + 1) % 8  # may name some of the same experts
    shared = [len(set(a) & set(b)) for a, b in zip(first.ids[3].tolist(), second.ids[3].tolist(), strict=True)]
    assert routing_agreement(first, second) == pytest.approx((5 * 4 + sum(shared)) / 24)
    second.token[2:] += 100  # the texts differ from here on
    assert routing_agreement(first, second) == 1.0
    assert routing_agreement(first, plain_text(6, n_experts=9)) is None


def test_shared_popularity_by_hand() -> None:
    first, second = plain_text(4), plain_text(4)
    first.ids[:] = np.array([0, 1], dtype=np.uint8)
    second.ids[:] = np.array([0, 2], dtype=np.uint8)
    second.ids[0] = np.array([0, 1], dtype=np.uint8)
    profiles = [profile_model(trace, []) for trace in (first, second)]
    assert popularity_shared(*profiles) == {0: pytest.approx(0.5 + 0.25 / 2), 1: pytest.approx(0.625)}
    assert popularity_shared(profiles[0], profile_model(plain_text(4, n_experts=9), [])) == {}
    second.ids[:, 0] = second.sentinel
    assert list(popularity_shared(profiles[0], profile_model(second, []))) == [1]


@pytest.mark.parametrize("pair", [None, PAIR])
def test_a_saved_profile_is_read_as_it_was(tmp_path: Path, pair: PairSimilarity | None) -> None:
    texts = [{"category": "a"}, {"category": "b"}]
    trace = two_texts(parameters={"texts": texts, "dataset": "sample"})
    profile, run = profile_model(trace, [1], pair=pair), run_facts(trace)
    written = complete_report(profile, run)
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(written))
    read, report = read_profile(path)
    assert report == json.loads(path.read_text())
    assert model_report(read) == written["model_profile"]  # every number comes back
    assert read.meta == trace.meta
    for this, other in ((profile, read), (read, profile)):  # pictures are drawn from the dataclass alone
        pictures = profile_pictures(this, Comparison.of(this, other, {}, None))
        assert {"popularity", "popularity-shared", "overlap", "gain", "by-category"} < {each.key for each in pictures}
    path.write_text(json.dumps(complete_report(profile, run, Comparison.of(profile, read, report, None))))
    assert read_profile(path)[1] == report  # not what it was compared with


def test_keys_of_layers_are_known() -> None:
    assert set(layer_report(profile_model(two_texts(), [1]).layers[0], {})) == LAYER_KEYS


def _changed(report: dict[str, Any], *path: str, value: Any) -> str:
    changed = json.loads(json.dumps(report))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(changed)


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    trace = two_texts()
    report = complete_report(profile_model(trace, [1]), run_facts(trace))
    mean = ("model_profile", "mean_of_layers")
    texts = ["", "{", "[]", "{}", "3", "[[]]", '{"layer": 1}', json.dumps(report).replace("0.25", "NaN")]
    texts += [_changed(report, "schema", value="other"), _changed(report, "run", "n_experts", value="many")]
    texts += [_changed(report, *mean, "popularity", value=[0.5]), _changed(report, *mean, "skew", value={"gini": 1})]
    texts += [_changed(report, *mean, "overlap_by_distance", value={"1": "x"})]
    for text in texts:
        path = tmp_path / "file.json"
        path.write_text(text)
        with pytest.raises(InputError, match="not a saved profile"):
            read_profile(path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a saved profile"):
        read_profile(tmp_path / "binary.json")
