"""What went, came or was renamed since the recordings, each with its reason: `compare` ignores exactly these.

A rule is (pattern, successor, reason). The pattern is a regular expression of a place in the recordings from its
beginning: "options: bench --fit.*" is every case of that option, "commands: .*\\.uploads" a key in any command.
Successor: the key's new name (the last part of the place), or "" where nothing follows. Rules that match nothing are
reported, but for those with a successor in another part of the table.
"""

from __future__ import annotations

# (pattern of a place, last part of its new name, reason)
RENAMED: list[tuple[str, str, str]] = []
# (pattern of a place that went or came, successor in words, reason)
REMOVED: list[tuple[str, str, str]] = [
    (r"commands-slow: validate measured: .*error", "", "measured"),
    (r"options-slow: lab replay.*: config\.", "ReplayInput and ReplayConfig", "replays and curves are asked for alike"),
    (
        r"options-slow: lab replay --(predictor|hint)-accuracy .*: ended\.names",
        "",
        "the message repeats the option's list",
    ),
    (r"functions: lab\.sim\.step_costs\.program_of: .*\.handoff\.", "", "calls are timed as they are read"),
]
