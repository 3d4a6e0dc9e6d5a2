"""Perplexity in batches of a verification's size: by its definition, and whatever the size of a batch."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moeedge.bench.perplexity import measure_perplexity, negative_log_likelihood
from moeedge.data.datasets import load_text
from moeedge.data.prompts import EvaluationText
from moeedge.errors import DatasetError, InputError
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.run import Run

_TEXT = EvaluationText("words", "the cat and the dog saw " * 8, "0")


def test_the_likelihood_by_its_definition() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=np.float32)) + np.float32(700)
    assert negative_log_likelihood(logits, [0, 2]) == pytest.approx([math.log(2), -math.log(0.8)], abs=1e-4)


def test_tokens_one_by_one_and_in_batches(tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model, Context(model, n_ctx=64, n_threads=1) as context:
        tokens = model.tokenize(_TEXT.text)
        losses = []
        for start in range(0, len(tokens), 64):
            part = tokens[start : start + 64]
            context.clear()
            for token, target in pairwise(part):
                logits = context.decode([token], phase=Phase.DECODE, logits="last")
                losses.append(float(negative_log_likelihood(logits, [target])[0]))
        for batch_tokens in (1, 5, 9):
            measured = measure_perplexity(context, _TEXT, batch_tokens=batch_tokens)
            assert measured is not None
            assert (measured.n_tokens, measured.batch_tokens, measured.window_tokens) == (len(losses), batch_tokens, 64)
            assert measured.nll == pytest.approx(np.mean(losses), abs=0.01)  # a batch rounds otherwise
            assert measured.value == pytest.approx(math.exp(measured.nll))
        assert context.n_past == 0
        assert measure_perplexity(context, _TEXT, batch_tokens=5, run=Run(cancelled=lambda: True)) is None
        with pytest.raises(InputError):
            measure_perplexity(context, EvaluationText("one", "a", "0"), batch_tokens=5)


def test_texts(tmp_path: Path) -> None:
    toy = load_text("toy")
    assert toy.text.count("<|im_start|>assistant") >= 28
    own = tmp_path / "own.txt"
    own.write_text("hello", encoding="utf-8")
    assert load_text(str(own)).name == "own.txt"
    for content in (b" ", b"\xff"):
        own.write_bytes(content)
        with pytest.raises(DatasetError):
            load_text(str(own))
    with pytest.raises(DatasetError):
        load_text(str(tmp_path / "absent.txt"))
