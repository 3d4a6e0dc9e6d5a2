"""`moeedge pull` and `rm` against a local hub: the files that arrive and go, the requests, and the failures."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from moeedge.errors import DownloadError
from moeedge.hub import remote
from tests.hub.conftest import BIG, SMALL, HubMachine, sha256

INCOMPLETE = ".incomplete"


@pytest.fixture
def pair(place: HubMachine, bundled_pair: tuple[Path, Path]) -> HubMachine:
    """The machine with the bundled pair in place of its files."""
    place.hub.files[BIG], place.hub.files[SMALL] = (path.read_bytes() for path in bundled_pair)
    place.write_catalog()
    return place


def test_pull_and_chat(pair: HubMachine) -> None:
    absent = pair.run("chat", "-m", "big", "-p", "Hello", "--offline", code=2)
    assert "big (2" in absent.stderr and "moeedge pull big" in absent.stderr
    pulled = pair.run("pull", "big", "-o", "json")
    target_row, draft_row = json.loads(pulled.stdout)
    assert (target_row["role"], target_row["licence"], target_row["missing"]) == ("target", "mit", [])
    assert Path(target_row["path"]).read_bytes() == pair.hub.files[BIG]
    assert Path(draft_row["path"]).read_bytes() == pair.hub.files[SMALL]
    arguments = ["chat", "-m", "BIG:1b", "-p", "What is 3 + 4?", "-n", "16", "-t", "1", "-dev", "none", "--temp", "0"]
    answer = pair.run(*arguments)
    assert "7" in answer.stdout
    assert "The draft is small" in answer.stderr
    assert "drafts by small" in answer.stderr and "accepted" in answer.stderr
    without = pair.run(*arguments, "-md", "none")
    assert without.stdout == answer.stdout
    assert "drafts off" in without.stderr


def test_chat_downloads_what_hf_names(pair: HubMachine) -> None:
    """As llama.cpp does; the second time nothing is requested."""
    model = ["-hf", "me/big-GGUF:Q4_K_M", "-md", "none"]
    arguments = ["chat", *model, "-p", "Hello", "-n", "4", "-t", "1", "-dev", "none", "--temp", "0"]
    first = pair.run(*arguments)
    assert "not on this machine" in first.stderr and "from me/big-GGUF" in first.stderr
    pair.hub.requests.clear()
    again = pair.run(*arguments)
    assert again.stdout == first.stdout
    assert not pair.hub.requests


def test_a_model_of_the_catalog_comes_with_its_draft(pair: HubMachine) -> None:
    result = pair.run("run", "big", "What is", "3 + 4?", "-n", "8", "-t", "1", "-dev", "none", "--temp", "0")
    assert "7" in result.stdout and "draft small" in result.stderr
    assert len(pair.hub.ranges()) == 2


def test_plan_of_hf_reads_the_header_alone(pair: HubMachine) -> None:
    result = pair.run("plan", "-hf", "me/big-GGUF:Q4_K_M", "-dev", "none", "-o", "json")
    assert not json.loads(result.stdout)["model"]["is_here"]


def test_offline_asks_no_server(place: HubMachine) -> None:
    asked = ("chat", "-p", "x", "-m")
    assert "moeedge pull" in place.run(*asked, "big", "--offline", code=2).stderr
    assert "moeedge pull" in place.run(*asked, "me/big-GGUF:Q4_K_M", LLAMA_ARG_OFFLINE="1", code=2).stderr
    assert "HF_HUB_OFFLINE" in place.run("pull", "big", HF_HUB_OFFLINE="1", code=1).stderr
    assert not place.hub.requests


def test_dry_run_downloads_nothing(place: HubMachine) -> None:
    result = place.run("pull", "big", "--dry-run")
    assert "target hf:me/big-GGUF:big-Q4_K_M.gguf 3 MiB" in result.stdout
    assert "draft hf:me/small-GGUF:small-Q8_0.gguf 68 KiB" in result.stdout
    assert place.hub.ranges() == []
    assert not place.blobs("me/big-GGUF")


@pytest.mark.slow
def test_cached_files_are_not_downloaded(place: HubMachine) -> None:
    place.run("pull", "big", "--no-draft")
    assert not place.blobs("me/small-GGUF")
    place.run("pull", "big", "--draft", "hf:me/small-GGUF:Q8_0")
    assert place.blobs("me/small-GGUF")
    place.hub.requests.clear()
    assert "here already" in place.run("pull", "big").stderr
    assert place.hub.ranges() == []
    place.run("pull", "big", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")


def test_a_split_model(place: HubMachine) -> None:
    names = [f"q8/wide-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for i, name in enumerate(names):
        place.hub.files["me/wide-GGUF", name] = bytes([i]) * 1000
    result = place.run("pull", "hf:me/wide-GGUF:Q8_0")
    first = Path(result.stdout.split()[1])
    assert first.name == "wide-Q8_0-00001-of-00003.gguf"
    assert [(first.parent / Path(name).name).read_bytes() for name in names] == [bytes([i]) * 1000 for i in range(3)]


@pytest.mark.parametrize(
    ("ignore_range", "second"), [(False, f"bytes={2**20}-"), pytest.param(True, None, marks=pytest.mark.slow)]
)
def test_a_broken_connection_is_resumed_in_the_same_run(
    place: HubMachine, ignore_range: bool, second: str | None
) -> None:
    """From the beginning, where the server does not know ranges."""
    place.hub.cut_after, place.hub.ignore_range = 2**20, ignore_range
    place.run("pull", "big", "--no-draft")
    assert second is None or place.hub.ranges() == [None, second]
    body = place.hub.files[BIG]
    assert place.blobs("me/big-GGUF") == {sha256(body): body}


@pytest.mark.slow
def test_a_second_run_fetches_only_the_rest(place: HubMachine) -> None:
    place.hub.cut_after, place.hub.status_after_cut = 2**20, 503
    body = place.hub.files[BIG]
    assert "503" in place.run("pull", "big", "--no-draft", code=1).stderr
    listed = json.loads(place.run("list", "-o", "json").stdout)
    assert [(row["state"], row["have_bytes"]) for row in listed if row["name"] == "big"] == [("partial", 2**20)]
    chat = place.run("chat", "-m", "big", "-p", "x", code=1)  # goes on with the download by itself, which fails again
    assert "503" in chat.stderr
    assert place.blobs("me/big-GGUF") == {sha256(body) + INCOMPLETE: body[: 2**20]}
    place.hub.status, place.hub.requests = 200, []
    place.run("pull", "big", "--no-draft")
    assert place.hub.ranges() == [f"bytes={2**20}-"]
    assert place.blobs("me/big-GGUF") == {sha256(body): body}


@pytest.mark.slow
def test_a_damaged_partial_file_is_deleted(place: HubMachine) -> None:
    place.hub.cut_after, place.hub.status_after_cut = 2**20, 503
    place.run("pull", "big", "--no-draft", code=1)
    folder = place.folder / "hf" / "hub" / "models--me--big-GGUF" / "blobs"
    (part,) = folder.iterdir()
    part.write_bytes(b"x" + part.read_bytes()[1:])
    place.hub.status = 200
    damaged = place.run("pull", "big", "--no-draft", code=1)
    assert "damaged" in damaged.stderr and "SHA-256" in damaged.stderr
    assert not list(folder.iterdir())
    place.run("pull", "big", "--no-draft")


def test_a_wrong_hash_from_the_hub(place: HubMachine) -> None:
    place.hub.claimed_sha256 = "0" * 64
    refused = place.run("pull", "big", code=1)
    assert "another big-Q4_K_M.gguf than the catalog" in " ".join(refused.stderr.split())
    assert place.hub.ranges() == []
    damaged = place.run("pull", "hf:me/small-GGUF", code=1)  # no catalog to compare with
    assert "not 000000000000..." in damaged.stderr
    assert not place.blobs("me/small-GGUF")


def test_not_enough_disk_space(place: HubMachine) -> None:
    place.hub.claimed_bytes = 10**15
    result = place.run("pull", "big", code=1)
    assert "TiB" not in result.stderr and "needs" in result.stderr and "HF_HUB_CACHE" in result.stderr
    assert place.hub.ranges() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_a_quota_keep_what_arrived(
    number: int, place: HubMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def fills_up(_name: str, _n_bytes: int) -> Iterator[remote.At]:
        def at(have_bytes: int, _phase: str) -> None:  # called in the sink's write
            if have_bytes >= 2**20:
                raise OSError(number, os.strerror(number))

        yield at

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_ENDPOINT", "HF_HOME"):
        monkeypatch.setenv(name, place.environment()[name])
    file, body = remote.ask_file(*BIG, place.hub.commit), place.hub.files[BIG]
    with pytest.raises(DownloadError, match="is full: 1 MiB of 3 MiB") as caught:
        remote.fetch_file(file, fills_up)
    assert caught.value.exit_code == 1
    assert place.blobs("me/big-GGUF") == {sha256(body) + INCOMPLETE: body[: 2**20]}
    remote.fetch_file(file, lambda *_: nullcontext(lambda *_: None))
    assert place.hub.ranges() == [None, f"bytes={2**20}-"]
    assert place.blobs("me/big-GGUF") == {sha256(body): body}


@pytest.mark.parametrize(
    ("name", "code", "named"),
    [
        ("hf:me/big-GGUF:none.gguf", 2, "no file"),
        ("hf:me/none-GGUF:Q4_K_M", 1, "me/none-GGUF"),
        ("hf:me/big-GGUF@v9:Q4_K_M", 1, "v9"),
    ],
)
def test_unknown_files_and_repositories(place: HubMachine, name: str, code: int, named: str) -> None:
    assert named in place.run("pull", name, code=code).stderr


@pytest.mark.slow
def test_an_outdated_catalog(place: HubMachine) -> None:
    del place.hub.files[BIG]
    place.hub.files["me/big-GGUF", "renamed.gguf"] = b"x"
    assert "There is no big-Q4_K_M.gguf" in place.run("pull", "big", code=1).stderr
    place.hub.commit = "f" * 40
    assert "revision 89abcdef" in place.run("pull", "big", code=1).stderr


def test_gated_repository(place: HubMachine) -> None:
    place.hub.gated = True
    refused = place.run("pull", "big", code=1)
    assert "gated" in refused.stderr and "me/big-GGUF" in refused.stderr and "HF_TOKEN" in refused.stderr
    place.run("pull", "big", "--no-draft", HF_TOKEN="hf_secret")
    place.run("chat", "-hf", "me/small-GGUF", "-hft", "hf_secret", "-p", "x", code=2)  # it arrives, and is no model
    assert set(place.blobs("me/small-GGUF")) == {sha256(place.hub.files[SMALL])}
    downloads = [request for request in place.hub.requests if request.path.startswith("/cdn/")]
    assert all(request.token is None for request in downloads)  # another host


def test_no_network(place: HubMachine) -> None:
    result = place.run("pull", "big", HF_ENDPOINT="http://127.0.0.1:9", code=1)
    assert "http://127.0.0.1:9" in result.stderr and "partial" not in result.stderr
    partial = place.folder / "hf/hub/models--me--big-GGUF/blobs" / f"{sha256(place.hub.files[BIG])}.incomplete"
    partial.parent.mkdir(parents=True)
    for n_bytes in (0, 2**20):
        partial.write_bytes(bytes(n_bytes))
        result = place.run("pull", "big", HF_ENDPOINT="http://127.0.0.1:9", code=1)
        assert ("A partial download is kept: 1 MiB" in result.stderr) == (n_bytes > 0)


@pytest.mark.slow
def test_a_stalled_server(place: HubMachine) -> None:
    place.hub.stall = True
    start = time.monotonic()
    result = place.run("pull", "big", "--no-draft", HF_HUB_DOWNLOAD_TIMEOUT="1", code=1)
    assert "Cannot reach" in result.stderr
    assert time.monotonic() - start < 40


@pytest.mark.parametrize(
    ("signal_number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_interrupted(place: HubMachine, signal_number: int, code: int) -> None:
    place.hub.block_pause_s = 0.1
    process = subprocess.Popen(
        place.command("pull", "big", "--no-draft"), env=place.environment(), stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 30
    while not any(place.blobs("me/big-GGUF").values()):
        assert time.monotonic() < end, "nothing arrives"
        time.sleep(0.02)
    os.kill(process.pid, signal_number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code, stderr
    if code > 0:
        assert "same command" in stderr and "stopped at" in stderr
    (part,) = place.blobs("me/big-GGUF").values()
    assert part == place.hub.files[BIG][: len(part)]
    place.hub.block_pause_s, place.hub.requests = 0.0, []
    place.run("pull", "big", "--no-draft")
    assert place.hub.ranges() == [f"bytes={len(part)}-"]


def test_rm(place: HubMachine) -> None:
    place.run("pull", "big")
    assert "--yes" in place.run("rm", "big", code=2).stderr
    removed = place.run("rm", "big", "--yes")
    assert "3 MiB" in removed.stderr
    assert removed.stdout == ""
    assert not place.blobs("me/big-GGUF")
    assert set(place.blobs("me/small-GGUF")) == {sha256(place.hub.files[SMALL])}  # a model of its own
    assert "big" in place.run("rm", "big", "--yes", code=2).stderr


@pytest.mark.slow
def test_rm_of_an_unfinished_download(place: HubMachine) -> None:
    place.hub.cut_after, place.hub.status_after_cut = 2**20, 503
    place.run("pull", "big", "--no-draft", code=1)
    place.run("rm", "big", "--yes")
    assert not place.blobs("me/big-GGUF")


@pytest.mark.slow
def test_rm_keeps_shared_blobs(place: HubMachine) -> None:
    place.hub.files["me/small-GGUF", "copy-Q8_0.gguf"] = place.hub.files[SMALL]
    for name in ("small-Q8_0.gguf", "copy-Q8_0.gguf"):
        place.run("pull", f"hf:me/small-GGUF:{name}")
    place.run("rm", "hf:me/small-GGUF:copy-Q8_0.gguf", "--yes")
    assert "small" in place.run("list").stdout and place.blobs("me/small-GGUF")
    place.run("rm", "small", "--yes")
    assert not place.blobs("me/small-GGUF")


def test_rm_asks(place: HubMachine) -> None:
    place.run("pull", "small")
    errors = place.folder / "stderr.txt"
    for answer, left in (("n\n", True), ("y\n", False)):
        script = f"exec {' '.join(place.command('rm', 'small'))} 2>{errors}"
        result = subprocess.run(
            ["script", "-qec", script, "/dev/null"],
            env=place.environment(),
            input=answer,
            text=True,
            capture_output=True,
        )
        assert result.returncode == 0, result.stdout
        assert bool(place.blobs("me/small-GGUF")) is left
        assert result.stdout.strip() in ("", answer.strip())  # what the terminal repeats of the answer
        assert errors.read_text().count("emoved") == 1


def test_rm_leaves_the_bundled_pair(place: HubMachine) -> None:
    place.run("rm", "bundled", "--yes", code=2)


@pytest.mark.slow
def test_the_disk_fills_up_during_the_download(place: HubMachine) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))  # as a quota: EFBIG

    result = place.run("pull", "big", "--no-draft", before=small_files, code=1)
    assert "is full: 1 MiB of 3 MiB" in result.stderr
    assert [len(part) for part in place.blobs("me/big-GGUF").values()] == [2**20]
    place.hub.requests.clear()
    place.run("pull", "big", "--no-draft")
    assert place.hub.ranges() == [f"bytes={2**20}-"]
