"""Tags of reasoning, found in chat templates of the kinds in use."""

from __future__ import annotations

import pytest

from moeedge.llama.reasoning import (
    ReasoningTags,
    SplitAnswer,
    begins_in_reasoning,
    find_reasoning_tags,
    split_reasoning,
)
from moeedge.llama.text import CHATML, ChatFormat

THINK = ReasoningTags("<think>", "</think>")
SEED = ReasoningTags("<seed:think>", "</seed:think>")
HARMONY = ReasoningTags("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
HEADER = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
FOOTER = "{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n"
SHOWN = "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
CUT = "{% if '</think>' in m.content %}{% set c = m.content.split('</think>')[-1] %}{% endif %}"
CHANNELS = (
    "{% for m in messages %}{{ '<|start|>' + m.role }}"
    "{% if m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}{{ '<|message|>' + m.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("template", "tags", "is_open"),
    [
        (HEADER + SHOWN + FOOTER + "' }}{% endif %}", THINK, False),
        (HEADER + SHOWN + FOOTER + "<think>\\n' }}{% endif %}", THINK, True),
        (HEADER + CUT + FOOTER + "<think>\\n' }}{% endif %}", THINK, True),
        (HEADER + SHOWN.replace("think>", "seed:think>") + FOOTER + "' }}{% endif %}", SEED, False),
        (CHANNELS, HARMONY, False),
        (CHATML, None, False),
        ("{{ raise_exception('no') }}", None, False),
    ],
    ids=["reasoning", "opened by the prompt", "cut off by its end", "other tags", "channels", "none", "rejects"],
)
def test_tags_of_a_template(template: str, tags: ReasoningTags | None, is_open: bool) -> None:
    chat_format = ChatFormat(template)
    found = find_reasoning_tags(chat_format)
    assert found == tags
    if tags is not None:
        assert begins_in_reasoning(chat_format.render(QUESTION), found) is is_open


@pytest.mark.parametrize(
    ("text", "is_open", "parts"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", False, ("Why?", "So.")),
        ("Why?\n</think>\n\nSo.", True, ("Why?", "So.")),
        ("Why?\n</think>\n\nSo.", False, ("Why?", "So.")),
        ("<think>Why", False, ("Why", "")),
        ("Why", True, ("Why", "")),
        ("So.", False, ("", "So.")),
        ("It writes <think> there.", False, ("", "It writes <think> there.")),
    ],
)
def test_an_answer_is_split(text: str, is_open: bool, parts: tuple[str, str]) -> None:
    assert split_reasoning(text, THINK, is_open=is_open) == SplitAnswer(*parts)
    assert split_reasoning(text, None, is_open=is_open) == ("", text)
