"""Draws the README's pictures from a real run: `python docs/make_pictures.py`.

chat.svg: greeting, question, answer and panel of `moeedge chat` in the middle of an answer of the bundled pair, with
its experts cached on the emulated device. profile.svg: the heat map of `moeedge profile --layers all --plot`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from moeedge import paths
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.hub.catalog import load_catalog
from moeedge.scheduler.config import PlacementConfig
from moeedge.ui.chat.answer_figures import live_figures
from moeedge.ui.chat.greeting import print_greeting
from moeedge.ui.chat.panel import CacheMeter, render_panel
from moeedge.ui.chat.prompt import PROMPT
from moeedge.ui.chat.stream import wrap_rows

FOLDER = Path(__file__).parent
DEVICE = "emulated:link=2GB/s,threads=1"
CACHE_RATIO = 0.3
COLUMNS = 88
QUESTIONS = ("Tell me a short story about an owl.", "Write a story about a mouse.")
SHOWN_CHARACTERS = 260  # of the second answer, when the picture is taken
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def draw_chat(path: Path) -> None:
    """One answer to warm the cache up, then the next one, stopped for the picture."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, markup=False, highlight=False)
    config = EngineConfig(
        model=paths.bundled_target(),
        draft=paths.bundled_draft(),
        n_threads=1,
        device=DEVICE,
        placement=PlacementConfig(cache_ratio=CACHE_RATIO),
    )
    with Session.open(config) as session:
        print_greeting(console, session.info, toy=True, starter=load_catalog().starter())
        conversation = Conversation()
        meter = CacheMeter(session, interval_s=0)
        for question in QUESTIONS:
            conversation.ask(question)
            tokens = prompt_tokens(session.model, conversation)
            answer = session.generate(tokens, n_predict=200, sampling=SamplingConfig(temperature=0))
            with meter:
                for _ in answer.pieces():
                    if question == QUESTIONS[-1] and len(answer.text) >= SHOWN_CHARACTERS:
                        break
            conversation.answer(answer.text)
        console.print(f"\n{PROMPT}{QUESTIONS[-1]}")
        for line in answer.text.split("\n"):
            console.print("\n".join(wrap_rows(line, COLUMNS)))
        figures = live_figures(session.info, answer.stats, meter(), elapsed_s=0)
        console.print(render_panel(figures, columns=COLUMNS, rows=30, hint="Ctrl-C stops"))
        answer.close()
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # on a network
    code_format = without_fonts.replace("Fira Code, monospace", FONTS)
    svg = console.export_svg(title="moeedge chat", code_format=code_format, unique_id="chat")
    path.write_text(svg, encoding="utf-8")


def draw_profile(path: Path) -> None:
    """Prompts of the bundled data set, all layers."""
    options = ["--dataset", "toy", "--limit", "8", "--layers", "all", "-dev", "none", "-t", "1", "--plot", str(path)]
    subprocess.run([sys.executable, "-m", "moeedge", "profile", *options], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    draw_chat(FOLDER / "chat.svg")
    draw_profile(FOLDER / "profile.svg")
