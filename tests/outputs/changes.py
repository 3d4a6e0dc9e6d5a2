"""What went or came since the recordings, each with its reason: `compare` ignores exactly these.

A rule is (pattern, reason). The pattern is a regular expression of a place in the recordings from its beginning:
"options: bench --fit.*" is every case of that option, "commands: .*\\.uploads" a key in any command; of a renamed key
there are two. Rules that match nothing are reported.
"""

from __future__ import annotations

REMOVED = [
    (r"commands-slow: validate measured: .*error", "measured"),
    (r"tokens(-slow)?: (tiny|together) ", "tests/lossless compares all ways of decoding"),
    (r"choices: (speculation|layers) ", "the part functions has the same functions"),
    (r"functions: lab\.sim\.step_costs\.program_of: .*\.handoff\.", "calls are timed as they are read"),
]
