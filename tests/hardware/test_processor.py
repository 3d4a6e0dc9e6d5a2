"""The processor as Linux describes it, in files of other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.hardware import memory, processor


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def test_instructions_by_their_names(described: Path) -> None:
    (described / "cpuinfo").write_text("model name\t: Made Up 9\nflags\t\t: fpu sse4_2 avx2 avx512f avx512_vnni\n")
    assert processor.cpu_name() == "Made Up 9"
    assert processor.instruction_sets() == ["AVX2", "AVX-512", "AVX-512 VNNI"]
    (described / "cpuinfo").write_text("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n")
    assert processor.cpu_name() == "AMD EPYC (family 25, model 17)"
    (described / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd asimddp sve\n")
    assert processor.instruction_sets() == ["dot product", "SVE"]


def test_a_system_that_tells_nothing(described: Path) -> None:
    assert processor.instruction_sets() == []
    assert processor.cpu_name()
    assert processor.core_limit() is None


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),  # of a container, whose own group is at the root
        ({"app/one/cpu.max": "300000 100000\n", "app/cpu.max": "200000 100000\n"}, 2.0),  # a group around it has less
        ({"app/one/cpu.max": "max 100000\n"}, None),
        ({"cpu/app/one/cpu.cfs_quota_us": "50000\n", "cpu/app/one/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/app/one/cpu.cfs_quota_us": "-1\n", "cpu/app/one/cpu.cfs_period_us": "100000\n"}, None),
        ({"other/cpu.max": "100000 100000\n"}, None),
    ],
)
def test_a_containers_limit(described: Path, files: dict[str, str], limit: float | None) -> None:
    (described / "membership").write_text("4:cpu,cpuacct:/app/one\n5:memory:/\n0::/app/one\n")
    for name, text in files.items():
        (described / name).parent.mkdir(parents=True, exist_ok=True)
        (described / name).write_text(text)
    assert processor.core_limit() == limit


@pytest.mark.parametrize(
    ("limit", "threads", "most"), [(None, 8, 16), (2.5, 2, 3), (0.5, 1, 1), (12.0, 8, 12), (64.0, 8, 16)]
)
def test_threads_keep_to_the_limit(
    limit: float | None, threads: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "usable_cores", lambda: 16)
    monkeypatch.setattr(processor.psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(processor, "core_limit", lambda: limit)
    assert processor.physical_cores() == threads
    assert processor.concurrent_threads() == most


@pytest.mark.parametrize(
    ("logical", "physical", "threads"),
    [(16, 8, 8), (16, 16, 14), (8, 8, 6), (6, 6, 5), (4, 4, 3), (2, 2, 2), (1, 1, 1), (9, 8, 7)],
)
def test_a_gpu_leaves_cores_to_uploads(
    logical: int, physical: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "usable_cores", lambda: logical)
    monkeypatch.setattr(processor.psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(processor, "core_limit", lambda: None)
    assert processor.cores_next_to_gpu() == threads
