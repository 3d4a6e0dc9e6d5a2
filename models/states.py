"""What a head of the target is trained on: the target's hidden states and predictions over the generator's text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from models.data import batch
from models.llama_runner import Runner
from models.tokenizer import build
from moeedge.llama.hidden_states import tap_states

N_KEPT = 8  # of the target's likeliest next tokens


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file that `models.export` wrote."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    return build({token: i for i, token in enumerate(tokens[:-3])}, merges)


def record(
    target: Path,
    folder: Path,
    layers: Sequence[int],
    *,
    seed: str,
    n_files: int,
    n_rows: int,
    n_time: int,
    threads: int,
) -> list[Path]:
    """Runs the target over `n_files` times `n_rows` rows of `n_time` tokens; files that exist stay as they are.

    A file has tokens (R, T), weights (R, T) of their successors, states float16 (R, T, len(layers) * n_embd), ids and
    probabilities (R, T, N_KEPT) of the likeliest successors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i:05d}.npz" for i in range(n_files)]
    tokenizer = read_tokenizer(target)
    with Runner(target, n_ctx=n_time, n_threads=threads) as runner:
        n_layers, n_embd = (int(runner.meta(f"qwen3moe.{key}")) for key in ("block_count", "embedding_length"))
        read_states = tap_states(runner.context, layers, n_layers=n_layers, n_embd=n_embd)
        for i, path in enumerate(tqdm(paths, desc="states", mininterval=10)):
            if path.exists():
                continue
            tokens, _, weights = batch(tokenizer, seed, i, n_rows, n_time)
            states, ids, probabilities = [], [], []
            for row in tokens.tolist():
                runner.cut(0)
                logits = runner.eval(row)
                states.append(read_states(n_time).astype(np.float16))
                likeliest, p = best(logits)
                ids.append(likeliest)
                probabilities.append(p)
            part = path.with_suffix(".part")
            with part.open("wb") as file:
                np.savez(
                    file,
                    tokens=tokens.numpy().astype(np.int16),
                    weights=weights.numpy(),
                    states=np.stack(states),
                    ids=np.stack(ids),
                    probabilities=np.stack(probabilities),
                )
            part.replace(path)
    return paths


def best(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The N_KEPT likeliest tokens of each row, int16 (n, k), and their probabilities, float32, which sum to 1."""
    ids = np.argpartition(logits, -N_KEPT, axis=1)[:, -N_KEPT:]
    values = np.take_along_axis(logits, ids, axis=1)
    order = np.argsort(-values, axis=1)
    ids, values = np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)
    p = np.exp(values - values[:, :1])
    return ids.astype(np.int16), (p / p.sum(axis=1, keepdims=True)).astype(np.float32)
