"""What the profiler measures, on a clock that layers move themselves: exactly what they take."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from runtimes.job import ModelSpec, OptimizerSpec
from runtimes.model.stack import LayerStack, build_stack
from runtimes.planning import concurrency
from runtimes.planning import excerpt as excerpt_module
from runtimes.planning.excerpt import COPIES, Excerpt, LayerSeconds, chosen
from runtimes.planning.footprint import Footprint
from runtimes.planning.profile import COPY, LayerProfile, Profile
from runtimes.planning.profiler import (
    Rounds,
    kinds_of,
    measure_profile,
    profiles_of,
    run_rounds,
    spread_of,
    times_of,
)
from runtimes.planning.request import ProfileRequest
from runtimes.schedule import Op

WIDTH, CLASSES = 4, 3
SIZES = (1, 3)


class Clock:
    """Stands in for perf_counter; and how often each layer was computed, in all and in rounds."""

    seconds = 0.0
    calls: ClassVar[Counter[str]] = Counter()
    in_rounds: ClassVar[Counter[str]] = Counter()

    @classmethod
    def now(cls) -> float:
        return cls.seconds


class _Taking(torch.autograd.Function):
    """Forward and backward that take their time, the backward more for an input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, times: tuple[float, ...]) -> Tensor:
        ctx.times, ctx.samples = times, len(x)
        Clock.seconds += times[0] * len(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        _, backward, of_input = ctx.times
        Clock.seconds += (backward + of_input * ctx.needs_input_grad[0]) * ctx.samples
        return gradient if ctx.needs_input_grad[0] else None, torch.ones(()), None


class Takes(nn.Module):
    """A layer of one weight, that takes so many seconds a sample forward, backward, and for the
    gradient of its input."""

    def __init__(self, name: str, *times: float) -> None:
        super().__init__()
        self.name, self.times = name, times
        self.weight = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        Clock.calls[self.name] += 1
        out: Tensor = _Taking.apply(x, self.weight, self.times)
        return out


LOSS = (7.0, 0.5)


def loss_that_takes(logits: Tensor, labels: Tensor) -> Tensor:
    times = (LOSS[0] / len(logits), LOSS[1] / len(logits), 0.0)
    out: Tensor = _Taking.apply(logits, torch.ones((), requires_grad=True), times)
    return out.sum()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock.seconds, Clock.calls = 0.0, Counter()
    monkeypatch.setattr(excerpt_module, "perf_counter", Clock.now)
    monkeypatch.setattr(excerpt_module, "cross_entropy_sum", loss_that_takes)


TIMES = {"a": (1.0, 2.0, 16.0), "b": (3.0, 5.0, 0.25), "c": (0.5, 4.0, 1.0)}


def stack_of(letters: str) -> LayerStack:
    return LayerStack.from_module(nn.Sequential(*(Takes(one, *TIMES[one]) for one in letters)))


def request_of(**changes: Any) -> ProfileRequest:
    given = {"batch_sizes": SIZES, "repeats": 2, "warm_up": 1, **changes}
    image: Any = (WIDTH,)
    return ProfileRequest(ModelSpec("none"), image, **given)


def measured(letters: str, **changes: Any) -> tuple[LayerProfile, ...]:
    stack, request = stack_of(letters), request_of(**changes)
    footprint = Footprint(stack, request.image)
    kinds = kinds_of(footprint)
    shapes = [request.image] * (len(stack) + 1)
    excerpt = Excerpt(stack, shapes, chosen(kinds))
    Clock.calls.clear()
    rounds = run_rounds(excerpt, request, lambda _: None)
    Clock.in_rounds = Counter(Clock.calls)
    return profiles_of(stack, footprint, times_of(kinds, excerpt.indices, rounds.units))


def check_times(letters: str) -> None:
    """Every layer's own times, the loss's with the last layer's, and no gradient of the images."""
    for index, layer in enumerate(measured(letters)):
        forward, backward, of_input = TIMES[letters[index]]
        last = index == len(letters) - 1
        for n in SIZES:
            there = (forward * n + LOSS[0] * last,) * 3
            back = ((backward + of_input * (index > 0)) * n + LOSS[1] * last,) * 3
            assert layer.forward_seconds[n] == pytest.approx(there), (index, n)
            assert layer.backward_seconds[n] == pytest.approx(back), (index, n)


@pytest.mark.parametrize("letters", ["a", "abc", "aaa", "abcabca", "abbbbbbbbbc"])
def test_layers_take_what_they_take(letters: str) -> None:
    check_times(letters)


def test_like_layers_are_measured_by_a_few_of_them() -> None:
    layers = measured("a" + 9 * "b" + "c")
    units = len(SIZES) * 3
    assert Clock.in_rounds == {"a": units, "b": COPIES * units, "c": units}
    assert all(layer.forward_seconds == layers[1].forward_seconds for layer in layers[1:10])
    measured("a" + 2 * "b" + "c")
    assert Clock.in_rounds["b"] == 2 * units


def test_the_first_of_like_layers_is_another_kind() -> None:
    first, *others = measured("aaaa")[:-1]
    assert first.backward_seconds != others[0].backward_seconds
    assert others[0].backward_seconds == others[1].backward_seconds


def backward_with_forward(self: Excerpt, inputs: Any, unit: Any = Excerpt.unit) -> LayerSeconds:
    forward, backward = unit(self, inputs)
    return LayerSeconds(forward, [sum(pair) for pair in zip(forward, backward, strict=True)])


def images_with_gradient(self: Excerpt, n: int, inputs: Any = Excerpt.inputs) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs(self, n)]


