"""From -dev to a device, on this machine and on described ones."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from moeedge import native
from moeedge.cli.engine_options import check_device
from moeedge.errors import BackendError, DeviceError
from moeedge.hardware import devices, nvidia, rpc
from moeedge.hardware.devices import ResolvedDevice, list_devices, resolve
from moeedge.hardware.host import total_memory
from moeedge.hardware.spec import DeviceSpec
from moeedge.llama import library
from tests.support.machine import CPU, GIB, Machine
from tests.support.worker import WorkerProcess

_BLAS = native.Device("BLAS", "ACCEL", "OpenBLAS", 0, 0, "BLAS")
_CUDA = native.Device("CUDA0", "GPU", "NVIDIA Made Up", 6 * GIB, 8 * GIB, "CUDA", "0000:01:00.0")
_IGPU = native.Device("Vulkan0", "IGPU", "a laptop's", 4, 8, "Vulkan", shares_host_memory=True)
_METAL = native.Device("MTL0", "GPU", "Apple Made Up", 4, 8, "MTL", shares_host_memory=True)


@pytest.fixture(autouse=True)
def llama_cpp() -> None:
    """llama.cpp with its log in the logger."""
    library.start()


def _resolve(text: str, *, bundled: bool = False) -> ResolvedDevice:
    return resolve(DeviceSpec.parse(text), bundled=bundled)


def _row(name: str) -> devices.DeviceRow:
    return next(row for row in list_devices() if row.name == name)


def test_auto_takes_the_first_gpu(machine: Machine) -> None:
    machine.offer(CPU, _CUDA, native.Device("CUDA1", "GPU", "another", 1, 1, "CUDA"))
    for bundled in (False, True):
        found = _resolve("auto", bundled=bundled)
        assert (found.kind, found.ggml_name, found.llama_device) == ("gpu", "CUDA0", "auto")
        assert (found.label, found.free_bytes, found.default_ratio) == ("CUDA0 (NVIDIA Made Up)", 6 * GIB, None)
        assert (found.pci_id, found.notes) == ("0000:01:00.0", [])


def test_auto_without_a_gpu_notifies_and_emulates_one_for_the_bundled_model(machine: Machine) -> None:
    machine.offer(CPU, _BLAS)
    found = _resolve("auto")
    assert found.kind == "none"
    assert len(found.notes) == 1 and "moeedge devices" in found.notes[0]
    found = _resolve("auto", bundled=True)
    assert (found.kind, found.default_ratio) == ("emulated", 0.17)
    assert "emulated" in found.label and "-dev none" in found.notes[0]


@pytest.mark.parametrize("shared", [_IGPU, _METAL])
def test_auto_skips_a_gpu_in_the_hosts_memory(shared: native.Device, machine: Machine) -> None:
    """Metal calls its devices GPUs: experts there would be in the same memory twice."""
    machine.offer(CPU, shared)
    found = _resolve("auto")
    assert (found.kind, found.llama_device) == ("none", "auto")
    assert f"-dev {shared.name}" in found.notes[0]
    assert _resolve(shared.name).ggml_name == shared.name
    row = _row(shared.name)
    assert row.usable and "auto does not choose it" in row.remark


def test_names(machine: Machine) -> None:
    machine.offer(CPU, _BLAS, _CUDA)
    assert (_resolve("CUDA0").kind, _resolve("CUDA0").llama_device) == ("gpu", "CUDA0")
    assert _resolve("CPU").kind == "none" and _resolve("none") == ResolvedDevice("none")
    with pytest.raises(DeviceError, match=r"'CUDA7'.*: auto, none, emulated, CPU, CUDA0") as caught:
        _resolve("CUDA7")
    assert caught.value.exit_code == 2
    with pytest.raises(DeviceError, match="BLAS has no memory of its own"):
        _resolve("BLAS")
    with pytest.raises(DeviceError, match="CUDA7"):
        check_device("CUDA7")
    check_device("rpc://absent:1")  # not touched


def test_emulated_is_labelled() -> None:
    found = _resolve("emulated:link=25GB/s,threads=1")
    assert found.label == "emulated (CPU, link 25 GB/s)"
    assert (found.ggml_name, found.link_bytes_per_s, found.threads) == ("emulated", 25_000_000_000, 1)
    assert 0 < found.free_bytes < found.total_bytes == total_memory()


def test_vram_readings(machine: Machine) -> None:
    assert devices.read_memory(_resolve("none")) is None
    emulated = devices.read_memory(_resolve("emulated"), pool_bytes=100, filled_bytes=40)
    assert emulated == devices.VramReading(40, 60, 100, "pool")
    machine.offer(CPU, _CUDA)
    gpu = _resolve("auto")
    assert devices.read_memory(gpu) == devices.VramReading(2 * GIB, 6 * GIB, 8 * GIB, "ggml")  # no driver here
    machine.patch(nvidia, "memory", lambda pci_id: (3 * GIB, 5 * GIB, 8 * GIB))
    assert devices.read_memory(gpu) == devices.VramReading(3 * GIB, 5 * GIB, 8 * GIB, "nvml")
    machine.patch(nvidia, "memory", lambda pci_id: (3 * GIB, 77 * GIB, 80 * GIB))
    assert devices.read_memory(gpu).source == "ggml", "a slice of a card: the driver reports the full card"
    remote = ResolvedDevice("rpc", endpoint="h:1", free_bytes=50, total_bytes=80)
    assert devices.read_memory(remote, pool_bytes=10) == devices.VramReading(40, 40, 80, "worker")


def test_without_rpc_the_build_is_named() -> None:
    if rpc.is_built_in():
        pytest.skip("llama.cpp was built with RPC")
    with pytest.raises(BackendError, match=r'without RPC.*CMAKE_ARGS="-DGGML_RPC=on" pip install --no-cache-dir'):
        _resolve("rpc://127.0.0.1:50052")
    with pytest.raises(DeviceError) as caught:
        _resolve("CUDA7")
    assert "rpc://HOST:PORT" not in caught.value.hint


def test_no_worker_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(DeviceError, match=rf"rpc://127.0.0.1:{port} .*refused.*--listen"):
        rpc.greet(f"127.0.0.1:{port}")
    with pytest.raises(DeviceError, match=r"rpc://absent\.invalid:1"):
        rpc.greet("absent.invalid:1")


@pytest.fixture
def listener() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(10)
    return server


def _endpoint(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_busy_worker_raises_an_error(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_ANSWER_S", 0.2)
    with listener, pytest.raises(DeviceError, match="busy"):
        rpc.greet(_endpoint(listener))  # accepted by the kernel, but not answered


@pytest.mark.flaky(reruns=2)
def test_waiting_for_a_worker_that_hangs_is_limited(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's waits get a limit from outside."""
    monkeypatch.setattr(rpc, "_HANGING_S", 1)
    with listener, socket.create_connection(listener.getsockname()) as connection:
        rpc.limit_waits(_endpoint(listener))
        start_s = time.monotonic()
        with pytest.raises(BlockingIOError):  # EAGAIN, an error to llama.cpp
            connection.recv(1)
        assert 0.5 < time.monotonic() - start_s < 5
        endpoint = _endpoint(listener)
    rpc.limit_waits(endpoint)  # no connection: no effect


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, "is not a moeedge worker"),
        (b"", "is not a moeedge worker"),
        ((28).to_bytes(8, "little") + bytes([6, 0]) + bytes(26), r"6\.0.* 7"),
    ],
)
def test_another_server_listens(listener: socket.socket, answer: bytes, reason: str) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener, pytest.raises(DeviceError, match=reason):
        rpc.greet(_endpoint(listener))
        thread.join()
    thread.join()


