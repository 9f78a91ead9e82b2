"""Running a program: worker, transports, weight versions, evaluation, checkpoints, accounting."""
