"""A byte-level BPE tokenizer trained on the generator's own text, equal to llama.cpp's "qwen2" pre-tokenizer."""

from __future__ import annotations

import itertools
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.generator import END_OF_TEXT, IM_END, IM_START, chats

VOCAB_SIZE = 2048
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # the last ids of the vocabulary, as in Qwen's own tokenizer
TRAINING_CHATS = 40_000

# What llama.cpp uses for tokenizer.ggml.pre = "qwen2": single digits, words with one leading non-letter.
QWEN2_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Splits text as llama.cpp does before the merges."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer(seed: int = 0, n_chats: int = TRAINING_CHATS, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges; all 256 bytes are in the vocabulary, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (text for chat in itertools.islice(chats(f"tokenizer-{seed}"), n_chats) for _, text in chat.messages())
    roles = ("system\n", "user\n", "assistant\n") * 1000  # these lines occur in every prompt
    tokenizer.train_from_iterator(itertools.chain(texts, roles), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} tokens, not {vocab_size}: use more text")
    return tokenizer


def load_or_train(path: Path, seed: int = 0) -> Tokenizer:
    """The tokenizer kept at `path`, trained first when there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(seed).save(str(path))
    return Tokenizer.from_file(str(path))
