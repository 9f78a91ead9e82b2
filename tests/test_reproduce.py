"""reproduce.sh's own logic, with a stand-in for Python and pip that only writes down its calls."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Answers for python, pip and pipebench alike.  BREAK: the call that fails or kills the caller.
STAND_IN = r"""#!/bin/bash
call="$(basename "$0") $*"
case $call in
    *"sys.version_info < "*) exit "${OLD:-0}" ;;
    *"import ensurepip"*) exit "${NO_VENV:-0}" ;;
    *"sys.exit(here"*) exit "${NO_LOCK:-0}" ;;
    *"p.python_version()"*) echo "Python 3.13.0 on Darwin arm64"; exit ;;
    *" -c "*) exit ;;
esac
printf '%s\n' "$call" >>"$CALLS"
case $call in
    *"-m venv"*)
        venv=${*: -1}
        rm -rf "$venv" && mkdir -p "$venv/bin"
        for name in python pipebench ruff mypy lint-imports; do cp "$0" "$venv/bin/$name"; done
        ;;
esac
case $call in
    *"${BREAK:-nothing}"*)
        [ -z "${KILL:-}" ] || kill -9 "$PPID"
        [ -z "${HANG:-}" ] || { touch "$CALLS.hangs"; exec sleep 60; }
        exit "${CODE:-1}"
        ;;
esac
"""


class Clone:
    """A copy of what reproduce.sh needs, in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a clone"
        self.calls_file = folder / "calls"
        self.python = folder / "python"
        (self.folder / ".ci").mkdir(parents=True)
        for name in ("reproduce.sh", "pyproject.toml", ".ci/run"):
            shutil.copy(ROOT / name, self.folder / name)
        shutil.copytree(ROOT / "requirements", self.folder / "requirements")
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def start(
        self, *arguments: str, script: str = "reproduce.sh", **settings: str
    ) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHON": str(self.python),
            "CALLS": str(self.calls_file),
            **settings,
        }
        self.calls_file.unlink(missing_ok=True)
        return subprocess.Popen(
            [self.folder / script, *arguments],
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # As a terminal starts it: a CI job in the background may hand on an ignored SIGINT,
            # which no shell can trap.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, **settings: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **settings)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    @property
    def calls(self) -> list[str]:
        """The calls of the last run, with the folder's name left out."""
        if not self.calls_file.exists():
            return []
        text = self.calls_file.read_text()
        return text.replace(f"{self.folder.resolve()}/", "").splitlines()

    @property
    def installs(self) -> bool:
        return any(" -m pip install " in call for call in self.calls)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_installs_once_then_runs_the_smoke_tier(clone: Clone) -> None:
    code, output, errors = clone.run()
    assert (code, output) == (0, "")
    assert "about 4 minutes" in errors
    assert clone.calls == [
        "python -m venv --clear .venv",
        "python -m pip install -qq --no-input --disable-pip-version-check "
        "--requirement requirements/lock-py311-linux-x86_64.txt",
        "python -m pip install -qq --no-input --disable-pip-version-check --no-deps "
        f"--no-build-isolation --editable {clone.folder.resolve()}",
        "pipebench matrix --tier smoke",
        "pipebench tables",
        "pipebench figure throughput",
    ]
    assert clone.run()[0] == 0
    assert clone.calls == [
        "pipebench matrix --tier smoke",
        "pipebench tables",
        "pipebench figure throughput",
    ]


def test_elsewhere_it_says_so_and_uses_the_ranges(clone: Clone) -> None:
    code, _, errors = clone.run("--list", NO_LOCK="1")
    assert code == 0
    assert "The lock is for Python 3.11 on Linux x86_64, this is Python 3.13.0" in errors
    assert not any("requirements/" in call for call in clone.calls)
    assert any(call.endswith("[test]") for call in clone.calls)


def test_options_are_handed_on(clone: Clone) -> None:
    given = "--tier", "cifar100", "--only", "smoke/* b", "--jobs=2", "--set", "a.b=c d", "--fresh"
    clone.run(*given)
    assert f"pipebench matrix {' '.join(given)}" in clone.calls


@pytest.mark.parametrize("option", ["--list", "--dry-run"])
def test_looking_makes_no_tables(clone: Clone, option: str) -> None:
    assert clone.run(option)[0] == 0
    assert clone.calls[-1] == f"pipebench matrix --tier smoke {option}"


def test_a_failed_run_is_in_the_tables_and_in_the_exit_code(clone: Clone) -> None:
    assert clone.run(BREAK="pipebench matrix")[0] == 1
    assert clone.calls[-2:] == ["pipebench tables", "pipebench figure throughput"]


@pytest.mark.parametrize("code", ["2", "3"])
def test_nothing_follows_a_wrong_or_interrupted_matrix(clone: Clone, code: str) -> None:
    assert clone.run(BREAK="pipebench matrix", CODE=code)[0] == int(code)
    assert clone.calls[-1] == "pipebench matrix --tier smoke"


def test_the_step_that_fails_gives_the_exit_code(clone: Clone) -> None:
    assert clone.run(BREAK="pipebench tables", CODE="7")[0] == 7
    assert clone.calls[-1] == "pipebench tables"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 2), (["--fresh"], 2), (["--only", "x/*"], 0), (["--tier=cifar100"], 0)],
)
def test_a_choice_without_a_benchmark_needs_no_figure(
    clone: Clone, arguments: list[str], code: int
) -> None:
    assert clone.run(*arguments, BREAK="figure", CODE="2")[0] == code
    assert clone.calls[-1] == "pipebench figure throughput"


