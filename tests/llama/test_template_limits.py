"""Chat templates that never end, or that take too much memory or text: one error, and the next prompt works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import product

import pytest

from moeedge.errors import EngineError, InputError
from moeedge.llama import text
from moeedge.llama.reasoning import find_reasoning_tags
from moeedge.llama.text import BuiltinFormat, ChatFormat

TURN = [{"role": "user", "content": "Hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
OUTPUT = "{% for i in range(99999) %}{% for j in range(99999) %}some text{% endfor %}{% endfor %}"
# ended at once, by memory or length
LARGE = {
    "output": OUTPUT,
    "output of a macro": f"{{% macro f() %}}{OUTPUT}{{% endmacro %}}{{{{ f() }}}}",
    "times": "{{ messages[0].content * 10**12 }}",
    "list": "{{ ([1] * 10**9) | sum }}",
    "replace": "{% set x = 'a' * 10**6 %}{{ x | replace('a', x) }}",
    "join": "{{ range(99999) | join('x' * 10**6) }}",
    "blocks": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
    "~": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "json": "{{ messages | tojson(indent=10**9) }}",
}
# ended by the limit of processor time
LONG = {
    "loops with a condition": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "power of a variable": "{{ (messages | length + 9) ** (10 ** 8) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "words": "{{ lipsum(n=10**9) }}",
    "characters": "{% for c in messages[0].content * 4 * 10**8 %}{% endfor %}",
}
# rejected by Jinja or Python, when they are parsed or rendered
REJECTED = {
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}",
    "parentheses": "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
    "ifs": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "fors": "{% for x in [1] %}" * 50 + "{% endfor %}" * 50,
    "long reason": "{{ raise_exception('x' * 10**7) }}",
}


@pytest.fixture(autouse=True)
def _next_prompt_works() -> Iterator[None]:
    yield
    assert ChatFormat("{{ messages[0].content }}").render(TURN) == "Hi"


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_large_prompts_end(source: str) -> None:
    with pytest.raises(InputError) as caught:
        ChatFormat(source).render(TURN)
    assert "--raw" in caught.value.hint


def test_an_endless_template_ends_within_seconds() -> None:
    chat_format = ChatFormat(ENDLESS, is_given=True)
    start_s = time.process_time()
    with pytest.raises(InputError) as caught:
        chat_format.render(TURN)
    assert time.process_time() - start_s < 1  # another process computes
    assert "--raw" not in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("source", LONG.values(), ids=LONG)
def test_long_operations_end(source: str) -> None:
    with pytest.raises(InputError):
        ChatFormat(source).render(TURN)


@pytest.mark.parametrize("source", REJECTED.values(), ids=REJECTED)
def test_what_python_refuses_is_an_error_of_the_template(source: str) -> None:
    with pytest.raises(EngineError) as caught:
        ChatFormat(source).render(TURN)
    assert len(caught.value.message) < 2000


@pytest.mark.slow
def test_reasoning_is_looked_for_in_no_endless_template() -> None:
    assert find_reasoning_tags(ChatFormat(f"{ENDLESS}</think>")) is not None  # by its name


def test_an_interrupt_while_a_template_is_rendered() -> None:
    def interrupt(*_signal: object) -> None:
        raise KeyboardInterrupt

    chat_format = ChatFormat(ENDLESS)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            chat_format.render(TURN)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_process_that_ended_between_two_prompts_is_replaced() -> None:
    chat_format = ChatFormat(None)
    before = chat_format.render(TURN)
    process = text._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert chat_format.render(TURN) == before


def test_long_conversations_are_rendered() -> None:
    messages = [{"role": role, "content": "wörd " * 50_000} for _, role in product(range(10), ("user", "assistant"))]
    prompt = ChatFormat(None).render(messages)
    assert prompt.count("wörd") == 20 * 50_000
    assert prompt == BuiltinFormat("chatml").render(messages)


def test_text_that_is_no_unicode_comes_back() -> None:
    messages = [{"role": "user", "content": "\ud800 \x00\n\u2028"}]
    assert ChatFormat("{{ messages[0].content }}").render(messages) == messages[0]["content"]
