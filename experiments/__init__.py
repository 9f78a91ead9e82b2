"""Experiments: configs, the command line, the launcher, data, tracking and run records."""
