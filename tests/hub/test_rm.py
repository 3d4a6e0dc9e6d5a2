"""`moeedge rm`: the files that are deleted, those that stay, and the question before."""

from __future__ import annotations

import subprocess

import pytest

from tests.hub.conftest import SMALL, HubMachine, sha256


def test_rm(place: HubMachine) -> None:
    assert place.run("pull", "big").returncode == 0
    asked = place.run("rm", "big")
    assert asked.returncode == 2 and "--yes" in asked.stderr
    removed = place.run("rm", "big", "--yes")
    assert removed.returncode == 0 and "3 MiB" in removed.stderr
    assert removed.stdout == ""
    assert not place.blobs("me/big-GGUF")
    assert set(place.blobs("me/small-GGUF")) == {sha256(place.hub.files[SMALL])}  # a model of its own
    again = place.run("rm", "big", "--yes")
    assert again.returncode == 2 and "big" in again.stderr


@pytest.mark.slow
def test_rm_of_an_unfinished_download(place: HubMachine) -> None:
    place.hub.cut_after, place.hub.status_after_cut = 2**20, 503
    assert place.run("pull", "big", "--no-draft").returncode == 1
    assert place.run("rm", "big", "--yes").returncode == 0
    assert not place.blobs("me/big-GGUF")


@pytest.mark.slow
def test_rm_keeps_shared_blobs(place: HubMachine) -> None:
    place.hub.files["me/small-GGUF", "copy-Q8_0.gguf"] = place.hub.files[SMALL]
    for name in ("small-Q8_0.gguf", "copy-Q8_0.gguf"):
        assert place.run("pull", f"hf:me/small-GGUF:{name}").returncode == 0
    assert place.run("rm", "hf:me/small-GGUF:copy-Q8_0.gguf", "--yes").returncode == 0
    assert "small" in place.run("list").stdout and place.blobs("me/small-GGUF")
    assert place.run("rm", "small", "--yes").returncode == 0
    assert not place.blobs("me/small-GGUF")


def test_rm_asks(place: HubMachine) -> None:
    assert place.run("pull", "small").returncode == 0
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
    assert place.run("rm", "bundled", "--yes").returncode == 2
