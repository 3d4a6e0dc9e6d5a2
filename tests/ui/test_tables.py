"""Tables of figures in terminals of several widths."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from moeedge.hardware.devices import Entry
from moeedge.sim.replay import ReplayConfig, replay
from moeedge.trace.schedule import recorded_schedule
from moeedge.ui.model_views import print_devices
from moeedge.ui.replay_view import print_rows
from moeedge.ui.simulate_view import print_table
from tests.support.traces import two_texts

COLUMNS = ["policy", "ratio", "t/s", "ms/token", "uploads"]
CELLS = [["spac", "0.17", "11.31", "88.4", "3.29"], ["lru", "0.5", "12.86", "77.7", "7.65"]]


def printed(width: int, *, terminal: bool) -> list[str]:
    out = StringIO()
    print_table(COLUMNS, CELLS, Console(file=out, width=width, force_terminal=terminal, highlight=False), left=2)
    return out.getvalue().splitlines()


def test_a_file_keeps_its_lines() -> None:
    assert (
        printed(20, terminal=False)
        == printed(200, terminal=True)
        == [
            "policy  ratio    t/s  ms/token  uploads",
            "spac    0.17   11.31      88.4     3.29",
            "lru     0.5    12.86      77.7     7.65",
        ]
    )


@pytest.mark.parametrize("width", [24, 31, 38])
def test_what_does_not_fit_comes_below(width: int) -> None:
    lines = printed(width, terminal=True)
    assert max(map(len, lines)) <= width
    for row in (COLUMNS, *CELLS):
        own = [line.split() for line in lines if line.split()[:2] == row[:2]]
        assert [cell for line in own for cell in line[2:]] == row[2:]


@pytest.mark.parametrize("width", [40, 80])
def test_devices_keep_their_names_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    gpu = Entry("CUDA0", "GPU", "NVIDIA GeForce RTX 4060", 7 << 30, 8 << 30, True, "for experts")
    worker = Entry("rpc://HOST:PORT", "RPC", "another machine's device", None, None, False, "without RPC")
    print_devices([gpu, worker])
    out = capsys.readouterr().out
    table = out.partition("\n\n")[0].splitlines()
    assert max(map(len, table)) <= width
    assert all(any(line.startswith(name) for line in table) for name in ("CUDA0 ", "rpc://HOST:PORT "))
    assert "7168" in out and "RTX" in out


@pytest.mark.parametrize("width", [40, 80])
def test_replays_keep_their_figures(width: int) -> None:
    schedule = recorded_schedule(two_texts())
    assert schedule is not None
    rows = replay(schedule, ReplayConfig(policies=("mixtral-offloading", "spac"), ratios=(0.5,)))
    out = StringIO()
    print_rows(rows, Console(file=out, width=width, force_terminal=True, highlight=False, color_system=None))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    for row in rows:
        own = [line.split()[1:] for line in lines if line.split()[:1] == [row.policy]]
        figures = [float(cell) for line in own for cell in line if cell != "-"]
        assert len(own) == {40: 5, 80: 1}[width]
        assert figures[:2] == pytest.approx([row.hit_rate_pairs, row.hit_rate_unique], abs=6e-4)
        assert figures[-1] == pytest.approx(row.share_of_oracle, abs=6e-4)
