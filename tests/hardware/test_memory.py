"""Free memory in a container, from a fake folder of control groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from moeedge.hardware import devices, memory
from moeedge.hardware.devices import ResolvedDevice

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB with 48 GiB available, and no control groups."""
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=48 * GIB))
    return tmp_path


def write_group(folder: Path, version: int, limit: str, used: int, cached: int, *, high: str = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}
    prefix = "total_"
    if version == 2:
        files = {"memory.max": limit, "memory.high": high, "memory.current": used}
        prefix = ""
    files["memory.stat"] = f"anon 5\n{prefix}active_file {cached // 2}\n{prefix}inactive_file {cached // 2}"
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_without_control_groups(groups: Path) -> None:
    assert (memory.available_memory(), memory.total_memory()) == (48 * GIB, 64 * GIB)
    (groups / "membership").write_text("0::/some/group\n")
    assert (memory.available_memory(), memory.total_memory()) == (48 * GIB, 64 * GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_the_page_cache_of_a_container_is_free(groups: Path, version: int) -> None:
    membership = "0::/app/one\n" if version == 2 else "11:cpu,cpuacct:/\n4:memory:/app/one\n"
    (groups / "membership").write_text(membership)
    root = groups if version == 2 else groups / "memory"
    write_group(root / "app/one", version, str(8 * GIB), 6 * GIB, 4 * GIB)
    assert (memory.available_memory(), memory.total_memory()) == (6 * GIB, 8 * GIB)
    write_group(root / "app", version, str(4 * GIB), 3 * GIB, 0)
    assert (memory.available_memory(), memory.total_memory()) == (GIB, 4 * GIB), "a group around it has less"
    reading = devices.read_memory(ResolvedDevice("ram"))
    assert reading is not None and (reading.free_bytes, reading.total_bytes) == (GIB, 4 * GIB)
    assert devices.ram(ResolvedDevice("none")).free_bytes == GIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_whose_group_is_at_the_root(groups: Path, version: int) -> None:
    """Its membership names a folder that only the host has."""
    (groups / "membership").write_text("0::/docker/abc\n" if version == 2 else "4:memory:/docker/abc\n")
    root = groups if version == 2 else groups / "memory"
    write_group(root, version, str(2 * GIB), GIB, 0)
    assert memory.available_memory() == GIB


def test_a_limit_above_which_a_group_is_slowed_down(groups: Path) -> None:
    (groups / "membership").write_text("0::/\n")
    write_group(groups, 2, "max", 5 * GIB, 0, high=str(4 * GIB))
    assert (memory.available_memory(), memory.total_memory()) == (0, 4 * GIB)
    write_group(groups, 2, "max", 5 * GIB, 0)
    assert memory.available_memory() == 48 * GIB


def test_files_of_another_form(groups: Path) -> None:
    (groups / "membership").write_text("0::/\n")
    write_group(groups, 2, str(GIB), 0, 0)
    (groups / "memory.stat").write_text("nothing here\n")
    assert memory.available_memory() == 48 * GIB


def test_what_fits_leaves_a_reserve(groups: Path) -> None:
    assert [memory.default_reserve(gib * GIB) // 2**20 for gib in (4, 8, 24, 141)] == [256, 256, 768, 1024]
    assert memory.fits(7 * GIB, free_bytes=8 * GIB, total_bytes=32 * GIB)
    assert not memory.fits(7 * GIB + 1, free_bytes=8 * GIB, total_bytes=32 * GIB)
    assert memory.fits(47 * GIB) and not memory.fits(47 * GIB + 1)
