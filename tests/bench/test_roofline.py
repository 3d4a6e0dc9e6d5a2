"""The limits that memory and multiplications set: weights per token as gguf reads them from the file, and their use."""

from __future__ import annotations

from math import prod
from pathlib import Path

import gguf
import pytest

from moeedge.bench import roofline
from moeedge.bench.roofline import Roofline, Weights, measure_roofline
from moeedge.llama.model import Model
from moeedge.records import as_dict
from tests.bench.recording import make_plan, run, write_conversations


@pytest.mark.parametrize("name", ["tiny_moe", "tiny_draft"])
def test_the_weights_of_a_token(name: str, request: pytest.FixtureRequest) -> None:
    """Dense weights once, a row of the embeddings at most, the used share of the experts."""
    path: Path = request.getfixturevalue(name)
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    with Model.load(path) as model:
        found = measure_roofline(model, n_threads=1)
        n_experts, n_used = model.info.n_experts, model.info.n_expert_used
    assert found is not None
    experts = sum(size for tensor, size in tensors.items() if "_exps." in tensor)
    dense = sum(tensors.values()) - experts - ("output.weight" in tensors) * tensors["token_embd.weight"]
    assert found.bytes_per_token == dense + (experts * n_used // n_experts if n_experts else 0)
    assert found.limit_ts == pytest.approx(found.read_bytes_per_s / found.bytes_per_token)
    assert found.read_bytes_per_s > 1e8
    assert found.products_per_s == 0 or found.products_per_s > 1e9


@pytest.mark.parametrize("name", ["tiny_moe", "tiny_draft"])
def test_the_products_of_a_token(name: str, request: pytest.FixtureRequest) -> None:
    """A weight is multiplied once per token; the output matrix by a prompt's last token alone."""
    path: Path = request.getfixturevalue(name)
    shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in gguf.GGUFReader(path).tensors}
    with Model.load(path) as model:
        found = Weights.read(path, model.info.n_layers, model.info.used_per_layer)
        n_experts, n_used = model.info.n_experts, model.info.n_expert_used
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    experts = sum(size for name, size in matrices.items() if "_exps." in name)
    edges = sum(matrices.get(f"{name}.weight", 0) for name in ("token_embd", "output"))
    expected = sum(matrices.values()) - experts - edges + (experts * n_used // n_experts if n_experts else 0)
    assert found.products_per_token == expected
    assert found.output_products == matrices.get("output.weight", matrices["token_embd.weight"])


def test_the_limit_of_a_prompt() -> None:
    """One token reads its experts, many read all of them; with more the products decide."""
    weights = Weights(100, ((10, 8, 2), (10, 8, 2)), 1000, 500)
    limit = Roofline(read_bytes_per_s=1e3, products_per_s=1e5, weights=weights)
    assert limit.bytes_per_token == 140 and limit.limit_ts == pytest.approx(1e3 / 140)
    assert weights.bytes_of(1000) == pytest.approx(260)
    assert limit.prompt_limit_ts(2) == pytest.approx(2 / (weights.bytes_of(2) / 1e3))
    assert limit.prompt_limit_ts(1000) == pytest.approx(1000 / ((1000 * 1000 + 500) / 1e5))
    unknown = Roofline(read_bytes_per_s=1e3, products_per_s=0.0, weights=weights)
    assert unknown.prompt_limit_ts(1000) == pytest.approx(1000 / 0.26)


def test_the_last_caches_of_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of cores share a cache of 32 MiB; what is read must not fit those of all the threads."""
    monkeypatch.setattr(roofline, "_PROCESSORS", tmp_path)
    for cpu in range(8):
        for index, (level, size, first) in enumerate([(1, "32K", cpu), (1, "32K", cpu), (3, "32768K", cpu // 2 * 2)]):
            folder = tmp_path / f"cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            shared = f"{cpu}" if level == 1 else f"{first}-{first + 1}"
            for name, text in {"level": level, "size": size, "shared_cpu_list": shared}.items():
                (folder / name).write_text(f"{text}\n")
    (tmp_path / "cpu8/cache").mkdir(parents=True)  # without caches
    assert [roofline._last_cache_bytes(n) >> 20 for n in (1, 2, 4, 16)] == [32, 64, 128, 128]
    monkeypatch.setattr(roofline, "_PROCESSORS", tmp_path / "none")
    assert roofline._last_cache_bytes(4) == 0


def test_rows_have_it(tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode's speed over the same limit; null where it is unknown."""
    known: Roofline | None = Roofline(read_bytes_per_s=1e9, products_per_s=1e9, weights=Weights(1000, (), 0, 0))
    monkeypatch.setattr("moeedge.bench.runner.measure_roofline", lambda model, n_threads: known)
    plan = make_plan(tiny_moe, None, dataset=write_conversations(tmp_path), n_predict=4, repetitions=1)
    for row in run(plan)[0]:
        record = as_dict(row)
        assert record["limit_ts"] == 1e6
        assert record["limit_share"] == record["tg_ts_median"] / 1e6
    known = None
    record = as_dict(run(plan)[0][0])
    assert record["limit_ts"] is record["limit_share"] is record["read_bytes_per_s"] is None
