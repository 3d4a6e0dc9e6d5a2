"""The counts next to a GPU on a small model: stock's are known from ggml's scheduler, ours have a bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeedge.native.abi import DevicePath
from tests.benchmarks.round_trips import Lane, main, measure, write_model
from tests.support.counting import CountingDevice, Counts

N_LAYERS, N_EMBD, N_EXPERTS, N_USED = 3, 256, 128, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), N_LAYERS, N_EMBD)


@pytest.mark.parametrize("n_tokens", [1, 9])
def test_counts_per_layer(n_tokens: int, model: Path, counting: CountingDevice) -> None:
    """Stock: input and ids down, the outputs of all chosen experts up. Ours: the weights too, and one sum up."""

    def per_layer(lane: Lane) -> tuple[Counts, float | None]:
        counts, hit_rate = measure(lane, model, counting, 1)[n_tokens]
        return (counts - reference) / N_LAYERS, hit_rate

    sizes = (n_tokens,)
    reference, _ = measure(Lane("device", on_device=True, sizes=sizes), model, counting, 1)[n_tokens]
    stock, _ = per_layer(Lane("stock", sizes=sizes))
    assert (stock.launches, stock.round_trips, stock.waits, stock.gets, stock.sets) == (1, 1, 4, 2, 1)
    column = N_EMBD * 4
    assert stock.bytes_up == pytest.approx(n_tokens * N_USED * column, abs=64)

    for device_path in DevicePath:
        ours, hit_rate = per_layer(Lane("moeedge", 0.5, sizes=sizes, device_path=device_path))
        assert hit_rate is not None and 0 < hit_rate < 1
        assert ours.launches <= 2 and ours.round_trips <= 2 and ours.waits <= 3
        assert ours.gets == 0 and ours.sets == 1 and ours.bytes_pageable == 0
        pairs = n_tokens if device_path is DevicePath.AHEAD else n_tokens * N_USED * hit_rate
        ids_and_weights = n_tokens * (N_EXPERTS + N_USED) * 4  # the ids are a view into the sorted experts
        assert ours.bytes_down <= (n_tokens + pairs) * column + ids_and_weights


@pytest.mark.parametrize(("name", "waits"), [("round-trips-0.6.0", 6), ("round-trips", 3)])
def test_records(name: str, waits: int) -> None:
    """Version 0.6.0's and today's are complete."""
    record = json.loads((Path(__file__).parents[2] / "docs" / "benchmarks" / f"{name}.json").read_text())
    rows = {(row["lane"], row["n_tokens"]): row["per_layer"] for row in record["rows"]}
    for n_tokens in (1, 9, 64):
        assert rows["stock", n_tokens]["round_trips"] == 1
        assert rows["moeedge-0.5-resident" if n_tokens == 64 else "moeedge-0.5", n_tokens]["waits"] == waits


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    main(["--layers", "2", "--embd", "256", "--repeats", "1", "--folder", str(tmp_path), "--out", str(out)])
    record = json.loads(out.read_text())
    assert {row["n_tokens"] for row in record["rows"]} == {1, 9, 64}
