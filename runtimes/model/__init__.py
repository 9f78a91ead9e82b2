"""A model as an ordered stack of named layers, stages cut from it, and keyed randomness."""
