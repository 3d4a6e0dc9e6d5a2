"""`moeedge bench` without its command line: modes side by side in one process, raw samples first, tables after."""
