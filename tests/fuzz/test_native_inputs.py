"""The native library's functions that take what a file or a user says, by libFuzzer under the address sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from tests.fuzz.gguf_header import parse
from tests.native.test_sanitizers import ROOT

SECONDS = os.environ.get("FUZZ_S")
CLANG = next(filter(None, map(shutil.which, ("clang++", *(f"clang++-{n}" for n in range(22, 13, -1))))), None)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or CLANG is None, reason="needs clang++ on Linux")
def test_no_input_breaks_the_native_library(tiny_moe: Path, tmp_path: Path) -> None:
    """The same inputs each time, or with FUZZ_S others for so many seconds."""
    assert CLANG is not None
    native, headers = ROOT / "moeedge" / "native", next(ROOT.glob("build/*/ggml-headers"), None)
    if headers is None:
        pytest.skip("llama.cpp's headers come with a build of this checkout")
    shutil.copytree(headers, tmp_path / "ggml-headers")
    libraries = Path(llama_cpp.__file__).parent / "lib"
    flags = "-fsanitize=fuzzer-no-link"
    commands = [
        f"cmake -S {native} -B {tmp_path} -DMOEEDGE_SANITIZE=address -DCMAKE_BUILD_TYPE=Debug "
        f"-DPython_EXECUTABLE={sys.executable} -DCMAKE_CXX_COMPILER={CLANG} -DCMAKE_CXX_FLAGS={flags}",
        f"cmake --build {tmp_path} --parallel 2",
        f"{CLANG} -g -O1 -fsanitize=fuzzer,address -I {native / 'include'} -I {headers} "
        f"{Path(__file__).with_name('native_inputs.cpp')} {tmp_path / 'libmoeedge.so'} -Wl,-rpath,{tmp_path} "
        f"-Wl,-rpath,{libraries} -L {libraries} -lggml-base -lggml -lggml-cpu -o {tmp_path / 'fuzz'}",
    ]
    for command in commands:
        built = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if "libclang_rt" in built.stderr:
            pytest.skip("clang's sanitizers are not installed")
        assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    data = tiny_moe.read_bytes()
    (corpus / "header").write_bytes(b"\0" + data[: parse(data).size])  # the first byte: moeedge_open_gguf
    options = ["-runs=100000", "-seed=1"] if SECONDS is None else [f"-max_total_time={SECONDS}"]
    options += ["-max_len=40000", "-rss_limit_mb=4000", "-timeout=10"]
    done = subprocess.run([tmp_path / "fuzz", corpus, *options], capture_output=True, text=True, errors="replace",
                          cwd=tmp_path, timeout=None if SECONDS else 300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
