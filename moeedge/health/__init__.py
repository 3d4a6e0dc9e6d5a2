"""The checks of `moeedge doctor`: installation, GPU, processor, memory, disks, environment, and what was measured."""