def without_loss(self: Excerpt, *args: Any, init: Any = Excerpt.__init__, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    self._with_loss = False


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("unit", backward_with_forward),
        ("inputs", images_with_gradient),
        ("__init__", without_loss),
    ],
)
def test_the_check_of_times_catches(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(Excerpt, name, mutant)
    with pytest.raises(AssertionError):
        check_times("abc")


def check_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is slow at first, and no more when it counts."""
    monkeypatch.setitem(TIMES, "b", (1000.0, 1000.0, 0.0))
    stack, request = stack_of("ab"), request_of(warm_up=2)
    excerpt = Excerpt(stack, [request.image] * 3, (0, 1))
    layer: Any = excerpt.module.layers[1]

    def say(text: object) -> None:
        if text == "round 1 of 2":
            layer.times = (1.0, 1.0, 0.0)

    rounds = run_rounds(excerpt, request, say)
    assert [len(units) for units in rounds.units.values()] == [2, 2]
    assert all(u.forward[1] == n + LOSS[0] for n in SIZES for u in rounds.units[n])


def test_the_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    check_warm_up(monkeypatch)
    run = Rounds.run
    monkeypatch.setattr(Rounds, "run", lambda self, counted: run(self, counted=True))
    with pytest.raises(AssertionError):
        check_warm_up(monkeypatch)


def test_layers_that_do_not_fit_each_other_have_inputs_of_their_own() -> None:
    model = nn.Sequential(
        *(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 3))
    )
    stack = LayerStack.from_module(model)
    footprint = Footprint(stack, (4,))
    indices = chosen(kinds_of(footprint), 1)
    assert indices == (0, 1, 2, 4)
    shapes = [(4,), *stack.output_shapes((4,))]
    excerpt = Excerpt(stack, shapes, indices)
    assert [(tuple(x.shape), x.requires_grad) for x in excerpt.inputs(2)] == [
        ((2, 4), False),
        ((2, 4), True),
    ]
    unit = excerpt.unit(excerpt.inputs(2))
    assert [len(times) for times in unit] == [4, 4]
    assert all(parameter.grad.abs().sum() > 0 for parameter in excerpt.parameters)


def test_layers_without_weights_have_no_backward() -> None:
    stack = LayerStack.from_module(nn.Sequential(nn.Flatten(), nn.Identity(), Takes("a", 1, 2, 4)))
    footprint = Footprint(stack, (WIDTH, 1, 1))
    assert [reached for _, reached in kinds_of(footprint)] == [False, False, False]
    shapes = [(WIDTH, 1, 1), *stack.output_shapes((WIDTH, 1, 1))]
    unit = Excerpt(stack, shapes, (0, 1, 2)).unit([torch.randn(2, WIDTH, 1, 1)])
    assert unit.backward == [0.0, 0.0, 2 * 2 + LOSS[1]]
    nothing = LayerStack.from_module(nn.Sequential(nn.Flatten()))
    excerpt = Excerpt(nothing, [(WIDTH, 1, 1), (WIDTH,)], (0,))
    rounds = run_rounds(excerpt, request_of(), lambda _: None)
    assert rounds.steps == {}


def test_gradients_are_those_of_plain_torch_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    stack = LayerStack.from_module(model)
    excerpt = Excerpt(stack, [(4,), *stack.output_shapes((4,))], (0, 1, 2), precision="float64")
    model.double().load_state_dict(stack.initial_weights(0, 3, 0, dtype=torch.float64))
    inputs = excerpt.inputs(6)
    loss = nn.functional.cross_entropy(model(inputs[0]), torch.zeros(6, dtype=torch.int64))
    loss.backward()
    for times in (1, 2):
        excerpt.unit(inputs)
        for found, known in zip(excerpt.parameters, model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, times * known.grad)


class Sleeps(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x * 1.0


def test_real_time_is_no_less_than_a_layer_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = nn.Sequential(nn.Linear(2, 2), Sleeps(0.03), Sleeps(0.001), nn.Linear(2, 2))
    stack = LayerStack.from_module(model)
    excerpt = Excerpt(stack, [(2,)] * 5, (0, 1, 2, 3))
    units = run_rounds(excerpt, request_of(batch_sizes=(1,)), lambda _: None).units[1]
    for unit in units:
        assert unit.forward[1] >= 0.03
        assert unit.forward[2] >= 0.001
    assert min(u.forward[1] for u in units) > min(u.forward[2] for u in units)


def test_quartiles() -> None:
    assert spread_of([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0, 4.0)
    assert spread_of([2.0]) == (2.0, 2.0, 2.0)


def test_optimizers_are_named_by_what_a_step_costs() -> None:
    methods = [
        OptimizerSpec().method,
        OptimizerSpec(momentum=0.9, nesterov=True, weight_decay=0.1).method,
        OptimizerSpec("adamw").method,
    ]
    assert methods == ["sgd", "sgd-momentum", "adamw"]


def test_the_profile_of_a_small_vit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(concurrency, "_LEAST_SECONDS", 0.01)
    spec = ModelSpec(
        "VisionTransformer",
        {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 6, "num_heads": 1}
        | {"num_classes": 3, "proj_drop_rate": 0.1},
    )
    request = ProfileRequest(spec, (3, 8, 8), (1, 2), repeats=1, warm_up=1)
    stack, said = build_stack(spec), []
    profile = measure_profile(request, stack, lambda what: said.append(str(what)))
    assert [layer.name for layer in profile.layers] == list(stack.names)
    assert len({id(layer.forward_seconds) for layer in profile.layers}) == 3
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * sum(stack.parameter_counts)
    assert profile.boundaries == Footprint(stack, (3, 8, 8)).boundaries
    block = profile.layers[1]
    # 5 tokens of width 8: what a block keeps is more than its input, as it keeps that too.
    assert block.output_bytes == 4 * 5 * 8 < block.kept_bytes
    assert profile.forward(0, 8, 2) == pytest.approx(
        sum(layer.forward_seconds[2].median for layer in profile.layers)
    )
    assert set(profile.optimizer_seconds_per_byte) == {"sgd", "sgd-momentum", "adamw", COPY}
    assert set(profile.concurrency) == {1, 2, 3}
    assert profile.reference_seconds is not None
    assert profile.reference_seconds > 0
    assert profile.concurrency[1] == 1
    assert set(profile.action_seconds) == {op.value for op in Op} - {Op.AVERAGE.value}
    assert profile.action_seconds["STEP"] > 0
    assert profile.provenance["measured_layers"] == [
        "embed",
        *(f"blocks.{i}" for i in range(4)),
        "head",
    ]
    assert "round 1 of 1" in said
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_layers_with_batch_norm_are_measured_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    normed = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten())
    stack = LayerStack.from_module(nn.Sequential(normed, nn.Linear(8, CLASSES)), "per-unit")
    excerpt = Excerpt(stack, [(1, 2, 2), (8,), (CLASSES,)], (0, 1))
    unit = excerpt.unit(excerpt.inputs(3))
    assert [len(unit.forward), len(unit.backward)] == [2, 2]
    assert min(*unit.forward, *unit.backward) > 0
