"""The vocabulary of models with random weights: byte-level BPE, 304 tokens, ChatML specials, fillers up to its size.

Ids 0..255 are the bytes, then 45 two-letter merges, then the three specials; every text can be tokenized and every
token has bytes, many of which are no complete UTF-8, as in real byte-level vocabularies. Fillers ("w304", ...) are
words that no text is tokenized to. Models with as many tokens have the same ones, so that any can draft for another.
"""

from __future__ import annotations

import gguf

_PAIRS = (  # Ġ is the byte-level spelling of a space
    "Ġt he in er an re on at en nd ti es or te of ed is it al ar st to nt"
    " ng se ha as ou io le ve co me de hi ri ro ic ne ea ra ce li ch ll"
)
MERGES = _PAIRS.split()
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
N_VOCAB = 256 + len(MERGES) + len(SPECIALS)
ENDOFTEXT, IM_START, IM_END = range(N_VOCAB - len(SPECIALS), N_VOCAB)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_symbols() -> list[str]:
    """The 256 printable characters that byte-level BPE writes for the bytes 0..255 (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int = N_VOCAB, *, mask: int = -1) -> None:
    """Writes the `tokenizer.*` keys; fillers follow the first N_VOCAB tokens. mask: a token's id, -1: none is one."""
    fillers = [f"w{token}" for token in range(N_VOCAB, n_vocab)]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*byte_symbols(), *MERGES, *SPECIALS, *fillers])
    kinds = [normal] * (N_VOCAB - len(SPECIALS)) + [control] * len(SPECIALS) + [normal] * len(fillers)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{merge[0]} {merge[1]}" for merge in MERGES])
    writer.add_bos_token_id(ENDOFTEXT)
    writer.add_eos_token_id(IM_END)
    writer.add_pad_token_id(ENDOFTEXT)
    if mask >= 0:
        writer.add_mask_token_id(mask)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