def test_a_worker_holds_no_layers_of_llama_cpp(worker: WorkerProcess) -> None:
    found = _resolve(worker.device)
    assert (found.kind, found.endpoint, found.label) == ("rpc", worker.endpoint, worker.device)
    assert 0 < found.free_bytes < found.total_bytes  # a CPU calls all of its memory free
    remote = {device.name: device for device in native.devices()}[found.ggml_name]
    assert (remote.kind, remote.total_bytes) == ("RPC", 0)
    assert not library.local_gpus()
    assert list(library.device_list(worker.device)) == [None]
    with pytest.raises(DeviceError, match=worker.device):
        _resolve(found.ggml_name)


def test_a_connection_is_shared_while_open_and_not_reused_later(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _resolve(worker.device)
    host, port = worker.endpoint.split(":")
    with socket.create_connection((host, int(port))):  # as a session has it
        assert _resolve(worker.device).ggml_name == first.ggml_name
    again = _resolve(worker.device)
    assert again.ggml_name != first.ggml_name
    assert again.label == first.label == worker.device
    rpc.mark_lost(worker.endpoint)
    monkeypatch.setattr(rpc, "_ANSWER_S", 0.2)
    with socket.create_connection((host, int(port))), pytest.raises(DeviceError, match="busy"):
        _resolve(worker.device)  # greeted in spite of the connection, which may be dead
