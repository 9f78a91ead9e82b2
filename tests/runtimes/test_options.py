"""What options say of themselves, and what values they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from runtimes.options import Limits, options_of
from runtimes.systems import SYSTEMS, get_system, system_options


@dataclass(frozen=True)
class Sample:
    flag: bool = True
    word: Literal["a", "b"] = "b"
    count: Annotated[int, Limits(at_least=1)] = 2
    share: Annotated[float | None, Limits(above=0)] = None
    free: float = 0.5


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("flag", [True, False], [1, 0, "true", None]),
        ("word", ["a", "b"], ["c", "A", None, 1]),
        ("count", [1, 7], [0, -1, 1.0, True, "1", None, float("inf")]),
        ("share", [None, 0.5, 3, 1e-9], [0, 0.0, -1, True, "0.5", float("nan"), float("inf")]),
        ("free", [-1, 0, 2.5], [None, "x", False]),
    ],
)
def test_values_that_an_option_takes(name: str, good: list[Any], bad: list[Any]) -> None:
    option = options_of(Sample)[name]
    for value in good:
        assert option.checked(value) == value
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} = .*, but it is {option.allowed}$"):
            option.checked(value)


def test_a_number_has_one_form() -> None:
    assert repr(options_of(Sample)["share"].checked(1)) == "1.0"
    assert repr(options_of(Sample)["count"].checked(1)) == "1"


def test_options_describe_themselves() -> None:
    assert {name: option.to_json() for name, option in options_of(Sample).items()} == {
        "flag": {"kind": "choice", "default": True, "allowed": [True, False]},
        "word": {"kind": "choice", "default": "b", "allowed": ["a", "b"]},
        "count": {"kind": "integer", "default": 2, "at_least": 1},
        "share": {"kind": "number", "default": None, "above": 0},
        "free": {"kind": "number", "default": 0.5},
    }


def test_options_of_another_type_are_a_mistake_of_the_system() -> None:
    @dataclass(frozen=True)
    class Wrong:
        names: str = ""

    with pytest.raises(TypeError, match="none that options have"):
        options_of(Wrong)


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_every_system_takes_its_defaults(name: str) -> None:
    defaults = {option.name: option.default for option in system_options(name).values()}
    assert get_system(name, defaults) == get_system(name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"advance": -1}, r"avgpipe: advance = -1, but it is a whole number, at least 0"),
        ({"every": 0}, r"avgpipe: every = 0, but it is a whole number, at least 1"),
        ({"alpha": 0}, r"avgpipe: alpha = 0, but it is a number, above 0"),
        ({"form": "new"}, r"form = 'new', but it is one of 'centre-first', 'symmetric'"),
        ({"tau": 2}, r"avgpipe has no option 'tau' \(its options: advance, form, averaging"),
    ],
)
def test_what_avgpipe_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_system("avgpipe", options)
