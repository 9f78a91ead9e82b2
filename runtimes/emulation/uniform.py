"""Profiles that nobody measured: layers that are all alike, for runs of which only time is asked.

python -m runtimes.emulation.uniform '{"layers": 8, "forward_seconds": 5e-4}' > uniform.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

from runtimes.job import ModelSpec
from runtimes.planning.profile import LayerProfile, Profile, Spread

__all__ = ["uniform_profile"]

_SIZES = (1, 1024)


def uniform_profile(
    layers: int,
    *,
    forward_seconds: float = 0.0,
    backward_seconds: float = 0.0,
    output_bytes: int = 4000,
    parameter_bytes: int = 4_000_000,
    step_seconds_per_byte: float = 0.0,
    classes: int = 10,
) -> Profile:
    """Seconds and bytes are of one sample and one layer, but for the bytes of weights; a unit takes
    so many times as long as it has samples.  ValueError for values that a profile refuses."""
    arguments = {
        "layers": layers,
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
        "output_bytes": output_bytes,
        "parameter_bytes": parameter_bytes,
        "step_seconds_per_byte": step_seconds_per_byte,
        "classes": classes,
    }
    forward, backward = (
        {n: Spread(n * seconds, n * seconds, n * seconds) for n in _SIZES}
        for seconds in (forward_seconds, backward_seconds)
    )
    return Profile(
        model=ModelSpec("uniform", {"layers": layers}),
        image=(1, 1, 1),
        precision="float32",
        device="synthetic",
        source="analytic",
        provenance={"synthetic": "uniform layers", "arguments": arguments},
        layers=tuple(
            LayerProfile(
                name=f"layers.{index}",
                forward_seconds=forward,
                backward_seconds=backward,
                output_bytes=4 * classes if index == layers - 1 else output_bytes,
                kept_bytes=output_bytes,
                parameter_bytes=parameter_bytes,
                parameter_tensors=1,
            )
            for index in range(layers)
        ),
        input_bytes=4,
        optimizer_seconds_per_byte=dict.fromkeys(
            ("sgd", "sgd-momentum", "adamw"), step_seconds_per_byte
        ),
    )


def _main(arguments: dict[str, Any]) -> None:
    json.dump(uniform_profile(**arguments).to_json(), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
