"""`moeedge lab replay` and `lab trace` from the command line: rows, tables, seeds, imports, and mistakes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.lab.traces.schedule import texts_of
from moeedge.trace.format import Trace
from moeedge.ui import console
from tests.support.commands import refused, run, run_json
from tests.support.traces import plain_text, two_texts


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    plain_text(60).save(tmp_path / "plain.npz")
    return tmp_path / "plain.npz"


def test_rows_are_flat_and_come_in_order(plain: Path) -> None:
    rows = run_json("lab", "replay", plain, "--cache-ratio", "0.25,0.5", "--policy", "lru,spac", "--gamma", 3)
    names = ["lru", "spac", "oracle", "belady"]
    assert [(row["rejected_token_model"], row["cache_ratio"], row["policy"]) for row in rows] == [
        (model, ratio, name) for model in ("optimistic", "pessimistic") for ratio in (0.25, 0.5) for name in names
    ]
    bounds = run_json("lab", "replay", plain, "--policy", "belady,oracle", "--gamma", 0)
    assert [row["policy"] for row in bounds] == ["oracle", "belady"]
    for row in rows:
        assert next(iter(row)) == "policy"
        assert not any(isinstance(value, dict | list) for value in row.values())
        assert (row["gamma"], row["acceptance_chance"], row["seed"], row["bytes_per_step"]) == (3, 0.8, 0, None)
        assert 0.0 <= row["hit_rate_pairs"] <= 1.0
        assert row["hit_rate_pairs"] <= row["oracle_hit_rate_pairs"]


def test_hardware_states_times(plain: Path) -> None:
    """In every row; a slower machine's Eq. 10 lets policies move less."""
    command = ("lab", "replay", plain, "--cache-ratio", 0.5, "--policy", "spac-paper", "--gamma", 3)
    rows = run_json(*command, "--hardware", "rtx4090-pcie4", "--model", "gpt-oss-20b")
    assert {row["hardware"] for row in rows} == {"rtx4090-pcie4, gpt-oss-20b"}
    assert not any("hardware" in row for row in run_json(*command))
    refused("lab", "replay", plain, "--hardware", "abacus")
    refused("lab", "replay", plain, "--hardware", "h200", "--model", "gpt-0")


def test_the_same_seed_gives_the_same_bytes(plain: Path) -> None:
    arguments = (plain, "--policy", "lru,hybrimoe", "--gamma", 3, "-o", "json", "--seed")
    first, again, other = (run("lab", "replay", *arguments, seed).stdout for seed in (5, 5, 6))
    assert first == again != other


def test_a_recorded_trace_brings_gamma_and_acceptance(tmp_path: Path) -> None:
    two_texts(parameters={"expert_bytes": 1000}).save(tmp_path / "own.npz")
    rows = run_json("lab", "replay", tmp_path / "own.npz", "--policy", "lru")
    drafts = ("rejected_token_model", "gamma", "acceptance_rate", "acceptance_chance")
    assert [tuple(row[key] for key in drafts) for row in rows] == [("recorded", 2, 0.4, 0.5)] * 3
    assert {row["acceptance_source"] for row in rows} == {"recorded"}
    assert rows[0]["bytes_per_step"] == pytest.approx(2000 * rows[0]["uploads_per_layer_step"], abs=1)
    cut = run_json("lab", "replay", tmp_path / "own.npz", "--policy", "lru", "--rejected-token-model", "pessimistic")
    assert {row["rejected_token_model"] for row in cut} == {"pessimistic"} and cut[0]["gamma"] == 2
    assert cut[0]["acceptance_source"] == "measured"
    assumed = run_json("lab", "replay", tmp_path / "own.npz", "--policy", "lru", "--acceptance-chance", "0.9")
    assert assumed[0]["acceptance_source"] == "assumed"


def test_an_assumed_acceptance_is_called_so(plain: Path) -> None:
    rows = run_json("lab", "replay", plain, "--policy", "lru", "--gamma", 3)
    assert {(row["acceptance_source"], row["acceptance_chance"]) for row in rows} == {("assumed", 0.8)}
    assert run_json("lab", "replay", plain, "--policy", "lru", "--gamma", 0)[0]["acceptance_source"] is None
    for more in ((), ("--curve",)):
        table = " ".join(run("lab", "replay", plain, "--policy", "lru", "--gamma", 3, *more).stdout.split())
        assert "assumed chance of 0.80" in table


def test_a_policy_above_the_oracle_has_its_reason(tmp_path: Path) -> None:
    plain_text(60, n_layers=8).save(tmp_path / "deep.npz")
    arguments = (tmp_path / "deep.npz", "--policy", "lru,moe-infinity", "--gamma", 3, "--cache-ratio", "0.1")
    for row in run_json("lab", "replay", *arguments):
        is_above = row["hit_rate_pairs"] > row["oracle_hit_rate_pairs"]
        assert is_above == (row["policy"] == "moe-infinity")
        assert row["above_oracle"] == ("within-step" if is_above else None)
    lines = run("lab", "replay", *arguments).stdout.splitlines()
    assert all(("between layers" in line) == line.startswith("moe-infinity") for line in lines if "0." in line[:40])
    assert "between layers" not in run("lab", "replay", *arguments, "--policy", "lru").stdout


