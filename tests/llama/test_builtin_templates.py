"""Chat templates by name, as llama.cpp writes them, and the same templates in Jinja."""

from __future__ import annotations

from pathlib import Path

import llama_cpp.llama_cpp as lib
import pytest

from moeedge.errors import InputError
from moeedge.llama.model import Model
from moeedge.llama.reasoning import TemplateChoice
from moeedge.llama.text import CHATML, ChatFormat, builtin_names, check_source

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie heißt du?"},
    {"role": "assistant", "content": "Ada."},
    {"role": "user", "content": "Why?"},
]
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|endoftext|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + "
    "'<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def by_llama_cpp(name: str) -> str:
    chat = (lib.llama_chat_message * len(MESSAGES))()
    for place, message in zip(chat, MESSAGES, strict=True):
        place.role, place.content = message["role"].encode(), message["content"].encode()
    buffer = lib.ctypes.create_string_buffer(4096)
    n = lib.llama_chat_apply_template(name.encode(), chat, len(MESSAGES), True, buffer, len(buffer))
    assert 0 < n < len(buffer)
    return buffer.raw[:n].decode()


def test_every_name_is_written_as_llama_cpp_does(tiny_moe: Path) -> None:
    assert {"chatml", "llama3", "gemma"} <= set(builtin_names())
    with Model.load(tiny_moe, header_only=True) as model:
        for name in builtin_names():
            assert model.render_chat(MESSAGES, template=TemplateChoice(name)) == by_llama_cpp(name)
            assert model.reasoning_tags(TemplateChoice(name)) is None


@pytest.mark.parametrize(("name", "jinja"), [("chatml", CHATML), ("zephyr", ZEPHYR), ("llama3", LLAMA3)])
def test_jinja_gives_the_same_text(name: str, jinja: str, tiny_moe: Path) -> None:
    with Model.load(tiny_moe, header_only=True) as model:
        assert model.render_chat(MESSAGES, template=TemplateChoice(jinja)) == by_llama_cpp(name)


def test_a_source_is_a_name_or_jinja() -> None:
    for source in ("", "chatml", "{{ messages }}"):
        check_source(source)
    with pytest.raises(InputError):
        check_source("chatlm")


def test_errors_of_a_given_template_are_bad_input() -> None:
    with pytest.raises(InputError) as raised:
        ChatFormat("{{ x }}\n{% if %}", is_given=True)
    assert "line 2" in raised.value.message
    with pytest.raises(InputError):
        ChatFormat("{{ raise_exception('no') }}", is_given=True).render(MESSAGES)
    with pytest.raises(InputError):
        ChatFormat("{{ messages[9].content + 1 }}", is_given=True).render(MESSAGES)


SWITCH = "{% if enable_thinking is defined and not enable_thinking %}[no]{% endif %}{{ messages[0].content }}"
EFFORT = "{{ reasoning_effort | default('medium') }}{{ other | default('') }}"


def test_variables_of_a_template(tiny_moe: Path) -> None:
    with Model.load(tiny_moe, header_only=True) as model:
        assert model.render_chat(MESSAGES, template=TemplateChoice(SWITCH, think="off")) == "[no]Be brief."
        assert model.render_chat(MESSAGES, template=TemplateChoice(SWITCH, think="on")) == "Be brief."
        assert model.render_chat(MESSAGES, template=TemplateChoice(EFFORT, think="high")) == "high"
        given = TemplateChoice(EFFORT, {"other": "!", "third": 1})
        assert model.render_chat(MESSAGES, template=given) == "medium!"
        [note] = model.check_template(given)
        assert "third" in note and "other" not in note
        for source, think in ((SWITCH, "low"), (EFFORT, "off"), ("chatml", "on"), ("", "on")):
            with pytest.raises(InputError):
                model.check_template(TemplateChoice(source, think=think))  # type: ignore[arg-type]
            assert model.check_template(TemplateChoice(source)) == []
        assert model.check_template(TemplateChoice(think="off")) == []  # its template knows no thinking
