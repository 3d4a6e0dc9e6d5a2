"""Shared fixtures: tiny random-weight models, written once per session, and the bundled pair where it is installed."""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import pytest

import moeedge.cli.chat_options  # noqa: F401  its declarations make the settings of a chat
from moeedge import paths
from moeedge.cli.app import environment_kept
from moeedge.errors import ModelFileError
from moeedge.hub.remote import is_offline
from moeedge.native.compute import is_amx_disabled
from tests.support.cases import SLOW_CASES
from tests.support.counting import CountingDevice, Unavailable, compile_device, counting_device
from tests.support.machine import Here, Machine
from tests.support.stock import NO_AMX
from tests.support.tiny import tiny_factory
from tests.support.worker import WorkerProcess, start_worker


class TinyFactory(Protocol):
    """`tiny(arch, seed=0, **dimensions)`: the path of a tiny model, written at most once per session."""

    def __call__(self, arch: str, *, seed: int = 0, **overrides: Any) -> Path: ...


def pytest_configure() -> None:
    """Makes idle OpenMP threads yield soon: on a shared machine a spinning team waits for cores that others hold.

    Read when llama_cpp is loaded, which nothing does before the first test module is imported.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # of nohup, which what is tested would keep
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("MOEEDGE_NO_PROBE", "1")  # the tests make hundreds of files
    # processes that the tests start without our library keep away from AMX kernels that fail, too
    if is_amx_disabled():
        os.environ[NO_AMX] = "1"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Here:
    """This machine, of which the test replaces parts."""
    return Here(monkeypatch, tmp_path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine that is described in this test's folder."""
    return Machine(monkeypatch, tmp_path)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this test keeps for later runs is here."""
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _process_kept() -> Iterator[None]:
    """What a command that runs here changes in the process ends with its test: environment, logs, console, network."""
    loggers = [logging.getLogger(name) for name in ("moeedge", "moeedge.llama")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    with environment_kept():
        yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
    if (console := sys.modules.get("moeedge.ui.console")) is not None:
        console.set_modes(quiet=False, plain=False)
    hub = sys.modules.get("huggingface_hub.constants")
    if hub is not None:  # it reads the variable once, when it is imported
        hub.HF_HUB_OFFLINE = is_offline()  # type: ignore[attr-defined]


def pytest_report_header() -> str:
    """The versions that a failure has to be read with."""
    found = []
    for package in ("moeedge", "llama_cpp_python", "numpy", "gguf"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{', '.join(found)}, {platform.machine()}, {cores} cores"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of SLOW_CASES are slow, whatever the parameter's name is."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and any(isinstance(value, str) and value in SLOW_CASES for value in callspec.params.values()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFactory:
    """Makes tiny random-weight models; see tests/support/tiny.py for architectures and dimensions."""
    return tiny_factory(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_moe(tiny: TinyFactory) -> Path:
    """A qwen3moe target: 3 layers, 16 experts of which 4 are used, Q4_0 experts."""
    return tiny("qwen3moe")


@pytest.fixture(scope="session")
def tiny_draft(tiny: TinyFactory) -> Path:
    """A dense qwen3 draft of `tiny_moe`: the same vocabulary, about every fourth greedy token the same."""
    return tiny("qwen3")


@pytest.fixture(scope="session")
def model(tiny_moe: Path) -> Iterator[Any]:
    """The `Model` of `tiny_moe`: shape and vocabulary, without weights."""
    from moeedge.llama.model import Model

    with Model.load(tiny_moe, header_only=True) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def bundled_pair() -> tuple[Path, Path]:
    """The bundled target and draft; skips where the installation has none."""
    try:
        return paths.bundled_target(), paths.bundled_draft()
    except ModelFileError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder that $MOEEDGE_DATA names; skips without one."""
    folder = paths.data_dir()
    if folder is None or not folder.is_dir():
        pytest.skip("MOEEDGE_DATA names no folder of prompt sets")
    return folder


@pytest.fixture(scope="module")
def counting() -> Iterator[CountingDevice]:
    """The counting device, a GPU to llama.cpp and to us while the module's tests run; skips without a compiler."""
    try:
        compile_device()
    except Unavailable as error:
        pytest.skip(str(error))
    with counting_device() as device:
        yield device


@pytest.fixture(scope="session")
def needs_rpc() -> None:
    """Skips where llama.cpp was built without RPC, and $GGML_BACKEND_PATH does not bring it."""
    from moeedge.hardware import rpc
    from moeedge.llama import library

    library.start()
    if not rpc.is_built_in():
        pytest.skip("llama.cpp was built without RPC (CMAKE_ARGS=-DGGML_RPC=on)")


@pytest.fixture
def worker(needs_rpc: None) -> Iterator[WorkerProcess]:
    """A worker of this test's own that serves the CPU."""
    with start_worker() as process:
        yield process
