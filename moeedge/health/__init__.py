"""What `moeedge doctor` checks: installation, GPU, processor, memory, disks, environment, and what was measured."""
