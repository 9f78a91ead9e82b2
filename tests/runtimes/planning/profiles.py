"""A small profile, for whoever reads one."""

from __future__ import annotations

from typing import Any

from runtimes.job import ModelSpec
from runtimes.planning.profile import LayerProfile, Links, Profile, Spread

__all__ = ["layer", "profile_of"]


def layer(name: str, forward: dict[int, float], **rest: Any) -> LayerProfile:
    """Its backward takes twice its forward."""
    return LayerProfile(
        name,
        {n: Spread(s, s, s) for n, s in forward.items()},
        {n: Spread(2 * s, 2 * s, 2 * s) for n, s in forward.items()},
        **{
            "output_bytes": 10,
            "kept_bytes": 100,
            "parameter_bytes": 1000,
            "parameter_tensors": 2,
            **rest,
        },
    )


def profile_of(*layers: LayerProfile, **rest: Any) -> Profile:
    """Of these layers, or of four: layer i takes i + 1 ms for 2 samples, three times that for 8."""
    made = layers or tuple(
        layer(f"layer {i}", {2: (i + 1) * 1e-3, 8: (i + 1) * 3e-3}, output_bytes=10 * (i + 1))
        for i in range(4)
    )
    settings: dict[str, Any] = {
        "optimizer_seconds_per_byte": {"sgd": 1e-6, "adamw": 4e-6},
        "action_seconds": {"F": 1e-4},
        "concurrency": {1: 1.0, 2: 1.8},
        "links": Links(2, 1e-5, 1e9, {2: {1000: 1e-4}}, 1e-10),
        **rest,
    }
    return Profile(
        ModelSpec("VisionTransformer", {"depth": 2}),
        (3, 8, 8),
        "float32",
        "cpu",
        "analytic",
        {"torch": "2"},
        made,
        5,
        **settings,
    )
