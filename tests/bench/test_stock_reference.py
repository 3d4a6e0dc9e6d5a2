"""stock-ar is stock: the same tokens as a process that loads neither moeedge nor its native library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from moeedge.bench.config import REFERENCE
from tests.bench.recording import make_plan, run, write_conversations

# plain greedy decoding with llama_cpp's low-level calls; prompts come in, answers go out as JSON
_STOCK = """
import json, sys
from pathlib import Path
from tests.support.stock import StockContext, silence
silence()
job = json.load(sys.stdin)
with StockContext(Path(job["model"]), n_ctx=job["n_ctx"], n_threads=1, n_batch=2048, n_ubatch=512) as stock:
    answers = [stock.greedy(prompt, job["n_predict"])[0] for prompt in job["prompts"]]
print(json.dumps({"answers": answers, "moeedge": [name for name in sys.modules if name.startswith("moeedge")],
                  "mapped": "libmoeedge" in Path("/proc/self/maps").read_text()}))
"""


def test_stock_ar_equals_a_process_without_our_library(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    dataset = write_conversations(tmp_path)
    plan = make_plan(tiny_moe, tiny_draft, dataset=dataset, n_predict=40, repetitions=1, ignore_eos=True)
    rows, recorder = run(plan)
    # the first turns: on an empty KV cache both sides decode the same batches
    ours = [s for s in recorder.samples if s.mode == REFERENCE and s.turn == 0]
    assert len(ours) == 2
    job = {
        "model": str(tiny_moe),
        "n_ctx": rows[0].setup.n_ctx,
        "n_predict": 40,
        "prompts": [sample.prompt_ids for sample in ours],
    }
    done = subprocess.run(
        [sys.executable, "-c", _STOCK],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["moeedge"] == []
    assert not result["mapped"]
    assert result["answers"] == [sample.tokens for sample in ours]
    # all other modes give the same tokens, turn by turn
    for sample in recorder.samples:
        reference = next(s for s in recorder.samples if s.key == sample.key and s.mode == REFERENCE)
        assert sample.tokens == reference.tokens
