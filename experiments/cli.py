"""The command line: results to stdout, progress and errors to stderr, how it went as exit code.

Nothing heavy is imported before a command needs it: `pipebench --help` is to answer at once.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from experiments.errors import UserError, one_line

if TYPE_CHECKING:
    from experiments.commands import Answer

__all__ = ["app", "main"]

Number = TypeVar("Number", int, float)

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 3

# Of all usage errors, by a public name: where typer keeps the class differs between its versions.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
_CTRL_C = 130  # What typer makes of KeyboardInterrupt.
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EEXIST)

app = typer.Typer(
    name="pipebench",
    help="Pipeline-parallel training systems, run, measured and compared.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigName = Annotated[
    str, typer.Argument(metavar="CONFIG", help="Name, as of `matrix --list`, or path of a config.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. train.epochs=2."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Archive earlier records and start over.")]
DataRoot = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Where CIFAR-100 or Fashion-MNIST lies (data.root)."),
]


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(_guarded())


def _guarded() -> int:
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _wrong(one_line(error))
    except _UsageError as error:
        said: Any = error
        return _wrong(f"{one_line(said.format_message()).rstrip('.')}; see pipebench --help")
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BrokenPipeError:
        # The reader of stdout has gone, as `head` does; say no more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        reason = (error.strerror or str(error)).lower()
        return _wrong(f"cannot write {error.filename or 'results'}: {reason}")
    if code == _CTRL_C:
        return _interrupted()
    return code if isinstance(code, int) else DONE


def _interrupted() -> int:
    sys.stderr.write("interrupted: the same command goes on from here\n")
    return INTERRUPTED


def _wrong(text: str) -> int:
    sys.stderr.write(f"error: {text}\n")
    return WRONG


def _show(answer: Answer, as_json: bool) -> int:
    text = json.dumps(answer.document, indent=1) if as_json else answer.text.rstrip("\n")
    sys.stdout.write(f"{text}\n")
    return answer.code


def _with_root(settings: Sequence[str] | None, data_root: str | None) -> list[str]:
    # As a JSON string, which TOML reads too, so that no directory's name is taken for a number.
    root = [] if data_root is None else [f"data.root={json.dumps(data_root)}"]
    return [*(settings or ()), *root]


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Of a list like 64,128; UserError for what is none."""
    try:
        return tuple(kind(part) for part in text.split(",") if part)
    except ValueError:
        raise UserError(f"{option} is {text!r}, but must be numbers like 1,2,4") from None


@app.command()
def run(
    config: ConfigName,
    set_: Settings = None,
    data_root: DataRoot = None,
    fresh: Fresh = False,
    json_: Json = False,
) -> int:
    """Train one config: once a seed and a value swept; what is recorded as done is not repeated."""
    from experiments.commands import run_config

    return _show(run_config(config, _with_root(set_, data_root), fresh=fresh), json_)


@app.command()
def bench(
    config: ConfigName,
    set_: Settings = None,
    data_root: DataRoot = None,
    fresh: Fresh = False,
    json_: Json = False,
) -> int:
    """Measure the systems of one config alternately, in one launch."""
    from experiments.commands import run_configs
    from experiments.loading import load

    found = load(config, _with_root(set_, data_root))
    if found.kind != "bench":
        raise UserError(f"{found.name} has no [bench] section: train it with `pipebench run`")
    return _show(run_configs([found], fresh=fresh), json_)


@app.command()
def matrix(
    tier: Annotated[str, typer.Option(metavar="T", help="Which configs: those of this tier.")],
    only: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Of these, the ones so named.")
    ] = None,
    set_: Settings = None,
    data_root: DataRoot = None,
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs at a time; timed ones run alone.")
    ] = 1,
    list_: Annotated[bool, typer.Option("--list", help="List the runs and start none.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    fresh: Fresh = False,
    json_: Json = False,
) -> int:
    """Run all configs of a tier; failures are rows, and keep no other from running."""
    from experiments.commands import list_matrix, plan_matrix, run_matrix
    from experiments.matrix import select

    entries = select(tier, only, _with_root(set_, data_root))
    if list_:
        return _show(list_matrix(entries), json_)
    if dry_run:
        return _show(plan_matrix(entries, fresh=fresh), json_)
    return _show(run_matrix(entries, fresh=fresh, jobs=jobs), json_)


@app.command()
def systems(json_: Json = False) -> int:
    """List the systems, their options, and the peers they are measured against."""
    from experiments.commands import list_systems

    return _show(list_systems(), json_)


@app.command()
def schedule(
    system: Annotated[str, typer.Argument(metavar="SYSTEM", help="As of `pipebench systems`.")],
    stages: Annotated[int, typer.Option(min=1, metavar="S")],
    units: Annotated[
        int,
        typer.Option(min=1, metavar="M", help="Micro-batches of a batch, or batches if uncut."),
    ],
    replicas: Annotated[
        str, typer.Option(metavar="R", help="Of every stage, or of each: 2,3,1.")
    ] = "1",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="An option of it, e.g. policy=B."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw to scale, with the times of a model's profile."),
    ] = None,
    json_: Json = False,
) -> int:
    """Draw what each rank does in one batch: a backward takes twice a forward's time.

    Systems whose unit is a whole batch run as many batches as there are units.
    """
    from experiments.commands import draw_schedule

    answer = draw_schedule(system, set_ or (), stages, units, replicas, profile)
    return _show(answer, json_)


@app.command("simulate")
def simulate_(
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
        _numbers("--batch-sizes", batch_sizes, int),
        _numbers("--bandwidth-shares", bandwidth_shares, float),
    )
    return _show(simulate_config(request, output, trace), json_)


@app.command()
def conformance(json_: Json = False) -> int:
    """Run every system on layers that see what happens, and compare that with what it declares."""
    from experiments.commands import check_conformance

    return _show(check_conformance(), json_)


@app.command()
def profile(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A timm ViT, or VisionTransformer, or the CONFIG whose model and images to take.",
        ),
    ],
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
    ranks: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Processes that measure at the same time; from 2 on links too."
        ),
    ] = 1,
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
    write_cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write links and memory, as a cluster for simulate."
        ),
    ] = None,
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
    return _show(make_profile(wanted), json_)


@app.command()
def tables(json_: Json = False) -> int:
    """Print the tables of all records, and write them beside the runs."""
    from experiments.commands import make_tables

    return _show(make_tables(), json_)


@app.command()
def figure(
    name: Annotated[str, typer.Argument(metavar="NAME", help="E.g. throughput.")],
    traces: Annotated[
        list[str] | None,
        typer.Option("--trace", metavar="RUN", help="For gantt: whose trace, as of `trace`."),
    ] = None,
    json_: Json = False,
) -> int:
    """Draw a figure of all records, as PDF and PNG, and print where it is.

    The figure gantt is drawn of traces instead: --trace names a run or a file, once or more often.
    """
    from experiments.commands import draw_figure

    return _show(draw_figure(name, traces or ()), json_)


@app.command()
def trace(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Id or directory of a run or of a contender, or a trace's file."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a copy there.")
    ] = None,
    json_: Json = False,
) -> int:
    """Say where the trace of a run is, and what is in it; ui.perfetto.dev draws it."""
    from experiments.commands import show_trace

    return _show(show_trace(run, output), json_)
