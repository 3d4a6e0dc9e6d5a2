"""The native library under the address, undefined-behaviour and thread sanitizers, attached to stock llama.cpp."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TinyFactory
from tests.native.conftest import ROOT, run_python

STRESS_S = 4.0  # of moving experts at random, see cache_stress
CASES = ("qwen3moe", "llama", "deepseek2", "gpt-oss", "llama4")
HYBRID_CASES = (("qwen3moe", {}), ("gpt-oss", {}), ("deepseek2", {"merged": True}))
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
MARKS = {"address": b"__asan_", "undefined": b"__ubsan_", "thread": b"__tsan_"}

# llama.cpp is not instrumented: the barriers of its thread team are invisible. glibc reuses thread-local memory.
SUPPRESSIONS = """\
called_from_lib:libggml-cpu.so
called_from_lib:libggml-base.so
called_from_lib:libllama.so
race:_dl_deallocate_tls
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizer's runtime as Linux does"),
    pytest.mark.skipif(not all(map(shutil.which, ("cmake", "c++"))), reason="needs cmake and a C++ compiler"),
]


def runtime(sanitizer: str) -> str:
    """The compiler's runtime library, which has to be in the process before anything else; skips without one."""
    name = RUNTIMES[sanitizer]
    path = subprocess.run(
        ["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return path


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all builds; llama.cpp's headers come from a build of this checkout, else they are fetched.

    The build compares their hash with the expected one and fetches them if it differs.
    """
    folder = tmp_path_factory.mktemp("native")
    for headers in sorted(ROOT.glob("build/*/ggml-headers")):
        shutil.copytree(headers, folder / "ggml-headers", dirs_exist_ok=True)
    return folder


def build(sanitizer: str, folder: Path) -> Path:
    """Configures and compiles the library with the sanitizer, warnings as errors; skips without llama.cpp's headers."""
    configure = ["cmake", "-S", str(ROOT / "moeedge" / "native"), "-B", str(folder), f"-DMOEEDGE_SANITIZE={sanitizer}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Debug", "-DMOEEDGE_WERROR=ON"]
    for command in (configure, ["cmake", "--build", str(folder), "--parallel", "2"]):
        result = subprocess.run(command, capture_output=True, text=True, timeout=900)
        output = result.stdout + result.stderr
        if "pip could not fetch" in output:
            pytest.skip("llama.cpp's headers cannot be fetched here")
        assert result.returncode == 0, output
    library = folder / "libmoeedge.so"
    assert MARKS[sanitizer] in library.read_bytes(), "the library is not instrumented"
    return library


@pytest.mark.parametrize("sanitizer", RUNTIMES)
def test_no_reports(sanitizer: str, tiny: TinyFactory, build_folder: Path) -> None:
    preload = runtime(sanitizer)
    suppressions = build_folder / "suppressions.txt"
    suppressions.write_text(SUPPRESSIONS)
    environment = {
        "MOEEDGE_LIBRARY": str(build(sanitizer, build_folder)),
        "LD_PRELOAD": preload,
        # Python itself leaks at exit; everything else ends the process
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=99",
        "TSAN_OPTIONS": f"exitcode=99:suppressions={suppressions}",
    }
    run_driver("sanitizer_driver", [str(tiny(arch)) for arch in CASES], environment)
    run_driver("cache_stress", [str(STRESS_S)], environment)
    models = [tiny(arch, experts=32, **dimensions) for arch, dimensions in HYBRID_CASES]
    run_driver("hybrid_driver", list(map(str, models)), environment)
    run_driver("ram_driver", list(map(str, models)), environment)


def run_driver(name: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Check that a driver of tests/support succeeds without a report of the sanitizer."""
    result = run_python("-m", f"tests.support.{name}", *arguments, **environment)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("this kernel maps memory where the compiler's ThreadSanitizer does not expect it")
    assert "Sanitizer" not in result.stderr, result.stderr
    assert "runtime error" not in result.stderr, result.stderr
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
