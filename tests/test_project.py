"""The project's own rules, as far as a program can check them."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from runtimes.plan import Plan
from runtimes.tracing import write_trace
from tests.timelines import program_of, timeline_of

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = ROOT / "requirements" / "lock-py311-linux-x86_64.txt"
PACKAGES = ("runtimes", "experiments", "analysis")
MODULE_LINES, FUNCTION_LINES = 420, 80


def modules(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- .data -------------------------------------------------------------------------------------

#: `job.data` is the job's data set, `torch.utils.data` a module; no tensor goes by these names.
NOT_TENSORS = {"job", "utils"}


def data_accesses(module: ast.Module) -> list[int]:
    """Lines that reach a tensor's ``.data``, as an attribute or by its name in a string."""
    lines = []
    for node in ast.walk(module):
        match node:
            case ast.Attribute(attr="data", value=value):
                owner = value.attr if isinstance(value, ast.Attribute) else None
                owner = value.id if isinstance(value, ast.Name) else owner
                if (owner or "").lstrip("_") not in NOT_TENSORS:
                    lines.append(node.lineno)
            case ast.Call(func=ast.Name(id=name), args=[_, ast.Constant(value="data"), *_]) if (
                name in {"getattr", "setattr", "delattr"}
            ):
                lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr=name), args=[*_, ast.Constant(value="data")]) if (
                name in {"attrgetter", "__getattribute__"}
            ):
                lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr="__setattr__"), args=[*arguments]):
                if any(isinstance(a, ast.Constant) and a.value == "data" for a in arguments):
                    lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "source",
    [
        "p.data",
        "p.data = q",
        "del p.data",
        "module.weight.data.copy_(x)",
        "[p.data for p in model.parameters()]",
        "p.grad.data.zero_()",
        "next(parameters).data.add_(g)",
        "weights['0'].data -= g",
        "self.data",
        "getattr(p, 'data')",
        "setattr(p, 'data', q)",
        "operator.attrgetter('data')",
        "object.__setattr__(p, 'data', q)",
        "p.__setattr__('data', q)",
    ],
)
def test_the_data_rule_catches(source: str) -> None:
    assert data_accesses(ast.parse(source)) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "job.data",
        "self.job.data.train",
        "self._job.data",
        "torch.utils.data.default_collate",
        "values['data']",
        "data = read(data)",
        "p.data_ptr()",
        "getattr(p, 'grad')",
    ],
)
def test_the_data_rule_permits(source: str) -> None:
    assert data_accesses(ast.parse(source)) == []


def test_no_tensor_data_in_runtimes() -> None:
    """Writing through ``.data`` while a unit is in flight raises nothing and corrupts gradients."""
    found = [
        f"{relative(path)}:{line}"
        for path in modules("runtimes")
        for line in data_accesses(tree(path))
    ]
    assert not found, f".data of a tensor: {found}"


# ---- size, docstrings, __all__ -----------------------------------------------------------------


