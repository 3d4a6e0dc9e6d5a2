"""Each check of `moeedge doctor`, on machines that lack something; the table of environment variables is complete."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from moeedge import native, paths
from moeedge.errors import BackendError, ModelFileError
from moeedge.health import doctor
from moeedge.health.doctor import BY_NAME, VARIABLES, Finding, checked
from moeedge.native.compute import Kernel
from moeedge.scheduler.disk import quick_rate
from tests.support.commands import reference
from tests.support.machine import Here, Machine

ROOT = Path(__file__).parents[2]
PLACES = ("moeedge", "tests", "models", ".ci")
SUFFIXES = (".py", ".cpp", ".h", ".txt", ".cmake", ".sh")
READ = re.compile(r"""(?:environ(?:\.get|\.setdefault|\.pop)?[\[(]|getenv\(|ENV\{)\s*["']?([A-Z][A-Z0-9_]+)""")
# a name in a string: of our prefix, and those that other libraries read and we mention
NAMED = re.compile(r"""["'](MOEEDGE_[A-Z_]+|HF_[A-Z_]+|HUGGINGFACE_[A-Z_]+|GGML_[A-Z_]+|GOMP_[A-Z]+|NO_COLOR)["']""")
NOT_OURS = {
    "PATH_VARIABLE",  # a constant of ours: GGML_BACKEND_PATH
    "LIBRARY_VARIABLE",  # likewise, in the tests
    "GGML_CUDA_REGISTER_HOST",  # set for ggml, whatever the user has
    "HUB_FILE",  # likewise, of an option of llama.cpp
    "PATH",
    "HOME",
    "XTERM_VERSION",  # by which terminals name themselves
    "STY",
}
OF_LIBRARIES = {  # which those below moeedge read by themselves
    "HF_TOKEN", "HF_HUB_DOWNLOAD_TIMEOUT", "HTTPS_PROXY", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "TMPDIR", "COLUMNS", "CMAKE_ARGS",
}  # fmt: skip


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_findings_before_an_error_are_kept() -> None:
    def check() -> Iterable[Finding]:
        yield Finding("first", "ok", "there")
        raise BackendError("It is gone.", "Bring it back.")

    assert checked("second", check) == [
        Finding("first", "ok", "there"),
        Finding("second", "broken", "It is gone.", "Bring it back."),
    ]


def test_this_installation_works() -> None:
    assert [finding.status for finding in doctor.library()] == ["ok", "ok"]
    assert {finding.status for finding in doctor.bundled_files()} == {"ok"}


def test_a_library_of_another_version_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise BackendError("moeedge was compiled for another.", "Install it again.")

    monkeypatch.setattr(native, "load", load)
    finding = checked("library", doctor.library)[-1]
    assert (finding.status, finding.hint) == ("broken", "Install it again.")


def test_gpus_that_are_used_and_that_are_not(here: Here) -> None:
    here.offer()
    assert only(doctor.gpu()).status == "ok"
    here.offer(cards=("NVIDIA Made Up",))
    missed = only(doctor.gpu())
    assert missed.status == "warning" and "--backend" in missed.hint
    cuda = native.Device("CUDA0", "GPU", "NVIDIA Made Up", 2**33, 2**34, "CUDA")
    here.offer(cuda, cards=("NVIDIA Made Up",))
    used = only(doctor.gpu())
    assert used.status == "ok" and "8.0 GiB of 16.0 GiB" in used.text


def test_a_missing_pair_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Path:
        raise ModelFileError("This installation lacks target.gguf.", "Install again.")

    monkeypatch.setattr(paths, "bundled_target", absent)
    pair, catalog = doctor.bundled_files()
    assert (pair.status, pair.hint, catalog.status) == ("warning", "Install again.", "ok")


def test_a_malformed_catalog_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[[model]\n")
    monkeypatch.setenv("MOEEDGE_CATALOG", str(tmp_path / "own.toml"))
    assert checked("catalog", doctor.bundled_files)[-1].status == "broken"


def kernel(instructions: str, layout: str, speed: float, *, is_equal: bool = True) -> Kernel:
    return Kernel(instructions, layout, is_equal, *(speed,) * 5, 0)


def test_kernels_with_other_bits_are_not_counted(here: Here) -> None:
    here.set_kernels(kernel("new", "q4_0", 2.5), kernel("new", "q8_0", 3.0, is_equal=False), kernel("old", "q4_0", 1.2))
    text = only(doctor.kernels()).text
    assert "(new)" in text and "1 of 1" in text and "2.5" in text and "1 not used" in text
    here.set_kernels(kernel("new", "q4_0", 2.5, is_equal=False))
    assert only(doctor.kernels()).status == "info"


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "infinity"), ("OMP_WAIT_POLICY", "ACTIVE")])
def test_threads_that_keep_their_cores(
    machine: Machine, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set_load(0.0)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert only(doctor.threads()).status == "ok"
    monkeypatch.setenv(name, value)
    assert only(doctor.threads()).status == "warning"


def test_a_busy_machine_and_a_containers_limit(machine: Machine) -> None:
    machine.set_cores(4, 4, 1.5)
    machine.set_load(0.0)
    assert "1.5" in only(doctor.threads()).text
    machine.set_load(1000.0)
    assert only(doctor.threads()).status == "warning"


def test_little_memory_and_an_old_processor(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write("large-pages", "always [madvise] never\n")
    assert only(doctor.memory()).status == "ok"
    machine.write("large-pages", "always madvise [never]\n")
    assert only(doctor.memory()).status == "info"
    machine.set_memory(2**28, 2**34)
    assert only(doctor.memory()).status == "warning"
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert only(doctor.processor()).status == "info"
    machine.write("cpuinfo", "flags: avx2\n")
    assert only(doctor.processor()).status == "ok"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_folders_that_may_be_written(hub: Path) -> None:
    models, disk = doctor.models()
    assert (models.status, models.topic, disk.topic) == ("ok", "models", "disk")
    assert disk.status in ("ok", "info")  # by the speed of this machine's disk
    assert not hub.exists()  # looking makes nothing
    assert "nothing measured" in only(doctor.kept_files()).text


def test_folders_that_may_not_be_written(hub: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.set_access(False)
    assert next(finding.status for finding in doctor.models()) == "warning"
    assert only(doctor.kept_files()).status == "warning"
    monkeypatch.setenv("MOEEDGE_CACHE", "/proc/none")
    finding = only(doctor.kept_files())
    assert finding.status == "warning" and "MOEEDGE_CACHE" in finding.hint
    here.set_access(True)
    here.set_disk(10**8)
    assert next(finding.status for finding in doctor.models()) == "warning"  # the disk is full


def test_a_glance_at_a_disk(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(2**22))
    speed, _ = quick_rate(file, read_s=0.01)
    assert speed > 1e6
    file.write_bytes(b"short")
    with pytest.raises(ModelFileError):
        quick_rate(file)


def test_variables_that_cannot_be_right(tmp_path: Path) -> None:
    def found(**values: str) -> dict[str, str]:
        findings = doctor.environment(values, honoured=["LLAMA_ARG_CTX_SIZE"])
        return {finding.text.partition("=")[0]: finding.status for finding in findings}

    assert found() == {"none set that acts here": "ok"}
    assert found(MOEEDGE_CACHE="/c")["MOEEDGE_CACHE"] == "ok"
    assert found(MOEEDGE_DATA=str(tmp_path / "no"))["MOEEDGE_DATA"] == "warning"
    assert found(MOEEDGE_INSTRUCTIONS="avx2")["MOEEDGE_INSTRUCTIONS"] == "ok"
    assert found(MOEEDGE_INSTRUCTIONS="avx3")["MOEEDGE_INSTRUCTIONS"] == "warning"
    assert found(MOEEDGE_LIBRARY=str(tmp_path / "no.so"))["MOEEDGE_LIBRARY"] == "broken"
    assert found(MOEEDGE_CASHE="/c")["MOEEDGE_CASHE"] == "warning"
    assert found(HF_HUB_OFFLINE="1")["HF_HUB_OFFLINE"] == "info"
    assert found(LLAMA_ARG_CTX_SIZE="1")["LLAMA_ARG_CTX_SIZE"] == "ok"
    assert found(LLAMA_ARG_PORT="1")["LLAMA_ARG_PORT"] == "info"
    assert found(TERM="xterm", XDG_CACHE_HOME="/x", HF_HOME="", PATH="/bin") == found()
    texts = [finding.text for finding in doctor.environment({"HF_TOKEN": "hf_secret", "MOEEDGE_CASHE": "/c"})]
    hints = [finding.hint for finding in doctor.environment({"MOEEDGE_CASHE": "/c"})]
    assert "(set)" in texts[0] and "hf_secret" not in str(texts) and "MOEEDGE_CACHE" in hints[-1]


def sources(*places: str) -> dict[Path, str]:
    files = [path for place in places for path in (ROOT / place).rglob("*") if path.suffix in SUFFIXES]
    return {path: path.read_text(encoding="utf-8") for path in files}


def test_every_variable_that_the_program_reads_is_in_the_table() -> None:
    found = {name for text in sources("moeedge").values() for name in READ.findall(text) + NAMED.findall(text)}
    found = {name for name in found if not name.startswith(("LLAMA_ARG_", "MOEEDGE_LLAMA_CPP")) and name.isupper()}
    assert {"MOEEDGE_CACHE", "HUGGINGFACE_HUB_CACHE", "MOEEDGE_WERROR", "GGML_CPU_DISABLE_FUSION"} <= found
    assert found - NOT_OURS <= BY_NAME.keys(), "add them to moeedge/health/doctor.py"


def test_every_variable_of_ours_in_tests_is_in_the_table() -> None:
    found = {name for text in sources("tests", ".ci").values() for name in READ.findall(text)}
    assert {name for name in found if name.startswith("MOEEDGE_")} <= BY_NAME.keys()


def test_every_variable_of_the_table_is_read() -> None:
    text = "\n".join(
        text for path, text in sources(*PLACES).items() if path.name not in ("doctor.py", Path(__file__).name)
    )
    for variable in VARIABLES:
        assert variable.name in text or variable.name in OF_LIBRARIES, variable.name


def test_the_reference_has_them() -> None:
    assert [variable.name for variable in VARIABLES if f"| `{variable.name}`" not in reference()] == []
