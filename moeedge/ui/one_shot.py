"""One prompt, one answer, no questions asked: text as it comes, or one JSON object at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from moeedge.engine.session import Session
from moeedge.engine.turn import Answer
from moeedge.ui.cache_meter import CacheMeter
from moeedge.ui.console import say, typing_hidden
from moeedge.ui.figures import join_parts, turn_parts
from moeedge.ui.interrupt import Interrupt
from moeedge.ui.report import answer_report
from moeedge.ui.settings import Settings
from moeedge.ui.stream import open_view


def answer_once(
    session: Session,
    prompt: Sequence[int],
    settings: Settings,
    *,
    as_json: bool,
    panel: bool,
    out: Console,
    err: Console,
) -> int:
    """Generate the answer to the prompt's tokens; the answer on `out`, its figures on `err`.

    Returns the exit code: 0, or 128 + the signal that stopped it (what was said until then is printed).
    """
    with Interrupt() as interrupt:
        interrupt.arm()
        answer = Answer(session, prompt, n_predict=settings.n_predict, sampling=settings.sampling, cancel=interrupt)
        meter = CacheMeter(session)
        try:
            if as_json:
                with meter:
                    for _ in answer:
                        pass
            else:
                view = open_view(out, session.info, lambda: answer.stats, stopping=interrupt, cache=meter, panel=panel)
                with meter, typing_hidden(), view:
                    for piece in answer:
                        view.write(piece)
        except KeyboardInterrupt:  # a second signal, between two steps
            answer.close()
        if as_json:
            report = answer_report(answer, session.info, settings.sampling, meter())
            out.file.write(json.dumps(report, ensure_ascii=False) + "\n")
            out.file.flush()
        else:
            parts = turn_parts(session.info, answer.stats, answer.stop_reason, meter())
            say(err, join_parts(parts, columns=err.width if err.is_terminal else None))
        for note in dict.fromkeys(answer.notes):
            say(err, note)
        for note in meter.notes:
            say(err, note, style="yellow")
        return interrupt.exit_code
