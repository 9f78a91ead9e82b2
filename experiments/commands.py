"""What each command does, apart from parsing its words and printing its answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config import Config
from experiments.errors import UserError, one_line
from experiments.interruption import Interruption
from experiments.matrix import Entry, exit_code, run_all
from experiments.overrides import parse_setting
from experiments.paths import results_root
from experiments.progress import Progress
from experiments.reports import (
    columns,
    configs_document,
    matrix_document,
    replicas_of,
    result_line,
    row_lines,
    runs_document,
    schedule_document,
    schedule_text,
    systems_document,
    systems_text,
)
from experiments.store import Store

if TYPE_CHECKING:
    from experiments.profiling import Wanted
    from experiments.simulation import Request

__all__ = [
    "Answer",
    "check_conformance",
    "draw_figure",
    "draw_schedule",
    "list_matrix",
    "list_systems",
    "make_profile",
    "make_tables",
    "plan_matrix",
    "run_config",
    "run_configs",
    "run_matrix",
    "show_trace",
    "simulate_config",
]


@dataclass(frozen=True)
class Answer:
    """The result of a command: as data with a "schema", as text, and as exit code."""

    document: Mapping[str, Any]
    text: str
    code: int = 0


def run_config(name_or_path: str, settings: Sequence[str], *, fresh: bool) -> Answer:
    """Run a config, once a seed and a point of its sweep."""
    from experiments.best_of import load_resolved

    return run_configs(load_resolved(name_or_path, settings, Store(results_root())), fresh=fresh)


def run_configs(configs: Sequence[Config], *, fresh: bool) -> Answer:
    """Run them one after the other; all are checked before the first starts."""
    from experiments.runner import execute, prepare

    store, progress, interruption = Store(results_root()), Progress(), Interruption()
    interruption.install()
    store.check()
    results: list[dict[str, Any]] = []
    ready = [prepare(config) for config in configs]
    with interruption.deferred() as stop:
        for prepared in ready:
            if not stop.is_set():
                results += execute(prepared, store, fresh=fresh, stop=stop, progress=progress)
    lines = [result_line(result, store.root / "runs") for result in results]
    statuses = [str(result["status"]) for result in results]
    if len(results) < len(configs):
        statuses.append("interrupted")
    return Answer(runs_document(results), columns(lines), exit_code(statuses))


def list_matrix(entries: Sequence[Entry]) -> Answer:
    text = columns([[entry.title, entry.config.kind] for entry in entries])
    return Answer(configs_document(entries, {}), text)


def plan_matrix(entries: Sequence[Entry], *, fresh: bool) -> Answer:
    """What :func:`run_matrix` would do; it writes nothing."""
    store = Store(results_root())
    swept = {entry.config.name for entry in entries if entry.config.swept is not None}
    intents = {entry.title: _intent(entry, store, swept, fresh=fresh) for entry in entries}
    text = columns([[title, what] for title, what in intents.items()])
    return Answer(configs_document(entries, intents), text)


def _intent(entry: Entry, store: Store, swept: Collection[str], *, fresh: bool) -> str:
    """``swept``: the sweeps that would run before."""
    from experiments.best_of import resolved
    from experiments.runner import intent, prepare

    waits_for = entry.config.waits_for
    try:
        prepared = prepare(entry.config)
        if waits_for is not None:
            try:
                prepared = prepare(resolved(entry.config, entry.settings, store))
            except UserError:
                if waits_for in swept:
                    return f"run with the best of {waits_for}"
                raise
        return intent(prepared, store, fresh=fresh)
    except UserError as error:
        return f"refuse: {one_line(error)}"


def run_matrix(entries: Sequence[Entry], *, fresh: bool, jobs: int) -> Answer:
    """Run them, up to ``jobs`` at a time; all are checked before the first starts."""
    from experiments.best_of import resolved
    from experiments.runner import Prepared, execute, prepare

    store, progress, interruption = Store(results_root()), Progress(), Interruption()
    interruption.install()
    store.check()
    ready: dict[str, Prepared | UserError] = {}
    for entry in entries:
        try:
            ready[entry.title] = prepare(entry.config)
        except UserError as error:
            ready[entry.title] = error

    def run(entry: Entry) -> list[dict[str, Any]]:
        prepared = ready[entry.title]
        if isinstance(prepared, UserError):
            raise prepared
        if entry.config.waits_for is not None:
            # Only now, since the sweep may have been among the runs before.
            prepared = prepare(resolved(entry.config, entry.settings, store))
        return execute(prepared, store, fresh=fresh, stop=stop, progress=progress)

    with interruption.deferred() as stop:
        rows = run_all(entries, run, jobs=jobs, stop=stop)
    text = columns([line for row in rows for line in row_lines(row)])
    return Answer(matrix_document(rows), text, exit_code([row.status for row in rows]))


def list_systems() -> Answer:
    document = systems_document()
    return Answer(document, systems_text(document))


def draw_schedule(
    system: str,
    settings: Sequence[str],
    stages: int,
    units: int,
    replicas: str,
    pipelines: int = 1,
    profile: Path | None = None,
) -> Answer:
    options = {".".join(path): value for path, value in map(parse_setting, settings)}
    counts = replicas_of(replicas, stages)
    document = schedule_document(system, options, stages, units, counts, pipelines, profile)
    Progress().warn(document["warnings"])
    return Answer(document, schedule_text(document))


def check_conformance() -> Answer:
    """Exit code 1 if a system is seen to do something else than it declares."""
    from experiments.conformance import conformance_document, conformance_table, judge_all

    rows = judge_all()
    document = conformance_document(rows)
    return Answer(document, conformance_table(rows), 0 if document["conforms"] else 1)


def make_profile(wanted: Wanted) -> Answer:
    """Write the profile; exit code 1 if the ranks that measure fail."""
    from experiments.profiling import profile_text, profiled, write_profile
    from experiments.this_machine import write_cluster

    interruption = Interruption()
    interruption.install()
    with interruption.deferred() as stop:
        try:
            profile = profiled(wanted, Progress(), stop)
        except RuntimeError as error:
            document = {"schema": "pipebench.profile_failure/1", "error": str(error)}
            return Answer(document, f"no profile: {error}", 1)
    write_profile(profile, wanted.output)
    written = [str(wanted.output)]
    if wanted.cluster is not None:
        write_cluster(profile, wanted.cluster)
        written.append(str(wanted.cluster))
    text = f"{profile_text(profile)}\n\nwritten to {' and '.join(written)}"
    return Answer(profile.to_json(), text)


@contextmanager
def _records() -> Iterator[None]:
    """The analysis knows the user's errors as ValueErrors."""
    try:
        yield
    except ValueError as error:
        raise UserError(one_line(error)) from None


