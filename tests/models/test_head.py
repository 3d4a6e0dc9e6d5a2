"""A head (EAGLE-3 draft) computes the same in llama.cpp as in PyTorch, learns, and drafts for the bundled target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the training extra (torch)")

from models import trainer  # noqa: E402
from models.export_head import export_head  # noqa: E402
from models.head import Head, HeadShape, draft_loss  # noqa: E402
from models.states import best, read_tokenizer, record  # noqa: E402
from moeedge import paths  # noqa: E402
from moeedge.llama.context import Context  # noqa: E402
from moeedge.llama.draft_heads import HeadContext, head_file  # noqa: E402
from moeedge.llama.model import Model  # noqa: E402
from moeedge.native.abi import Phase  # noqa: E402
from tests.support.stock import StockContext  # noqa: E402

N_TIME = 32


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of the target's states: 2 rows of N_TIME tokens."""
    folder, layers = tmp_path_factory.mktemp("states"), HeadShape().layers
    options = {"seed": "test", "n_files": 1, "n_rows": 2, "n_time": N_TIME, "threads": 1}
    (path,) = record(paths.bundled_target(), folder, layers, **options)
    return path


@pytest.fixture(scope="module")
def head(recorded: Path) -> Head:
    torch.manual_seed(0)
    net = Head(HeadShape())
    import gguf
    from gguf.quants import dequantize

    read = {tensor.name: tensor for tensor in gguf.GGUFReader(paths.bundled_target()).tensors}
    embed, norm = (
        torch.tensor(dequantize(read[name].data, read[name].tensor_type))
        for name in ("token_embd.weight", "output_norm.weight")
    )
    net.start(embed, norm, torch.from_numpy(np.load(recorded)["states"]).flatten(0, 1))
    return net


def test_the_recorded_predictions_are_the_targets(recorded: Path) -> None:
    data = np.load(recorded)
    with StockContext(paths.bundled_target(), n_ctx=64) as stock:
        for row, ids in zip(data["tokens"], data["ids"], strict=True):
            following = [stock.greedy(row[: i + 1].tolist(), 1)[0][0] for i in (0, 5, N_TIME - 1)]
            assert sum(int(ids[i, 0]) == token for i, token in zip((0, 5, N_TIME - 1), following, strict=True)) >= 2
    assert np.allclose(data["probabilities"].sum(axis=2), 1)
    assert data["states"].shape == (2, N_TIME, 3 * 64)


def test_best_keeps_the_likeliest() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32)
    ids, p = best(logits)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1)[:, : ids.shape[1]])
    chosen = np.exp(np.take_along_axis(logits, ids.astype(int), axis=1))
    np.testing.assert_allclose(p, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 0.02), ("q8_0", 0.15)])
def test_gguf_agrees_with_pytorch(head: Head, recorded: Path, kind: str, tolerance: float, tmp_path: Path) -> None:
    """The first drafts from the target's states, and three more that each start from the head's own state."""
    path = tmp_path / "head.gguf"
    export_head(head, read_tokenizer(paths.bundled_target()), path, kind, "test")
    data = np.load(recorded)
    row, states = data["tokens"][0].astype(int), data["states"][0].astype(np.float32)
    tokens = torch.from_numpy(row)[None]
    before = torch.cat((torch.zeros(1, 1, states.shape[1]), torch.from_numpy(states)[None, :-1]), dim=1)
    with torch.no_grad():
        wanted = [head.logits(hidden)[0].numpy() for hidden in head(tokens, before, 4)]
    n_first = N_TIME - 3
    with (
        Model.load(paths.bundled_target()) as target_model,
        Model.load(path) as model,
        Context(target_model, n_ctx=64, n_threads=1) as target,
    ):
        kind_of_head = head_file(target_model, model)
        assert kind_of_head is not None
        with HeadContext(model, kind_of_head, target, n_threads=1) as context:
            sequence = context.sequences[0]
            own = context.input_states(states[: n_first - 1])  # of the positions before tokens 1 ...
            rows = sequence.decode(row[1:n_first].tolist(), phase=Phase.DRAFT, logits="all", states=own).copy()
            found, expected = [rows], [wanted[0][1:n_first]]
            state = context.last_state(len(rows))
            for draft in range(1, 4):
                at = n_first - 1 + draft
                token = row[at : at + 1].tolist()
                found.append(sequence.decode(token, phase=Phase.DRAFT, logits="all", states=state).copy())
                state = context.last_state(1)
                expected.append(wanted[draft][at : at + 1])
    for a, b in zip(found, expected, strict=True):
        assert np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) < tolerance


def test_a_head_learns_and_its_checkpoint_goes_on(head: Head, recorded: Path, tmp_path: Path) -> None:
    data = {key: torch.from_numpy(value) for key, value in np.load(recorded).items()}
    weights = torch.ones_like(data["weights"])

    def loss_at(net: Head, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        tokens, ids = data["tokens"].long(), data["ids"].long()
        return draft_loss(net, tokens, data["states"].float(), ids, data["probabilities"], weights, n_drafts=3)

    net = Head(head.shape)
    net.load_state_dict(head.state_dict())
    before = loss_at(net, 0)[0].item()
    trained = trainer.run(net, trainer.TrainingPlan("head", 30, 3e-3, warmup_steps=5), loss_at, tmp_path)
    after = loss_at(trained, 0)[0].item()
    assert after < 0.6 * before
    loaded = trainer.load_head(tmp_path / "head.pt")
    assert loaded.shape == head.shape and loss_at(loaded, 0)[0].item() == pytest.approx(after)
