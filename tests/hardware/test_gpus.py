"""GPUs that llama.cpp cannot use, in trees as Linux shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeedge import native
from moeedge.hardware import gpus, nvidia
from moeedge.hardware.devices import list_devices, resolve
from moeedge.hardware.gpus import PresentGpu, present_gpus, unused_gpus
from moeedge.hardware.spec import DeviceSpec
from moeedge.llama import library
from tests.support.machine import CPU, Machine

Add = Callable[..., Path]


@pytest.fixture
def add(machine: Machine) -> Add:
    """Adds a PCI device to a machine that has none, and returns its folder."""
    library.start()
    machine.patch(gpus.sys, "platform", "linux")

    def add(pci_id: str, vendor: str, device: str, driver: str = "", *, kind: str = "0x030000", node: str = "") -> Path:
        folder = f"sys/bus/pci/devices/{pci_id}"
        for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
            path = machine.write(f"{folder}/{name}", text + "\n").parent
        if driver:
            target = machine.root / "sys/bus/pci/drivers" / driver
            target.mkdir(parents=True, exist_ok=True)
            (path / "driver").symlink_to(target)
        if node:
            (path / "drm" / node).mkdir(parents=True)
            (path / "drm" / "card0").mkdir()
            machine.write(f"dev/dri/{node}", "")
        return path

    return add


def notes_of(device: str) -> str:
    return " ".join(resolve(DeviceSpec.parse(device)).notes)


def test_screens_without_a_gpu_and_other_devices_are_none(add: Add) -> None:
    add("0000:00:01.0", "0x1af4", "0x1050")  # a virtual screen
    add("0000:00:02.0", "0x1a03", "0x2000")  # a server's
    add("0000:00:03.0", "0x8086", "0x1533", "igb", kind="0x020000")  # a network card of Intel
    assert present_gpus() == []


def test_an_amd_card_without_a_backend(add: Add, machine: Machine) -> None:
    folder = add("0000:03:00.0", "0x1002", "0x744c", "amdgpu", node="renderD128")
    (folder / "mem_info_vram_total").write_text(f"{24 * 2**30}\n")
    names = "10de  NVIDIA\n\t744c  another\n1002  Advanced\n\t744b  wrong\n\t744c  Navi 31\n\t\t1002 0e3b  x\n"
    machine.write("usr/share/misc/pci.ids", names)
    (gpu,) = present_gpus()
    assert (gpu.vendor, gpu.name, gpu.driver, gpu.total_bytes) == ("AMD", "AMD Navi 31", "amdgpu", 24 * 2**30)
    assert gpu.lacks_backend and not gpu.in_processor
    row = next(row for row in list_devices() if row.name == "AMD Navi 31")
    assert not row.usable and row.total_bytes == 24 * 2**30
    assert "--backend FILE" in row.remark and "-DGGML_HIP=on" in row.remark
    assert "Navi 31" in notes_of("auto")


def test_one_that_llama_cpp_uses_is_not_listed_again(add: Add) -> None:
    for pci_id in ("0000:03:00.0", "0000:04:00.0"):
        add(pci_id, "0x1002", "0x744c", "amdgpu", node=f"renderD{pci_id[6]}")
    rocm = native.Device("ROCm0", "GPU", "Radeon", 1, 1, "ROCm", "0000:04:00.0")
    assert [gpu.pci_id for gpu in unused_gpus([CPU, rocm])] == ["0000:03:00.0"]
    vulkan = native.Device("Vulkan0", "GPU", "AMD Radeon RX", 1, 1, "Vulkan")  # which tells no address
    assert [gpu.pci_id for gpu in unused_gpus([CPU, vulkan])] == ["0000:04:00.0"]
    assert unused_gpus([CPU, rocm, vulkan]) == []
    same = native.Device("Vulkan0", "GPU", "AMD Radeon RX", 1, 1, "Vulkan", "0000:04:00.0")
    assert [gpu.pci_id for gpu in unused_gpus([CPU, rocm, same])] == ["0000:03:00.0"]
    other = native.Device("CUDA0", "GPU", "NVIDIA Made Up", 1, 1, "CUDA", "0000:01:00.0")
    assert len(unused_gpus([CPU, other])) == 2


@pytest.mark.parametrize(("driver", "text"), [("", "no driver"), ("nouveau", "nouveau"), ("vfio-pci", "virtual")])
def test_a_card_without_its_driver(add: Add, driver: str, text: str) -> None:
    add("0000:01:00.0", "0x10de", "0x2684", driver, kind="0x030200")
    (gpu,) = present_gpus()
    assert not gpu.is_driven and not gpu.lacks_backend
    assert text in gpu.advice and "CMAKE_ARGS" not in gpu.advice
    assert notes_of("none") == "" and gpu.name not in notes_of("auto")  # only in moeedge devices


def test_a_card_that_the_driver_names(add: Add, machine: Machine) -> None:
    add("0000:01:00.0", "0x10de", "0x2684", "nvidia")
    information = "Model: \t\t NVIDIA Made Up\nIRQ:   \t\t 80\n"
    machine.write("proc/driver/nvidia/gpus/0000:01:00.0/information", information)
    (gpu,) = present_gpus()  # of the host, in a container without it
    assert gpu.name == "NVIDIA Made Up" and not gpu.reachable and "--gpus all" in gpu.advice
    machine.offer(CPU, cards=("NVIDIA Made Up Ti", "NVIDIA of WSL"))
    first, second = present_gpus()
    assert first.name == "NVIDIA Made Up Ti" and first.lacks_backend and "-DGGML_CUDA=on" in first.advice
    assert (second.name, second.pci_id) == ("NVIDIA of WSL", "") and second.lacks_backend


def test_a_device_file_that_is_closed_to_the_user(add: Add, machine: Machine) -> None:
    add("0000:03:00.0", "0x8086", "0x56a0", "xe", node="renderD128")
    machine.set_access(False)
    (gpu,) = present_gpus()
    assert gpu.blocked.endswith("renderD128") and "usermod" in gpu.advice and not gpu.lacks_backend


def test_graphics_in_a_processor_are_listed_but_not_suggested(add: Add) -> None:
    add("0000:00:02.0", "0x8086", "0x9a49", "i915", node="renderD128")
    apu = add("0000:c1:00.0", "0x1002", "0x15bf", "amdgpu", node="renderD129")
    (apu / "mem_info_vram_total").write_text(str(2**29))
    assert [gpu.in_processor for gpu in present_gpus()] == [True, True]
    assert len([row for row in list_devices() if row.description in ("Intel", "AMD")]) == 2
    assert "Intel" not in notes_of("auto") and "AMD" not in notes_of("auto")


def test_a_mac_without_metal(machine: Machine) -> None:
    machine.patch(gpus.sys, "platform", "darwin")
    (gpu,) = unused_gpus([CPU])
    assert gpu == PresentGpu("Apple", "the Mac's GPU", in_processor=True) and "-DGGML_METAL=on" in gpu.advice
    metal = native.Device("MTL0", "GPU", "Apple M9", 4, 8, "MTL", shares_host_memory=True)
    assert unused_gpus([CPU, metal]) == []


def test_memory_of_processes_as_nvidias_driver_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Exception):
        pass

    def processes(card: int) -> list[SimpleNamespace]:
        if card == 2:
            raise Lost
        return [SimpleNamespace(pid=7, usedGpuMemory=100), SimpleNamespace(pid=card, usedGpuMemory=None)]

    driver = SimpleNamespace(
        NVMLError=Lost,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=processes,
    )
    monkeypatch.setattr(nvidia, "_nvml", lambda: driver)
    assert nvidia.process_bytes() == {7: 200}
