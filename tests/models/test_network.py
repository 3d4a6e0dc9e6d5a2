"""Network, growth and training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the training extra (torch)")

from models import trainer  # noqa: E402
from models.network import Network, Shape, alike, grow  # noqa: E402

TINY = Shape(n_vocab=64, n_layer=2, n_embd=32, n_head=2, n_head_kv=1, head_dim=16, n_expert=8, n_expert_used=2, n_ff=16)


def test_growing_keeps_the_function_and_makes_different_routers() -> None:
    torch.manual_seed(0)
    small = Network(TINY)
    big = grow(small, 6)
    tokens = torch.randint(0, 64, (2, 10))
    with torch.no_grad():
        torch.testing.assert_close(big(tokens)[0], small(tokens)[0], rtol=1e-5, atol=1e-5)
    routers = [block.ffn.router.weight for block in big.blocks]
    assert all(not torch.equal(a, b) for i, a in enumerate(routers) for b in routers[:i])


def test_later_tokens_do_not_change_earlier_ones() -> None:
    torch.manual_seed(0)
    net = Network(replace(TINY, n_expert=0, n_expert_used=0))
    tokens = torch.randint(0, 64, (1, 12))
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % 64
    with torch.no_grad():
        torch.testing.assert_close(net(tokens)[0][:, :-1], net(other)[0][:, :-1])


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def loss_at(net: Network, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        hidden, _ = net(tokens)
        loss = torch.nn.functional.cross_entropy(net.logits(hidden).flatten(0, 1), tokens.flatten())
        return loss, {"loss": loss.item()}

    torch.manual_seed(0)
    whole = Network(TINY)
    halves = Network(TINY)
    halves.load_state_dict(whole.state_dict())
    plan = trainer.TrainingPlan("x", 6, 1e-3, warmup_steps=2)
    whole = trainer.run(whole, plan, loss_at, tmp_path)

    class Stop(Exception):
        pass

    def breaks_off(net: Network, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        if step == 3:
            raise Stop
        return loss_at(net, step)

    second = tmp_path / "second"
    second.mkdir()
    with pytest.raises(Stop):
        trainer.run(halves, replace(plan, save_every_s=-1.0), breaks_off, second)
    halves = trainer.run(halves, plan, loss_at, second)
    for a, b in zip(whole.parameters(), halves.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_adjacent_tokens_of_like_routing_cost_nothing_and_others_do() -> None:
    torch.manual_seed(0)
    base = torch.randn(2, 6, 32)
    noise = torch.randn(2, 6, 32)
    for first, change in ((base, 0.0), (noise, 1.0)):
        # tokens 2i and 2i + 1 are near copies of each other, or strangers
        logits = torch.stack((base, first + 0.01 * noise), dim=2).flatten(1, 2)
        pairs = alike(logits)[:, ::2]
        assert (pairs > 0.95).all() if change == 0.0 else (pairs.mean() < 0.3)
