"""Every documented command runs, or at least parses; every path, link and name exists."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from analysis.records import PARTS
from runtimes.plan import Plan
from runtimes.schedule import ScheduleError, validate
from runtimes.system import FlushSystem, System
from runtimes.systems import PEERS, SYSTEMS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
page_names = [page.relative_to(ROOT).as_posix() for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=page_names)


# ---- reading the pages -------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A `$ …` line of a console block.  ``parsed_only``: the block is marked `<!-- slow -->` or
    `<!-- needs records -->`.  ``output``: what the page shows below the command."""

    page: str
    line: str
    output: str
    parsed_only: bool

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n(?:<!-- (slow|needs records) -->)?", re.M | re.S)


def commands(text: str, page: str = "") -> list[Command]:
    found = []
    for language, body, mark in FENCE.findall(text):
        if language != "console":
            continue
        assert body.startswith("$ "), f"{page}: a console block starts with a command: {body!r}"
        for block in re.split(r"^\$ ", body, flags=re.M)[1:]:
            line, _, output = block.partition("\n")
            found.append(Command(page, line, output, bool(mark)))
    return found


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


COMMANDS = [
    command
    for page, name in zip(PAGES, page_names, strict=True)
    for command in commands(page.read_text(), name)
]


def identity(command: Command) -> str:
    return f"{command.page}: {command.line}"


# ---- commands ----------------------------------------------------------------------------------


