"""The command line: results to stdout, progress and errors to stderr, how it went as exit code.

Nothing heavy is imported before a command needs it: `pipebench --help` is to answer at once.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from experiments import predicting
from experiments.errors import UserError, one_line
from experiments.words import ConfigName, Json, Settings, show

__all__ = ["app", "main"]

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


def _with_root(settings: Sequence[str] | None, data_root: str | None) -> list[str]:
    # As a JSON string, which TOML reads too, so that no directory's name is taken for a number.
    root = [] if data_root is None else [f"data.root={json.dumps(data_root)}"]
    return [*(settings or ()), *root]


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

    return show(run_config(config, _with_root(set_, data_root), fresh=fresh), json_)


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
    return show(run_configs([found], fresh=fresh), json_)


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
        return show(list_matrix(entries), json_)
    if dry_run:
        return show(plan_matrix(entries, fresh=fresh), json_)
    return show(run_matrix(entries, fresh=fresh, jobs=jobs), json_)


@app.command()
def systems(json_: Json = False) -> int:
    """List the systems, their options, and the peers they are measured against."""
    from experiments.commands import list_systems

    return show(list_systems(), json_)


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
    pipelines: Annotated[
        int, typer.Option(min=1, metavar="N", help="Parallel ones, of a system that has them.")
    ] = 1,
    advance: Annotated[
        int | None, typer.Option(metavar="A", help="Short for --set advance=A.")
    ] = None,
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

    Systems whose unit is a whole batch run as many batches as there are units. Parallel pipelines
    share a rank's row: F3a is the forward of unit 3 of the first pipeline, F3b of the second.
    """
    from experiments.commands import draw_schedule

    short = [] if advance is None else [f"advance={advance}"]
    answer = draw_schedule(
        system, [*(set_ or ()), *short], stages, units, replicas, pipelines, profile
    )
    return show(answer, json_)


app.command("simulate")(predicting.simulate)


@app.command()
def conformance(json_: Json = False) -> int:
    """Run every system on layers that see what happens, and compare that with what it declares."""
    from experiments.commands import check_conformance

    return show(check_conformance(), json_)


app.command()(predicting.profile)


@app.command()
def tables(json_: Json = False) -> int:
    """Print the tables of all records, and write them beside the runs."""
    from experiments.commands import make_tables

    return show(make_tables(), json_)


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

    return show(draw_figure(name, traces or ()), json_)


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

    return show(show_trace(run, output), json_)
