"""The process that renders chat templates: they come from model files, and one that never ends must not stop a chat.

Started as `python -IS <this file> FOLDER...`, with the folders of Jinja and what it needs. Each line of standard input
asks for one template, each line of standard output answers; both are JSON:
  {"source": text}                           -> {"variables": [name, ...]}
  {"source": text, "given": variables}       -> {"text": prompt}
  what the template raises                   -> {"error": reason, "line": number or null}
  a prompt that is too long, no memory left  -> {}
A timer ends the process where an answer takes too much processor time, also within one operation of Jinja.
Imports no module of moeedge, so that it starts within milliseconds.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

# of one answer; a real template takes milliseconds, a few MiB and few characters more than its messages have
CPU_S = 2.0
MEMORY_BYTES = 2**30
MORE_CHARACTERS = 4_000_000  # and four for each byte of the request
_REASON_CHARACTERS = 1000


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[Any, list[str]]:
    """The template and the names of its variables."""
    import jinja2.ext
    import jinja2.meta
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """The tag {% generation %}, which marks the assistant's part for training: a prompt contains only its body."""

        tags = {"generation"}  # noqa: RUF012 (the base class wants an instance-like attribute)

        def parse(self, parser: Parser) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), sorted(variables)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _answer(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        template, variables = _compiled(request["source"])
        if "given" not in request:
            return {"variables": variables}
        pieces, n_left = [], MORE_CHARACTERS + 4 * len(line)
        for piece in template.generate(request["given"]):
            pieces.append(piece)
            n_left -= len(piece)
            if n_left < 0:
                return {}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {}
    except Exception as error:  # whatever a template's own expressions raise
        reason = str(error)[:_REASON_CHARACTERS] or type(error).__name__
        return {"error": reason, "line": getattr(error, "lineno", None)}


def main() -> None:
    """Answers until standard input ends."""
    with suppress(ValueError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # at its end the signal's default action ends the process
        reply = json.dumps(_answer(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.path += sys.argv[1:]
    main()
