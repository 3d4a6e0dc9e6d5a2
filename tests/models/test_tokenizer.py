"""The tokenizer: any text survives the round trip, special tokens are single, training is repeatable."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer

from models.tokenizer import SPECIAL_TOKENS, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(n_chats=3000, vocab_size=1024)


def test_training_is_repeatable(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(n_chats=3000, vocab_size=1024).to_str() == tokenizer.to_str()


def test_special_tokens_are_the_last_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == [1021, 1022, 1023]
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1022


def test_numbers_are_split_into_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]


def test_round_trip_of_any_text(tokenizer: Tokenizer) -> None:
    @settings(max_examples=300, deadline=None)
    @given(st.text())
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    check()
