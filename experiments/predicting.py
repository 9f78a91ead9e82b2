"""The commands that say what a run would take, without running it: profile and simulate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.words import ConfigName, Json, Settings, numbers, show

__all__ = ["profile", "simulate"]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A timm ViT, or VisionTransformer, or the CONFIG whose model and images to take.",
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        min=1, metavar="N", help="Processes that measure at the same time; from 2 on links too."
    ),
]
WrittenCluster = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write links and memory, as a cluster for simulate."),
]


def simulate(
    config: ConfigName,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="In experiments/clusters, or a file; default: what the config emulates.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="In experiments/profiles, or a file; default: computed for the cluster's devices.",
        ),
    ] = None,
    batch_sizes: Annotated[
        str, typer.Option(metavar="N,…", help="In the place of train.batch_size.")
    ] = "",
    bandwidth_shares: Annotated[
        str, typer.Option(metavar="X,…", help="What links reach of their bandwidth.")
    ] = "1",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write it there, not to results/."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what each device does when.")
    ] = None,
    set_: Settings = None,
    json_: Json = False,
) -> int:
    """Simulate a config's systems on a cluster: time and memory, without running anything."""
    from experiments.commands import simulate_config
    from experiments.simulation import Request

    request = Request(
        config,
        set_ or (),
        cluster,
        profile,
        numbers("--batch-sizes", batch_sizes, int),
        numbers("--bandwidth-shares", bandwidth_shares, float),
    )
    return show(simulate_config(request, output, trace), json_)


def profile(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it, as JSON.")
    ],
    batch_sizes: Annotated[
        str, typer.Option(metavar="N,…", help="Samples of a unit, from the least to the most.")
    ] = "1,2,4,8",
    image_size: Annotated[
        int | None, typer.Option(min=1, metavar="PIXELS", help="Default: the model's, or 224.")
    ] = None,
    in_chans: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Channels; default: the model's, or 3.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="P", help="float32, tf32, bf16 or float64.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu or cuda.")] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An argument of the model, e.g. depth=4."),
    ] = None,
    batch_norm: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="per-unit: BatchNorm on the statistics of each unit."),
    ] = None,
    set_: Settings = None,
    ranks: Ranks = 1,
    pin_cores: Annotated[
        bool | None, typer.Option("--pin-cores/--no-pin-cores", help="A core for each rank.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N")] = 15,
    device_spec: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compute it for a100-80gb, v100-32gb or h200 instead."),
    ] = None,
    compute_efficiency: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of that device's peak FLOP/s; default 0.5."),
    ] = None,
    memory_efficiency: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of its memory's bandwidth; default 0.8.")
    ] = None,
    write_cluster: WrittenCluster = None,
    json_: Json = False,
) -> int:
    """Measure what a model's layers, optimizers and messages cost here, or compute it for a device
    that is not here; the simulator reads the file."""
    from experiments.commands import make_profile
    from experiments.profiling import Wanted

    wanted = Wanted(
        model=model,
        output=output,
        batch_sizes=batch_sizes,
        image_size=image_size,
        in_chans=in_chans,
        precision=precision,
        device=device,
        args=arg or (),
        batch_norm=batch_norm,
        settings=set_ or (),
        ranks=ranks,
        pin_cores=pin_cores,
        repeats=repeats,
        device_spec=device_spec,
        compute_efficiency=compute_efficiency,
        memory_efficiency=memory_efficiency,
        cluster=write_cluster,
    )
    return show(make_profile(wanted), json_)
