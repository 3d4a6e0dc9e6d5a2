"""What can be left out of MoE-SpAc, by the names of its Table 4; no imports, so that `--help` stays quick."""

from __future__ import annotations

ABLATIONS: dict[str, str] = {
    "no-spec-ue": "binary utilities: used in the last step or not (K = 1)",
    "no-ada-bc": "fixed boundaries of the utility's transitions, 3 up and 1 down (spac-paper); nothing fitted (spac)",
    "no-het-wb": "a fixed threshold, tau = 2",
    "no-prefetch": "what was used first stays for good",
    "no-evict": "nothing makes room for anything once the slots are full",
    "no-sd": "no speculation (the engine's draft length is 0)",
}
