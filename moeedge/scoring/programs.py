"""Turns an answer that contains code into a program that can be run with its tests."""

from __future__ import annotations

import re
import textwrap
import warnings

_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*\n(.*?)(?:^[ \t]*(?:```|~~~)[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*$\n?", re.MULTILINE)
_LAST_DEFINITION = re.compile(r"^(?:async )?def (\w+)", re.MULTILINE)
_CODE_STARTS = re.compile(r"^(?:def |class |import |from |@|async def )", re.MULTILINE)
# runs as a module of another name, so that code below `if __name__ == "__main__"` is not run
_AS_MODULE = 'import sys; __name__ = "answer"; sys.modules[__name__] = sys.modules["__main__"]; del sys\n'
_MAX_LINES = 400


def entry_point(head: str) -> str:
    """Returns the function that `head` starts: the last one defined at top level; "" for none."""
    found = _LAST_DEFINITION.findall(head)
    return found[-1] if found else ""


def program_of(answer: str, tests: str, *, head: str = "") -> str:
    """Returns the program that passes if `answer` solves the task.

    head: the text that the answer continues: imports and helpers, the signature, a docstring. An answer that defines
    the function itself replaces the signature; one with only the body, indented or not, is placed below it.
    """
    entry = entry_point(head)
    code = _code_of(answer, entry)
    if entry and re.search(rf"^(?:async )?def {entry}\b", code, re.MULTILINE):
        code = f"{head[: _definition_at(head, entry)]}\n{code}"
    elif head:
        code = _completed(head, code)
    futures = "".join(f"{line.strip()}\n" for line in _FUTURE.findall(code))
    return f"{futures}{_AS_MODULE}{_FUTURE.sub('', code)}\n\n{tests}\n"


def compiles(code: str) -> bool:
    """Whether `code` is a Python module; never raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def _code_of(answer: str, entry: str) -> str:
    """Returns the fenced block that defines `entry`, else the last one; without fences the part that may be code."""
    blocks = [textwrap.dedent(block) for block in _FENCE.findall(answer)]
    if blocks:
        defining = [
            block for block in blocks if entry and re.search(rf"^(?:async )?def {entry}\b", block, re.MULTILINE)
        ]
        return defining[-1] if defining else blocks[-1]
    start = _CODE_STARTS.search(answer)
    if start is None or (entry and f"def {entry}" not in answer):
        return answer
    return _longest_code(answer[start.start() :])


def _definition_at(head: str, entry: str) -> int:
    """Returns the offset of the last definition of `entry`, without its decorators."""
    return [match.start() for match in _LAST_DEFINITION.finditer(head) if match[1] == entry][-1]


def _completed(head: str, body: str) -> str:
    """Returns `head` with `body` below its signature, for any indentation; text after the body is dropped."""
    start = head if head.endswith("\n") else f"{head}\n"
    indented = textwrap.indent(body.strip("\n"), "    ")
    first_only = f"    {body.strip()}"  # an indented body whose first blanks were stripped
    shapes = [body.strip("\n"), first_only, indented]
    for shape in shapes:
        if shape.startswith((" ", "\t")) and compiles(start + shape):
            return start + shape
    for shape in shapes:
        code = _longest_code(start + shape, at_least=start.count("\n") + 1)
        if shape.startswith((" ", "\t")) and compiles(code):
            return code
    return start + body


def _longest_code(text: str, at_least: int = 1) -> str:
    """Returns the longest prefix of lines that compiles, or `text` if none does."""
    lines = text.split("\n")[:_MAX_LINES]
    for n in range(len(lines), at_least - 1, -1):
        code = "\n".join(lines[:n])
        if compiles(code):
            return code
    return text
