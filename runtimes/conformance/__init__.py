"""What a system declares, and what a run of it is seen to do: read from tagged tensors alone."""
