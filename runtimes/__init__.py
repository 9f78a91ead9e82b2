"""Schedules, models, execution and planning of pipeline-parallel training.

Depends on torch, torchvision, timm and numpy only, and knows nothing of experiments.
"""
