"""Write the model card and the loss curve of the bundled pair: `python -m models.card --work DIR`."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np

from models.evaluate import BUNDLED, read, table
from models.generator.arithmetic import LARGEST
from models.measure import Result
from models.network import DRAFT_SHAPE, LIKENESS, TARGET_SHAPE
from models.train import (
    DEEP_ROUTING,
    LONG_EVERY,
    LONG_FROM,
    LONG_ROWS,
    LONG_TIME,
    N_ROWS,
    N_TIME,
    SHALLOW_LAYERS,
    SHALLOW_ROUTING,
)

STAGES = {
    "target-shallow": f"target, {SHALLOW_LAYERS} layers",
    "target": f"target, {TARGET_SHAPE.n_layer} layers",
    "draft-plain": "draft, text",
    "draft": "draft, distilled (KL)",
}

TITLES = ("moeedge toy target", "moeedge toy draft")
PAUSE_S = 120.0  # a longer time between two steps is a pause
TEMPLATE = Path(__file__).with_name("card_template.md")


def read_log(path: Path) -> dict[str, np.ndarray]:
    """Columns of a stage's log by name; a step that was run twice (after an interruption) counts once."""
    rows = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows[row["step"]] = row
    ordered = [rows[step] for step in sorted(rows)]
    return {key: np.array([row[key] for row in ordered]) for key in ("step", "loss", "answer_loss", "time")}


def smooth(values: np.ndarray, width: int = 20) -> np.ndarray:
    """Running mean; the ends average over what there is."""
    kernel = np.ones(min(width, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def plot(logs: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Plot the loss on answers over steps, one curve per stage, stages in order."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=False)
    for axis, prefix in zip(axes, ("target", "draft"), strict=True):
        start = 0
        for stage in (s for s in STAGES if s.startswith(prefix) and s in logs):
            log = logs[stage]
            axis.plot(start + log["step"], smooth(log["answer_loss"]), label=STAGES[stage], linewidth=1)
            start += len(log["step"])
        axis.set(xlabel="step", ylabel="loss on answers (nats per token)", yscale="log", title=prefix)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def duration(logs: dict[str, dict[str, np.ndarray]]) -> str:
    """Time that the steps took, in words; pauses between runs are left out."""
    steps_s = np.concatenate([np.diff(log["time"]) for log in logs.values()])
    minutes = steps_s[(steps_s >= 0) & (steps_s < PAUSE_S)].sum() / 60
    return f"{minutes:.0f} minutes"


def weakest(result: Result) -> str:
    """A sentence on the domain with the fewest right answers."""
    name = min(result.domains, key=lambda domain: result.domains[domain].right)
    return f"The weakest domain is {name} ({result.domains[name].right:.2f} right). "


def file_row(path: Path, kind: str, shape: str) -> str:
    data = path.read_bytes()
    return f"| `{path.name}` | {kind} | {shape} | {len(data) / 1e6:.1f} MB | `{hashlib.sha256(data).hexdigest()}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/models"), help="folder of checkpoints and logs")
    parser.add_argument("--evaluation", type=Path, default=BUNDLED / "evaluation.json")
    parser.add_argument("--expert-type", default="Q4_0")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logs = {name: read_log(args.work / f"{name}.jsonl") for name in STAGES if (args.work / f"{name}.jsonl").exists()}
    plot(logs, BUNDLED / "loss.png")
    stages = [
        f"| {STAGES[name]} | {len(log['step']):,} | {len(log['step']) * N_ROWS * N_TIME / 1e6:.1f} M | "
        f"{log['loss'][-50:].mean():.4f} | {log['answer_loss'][-50:].mean():.4f} |"
        for name, log in logs.items()
    ]
    t, d = TARGET_SHAPE, DRAFT_SHAPE
    files = [
        file_row(
            BUNDLED / "target.gguf",
            "qwen3moe",
            f"{t.n_layer} layers, width {t.n_embd}, {t.n_expert} experts of width {t.n_ff}, top {t.n_expert_used}",
        ),
        file_row(BUNDLED / "draft.gguf", "qwen3", f"{d.n_layer} layers, width {d.n_embd}, feed-forward {d.n_ff}"),
    ]
    export = "python -m models.export build/models/"
    commands = "\n".join(
        (
            "python -m models.train target",
            "python -m models.train draft",
            f"{export}target.pt models/bundled/target.gguf --type {args.expert_type.lower()} --name '{TITLES[0]}'",
            f"{export}draft.pt models/bundled/draft.gguf --type q8_0 --name '{TITLES[1]}'",
            "python -m models.evaluate --json models/bundled/evaluation.json",
            "python -m models.card",
        )
    )
    result = read(args.evaluation)
    (BUNDLED / "README.md").write_text(
        TEMPLATE.read_text().format(
            files="\n".join(files),
            n_vocab=t.n_vocab,
            expert_type=args.expert_type,
            n_rows=N_ROWS,
            n_time=N_TIME,
            seed=args.seed,
            shallow=SHALLOW_LAYERS,
            deep=t.n_layer,
            balance=SHALLOW_ROUTING[0],
            long_from=LONG_FROM,
            long_every=LONG_EVERY,
            long_rows=LONG_ROWS,
            long_time=LONG_TIME,
            change=DEEP_ROUTING[1],
            likeness=LIKENESS,
            hours=duration(logs),
            largest=LARGEST,
            weak=weakest(result),
            stages="\n".join(stages),
            commands=commands,
            evaluation=table(result),
        )
    )


if __name__ == "__main__":
    main()