def test_modules_and_functions_are_short() -> None:
    long = []
    for path in modules(*PACKAGES):
        lines = path.read_text().count("\n")
        if lines > MODULE_LINES:
            long.append(f"{relative(path)}: {lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.append(f"{relative(path)}:{node.lineno} {node.name}: {lines} lines")
    assert not long, long


def test_every_module_has_a_docstring() -> None:
    bare = [
        relative(path)
        for path in modules(*PACKAGES)
        if tree(path).body and not ast.get_docstring(tree(path))
    ]
    assert not bare, bare


def test_no_module_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
    assert not [relative(path) for path in modules(*PACKAGES) if path.stem in vague]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_offers(package: str) -> None:
    """``__all__`` exists wherever something is defined, and each of its names is there."""
    silent, missing = [], []
    for path in modules(package):
        defines = any(not isinstance(node, ast.Expr) for node in tree(path).body)
        if not defines or path.stem == "__main__":
            continue
        module = importlib.import_module(module_name(path))
        if not hasattr(module, "__all__"):
            silent.append(relative(path))
        missing += [
            f"{relative(path)}: {name}"
            for name in getattr(module, "__all__", ())
            if not hasattr(module, name)
        ]
    assert not silent, f"without __all__: {silent}"
    assert not missing, f"in __all__, but not there: {missing}"


# ---- packages, dependencies, lock --------------------------------------------------------------


def test_listed_packages_are_those_on_disk() -> None:
    on_disk = {module_name(path) for path in modules(*PACKAGES) if path.name == "__init__.py"}
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == on_disk
    homeless = {path.parent for path in modules(*PACKAGES)} - {
        ROOT.joinpath(*name.split(".")) for name in on_disk
    }
    assert not homeless, f"modules outside any package: {homeless}"


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    texts = [
        *PYPROJECT["build-system"]["requires"],
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    return [Requirement(text) for text in texts]


def locked() -> dict[str, Requirement]:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


def version(pin: Requirement) -> str:
    return next(iter(pin.specifier)).version


def test_lock_pins_one_version_each() -> None:
    for pin in locked().values():
        assert [part.operator for part in pin.specifier] == ["=="], str(pin)
    names = [*locked()]
    assert names == sorted(names)


def test_lock_satisfies_the_ranges() -> None:
    pins = locked()
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not locked"
        assert version(pins[name]) in requirement.specifier, f"{pins[name]} against {requirement}"


def test_lock_names_hardware_packages_for_that_hardware_only() -> None:
    for name, pin in locked().items():
        if name.startswith(("nvidia-", "cuda-")) or name == "triton":
            assert pin.marker is not None, f"{pin} needs a marker"
            for system, machine, wanted in [
                ("Linux", "x86_64", True),
                ("Linux", "aarch64", False),
                ("Darwin", "x86_64", False),
            ]:
                place = {"platform_system": system, "platform_machine": machine}
                assert pin.marker.evaluate(place) is wanted, str(pin)
        else:
            assert pin.marker is None, str(pin)


def test_lock_is_complete() -> None:
    """Nothing that a locked version needs is left to pip's choice."""
    pins = locked()
    for name, pin in pins.items():
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.version != version(pin):
            continue  # installed from the ranges
        for text in found.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in pins, f"{name} needs {text}"


# ---- imports -----------------------------------------------------------------------------------


def imported(path: Path) -> Iterator[str]:
    """Top-level names of the modules that a file imports, wherever in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: import by full name"
            yield (node.module or "").split(".")[0]


#: import name → the distribution that brings it, where the two differ.
DISTRIBUTIONS = {"PIL": "pillow", "pydantic_core": "pydantic", "sklearn": "scikit-learn"}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_are_declared(package: str) -> None:
    declared = {
        canonicalize_name(Requirement(t).name) for t in PYPROJECT["project"]["dependencies"]
    }
    if package == "runtimes":
        declared = {"torch", "torchvision", "timm", "numpy"}
    undeclared = [
        f"{relative(path)} imports {name}"
        for path in modules(package)
        for name in imported(path)
        if name not in sys.stdlib_module_names
        and name not in PACKAGES
        and canonicalize_name(DISTRIBUTIONS.get(name, name)) not in declared
    ]
    assert not undeclared, undeclared


def test_imports_of_tests_are_declared() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements()}
    known = {*sys.stdlib_module_names, *PACKAGES, "tests"}
    undeclared = {
        f"{relative(path)} imports {name}"
        for path in modules("tests")
        for name in imported(path)
        if name not in known and canonicalize_name(DISTRIBUTIONS.get(name, name)) not in declared
    }
    assert not undeclared, undeclared


def test_dependencies_are_used() -> None:
    used = {
        canonicalize_name(DISTRIBUTIONS.get(name, name))
        for path in modules(*PACKAGES)
        for name in imported(path)
    }
    declared = {Requirement(text).name for text in PYPROJECT["project"]["dependencies"]}
    assert {canonicalize_name(name) for name in declared} <= used


def test_schedule_contract_names_all_its_neighbours() -> None:
    contracts = {c["id"]: c for c in PYPROJECT["tool"]["importlinter"]["contracts"]}
    neighbours = {
        module_name(path)
        for path in (*(ROOT / "runtimes").glob("*.py"), *(ROOT / "runtimes").glob("*/__init__.py"))
    } - {"runtimes", "runtimes.schedule", "runtimes.plan"}
    assert neighbours <= set(contracts["schedule"]["forbidden_modules"])


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("runtimes/schedule/orders.py", "import torch", "schedule"),
        ("runtimes/schedule/orders.py", "from runtimes.job import Job", "schedule"),
        ("runtimes/job.py", "import experiments", "runtimes"),
        ("runtimes/job.py", "import pydantic", "runtimes-external"),
        ("analysis/__init__.py", "from runtimes.plan import Plan", "analysis"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(
    tmp_path: Path, module: str, statement: str, contract: str
) -> None:
    names = {c["id"]: c["name"] for c in PYPROJECT["tool"]["importlinter"]["contracts"]}
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{statement}\n")
    command = [
        *(sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"),
        *("--contract", contract, "--no-cache"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{names[contract]} BROKEN" in done.stdout


def loaded(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``statement``."""
    code = f"import sys, json\n{statement}\nprint(json.dumps([*sys.modules]), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}


def test_help_loads_nothing_heavy() -> None:
    """So that `pipebench --help` answers in under a second."""
    help_ = "sys.argv = ['pipebench', '--help']\nfrom experiments.cli import main\n"
    help_ += "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    heavy = {"torch", "torchvision", "timm", "numpy", "pandas", "matplotlib", "sklearn", "wandb"}
    assert not loaded(help_) & heavy


def test_a_rank_loads_runtimes_only() -> None:
    names = loaded("import runtimes.execution.session")
    assert "torch" in names
    # timm loads wandb, if it is there, for a function that nobody here calls.
    assert not names & {"experiments", "analysis", "typer", "rich", "pandas", "matplotlib"}


def test_a_rank_watches_its_agent_before_it_loads_torch() -> None:
    assert not loaded("import runtimes.execution.rank") & {"torch", "numpy"}


def test_schedules_load_without_torch() -> None:
    names = "runtimes.schedule, runtimes.plan, runtimes.job, runtimes.tracing"
    assert not loaded(f"import {names}") & {"torch", "numpy"}


def test_a_gantt_figure_is_drawn_without_torch_or_runtimes(tmp_path: Path) -> None:
    write_trace(
        tmp_path / "trace.json", [timeline_of(program_of(Plan.even(2, 2, micro_batches=2)))]
    )
    statement = "from pathlib import Path\nfrom analysis.gantt import write_gantt\n"
    statement += f"folder = Path({str(tmp_path)!r})\n"
    statement += "write_gantt('gantt', [(folder / 'trace.json', None)], folder)"
    assert not loaded(statement) & {"torch", "runtimes", "experiments"}
    assert (tmp_path / "gantt.png").stat().st_size > 10_000


# ---- what must not be in a tracked file --------------------------------------------------------

FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w./~-])/(?:home|Users|root|work)/",
            r"/tmp/(?:venv|team)\b",
            "py" r"pi\.(?:org|python\.org)",
            "python" r"hosted\.org",
            "deb" r"\.debian\.org",
            "--(?:extra-)?index" r"-url",
        ]
    )
)


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout: no list of tracked files")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


@pytest.mark.parametrize(
    "text",
    ["see /" + "home/me/x", "root = '/" + "work/main'", "at files.python" + "hosted.org/x"],
)
def test_the_foreign_rule_catches(text: str) -> None:
    assert FOREIGN.search(text)


def test_no_foreign_place_in_tracked_files() -> None:
    found = []
    for path in tracked():
        if path.suffix in {".png", ".pdf", ".npy", ".gz"} or not path.is_file():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if FOREIGN.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert not found, found


def test_no_unfinished_notes() -> None:
    notes = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")
    sources = [*modules(*PACKAGES), *sorted((ROOT / "tests").rglob("*.py"))]
    assert not [relative(path) for path in sources if notes.search(path.read_text())]
