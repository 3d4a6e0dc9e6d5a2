"""The report is one well-formed page that loads nothing, and its pictures take the page's colours."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moeedge.analysis.profile import ModelProfile, complete_report, profile_model
from moeedge.ui.plots import COLOURS, DARK_COLOURS, save_plots, svg_of
from moeedge.ui.profile_plots import profile_plots, report_html
from moeedge.ui.profile_views import run_lines
from tests.support.traces import make_trace, plain_text, two_texts

TEXTS = [{"category": "a <b>"}, {"category": "c"}]


def profiled() -> ModelProfile:
    return profile_model(two_texts(parameters={"texts": TEXTS}), [0, 1])


def page_of(profile: ModelProfile, *, n_pictures: int = 1) -> str:
    """The page with the first pictures: each takes a while to draw."""
    numbers = complete_report(profile, {"model": profile.meta.model})
    pictures = profile_plots(profile)[:n_pictures]
    return report_html(f"Profile of {profile.meta.model}", run_lines(profile), "a <b> c", pictures, numbers)


@pytest.mark.parametrize("n_pictures", [2, pytest.param(99, marks=pytest.mark.slow)])
def test_page(n_pictures: int) -> None:
    text = page_of(profiled(), n_pictures=n_pictures)
    page = ElementTree.fromstring(text)  # every element is closed
    ids = [element.get("id") for element in page.iter() if element.get("id")]
    assert len(ids) == len(set(ids)) > 20
    svgs = [element for element in page.iter() if element.tag.endswith("svg")]  # lines and a map
    assert len(svgs) > 1 and all(svg.get("aria-label") and "width" not in svg.attrib for svg in svgs)
    attributes = [attribute for element in page.iter() for attribute in element.items()]
    addresses = [value for name, value in attributes if name.rpartition("}")[2] in ("src", "href")]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    loads = re.findall(r"https?://[^\"' ]+", text)
    assert all(address.startswith("http://www.w3.org/") for address in loads)  # names of XML, never fetched
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert not set(COLOURS) & set(re.findall(r"#[0-9a-f]{6}", text[text.index("<body>") :]))
    assert len(COLOURS) == len(DARK_COLOURS)
    sections = {picture.section for picture in profile_plots(profiled())}
    assert "What speculation gains" in sections
    assert n_pictures == 2 or sections < set(page.itertext())


def test_names_cannot_end_an_element() -> None:
    profile = profiled()
    meta = replace(profile.meta, model="</script><script>alert(1)</script>")
    text = page_of(replace(profile, meta=meta))
    assert "alert(1)" in text and "<script>alert" not in text
    ElementTree.fromstring(text)


def test_pictures_are_files(tmp_path: Path) -> None:
    pictures = profile_plots(profiled())
    assert len({picture.title for picture in pictures}) == len(pictures)
    assert all(len(line.values) == len(picture.x) for picture in pictures for line in picture.shown)
    assert svg_of(pictures[0]) == svg_of(pictures[0])
    save_plots(pictures[:1], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("trace", [plain_text(30), make_trace([(1, 0, 0, True)] * 3)])
def test_pages_without_speculation_and_without_text(trace: object) -> None:
    ElementTree.fromstring(page_of(profile_model(trace, [0])))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_readmes_picture_of_the_chat_needs_no_network(bundled_pair: tuple[Path, Path], tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs" / "make_pictures.py"
    runpy.run_path(str(script))["draw_chat"](tmp_path / "chat.svg", bundled_pair[0], ram=12 * 2**20)
    svg = (tmp_path / "chat.svg").read_text()
    assert svg.startswith("<svg") and len(svg) < 150_000
    assert "font-face" not in svg and "url(http" not in svg
    for text in ("Model:", "Experts:", "Drafts:", "drafts&#160;accepted", "experts&#160;in&#160;RAM", "disk", "time:"):
        assert text in svg