def test_checks_end_with_pytest_and_stop_at_the_first_failure(clone: Clone) -> None:
    assert clone.run("test", "-k", "validator")[0] == 0
    assert clone.calls[-5:] == [
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "lint-imports --no-logo",
        "python -m pytest -k validator",
    ]
    assert clone.run("test", BREAK="mypy", CODE="2")[0] == 2
    assert clone.calls[-1] == "mypy "


def test_ci_runs_the_checks(clone: Clone) -> None:
    process = clone.start(script=".ci/run", BREAK="-m pytest", CODE="5")
    process.communicate(timeout=60)
    assert process.returncode == 5
    assert clone.calls[-1] == "python -m pytest"


@pytest.mark.parametrize(
    "arguments", [["--tears", "smoke"], ["smoke"], ["--tier"], ["--jobs"], ["tests"]]
)
def test_wrong_usage_is_refused_before_anything_is_installed(
    clone: Clone, arguments: list[str]
) -> None:
    code, _, errors = clone.run(*arguments)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert arguments[0] in errors
    assert not clone.calls


def test_help_is_the_opening_comment(clone: Clone) -> None:
    code, output, errors = clone.run("--help")
    assert (code, errors) == (0, "")
    assert output.startswith("From nothing to tables and a figure.")
    assert output.rstrip().endswith("otherwise that of the step that failed.")
    assert not clone.calls


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"OLD": "1"}, "is a Python 3.11 or newer"),
        ({"NO_VENV": "1"}, "has no venv module"),
        ({"PYTHON": "/nowhere/python"}, "is a Python 3.11 or newer"),
        ({"PYTHON": "", "PATH": "EMPTY"}, "none of 'python3.11 python3"),
    ],
)
def test_no_python_is_one_clear_line(clone: Clone, settings: dict[str, str], words: str) -> None:
    if settings.get("PATH") == "EMPTY":
        tools = clone.folder / "tools"
        tools.mkdir()
        for tool in ("bash", "env", "dirname", "cat", "cksum", "sed", "rm"):
            os.symlink(str(shutil.which(tool)), tools / tool)
        settings = {**settings, "PATH": str(tools)}
    code, _, errors = clone.run(**settings)
    assert code == 2
    assert len(errors.splitlines()) == 1, errors
    assert words in errors
    assert not (clone.folder / ".venv").exists()


@pytest.mark.parametrize("step", ["-m venv", "--requirement", "--editable"])
def test_an_installation_that_was_killed_is_made_anew(clone: Clone, step: str) -> None:
    code, _, _ = clone.run(BREAK=step, KILL="1")
    assert code == -signal.SIGKILL
    assert clone.run("--list")[0] == 0
    assert clone.calls[0] == "python -m venv --clear .venv"
    assert clone.run("--list")[0] == 0
    assert not clone.installs


def test_a_failed_installation_is_not_taken_for_one(clone: Clone) -> None:
    code, _, errors = clone.run(BREAK="--requirement", CODE="9")
    assert code == 1
    assert "pip could not install" in errors
    assert clone.run("--list")[0] == 0
    assert clone.calls[0] == "python -m venv --clear .venv"


@pytest.mark.parametrize("file", ["pyproject.toml", "requirements/lock-py311-linux-x86_64.txt"])
def test_other_versions_are_installed_over_the_old_ones(clone: Clone, file: str) -> None:
    clone.run("--list")
    with (clone.folder / file).open("a") as text:
        text.write("# other\n")
    assert clone.run("--list", BREAK="--requirement", KILL="1")[0] == -signal.SIGKILL
    assert "-m pip install" in clone.calls[0]
    # That one was cut off, so what is there is no longer trusted.
    assert clone.run("--list")[0] == 0
    assert "-m venv --clear" in clone.calls[0]


def test_a_moved_clone_is_installed_anew(clone: Clone) -> None:
    clone.run("--list")
    clone.folder = clone.folder.rename(clone.folder.with_name("moved"))
    clone.run("--list")
    assert clone.calls[0] == "python -m venv --clear .venv"


@pytest.mark.parametrize("step", ["pipebench matrix", "--requirement", "-m pytest"])
def test_interrupted_is_3(clone: Clone, step: str) -> None:
    arguments = ["test"] if "pytest" in step else []
    process = clone.start(*arguments, BREAK=step, HANG="1")
    sign = Path(f"{clone.calls_file}.hangs")
    for _ in range(300):
        if sign.exists():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "pip could not" not in errors
    assert step in clone.calls[-1]