def simulate_config(request: Request, output: Path | None, trace: Path | None) -> Answer:
    """The document goes to ``output``, or to where tables and figures find it."""
    from experiments.simulation import simulated, simulation_rows
    from runtimes.manifest import write_json
    from runtimes.tracing import write_trace

    found = simulated(request, traced=trace is not None)
    document = found.document
    Progress().warn(document["warnings"])
    if output is None:
        name = document["name"].replace("/", "-")
        output = results_root() / "simulated" / f"{name}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, document)
    if trace is not None:
        write_trace(trace, found.timelines)
    return Answer(document, f"{columns(simulation_rows(document))}\n{output}")


def make_tables() -> Answer:
    from analysis.tables import print_tables, tables_document, write_tables

    root = results_root()
    with _records():
        document, text = tables_document(root), print_tables(root)
        write_tables(root, root / "tables")
    return Answer(document, text)


def draw_figure(name: str, traces: Sequence[str] = ()) -> Answer:
    """``traces``: runs or files, for the figure that is drawn of them."""
    root = results_root()
    if traces and name != "gantt":
        raise UserError(f"figure {name} is drawn of records: --trace is for gantt")
    with _records():
        if traces:
            paths = _draw_gantt(traces)
        else:
            from analysis.figures import write_figure

            paths = write_figure(name, root, root / "figures")
    files = [str(path) for path in paths]
    document = {"schema": "pipebench.figure/1", "name": name, "files": files}
    return Answer(document, "\n".join(files))


def _draw_gantt(traces: Sequence[str]) -> list[Path]:
    from analysis.gantt import write_gantt
    from experiments.traces import find_trace

    store = Store(results_root())
    found = [find_trace(given, store) for given in traces]
    sources = [(item.file, item.label) for item in found]
    return write_gantt(f"gantt-{found[0].name}", sources, store.root / "figures")


def show_trace(given: str, output: Path | None) -> Answer:
    """What is in the trace of a run; ``output``: where a copy of it goes."""
    from experiments.traces import copy_trace, find_trace, timelines_of, trace_text, traces_document

    found = find_trace(given, Store(results_root()))
    timelines = timelines_of(found)
    if output is not None:
        copy_trace(timelines, output)
    document = traces_document(output or found.file, timelines)
    return Answer(document, trace_text(document))
