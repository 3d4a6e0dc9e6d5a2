"""Draws the README's pictures from real runs: `python docs/make_pictures.py MODEL.gguf`.

chat.svg: greeting, question, answer and panel of `moeedge chat -m MODEL.gguf` in the middle of an answer; the README's
model is larger than the memory. profile.svg: the heat map of `moeedge profile --layers all --plot`, bundled pair.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Literal

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from moeedge.cli.engine_options import EngineOptions
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import SamplingConfig
from moeedge.ui.chat.greeting import print_greeting
from moeedge.ui.chat.live import render_panel
from moeedge.ui.chat.prompt import PROMPT
from moeedge.ui.chat.single import CacheMeter
from moeedge.ui.chat.stream import wrap_rows
from moeedge.ui.figures import live_figures

FOLDER = Path(__file__).parent
COLUMNS = 88
QUESTIONS = ("Tell me a short story about an owl.", "Write a story about a mouse.")
SHOWN_CHARACTERS = 260  # of the second answer, when the picture is taken
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def draw_chat(path: Path, model: Path, ram: int | Literal["auto"] = "auto") -> None:
    """One answer to warm the cache up, then the next one, stopped for the picture; ram: bytes for experts."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, markup=False, highlight=False)
    options = EngineOptions(model=model, device="none")
    options.limit_openmp_spin(ram=str(ram))
    with Session.open(replace(options.config(), ram=ram)) as session:
        print_greeting(console, session.info, toy=False)
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
    draw_chat(FOLDER / "chat.svg", Path(sys.argv[1]))
    draw_profile(FOLDER / "profile.svg")