def test_progress_without_a_terminal(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("lab", "replay", plain, "--policy", "lru", "--gamma", 3, "-o", "json")
    quiet = run(*arguments)
    assert not quiet.stderr  # it takes less time than passes before the first line
    monkeypatch.setattr(console, "LINE_S", 0.0)
    for more in ((), ("--curve",)):
        result = run(*arguments, *more)
        assert result.exit_code == 0
        assert all(
            re.fullmatch(r"\w+[\w ]*: [\d,]+ of [\d,]+ (steps|curves)", line) for line in result.stderr.splitlines()
        )
        assert result.stderr
        assert bool(more) or result.stdout == quiet.stdout


def test_tables(plain: Path) -> None:
    models = ("--gamma", 3, "--rejected-token-model", "optimistic")
    arguments = (plain, "--policy", "lru,fate", *models, "--expert-bytes", 1 << 20)
    result = run("lab", "replay", *arguments)
    assert result.exit_code == 0, result.output
    for part in ("random: 1 texts", "optimistic rejected tokens", "oracle", "MiB/step", "fate: by the cache alone"):
        assert part in " ".join(result.stdout.split())
    seeing = " ".join(run("lab", "replay", *arguments, "--predictor-accuracy", "default").stdout.split())
    assert "fate *" in seeing and "(next-gate 0.8)" in seeing
    without = run("lab", "replay", plain, "--policy", "lru", "--gamma", 0)
    assert "one token at a time" in without.stdout and without.stdout.count("belady ") == 1


def test_what_policies_go_without_is_said(tmp_path: Path) -> None:
    """In the table's legend, and with JSON on standard error: predictors, token ids, a profile."""
    text = plain_text(60)
    replace(text, token=np.full_like(text.token, -1)).save(tmp_path / "bare.npz")
    blind = ("sp-moe", "fate", "adapmoe", "mixtral-offloading", "hybrimoe")
    arguments = ("--policy", ",".join((*blind, "spac", "static")), "--gamma", 3, "--rejected-token-model", "optimistic")
    want = [
        f"{', '.join(blind)}: by the cache alone, without a predictor",
        "spac: without token tables, since this trace holds no vocabulary ids",
        "static: profiled on the first steps",
    ]
    table = " ".join(run("lab", "replay", tmp_path / "bare.npz", *arguments).stdout.split())
    said = run("lab", "replay", tmp_path / "bare.npz", *arguments, "-o", "json")
    for sentence in want:
        assert sentence in table
        assert sentence in " ".join(said.stderr.split())
    rows = json.loads(said.stdout)
    assert not any(row["token_ids"] or row["profile"] or row["prediction_source"] for row in rows)

    full = two_texts()  # with vocabulary ids, and a text to spare
    assert (full.token >= 0).all()
    full.save(tmp_path / "words.npz")
    result = run("lab", "replay", tmp_path / "words.npz", "--policy", "spac", "-o", "json")
    assert "token ids alone" in result.stderr
    full = replace(full, hidden_states=np.zeros((full.n_tokens, 4), dtype=np.float16))
    full.save(tmp_path / "full.npz")
    more = ("--predictor-accuracy", "default", "--profile-texts", 1, "-o", "json")
    result = run("lab", "replay", tmp_path / "full.npz", "--policy", "fate,spac,static", *more)
    assert result.exit_code == 0 and result.stderr == ""
    assert all(row["token_ids"] and row["draft_hidden_states"] and row["profile"] for row in json.loads(result.stdout))


def test_accuracies_and_profiles_can_be_given(plain: Path) -> None:
    command = ("lab", "replay", plain, "--policy", "fate,sp-moe-prefetch", "--gamma", 3, "--predictor-accuracy")
    blind, seeing = (run_json(*command, f"next-gate={share},draft-router={share}")[:2] for share in (0.0, 1.0))
    for index, source in enumerate(("next-gate", "draft-router")):
        assert blind[index]["hit_rate_pairs"] < seeing[index]["hit_rate_pairs"]
        assert (seeing[index]["prediction_source"], seeing[index]["predictor_accuracy"]) == (source, 1.0)


def test_curves_come_as_table_json_and_picture(tmp_path: Path, plain: Path) -> None:
    two_texts().save(tmp_path / "own.npz")
    traces = (tmp_path / "own.npz", plain)
    arguments = ("lab", "replay", *traces, "--curve", "--policy", "spac,lfu,lru,fate", "--gamma", 3, "-t", 1)
    panels = run_json(*arguments, "--max-uploads", "0.1,0.2", "--plot", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert [(panel["trace"], panel["rejected_token_model"]) for panel in panels] == [
        (name, model) for name in ("own.npz", "plain.npz") for model in ("optimistic", "pessimistic")
    ]
    points = panels[-1]["points"]
    assert [point["max_uploads"] for point in points if point["policy"] == "lru"] == [0.1, 0.2, None]
    assert all(len(point["pairs_hit"]) == len(point["uploads"]) == len(panels[-1]["pairs"]) for point in points)
    assert panels[-1]["apart"] == ["fate"]
    table = " ".join(run(*arguments).stdout.split())
    assert "(fate)" in table and "lead over lfu" in table
    assert "--curve" in refused("lab", "replay", plain, "--plot", tmp_path / "curves.png")
    assert "--curve" in refused("lab", "replay", plain, "--max-uploads", "0.5,2")


def test_texts_are_chosen_by_number(tmp_path: Path) -> None:
    two_texts().save(tmp_path / "own.npz")
    both = run_json("lab", "replay", tmp_path / "own.npz", "--policy", "lru")
    second = run_json("lab", "replay", tmp_path / "own.npz", "--policy", "lru,static", "--texts", "1:")
    assert (both[0]["texts"], second[0]["texts"]) == (2, 1)
    assert (both[0]["profile"], second[0]["profile"]) == (False, True)  # of the text before
    each = run_json("lab", "replay", tmp_path / "own.npz", tmp_path / "own.npz", "--policy", "lru", "--texts", ":1,1:2")
    assert each[0]["steps"] + each[3]["steps"] == both[0]["steps"]
    for wrong in ("1", "2:", "a:b", "0:1,1:2,0:"):
        assert "--texts" in refused("lab", "replay", tmp_path / "own.npz", "--texts", wrong)


def test_memory_can_be_emptied_with_each_text(tmp_path: Path) -> None:
    """The second text repeats the first: who remembers it hits more."""
    first = two_texts()
    repeated = texts_of(first, 0, 1)
    again = replace(repeated, sequence=repeated.sequence + 1)
    columns = ("ids", "phase", "sequence", "step", "accepted", "token", "position")
    twice = replace(
        first, **{name: np.concatenate([getattr(repeated, name), getattr(again, name)]) for name in columns}
    )
    twice.save(tmp_path / "twice.npz")
    arguments = ("lab", "replay", tmp_path / "twice.npz", "--policy", "spac", "--cache-ratio", 0.25)
    carried, emptied = run_json(*arguments)[0], run_json(*arguments, "--fresh-memory")[0]
    assert (carried["fresh_memory"], emptied["fresh_memory"]) == (False, True)
    assert carried["hit_rate_pairs"] > emptied["hit_rate_pairs"]


def test_trace_info(tmp_path: Path) -> None:
    own = tmp_path / "own.npz"
    two_texts(weights=True).save(own)
    result = run("lab", "trace", "info", own)
    assert result.exit_code == 0, result.output
    parts = ("8 per layer, 2 per token", "10 decoded text", "up to 2 tokens, acceptance rate 0.400", "vocabulary ids")
    assert all(part in result.stdout for part in parts)
    found = run_json("lab", "trace", "info", own)
    assert found["acceptance_chance"] == 0.5
    assert (found["model"], found["n_experts"], found["gamma"], found["acceptance_rate"]) == ("random", 8, 2, 0.4)


def test_trace_import(tmp_path: Path) -> None:
    csv, back = tmp_path / "text.csv", tmp_path / "back.npz"
    csv.write_text("pos,layer,id0,id1\n0,0,1,2\n0,1,3,4\n1,0,1,5\n1,1,3,6\n")
    result = run("lab", "trace", "import", csv, back, "--n-experts", 16, "--model", "mine", "--expert-bytes", 4096)
    assert result.exit_code == 0 and result.stdout == "" and "2 tokens" in result.stderr
    trace = Trace.load(back)
    sizes = trace.expert_bytes()
    assert (trace.meta.model, trace.meta.n_experts, trace.n_tokens) == ("mine", 16, 2)
    assert sizes is not None and sizes.tolist() == [4096, 4096]
    assert trace.meta.source.endswith("text.csv")
    assert "trace that is read" in refused("lab", "trace", "import", back, back)
    assert ".npz" in refused("lab", "trace", "import", csv, tmp_path / "back.csv")


@pytest.mark.parametrize(("name", "content"), [("empty.npz", b""), ("layers.csv", b"pos,layer,id0\n0,2147483647,1\n")])
@pytest.mark.parametrize(
    "command", [["lab", "trace", "info"], ["lab", "trace", "import"], ["lab", "replay"]], ids=" ".join
)
def test_broken_files_end_with_one_sentence(name: str, content: bytes, command: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    more = [str(tmp_path / "out.npz")] if command[-1] == "import" else []
    message = refused(*command, tmp_path / name, *more)
    assert message.startswith("error: ") and name in message and "trace" in message
    assert not (tmp_path / "out.npz").exists()
