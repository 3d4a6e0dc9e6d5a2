"""The report of `moeedge profile`: one HTML file with its pictures, tables and JSON inside.

It loads nothing, has no script that runs, follows the reader's light or dark setting and fits a phone.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from moeedge.paths import write_file
from moeedge.ui.pictures import COLOURS, DARK_COLOURS, Picture, svg_of

_MAX_ROWS = 200  # of a table: longer ones are in the JSON alone
Facts = Sequence[tuple[str, str]]


def _variables(colours: Sequence[str], **others: str) -> str:
    named = {f"line-{place}": colour for place, colour in enumerate(colours, start=1)} | others
    return " ".join(f"--{name}: {value};" for name, value in named.items())


_LIGHT = _variables(COLOURS, text="#1c1e21", faint="#5b6168", paper="#ffffff", card="#f6f7f8", grid="#d9dce0")
_DARK = _variables(DARK_COLOURS, text="#e6e8ea", faint="#a3a9b0", paper="#14171a", card="#1d2125", grid="#3a4047")

_STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }}
h2 {{ font-size: 1.2rem; margin: 2rem 0 .75rem; }}
h3 {{ font-size: 1rem; margin: 0 0 .25rem; }}
pre {{ overflow-x: auto; padding: .75rem; background: var(--card); border-radius: .5rem; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }}
figure {{ margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; min-width: 0; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figcaption, .faint {{ color: var(--faint); font-size: .875rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0; }}
dt {{ color: var(--faint); }}
dd {{ margin: 0; }}
details {{ margin-top: .5rem; font-size: .875rem; }}
summary {{ cursor: pointer; color: var(--faint); }}
.scroll {{ overflow-x: auto; max-height: 24rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .1rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ position: sticky; top: 0; background: var(--card); font-weight: 600; }}
@media print {{ figure {{ break-inside: avoid; }} }}
"""


def report_html(title: str, facts: Facts, text: str, pictures: Iterable[Picture], numbers: dict[str, Any]) -> str:
    """The page. facts: labels and values of the run; text: main figures; numbers: the JSON that the page carries."""
    escaped = html.escape(title)
    listed = "".join(f"<dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd>" for label, value in facts)
    sections = "".join(
        f'<section><h2>{html.escape(name)}</h2><div class="grid">{"".join(map(_figure, members))}</div></section>'
        for name, members in groupby(pictures, key=lambda picture: picture.section)
    )
    # "<" cannot end the element inside a JSON string if it is written as an escape
    data = json.dumps(numbers, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escaped}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escaped}</h1>
<dl>{listed}</dl>
<pre>{html.escape(text)}</pre>
{sections}
<p class="faint">Every number of this page is in its source as JSON: the element with the id "numbers".</p>
<script type="application/json" id="numbers">{data}</script>
</body>
</html>
"""


def _figure(picture: Picture) -> str:
    title = html.escape(picture.title)
    drawn = svg_of(picture).replace("<svg ", f'<svg aria-label="{title}" ', 1)
    caption = f"<figcaption>{html.escape(picture.caption)}</figcaption>"
    return f"<figure><h3>{title}</h3>{drawn}{caption}{_table(picture)}</figure>"


def _table(picture: Picture) -> str:
    if not picture.rows or len(picture.rows) > _MAX_ROWS:
        return ""
    head = "".join(f"<th>{html.escape(column.title)}</th>" for column in picture.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(column.text(row))}</td>" for column in picture.columns) + "</tr>"
        for row in picture.rows
    )
    return (
        f'<details><summary>Numbers</summary><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def write_report(path: Path, text: str) -> None:
    """Replaces the file at `path`. Raises InputError where it cannot be written."""
    with write_file(path, "report") as temporary:
        temporary.write_text(text, encoding="utf-8")
