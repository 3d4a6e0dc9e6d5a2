"""The bundled pair as it ships: what the card says is true, it is small, every layer routes in its own way."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from models.evaluate import BUNDLED, bars, read, table, truthful
from models.generator import DOMAINS, held_back, render_chat
from models.measure import measure
from moeedge.llama.model import Model

TARGET, DRAFT = BUNDLED / "target.gguf", BUNDLED / "draft.gguf"

if not TARGET.exists():
    pytest.skip("the bundled pair is not there", allow_module_level=True)


def test_the_card_gives_the_files_hashes() -> None:
    card = (BUNDLED / "README.md").read_text()
    told = dict(re.findall(r"`(\w+\.gguf)` \|.*`([0-9a-f]{64})`", card))
    assert told == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (TARGET, DRAFT)}


def test_the_recorded_evaluation_keeps_every_bar_and_is_the_cards() -> None:
    recorded = read(BUNDLED / "evaluation.json")
    assert [bar.name for bar in bars(recorded) if not bar.kept] == []
    assert table(recorded) in (BUNDLED / "README.md").read_text()


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
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    from models.tokenizer import SPECIAL_TOKENS, pre_tokenizer

    fields = pytest.importorskip("gguf").GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tuple(tokens[-3:]) == SPECIAL_TOKENS
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens[:-3])}, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer(), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    texts = [render_chat(chat) for chat in held_back(50)]
    texts += [
        "Gr\u00fc\u00dfe, \u4f60\u597d \U0001f600!",
        "a  b\n\n c\t\r\nd",
        "1234 + 5.6e-7",
        "don't I'LL we're",
        "   ",
        "\x00\x7f",
    ]
    with Model.load(path, device="none") as model:
        for text in texts:
            assert model.tokenize(text, add_special=False) == tokenizer.encode(text).ids, text


@pytest.mark.slow
def test_the_bars_hold_on_a_subset() -> None:
    result = measure(TARGET, DRAFT, gamma=8, n_scored=12)
    assert set(result.domains) == set(DOMAINS)
    assert truthful(result.who)
    assert result.mean_right >= 0.75  # 12 chats of a domain say less than the 100 of the bars
    assert result.acceptance >= 0.65
    assert 0.2 <= result.overlap <= 0.6
    assert result.unique_of_4 <= 0.9
    assert all(domain.finished >= 0.9 for domain in result.domains.values())
