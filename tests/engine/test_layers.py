"""The layers that --layer and --layers name."""

from __future__ import annotations

import pytest

from moeedge.engine.recording import describe_layers, parse_layers
from moeedge.errors import InputError, LayerRangeError


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("47", [47]),
        ("all", list(range(48))),
        (" ALL ", list(range(48))),
        ("0,5,40-47", [0, 5, *range(40, 48)]),
        ("3, 1, 3", [3, 1]),
        ("2-2", [2]),
        ("5 - 7 , 6-8", [5, 6, 7, 8]),
    ],
)
def test_lists(text: str, layers: list[int]) -> None:
    assert parse_layers(text, 48) == layers


@pytest.mark.parametrize("text", ["48", "0,48", "40-48", "-1", "999999999"])
def test_out_of_range_names_the_valid_range(text: str) -> None:
    with pytest.raises(LayerRangeError, match=r"layers are 0 to 47\.$") as caught:
        parse_layers(text, 48)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "x", "1,,2", "1-", "1.5", "0x3", "1 2", "٣", "99999999999999999999"])
def test_not_a_list(text: str) -> None:
    with pytest.raises(InputError, match="not a list of layers"):
        parse_layers(text, 48)


def test_backward_range() -> None:
    with pytest.raises(InputError, match="backwards"):
        parse_layers("7-5", 48)


def test_single() -> None:
    assert parse_layers("47", 48, single=True) == [47]
    with pytest.raises(LayerRangeError):
        parse_layers("48", 48, single=True)
    with pytest.raises(LayerRangeError):
        parse_layers("-1", 48, single=True)
    with pytest.raises(InputError, match="--layers"):
        parse_layers("1-3", 48, single=True)


def test_model_of_one_layer() -> None:
    with pytest.raises(LayerRangeError, match="are 0 only"):
        parse_layers("1", 1)


@pytest.mark.parametrize(
    ("layers", "text"), [([], ""), ([3], "3"), ([1, 2, 3], "1-3"), ([0, 2, 4, 5, 6, 9], "0, 2, 4-6, 9")]
)
def test_description(layers: list[int], text: str) -> None:
    assert describe_layers(layers) == text
