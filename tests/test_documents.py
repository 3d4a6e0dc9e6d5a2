"""Links of the documents: files and headings that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# models/card_template.md becomes models/bundled/README.md, whose links are checked there
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/*/*.md")])
_LINK = re.compile(r"(?<!\\)\]\(([^()\s]+)\)")
_CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|``[^`]+``|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Anchors of a Markdown text's headings, as GitHub makes them: lower case, no punctuation, hyphens for spaces.

    A heading that occurs again gets -1, -2 and so on.
    """
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while (name := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(name)
    return found


def broken_links(document: Path) -> list[str]:
    """Relative links of a Markdown file whose file or heading does not exist."""
    broken = []
    for target in _LINK.findall(_CODE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists():
            broken.append(f"{target}: no such file")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text(encoding="utf-8")):
            broken.append(f"{target}: no such heading")
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Two `words`\n## Again\n## Again\n```\n# no heading\n```\n", encoding="utf-8")
    page = tmp_path / "a.md"
    page.write_text(
        "[1](b.md#two-words) [2](b.md#again-1) [3](b.md#no-heading) [4](c.md) [5](#here) [6](ftp://x.y) `[7](d.md)`\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["b.md#no-heading: no such heading", "c.md: no such file", "#here: no such heading"]
