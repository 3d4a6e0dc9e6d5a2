"""Links of the documents lead somewhere; records of measurements name their commit and are used; versions agree."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moeedge
from tests.benchmarks.performance import read

ROOT = Path(__file__).parents[1]
# docs/cli.md is made where documents are published: no document may link to it
GENERATED = ROOT / "docs" / "cli.md"
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/*/*.md")} - {GENERATED})
RECORDS = sorted([*ROOT.glob("docs/benchmarks/*.json"), *ROOT.glob("docs/benchmarks/*.json.gz")])
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
        if not path.exists() or path == GENERATED:
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


def _environments(part: Any) -> Iterator[dict[str, Any]]:
    """Objects of a record that name a commit and the processor."""
    if isinstance(part, dict) and {"commit", "cpu"} <= part.keys():
        yield part
    elif isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _environments(inner)


def lacks(record: Any, commits: frozenset[str]) -> str:
    """What a record does not say about its origin; empty: it names clean commits of the history."""
    named = list(_environments(record))
    if not named:
        return "no environment"
    unknown = sorted({part["commit"][:9] for part in named if part["commit"] and part["commit"] not in commits})
    found = [f"commit {commit} is not in the history" for commit in unknown]
    found += ["no commit"] * any(part["commit"] is None for part in named)
    found += ["uncommitted changes"] * any(part["dirty"] for part in named)
    return "; ".join(found)


def test_records_name_their_commit_and_environment_or_are_listed() -> None:
    try:
        shallow = _git("rev-parse", "--is-shallow-repository").strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    if shallow == "true":
        pytest.skip("the history is not complete")
    commits = frozenset(_git("rev-list", "HEAD").split())
    index = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", index, re.MULTILINE))
    assert {path.name: text for path in RECORDS if (text := lacks(read(path), commits))} == listed
    for commit in re.findall(r"\| ([0-9a-f]{7,}) \|", index):
        assert any(known.startswith(commit) for known in commits), commit


def test_what_a_record_lacks() -> None:
    known = {"commit": "a" * 40, "cpu": "Made Up 9", "dirty": False}
    commits = frozenset([known["commit"]])
    assert lacks([known], commits) == ""
    assert lacks({"runs": [1.0]}, commits) == "no environment"
    assert lacks({"environment": known | {"dirty": True}}, commits) == "uncommitted changes"
    assert lacks([known | {"commit": "b" * 40}], commits) == "commit bbbbbbbbb is not in the history"
    assert lacks([known, known | {"commit": None}], commits) == "no commit"


def test_every_record_is_used_by_a_document() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS if path.parent.name != "benchmarks")
    assert [path.name for path in RECORDS if path.name not in texts] == []


def test_the_citation_has_the_version_and_the_licence() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == moeedge.__version__
    assert "\nlicense: MIT\n" in citation and (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout
