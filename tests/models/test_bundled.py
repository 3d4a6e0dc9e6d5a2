"""The bundled pair as it ships: what the card says is true, it is small, every layer routes in its own way."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from models.evaluate import BUNDLED, MIN_ACCEPTANCE, MIN_OVERLAP, evaluate
from models.generator import held_back, render_chat
from models.llama_runner import Runner

TARGET, DRAFT = BUNDLED / "target.gguf", BUNDLED / "draft.gguf"

if not TARGET.exists():
    pytest.skip("the bundled pair is not there", allow_module_level=True)


def test_the_card_gives_the_files_hashes() -> None:
    card = (BUNDLED / "README.md").read_text()
    told = dict(re.findall(r"`(\w+\.gguf)` \|.*`([0-9a-f]{64})`", card))
    assert told == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (TARGET, DRAFT)}


def test_both_files_together_are_small() -> None:
    assert TARGET.stat().st_size + DRAFT.stat().st_size < 50e6


def test_shape_and_routers_of_all_layers_differ() -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(TARGET)
    assert reader.fields["qwen3moe.block_count"].contents() == 48
    assert reader.fields["qwen3moe.expert_count"].contents() == 128
    assert reader.fields["qwen3moe.expert_used_count"].contents() == 8
    routers = [np.array(t.data).ravel() for t in reader.tensors if "ffn_gate_inp" in t.name]
    assert len(routers) == 48
    unit = np.stack([r / np.linalg.norm(r) for r in routers])
    alike = unit @ unit.T - np.eye(48)
    assert np.abs(alike).max() < 0.99


@pytest.mark.parametrize("path", [TARGET, DRAFT], ids=lambda p: p.stem)
def test_llama_cpp_reads_the_same_tokens_as_the_tokenizer(path: Path) -> None:
    pytest.importorskip("tokenizers")
    from models.tokenizer import SPECIAL_TOKENS, build

    fields = pytest.importorskip("gguf").GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tuple(tokens[-3:]) == SPECIAL_TOKENS
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = build({token: i for i, token in enumerate(tokens[:-3])}, merges)
    texts = [render_chat(chat) for chat in held_back(50)]
    texts += [
        "Gr\u00fc\u00dfe, \u4f60\u597d \U0001f600!",
        "a  b\n\n c\t\r\nd",
        "1234 + 5.6e-7",
        "don't I'LL we're",
        "   ",
        "\x00\x7f",
    ]
    with Runner(path) as runner:
        for text in texts:
            assert runner.encode(text) == tokenizer.encode(text).ids, text


@pytest.mark.slow
def test_the_bars_hold_on_a_subset() -> None:
    result = evaluate(TARGET, DRAFT, gamma=4, n_prompts=12, n_scored=4)
    assert result.acceptance >= MIN_ACCEPTANCE
    assert result.overlap >= MIN_OVERLAP
    assert result.finished == 1.0
