"""Actions and their text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.schedule import Action, Op, parse
from runtimes.schedule.action import RECEIVES, SENDS

small = st.integers(0, 10_000)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    op = draw(st.sampled_from(list(Op)))
    low = draw(small)
    message = op in SENDS | RECEIVES
    return Action(
        draw(small),
        draw(small),
        draw(small),
        op,
        draw(small),
        draw(st.none() | small),
        draw(st.none() | small),
        draw(small) if message else None,
        (low, low + draw(st.integers(1, 99))) if message else None,
    )


@given(actions())
def test_the_text_form_reads_back_as_the_same_action(action: Action) -> None:
    assert parse(str(action)) == action


def test_text_forms_of_the_design() -> None:
    assert parse("p0.s1.r0.B3/1@2") == Action(0, 1, 0, Op.B, 3, 1, 2)
    sent = Action(0, 1, 2, Op.SEND_ACT, 3, None, 2, 0, (4, 7))
    assert str(sent) == "p0.s1.r2.SEND_ACT3>r0[4:7]@2"
    received = Action(0, 2, 0, Op.RECV_ACT, 3, None, 2, 2, (4, 7))
    assert str(received) == "p0.s2.r0.RECV_ACT3<r2[4:7]@2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B3",
        "p0.s1.r0.X3",
        "p0.s1.r0.B",
        "p0.s1.r0.B03",
        "p0.s1.r0.SEND_ACT3<r0[0:1]",
        "p0.s1.r0.B3 ",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an action.*expected"):
        parse(text)
