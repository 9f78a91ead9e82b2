"""Profiles as files, what lies between what was measured, and what actions cost by them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtimes.plan import Plan
from runtimes.planning.profile import COPY, Profile
from runtimes.schedule import Op
from runtimes.simulation.cluster import Cluster
from runtimes.simulation.costs import ProfileCosts, Reduced
from runtimes.simulation.simulator import simulate
from runtimes.systems import get_system
from tests.runtimes.planning.profiles import layer, profile_of


def test_as_a_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_of().to_json()))
    assert Profile.load(path) == profile_of()


def test_times_are_linear_between_two_measured_sizes_and_end_with_them() -> None:
    profile = profile_of()
    assert profile.forward(1, 3, 2) == pytest.approx(5e-3)
    assert profile.forward(1, 3, 5) == pytest.approx(10e-3)
    assert profile.backward(0, 4, 8) == pytest.approx(60e-3)
    assert profile.boundaries == (5, 10, 20, 30, 40)
    assert profile.largest_unit == 8
    for samples in (1, 9):
        said = f"layer 'layer 1' is profiled for 2, 8 samples, not for {samples}"
        with pytest.raises(ValueError, match=said):
            profile.forward(1, 3, samples)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": "pipebench.profile/1", "layers": [', "is no whole JSON document"),
        ("[]", "is no profile"),
        ("{}", "not a profile of schema pipebench.profile/1: None"),
        ('{"schema": "pipebench.profile/1"}', "lacks something: 'model'"),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        Profile.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot read the profile .*nowhere.json"):
        Profile.load(tmp_path / "nowhere.json")


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole, path = json.dumps(profile_of().to_json()), tmp_path / "profile.json"
    for length in range(0, len(whole), 97):
        path.write_text(whole[:length])
        with pytest.raises(ValueError, match="is no whole JSON document"):
            Profile.load(path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: profile_of(layer("a", {2: -1.0})), "'a' has a forward that takes -1.0 s"),
        (lambda: profile_of(layer("a", {2: math.inf})), "takes inf s"),
        (lambda: profile_of(layer("a", {})), "layer 'a' has no forward times"),
        (lambda: profile_of(layer("a", {0: 1.0})), "a forward of 0 samples"),
        (lambda: profile_of(layer("a", {1: 1.0}, kept_bytes=-1)), "takes -1 bytes"),
        (lambda: replace(profile_of(), layers=()), "at least one layer"),
        (lambda: profile_of(action_seconds={"F": -1.0}), "F of the runtime takes -1.0 s"),
        (lambda: profile_of(optimizer_seconds_per_byte={"sgd": -1.0}), "a step of sgd takes"),
    ],
)
def test_times_that_cannot_be_are_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        wrong()


# -- what actions cost by a profile ----------------------------------------------------------------


def test_costs_are_those_of_the_layers() -> None:
    plan = Plan.contiguous((1, 3), (1, 2), cuts=(2,))
    costs = ProfileCosts(profile_of(), plan, "adamw")
    assert costs.compute_seconds(Op.F, 1, 0, None, 2) == pytest.approx(9e-3)
    assert costs.compute_seconds(Op.R, 1, 0, None, 2) == pytest.approx(9e-3)
    assert costs.compute_seconds(Op.B, 1, 0, None, 2) == pytest.approx(18e-3)
    # Part 0 of the backward holds the last layers.
    assert costs.compute_seconds(Op.B, 1, 0, 0, 2) == pytest.approx(14e-3)
    assert costs.compute_seconds(Op.B, 1, 0, 1, 2) == pytest.approx(4e-3)
    assert costs.message_bytes(0) == 10
    assert costs.reduced(1, None) == Reduced(3000, 6)
    assert costs.reduced(1, 0) == Reduced(2000, 4)
    assert costs.step_seconds(1, 0) == pytest.approx(12e-3)
    assert ProfileCosts(profile_of(), plan).step_seconds(1, 0) == 0.0
    copying = profile_of(optimizer_seconds_per_byte={"adamw": 4e-6, COPY: 1e-6})
    steps = ProfileCosts(copying, plan, "adamw", versions=(2, 1))
    assert steps.step_seconds(0, 0) == pytest.approx(5e-3)
    assert steps.step_seconds(1, 0) == pytest.approx(12e-3)
    assert [costs.overhead_seconds(op) for op in (Op.F, Op.B)] == [1e-4, 0.0]


def test_a_profile_of_other_layers_optimizers_and_batches_is_refused() -> None:
    plan = Plan.even(4, 2, micro_batches=2)
    with pytest.raises(ValueError, match="the plan cuts 5 layers, but the profile is of 4"):
        ProfileCosts(profile_of(), Plan.even(5, 2))
    with pytest.raises(ValueError, match="no step of 'lamb', only of sgd, adamw"):
        ProfileCosts(profile_of(), plan, "lamb")
    program = get_system("dapple").program(plan, (20,))
    with pytest.raises(ValueError, match="is profiled for 2, 8 samples, not for 10") as error:
        simulate(program, Cluster.ideal(2), ProfileCosts(profile_of(), plan))
    assert "\n" not in str(error.value)


def test_a_program_takes_the_times_of_its_profile() -> None:
    """One stage of 10 ms a forward of 2 samples, with 0.1 ms of the runtime's, and a step."""
    plan = Plan.even(4, 1, micro_batches=3)
    program = get_system("gpipe").program(plan, (6,))
    found = simulate(program, Cluster.ideal(1), ProfileCosts(profile_of(), plan, "sgd"))
    assert found.makespan_seconds == pytest.approx(3 * (30e-3 + 1e-4) + 4e-3)
