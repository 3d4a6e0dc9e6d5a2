"""Pictures: written in the requested format, without using the display."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from moeedge.analysis.profile import moving_mean, profile_layers
from moeedge.errors import InputError
from moeedge.ui.console import check_picture
from moeedge.ui.profile_plots import plot_profiles
from tests.support.traces import make_trace, plain_text, two_texts

MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", list(MAGIC))
@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_pictures(tmp_path: Path, suffix: str, layers: list[int]) -> None:
    path = tmp_path / f"picture{suffix}"
    plot_profiles(profile_layers(two_texts(), layers), "a model, gamma 2", path)
    assert path.read_bytes().startswith(MAGIC[suffix])
    assert "matplotlib.pyplot" not in sys.modules  # no display, no global state


def test_pictures_without_speculation_and_without_steps(tmp_path: Path) -> None:
    for trace in (plain_text(30), make_trace([(1, 0, 0, True)])):
        plot_profiles(profile_layers(trace, [0]), "title", tmp_path / "one.png")
        plot_profiles(profile_layers(trace, [0, 1]), "title", tmp_path / "two.png")
        assert (tmp_path / "one.png").stat().st_size > 5000


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--plot cannot write x\.gif"):
        check_picture(Path("x.gif"))
    with pytest.raises(InputError, match="Cannot write the picture"):
        plot_profiles(profile_layers(two_texts(), [0]), "title", tmp_path / "no" / "folder.png")


def test_smoothing_by_hand() -> None:
    nan = np.nan
    np.testing.assert_allclose(moving_mean(np.array([nan, 1, 3, nan, 5]), 2), [nan, 1, 2, 3, 5])
    np.testing.assert_allclose(moving_mean(np.array([1.0, 2.0]), 16), [1.0, 1.5])
