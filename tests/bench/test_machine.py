"""The machine in a record: the limits that memory and multiplications set, versions, files, the state of a checkout."""

from __future__ import annotations

import hashlib
import subprocess
from math import prod
from pathlib import Path

import gguf
import pytest

from moeedge.bench import roofline
from moeedge.bench.roofline import Roofline, Weights, measure_roofline
from moeedge.hardware.provenance import HEADER_BYTES, _git_state, read_provenance
from moeedge.llama.model import Model
from moeedge.records import as_dict
from tests.bench.recording import make_plan, run, write_conversations
from tests.conftest import TinyFactory
from tests.support.machine import Machine


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen3", "glm4moe"])
def test_the_weights_and_products_of_a_token(arch: str, tiny: TinyFactory) -> None:
    """Dense weights once, a row of the embeddings at most, the used share of the experts.

    A weight is multiplied once per token; the output matrix by a prompt's last token alone.
    """
    path = tiny(arch)
    with Model.load(path) as model:
        head = f"blk.{model.info.n_layers}."  # glm4moe's, which drafts
    tensors = [tensor for tensor in gguf.GGUFReader(path).tensors if not tensor.name.startswith(head)]
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in tensors}
    matrices = {tensor.name: prod(int(n) for n in tensor.shape) for tensor in tensors if len(tensor.shape) > 1}
    with Model.load(path) as model:
        info = model.info
        found, weights = measure_roofline(model, n_threads=1), Weights.read(model)

    def used(values: dict[str, int]) -> int:
        experts = sum(value for tensor, value in values.items() if "_exps." in tensor)
        share = experts * info.n_expert_used // info.n_experts if info.n_experts else 0
        return sum(values.values()) - experts + share

    assert found.bytes_per_token == used(sizes) - ("output.weight" in sizes) * sizes["token_embd.weight"]
    assert found.limit_ts == pytest.approx(found.read_bytes_per_s / found.bytes_per_token)
    assert found.read_bytes_per_s > 1e8
    assert found.products_per_s == 0 or found.products_per_s > 1e9
    edges = sum(matrices.get(f"{edge}.weight", 0) for edge in ("token_embd", "output"))
    assert weights.products_per_token == used(matrices) - edges
    experts = {name: n for name, n in matrices.items() if "_exps." in name}
    assert weights.expert_products * info.n_experts == sum(experts.values())
    types = sum(size for name, size in sizes.items() if name in experts) / max(sum(experts.values()), 1)
    assert weights.bytes_per_weight == pytest.approx(types if experts else weights.dense_bytes / weights.products(1))
    assert weights.output_products == matrices.get("output.weight", matrices["token_embd.weight"])


def test_the_limit_of_a_prompt() -> None:
    """One token reads its experts, many read all of them; with more the products decide."""
    weights = Weights(100, ((10, 8, 2), (10, 8, 2)), 1000, 500, 60)
    limit = Roofline(read_bytes_per_s=1e3, products_per_s=1e5, weights=weights)
    assert limit.bytes_per_token == 140 and limit.limit_ts == pytest.approx(1e3 / 140)
    assert weights.bytes_of(1000) == pytest.approx(260)
    assert limit.prompt_limit_ts(2) == pytest.approx(2 / (weights.bytes_of(2) / 1e3))
    assert limit.prompt_limit_ts(1000) == pytest.approx(1000 / ((1000 * 1000 + 500) / 1e5))
    unknown = Roofline(read_bytes_per_s=1e3, products_per_s=0.0, weights=weights)
    assert unknown.prompt_limit_ts(1000) == pytest.approx(1000 / 0.26)


def test_the_last_caches_of_the_threads(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of cores share a cache of 32 MiB; what is read must not fit those of all the threads."""
    monkeypatch.setattr(roofline, "_PROCESSORS", machine.root)
    assert roofline._last_cache_bytes(4) == 0
    for cpu in range(8):
        first = cpu // 2 * 2
        for index, (level, size, shared) in enumerate([*[(1, "32K", cpu)] * 2, (3, "32768K", f"{first}-{first + 1}")]):
            for name, text in {"level": level, "size": size, "shared_cpu_list": shared}.items():
                machine.write(f"cpu{cpu}/cache/index{index}/{name}", f"{text}\n")
    (machine.root / "cpu8/cache").mkdir(parents=True)  # without caches
    assert [roofline._last_cache_bytes(n) >> 20 for n in (1, 2, 4, 16)] == [32, 64, 128, 128]


def test_rows_have_it(tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode's speed over the same limit; null where it is unknown."""
    known: Roofline | None = Roofline(read_bytes_per_s=1e9, products_per_s=1e9, weights=Weights(1000, (), 0, 0, 0))
    monkeypatch.setattr("moeedge.bench.runner.measure_roofline", lambda model, n_threads: known)
    plan = make_plan(tiny_moe, None, dataset=write_conversations(tmp_path), n_predict=4, repetitions=1)
    for row in run(plan)[0]:
        record = as_dict(row)
        assert record["limit_ts"] == 1e6
        assert record["limit_share"] == record["tg_ts_median"] / 1e6
    known = None
    record = as_dict(run(plan)[0][0])
    assert record["limit_ts"] is record["limit_share"] is record["read_bytes_per_s"] is None


def _git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_files_are_known_by_their_content(tmp_path: Path) -> None:
    model, trace = tmp_path / "model.gguf", tmp_path / "trace.npz"
    model.write_bytes(bytes(HEADER_BYTES) + b"weights")
    trace.write_bytes(b"routing")
    first = read_provenance(model, trace=trace, timed=False)
    assert first.model_header_sha256 == hashlib.sha256(bytes(HEADER_BYTES)).hexdigest()
    assert first.trace_sha256 == hashlib.sha256(b"routing").hexdigest() and first.time is None
    assert first == read_provenance(model, trace=trace, timed=False)
    assert read_provenance(tmp_path / "absent.gguf").model_header_sha256 is None


def test_what_limits_or_replaces_the_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOEEDGE_INSTRUCTIONS", "LLAMA_CPP_LIB_PATH"):
        monkeypatch.delenv(name, raising=False)
    plain = read_provenance()
    monkeypatch.setenv("MOEEDGE_INSTRUCTIONS", "avx2")
    assert read_provenance().cpu == f"{plain.cpu}, MOEEDGE_INSTRUCTIONS=avx2"
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "elsewhere")
    assert read_provenance().llama_cpp_version.startswith(f"{plain.llama_cpp_version} ")


def test_commit_and_dirty_flag_of_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "moeedge"
    package.mkdir()
    assert _git_state(package) == (None, None)  # an installed wheel
    try:
        _git(tmp_path, "init", "-q")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    (package / "a.py").write_text("a = 1\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "First", "--no-verify")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert _git_state(package) == (commit, False)
    (package / "new.txt").write_text("untracked files do not count\n")
    assert _git_state(package) == (commit, False)
    (package / "a.py").write_text("a = 2\n")
    assert _git_state(package) == (commit, True)
