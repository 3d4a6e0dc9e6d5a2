"""Cost models survive JSON, reject impossible values, and read their curves between and beyond the points."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from moeedge.policies.cost_model import CostModel, expert_seconds
from moeedge.scheduler.measurement import kept_fields, measurement_json, parse_measurement

MODEL = CostModel(
    cpu_expert_s=np.array([0.0, 1e-4, 1.5e-4]),
    device_expert_s=np.array([0.0, 2e-5, 2.5e-5, 3e-5]),
    transfer_expert_s=2e-4,
    draft_token_s=1e-3,
    block_overhead_s=2e-5,
    r_c=np.array([0.1, 0.4, 0.6, 0.8, 0.9]),
    r_g=np.array([0.9, 0.5, 0.3, 0.1, 0.05]),
)


def test_json_round_trip() -> None:
    again = parse_measurement(CostModel, measurement_json(MODEL))
    assert measurement_json(again) == measurement_json(MODEL)
    assert again.cap == 4
    assert np.array_equal(again.r_c, MODEL.r_c)


def test_curves_between_and_beyond_their_points() -> None:
    times = expert_seconds(MODEL.cpu_expert_s, np.array([1, 1.5, 4]))
    assert times == pytest.approx([1e-4, 1.25e-4, 3e-4])  # the last: in proportion to the last point
    assert expert_seconds(MODEL.device_expert_s, 0) == 0


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": 1}', '{"schema": 2}', "no json"])
def test_other_json_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_measurement(CostModel, text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu_expert_s", np.array([0.0])),
        ("cpu_expert_s", np.array([1.0, 1.0])),
        ("device_expert_s", np.array([0.0, np.nan])),
        ("transfer_expert_s", -1.0),
        ("draft_token_s", float("inf")),
        ("r_c", np.array([0.5, 1.5, 0.5, 0.5, 0.5])),
        ("r_g", np.array([0.5, 0.5])),
    ],
)
def test_impossible_values_are_rejected(field: str, value: object) -> None:
    with pytest.raises(ValueError):
        replace(MODEL, **{field: value})


def test_a_missing_field_is_named() -> None:
    fields = kept_fields(MODEL)
    del fields["r_g"]
    with pytest.raises(ValueError, match="r_g"):
        parse_measurement(CostModel, json.dumps(fields))
