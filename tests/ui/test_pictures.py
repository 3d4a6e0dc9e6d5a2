"""The README's pictures are drawn by a script in docs/."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "make_pictures.py"


@pytest.mark.slow
def test_the_picture_of_the_chat_needs_no_network(bundled_pair: tuple[Path, Path], tmp_path: Path) -> None:
    runpy.run_path(str(SCRIPT))["draw_chat"](tmp_path / "chat.svg", bundled_pair[0], ram=12 * 2**20)
    svg = (tmp_path / "chat.svg").read_text()
    assert svg.startswith("<svg") and len(svg) < 150_000
    assert "font-face" not in svg and "url(http" not in svg
    for text in ("Model:", "Experts:", "Drafts:", "drafts&#160;accepted", "experts&#160;in&#160;RAM", "disk", "time:"):
        assert text in svg