@cache
def command_line() -> Any:
    import typer

    from experiments.cli import app

    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Fail unless ``words`` are a call of pipebench that its parser accepts; run nothing."""
    from experiments.loading import load

    group = command_line()
    with group.make_context("pipebench", [words[0]], resilient_parsing=True) as context:
        command = group.get_command(context, words[0])
        assert command is not None, f"no command {words[0]!r}"
    with command.make_context(words[0], words[1:]) as context:
        values = context.params
    if words[0] in {"run", "bench"}:
        load(str(values["config"]), values["set_"] or ())


def as_pipebench(words: list[str]) -> list[str] | None:
    """What a command comes down to; None if it is not for pipebench to judge."""
    if words[0] == "pipebench":
        return words[1:]
    if words[0] == "./reproduce.sh" and words[1:2] != ["test"]:
        tier = [] if any(word.startswith("--tier") for word in words) else ["--tier", "smoke"]
        return ["matrix", *tier, *words[1:]]
    return None


@pytest.mark.parametrize("command", COMMANDS, ids=identity)
def test_commands_parse(command: Command) -> None:
    words = as_pipebench(command.words)
    if words is None:
        assert command.words[:2] == ["./reproduce.sh", "test"], f"who knows {command.line!r}?"
        assert os.access(ROOT / "reproduce.sh", os.X_OK)
    elif "--help" not in words:
        parse(words)


@pytest.mark.parametrize("words", [["scedule", "dapple"], ["systems", "--tears", "3"]])
def test_a_wrong_command_does_not_parse(words: list[str]) -> None:
    with pytest.raises(Exception, match="scedule|--tears"):
        parse(words)


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if not command.parsed_only], ids=identity
)
def test_quick_commands_run_and_print_what_the_page_shows(command: Command, tmp_path: Path) -> None:
    words = as_pipebench(command.words)
    assert words is not None, f"not a quick command: {command.line}"
    done = subprocess.run(
        [sys.executable, "-c", "from experiments.cli import main; main()", *words],
        cwd=tmp_path,
        env={**os.environ, "PIPEBENCH_RESULTS": str(tmp_path / "results"), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if command.output.strip():
        shown = [line.rstrip() for line in command.output.strip().splitlines()]
        assert [line.rstrip() for line in done.stdout.strip().splitlines()] == shown


def test_configs_open_with_commands_that_run_them() -> None:
    """Lines `# Run: …`, and those aligned below; a file called base-… is only extended."""
    for path in sorted((ROOT / "experiments/configs").rglob("*.toml")):
        opening = path.read_text().split("\n\n")[0]
        lines = re.findall(r"^# +(?:Run: )?((?:pipebench|\./reproduce\.sh) .+)$", opening, re.M)
        assert lines or path.stem.startswith("base-"), f"{path}: how is it run?"
        for line in lines:
            words = as_pipebench(shlex.split(line))
            assert words is not None
            parse(words)
            assert words[0] == "matrix" or words[1].startswith(path.parent.name), line


def test_blocks_are_read_as_meant() -> None:
    text = "```console\n$ a b\nout\n$ c\n```\n<!-- slow -->\n\n```sh\n$ d\n```\n"
    assert commands(text) == [
        Command("", "a b", "out\n", parsed_only=True),
        Command("", "c", "", parsed_only=True),
    ]


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
FOREIGN_OPTIONS = {"--hypothesis-profile"}


@each_page
def test_options_exist(page: Path) -> None:
    known = set(FOREIGN_OPTIONS) | set(OPTION.findall((ROOT / "reproduce.sh").read_text()))
    for command in command_line().commands.values():
        known |= {name for option in command.params for name in option.opts} | {"--help"}
    for span in code_spans(page):
        assert set(OPTION.findall(span)) <= known, span


@each_page
def test_settings_exist(page: Path) -> None:
    from experiments.loading import config_names, load

    trains = next(name for name in config_names() if load(name).kind == "train")
    for span in code_spans(page):
        for setting in re.findall(r"--set (\S+=\S+)", span):
            load(trains, [setting])


def test_shown_sections_are_what_a_config_may_say(tmp_path: Path) -> None:
    """Each TOML block, on top of a config that trains."""
    from experiments.loading import load
    from experiments.paths import CONFIGS
    from experiments.resolve import layers_of, tasks_of

    whole = (CONFIGS / "smoke/base-digits.toml").read_text()
    whole += '\n[system]\nname = "dp"\n[plan]\nreplicas = [2]\n'
    blocks = [
        body
        for page in PAGES
        for name, body, _ in FENCE.findall(page.read_text())
        if name == "toml"
    ]
    assert blocks
    for body in blocks:
        (file := tmp_path / "shown.toml").write_text(whole + body)
        config = load(str(file))
        assert tasks_of(config, layers_of(config))


# ---- links, paths, names -----------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), target
        assert aim.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(aim), target


OURS = ("runtimes", "experiments", "analysis", "tests", "docs", "requirements", ".ci")
TOP_FILES = re.compile(r"[\w.-]+\.(?:toml|sh|md|lock)")


def named_paths(page: Path) -> set[str]:
    """Paths of this repository among the code spans; those that runs make are not."""
    made_by_a_run = set(re.findall(r"`([\w.]+)`", (ROOT / "docs/records.md").read_text()))
    found = set()
    for span in code_spans(page):
        for word in span.split():
            word = word.removeprefix("./").rstrip(",.;:")
            if ("/" in word and word.split("/")[0] in OURS) or (
                TOP_FILES.fullmatch(word) and word not in made_by_a_run
            ):
                found.add(word)
    return found


@each_page
def test_named_paths_exist(page: Path) -> None:
    missing = [path for path in sorted(named_paths(page)) if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing, missing


def test_paths_are_found_in_the_pages() -> None:
    found = named_paths(ROOT / "CONTRIBUTING.md")
    assert {"runtimes/gpipe/", "tests/processes.py", ".ci/run", "pyproject.toml"} <= found
    assert "config.toml" not in named_paths(ROOT / "docs/records.md")


@each_page
def test_dotted_names_exist(page: Path) -> None:
    for span in code_spans(page):
        if not re.fullmatch(r"(?:runtimes|experiments|analysis)(?:\.\w+)+", span):
            continue
        parts = span.split(".")
        for length in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            for name in parts[length:]:
                value = getattr(value, name)
            break
        else:
            pytest.fail(span)


# ---- statements that code can check ------------------------------------------------------------


def test_the_readme_lists_the_systems_that_exist() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| .* \|(?: `([\w-]+)`: .*)? \|$", prose(PAGES[0]), re.M)
    systems = [row for row in rows if row[0] in SYSTEMS]
    assert {ours for ours, _ in systems} == set(SYSTEMS)
    assert {peer: ours for ours, peer in systems if peer} == {
        peer: ours for peer, (_, ours) in PEERS.items()
    }


def test_the_records_page_lists_the_parts_of_wall_time() -> None:
    text = (ROOT / "docs/records.md").read_text()
    table = text.split("| part | time in which the rank |")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.M)) == PARTS


def example_of_a_system() -> tuple[str, type[System]]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (source,) = [body for language, body, _ in FENCE.findall(text) if language == "python"]
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, "CONTRIBUTING.md", "exec"), scope)
    (system,) = [
        value
        for value in scope.values()
        if isinstance(value, type) and issubclass(value, FlushSystem) and value is not FlushSystem
    ]
    return source, system


def test_the_example_of_a_system_makes_valid_programs() -> None:
    source, system = example_of_a_system()
    assert len(source.splitlines()) <= 40
    assert ast.get_docstring(ast.parse(source))
    for stages in (1, 2, 3, 4):
        for units in (1, 2, 5, 8):
            plan = Plan.even(8, stages, micro_batches=units)
            validate(system().program(plan, (18, 1)), system().declared(plan))


def test_an_example_that_keeps_less_than_it_runs_ahead_is_refused() -> None:
    _, system = example_of_a_system()
    plan = Plan.even(8, 2, micro_batches=4)
    with pytest.raises(ScheduleError, match="rule 9"):
        validate(system().program(plan, (8,)), SYSTEMS["dapple"]().declared(plan))


@pytest.mark.parametrize(
    "name", sorted(name for name, system in SYSTEMS.items() if issubclass(system, FlushSystem))
)
def test_synchronous_systems_take_at_most_40_lines_of_code(name: str) -> None:
    """Blank lines, comments and docstrings do not count."""
    path = Path(sys.modules[SYSTEMS[name].__module__].__file__ or "")
    tree = ast.parse(path.read_text())
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    code = [
        line
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip() and not line.strip().startswith("#") and number not in docstrings
    ]
    assert len(code) <= 40
