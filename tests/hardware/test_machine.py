"""Memory and processor as Linux describes them, in containers too, and the load of other programs."""

from __future__ import annotations

import pytest

from moeedge.hardware import devices, host
from moeedge.hardware.host import LoadReading, busy_note, takes_cores
from tests.support.machine import GIB, Machine


def write_group(machine: Machine, folder: str, version: int, limit: str, used: int, cached: int = 0) -> None:
    """Files of a control group. limit: the hard one, and in version 2 after a comma that of slowing down."""
    hard, _, high = limit.partition(",")
    files: dict[str, object] = {"memory.limit_in_bytes": hard, "memory.usage_in_bytes": used}
    if version == 2:
        files = {"memory.max": hard, "memory.high": high or "max", "memory.current": used}
    prefix = "total_" if version == 1 else ""
    files["memory.stat"] = f"anon 5\n{prefix}active_file {cached // 2}\n{prefix}inactive_file {cached // 2}"
    for name, text in files.items():
        machine.write(f"{'memory/' if version == 1 else ''}{folder}{name}", f"{text}\n")


def free_and_total() -> tuple[int, int]:
    return host.available_memory(), host.total_memory()


def test_without_control_groups(machine: Machine) -> None:
    assert free_and_total() == (48 * GIB, 64 * GIB)
    machine.write("membership", "0::/some/group\n")
    assert free_and_total() == (48 * GIB, 64 * GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_the_page_cache_of_a_container_is_free(machine: Machine, version: int) -> None:
    machine.write("membership", "0::/app/one\n" if version == 2 else "11:cpu,cpuacct:/\n4:memory:/app/one\n")
    write_group(machine, "app/one/", version, str(8 * GIB), 6 * GIB, 4 * GIB)
    assert free_and_total() == (6 * GIB, 8 * GIB)
    write_group(machine, "app/", version, str(4 * GIB), 3 * GIB)
    assert free_and_total() == (GIB, 4 * GIB), "a group around it has less"
    reading = devices.host_memory()
    assert (reading.free_bytes, reading.total_bytes) == (GIB, 4 * GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_whose_group_is_at_the_root(machine: Machine, version: int) -> None:
    """Its membership names a folder that only the host has."""
    machine.write("membership", "0::/docker/abc\n" if version == 2 else "4:memory:/docker/abc\n")
    write_group(machine, "", version, str(2 * GIB), GIB)
    assert host.available_memory() == GIB


def test_a_limit_above_which_a_group_is_slowed_down_and_files_of_another_form(machine: Machine) -> None:
    machine.write("membership", "0::/\n")
    write_group(machine, "", 2, f"max,{4 * GIB}", 5 * GIB)
    assert free_and_total() == (0, 4 * GIB)
    write_group(machine, "", 2, "max", 5 * GIB)
    assert host.available_memory() == 48 * GIB
    write_group(machine, "", 2, str(GIB), 0)
    machine.write("memory.stat", "nothing here\n")
    assert host.available_memory() == 48 * GIB


def test_what_fits_leaves_a_reserve(machine: Machine) -> None:
    found = [host.default_reserve(gib * GIB) // 2**20 for gib in (0, 4, 8, 16, 24, 141)]
    assert found == [256, 256, 256, 512, 768, 1024]
    assert host.fits(7 * GIB, free_bytes=8 * GIB, total_bytes=32 * GIB)
    assert not host.fits(7 * GIB + 1, free_bytes=8 * GIB, total_bytes=32 * GIB)
    assert host.fits(47 * GIB) and not host.fits(47 * GIB + 1)


def test_instructions_by_their_names(machine: Machine) -> None:
    assert host.instruction_sets() == [] and host.cpu_name(), "a system that tells nothing"
    assert host.core_limit() is None
    machine.write("cpuinfo", "model name\t: Made Up 9\nflags\t\t: fpu sse4_2 avx2 avx512f avx512_vnni\n")
    assert host.cpu_name() == "Made Up 9"
    assert host.instruction_sets() == ["AVX2", "AVX-512", "AVX-512 VNNI"]
    machine.write("cpuinfo", "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n")
    assert host.cpu_name() == "AMD EPYC (family 25, model 17)"
    machine.write("cpuinfo", "processor\t: 0\nFeatures\t: fp asimd asimddp sve\n")
    assert host.instruction_sets() == ["dot product", "SVE"]


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),  # of a container, whose own group is at the root
        ({"app/one/cpu.max": "300000 100000\n", "app/cpu.max": "200000 100000\n"}, 2.0),  # a group around it has less
        ({"app/one/cpu.max": "max 100000\n"}, None),
        ({"cpu/app/one/cpu.cfs_quota_us": "50000\n", "cpu/app/one/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/app/one/cpu.cfs_quota_us": "-1\n", "cpu/app/one/cpu.cfs_period_us": "100000\n"}, None),
        ({"other/cpu.max": "100000 100000\n"}, None),
    ],
)
def test_a_containers_limit_of_cores(machine: Machine, files: dict[str, str], limit: float | None) -> None:
    machine.write("membership", "4:cpu,cpuacct:/app/one\n5:memory:/\n0::/app/one\n")
    for name, text in files.items():
        machine.write(name, text)
    assert host.core_limit() == limit


@pytest.mark.parametrize(
    ("limit", "threads", "most"), [(None, 8, 16), (2.5, 2, 3), (0.5, 1, 1), (12.0, 8, 12), (64.0, 8, 16)]
)
def test_threads_keep_to_the_limit(limit: float | None, threads: int, most: int, machine: Machine) -> None:
    machine.set_cores(16, 8, limit)
    assert (host.physical_cores(), host.concurrent_threads()) == (threads, most)


def test_a_gpu_leaves_cores_to_uploads(machine: Machine) -> None:
    found = []
    for logical, physical in ((16, 8), (16, 16), (8, 8), (6, 6), (4, 4), (2, 2), (1, 1), (9, 8)):
        machine.set_cores(logical, physical)
        found.append(host.cores_next_to_gpu())
    assert found == [8, 14, 6, 5, 3, 2, 1, 7]


def test_our_own_work_does_not_count() -> None:
    before = LoadReading(machine_s=100.0, own_s=10.0, at_s=50.0)
    assert LoadReading(104.0, 12.0, 52.0).others_since(before) == pytest.approx(1.0)
    assert LoadReading(101.0, 12.0, 52.0).others_since(before) == 0.0  # clocks of different resolution
    assert LoadReading(100.08, 10.0, 50.02).others_since(before) == 0.0  # a tick of the clock says nothing
    assert before.others_since(before) == 0.0


def test_cores_that_other_programs_take(machine: Machine) -> None:
    machine.set_cores(8, 8)
    assert not takes_cores(4.2, 4) and takes_cores(4.3, 4)  # four cores are free
    assert takes_cores(0.3, 8) and takes_cores(0.3, 100) and not takes_cores(0.2, 8)
    assert "3.0 of 8" in (busy_note(3.0, 8) or "") and busy_note(3.0, 4) is None
