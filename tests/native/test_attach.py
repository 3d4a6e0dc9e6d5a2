"""Attaching: version checks, the exported entry point, and loading into an unmodified llama.cpp program."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import shutil
import subprocess
from ctypes import c_char_p, c_size_t
from pathlib import Path

import numpy as np
import pytest

from moeedge import native
from moeedge.errors import BackendError, VersionMismatchError
from moeedge.llama import library as engine_library
from tests.conftest import TinyFactory
from tests.native.conftest import printed
from tests.support.cases import ATTENTION_CASES, SLOW_CASES, case_model
from tests.support.commands import run
from tests.support.raw_ggml import ggml
from tests.support.stock import StockContext, transcript


def test_attach_twice_registers_one_device() -> None:
    native.attach()
    native.load().moeedge_register()
    engine_library.start()
    n_devices = ggml("ggml_backend_dev_count", result=c_size_t)
    handles = [ggml("ggml_backend_dev_get", c_size_t(i)) for i in range(n_devices)]
    assert [ggml("ggml_backend_dev_name", handle, result=c_char_p) for handle in handles].count(b"MOEEDGE") == 1
    found = native.devices()  # without ours
    assert [device.kind for device in found].count("CPU") == 1
    assert "MOEEDGE" not in [device.name for device in found]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the system has no large pages")
def test_large_buffers_are_in_large_pages() -> None:
    native.attach()
    buffer = ggml("ggml_backend_buft_alloc_buffer", ggml("ggml_backend_cpu_buffer_type"), c_size_t(8 << 20))
    assert buffer
    middle, is_inside, advised = ggml("ggml_backend_buffer_get_base", buffer) + (4 << 20), False, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            advised = "hg" in line.split()
    ggml("ggml_backend_buffer_free", buffer, result=None)
    assert advised


def test_another_llama_cpp_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names both versions and the hint the fix; only the version string is faked."""
    installed = importlib.metadata.version("llama-cpp-python")
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.3.99" if name == "llama-cpp-python" else real(name)
    )
    with pytest.raises(VersionMismatchError) as caught:
        native.load.__wrapped__()
    assert "0.3.99" in caught.value.message
    assert installed in caught.value.message
    assert f"pip install llama-cpp-python=={installed}" in caught.value.hint


def test_another_backend_api_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_for = native.load().moeedge_backend_api_version()
    assert native.library.installed_api_version() == compiled_for
    monkeypatch.setattr(native.library, "installed_api_version", lambda: compiled_for + 1)
    with pytest.raises(VersionMismatchError, match=f"API {compiled_for}.* has {compiled_for + 1}"):
        native.load.__wrapped__()


ATTACH = """\
import ctypes
from moeedge import native
from moeedge.errors import VersionMismatchError
try:
    native.attach()
except VersionMismatchError as error:
    print(error)
native.load().ggml_backend_init.restype = ctypes.c_void_p
print(native.load().ggml_backend_init())
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_another_ggml_is_rejected(tmp_path: Path) -> None:
    """A ggml whose ggml_version() differs: neither entry point registers the backend."""
    other = tmp_path / "libother.so"
    source = b'const char * ggml_version(void) { return "9.9.9"; }'
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(other), "-x", "c", "-"], input=source, check=True)
    message, entry = printed("-c", ATTACH, LD_PRELOAD=str(other)).splitlines()
    assert "compiled for ggml" in message
    assert entry == "None"


@pytest.mark.parametrize(("content", "message"), [(None, "not at"), (b"no ELF file", "cannot be loaded")])
def test_a_missing_or_damaged_library(
    content: bytes | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "libmoeedge.so"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("MOEEDGE_LIBRARY", str(file))
    with pytest.raises(BackendError, match=message):
        native.load.__wrapped__()


def test_entry_point_states_the_api_version() -> None:
    library = native.load()
    library.ggml_backend_init.restype = ctypes.POINTER(ctypes.c_int)
    registration = library.ggml_backend_init()
    assert registration[0] == library.moeedge_backend_api_version()
    path = Path(run("devices", "--library").stdout.strip())
    assert path == native.library_path()
    assert ctypes.CDLL(str(path)).ggml_backend_init


def test_stock_program_loads_us_by_environment(tiny: TinyFactory, tmp_path: Path) -> None:
    """GGML_BACKEND_PATH alone: every architecture, a dense one too, equals the same program without it."""
    paths = [case_model(tiny, case) for case in ATTENTION_CASES if case not in SLOW_CASES]
    paths += [tiny("qwen3"), tiny("llama", experts=0)]
    results = []
    for library in ("", str(native.library_path())):
        out = tmp_path / "rows.npz"
        printed("-m", "tests.support.stock", out, 1, *paths, GGML_BACKEND_PATH=library)
        with np.load(out) as rows:
            results.append(dict(rows))
    stock, ours = results
    graphs = ours.pop("graphs")
    assert stock.keys() == ours.keys()
    for name, rows in stock.items():
        assert np.array_equal(rows, ours[name]), name
    # by default an instance takes the MoE blocks and leaves dense models to the CPU backend
    assert (graphs[:-2] > 0).all()
    assert (graphs[-2:] == 0).all()


def test_closed_contexts_free_their_instances(tiny_moe: Path) -> None:
    engine_library.start()
    before = native.load().moeedge_live_instances()
    with StockContext(tiny_moe) as context:
        assert native.load().moeedge_live_instances() == before + 1
        transcript(context)
    assert native.load().moeedge_live_instances() == before


def test_amx_kernels_of_llama_cpp_that_fail_are_off(tiny: TinyFactory) -> None:
    """A prompt of a quantized model ends with an answer, not with a signal, in a process that one would end."""
    path = tiny("qwen3moe", embd=256, dense_type="Q8_0")
    program = (
        "import sys; from pathlib import Path; from moeedge.llama import library; library.start()\n"
        "from tests.support.stock import StockContext\n"
        "with StockContext(Path(sys.argv[1]), n_threads=2) as stock: stock.decode(list(range(40, 72)))"
    )
    printed("-c", program, path)
    found = []
    for repack in (True, False):
        with StockContext(path, repack=repack) as stock:
            found.append(stock.decode(list(range(40, 72))))  # AMX computes batches of several tokens
    assert np.abs(found[0] - found[1]).max() < 0.05 * found[1].std()
