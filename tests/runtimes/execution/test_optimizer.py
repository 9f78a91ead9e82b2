from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.optimizer import build_optimizer, learning_rate
from runtimes.job import LearningRate, OptimizerSpec


def updated(spec: OptimizerSpec, steps: int = 3) -> float:
    weight = Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = build_optimizer([weight], spec)
    for _ in range(steps):
        weight.grad = 2 * weight.detach()
        optimizer.step()
    return weight.item()


def test_sgd_follows_its_recurrence() -> None:
    lr, momentum, decay = 0.1, 0.9, 0.01
    plain, nesterov = [1.0, 0.0], [1.0, 0.0]
    for _ in range(3):
        gradient = 2 * plain[0] + decay * plain[0]
        plain[1] = momentum * plain[1] + gradient
        plain[0] -= lr * plain[1]
        gradient = 2 * nesterov[0] + decay * nesterov[0]
        nesterov[1] = momentum * nesterov[1] + gradient
        nesterov[0] -= lr * (gradient + momentum * nesterov[1])
    assert updated(OptimizerSpec("sgd", lr, momentum, False, decay)) == pytest.approx(plain[0])
    assert updated(OptimizerSpec("sgd", lr, momentum, True, decay)) == pytest.approx(nesterov[0])


def test_adamw_follows_its_recurrence() -> None:
    spec = OptimizerSpec("adamw", lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)
    w, m, v = 1.0, 0.0, 0.0
    for k in range(1, 4):
        g = 2 * w
        w -= 0.1 * 0.2 * w
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w -= 0.1 * (m / (1 - 0.8**k)) / (math.sqrt(v / (1 - 0.9**k)) + 1e-6)
    assert updated(spec) == pytest.approx(w)


def test_a_stage_without_parameters_has_an_optimizer() -> None:
    build_optimizer([], OptimizerSpec()).step()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (OptimizerSpec(name="lion"), "'lion' is unknown: use sgd or adamw"),  # type: ignore[arg-type]
        (OptimizerSpec(lr=-1.0), "lr is -1.0"),
        (OptimizerSpec(lr=math.nan), "lr is nan"),
        (OptimizerSpec(weight_decay=-0.1), "weight_decay is -0.1"),
        (OptimizerSpec(momentum=1.0), r"momentum is 1.0.*\[0, 1\)"),
        (OptimizerSpec(nesterov=True), "nesterov needs a momentum"),
        (OptimizerSpec("adamw", momentum=0.9), "set it to 0"),
        (OptimizerSpec("adamw", betas=(0.9, 1.0)), "betas"),
        (OptimizerSpec("adamw", eps=0.0), "eps is 0.0"),
    ],
)
def test_bad_optimizers_are_refused(spec: OptimizerSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer([], spec)


def rates(rate: LearningRate, steps: int, per_epoch: int = 4, epochs: int = 3) -> list[float]:
    spec = OptimizerSpec(lr=2.0)
    return [learning_rate(spec, rate, step, per_epoch, epochs) for step in range(steps)]


def test_warm_up_rises_by_update_to_the_peak() -> None:
    assert rates(LearningRate(warmup_epochs=1), 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(LearningRate(warmup_epochs=0.5), 3) == [1.0, 2.0, 2.0]
    assert rates(LearningRate(), 2) == [2.0, 2.0]


def test_cosine_falls_from_the_peak_to_the_floor_at_the_end() -> None:
    cosine = rates(LearningRate("cosine", warmup_epochs=1, floor=0.1), 14)
    assert cosine[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert cosine[8] == pytest.approx((2.0 + 0.2) / 2)  # half of the way from update 4 to 12
    assert cosine[11] > cosine[12] == pytest.approx(0.2)
    assert cosine[13] == cosine[12]
    assert cosine[4:13] == sorted(cosine[4:13], reverse=True)


def test_steps_fall_at_milestones() -> None:
    stepped = rates(LearningRate("step", milestones=(1, 2.5), gamma=0.5), 12)
    assert stepped == [2.0] * 4 + [1.0] * 6 + [0.5] * 2


@pytest.mark.parametrize(
    ("rate", "step", "message"),
    [
        (LearningRate("linear"), 0, "'linear' is unknown"),  # type: ignore[arg-type]
        (LearningRate(), -1, "update -1"),
        (LearningRate(warmup_epochs=4), 0, "warmup_epochs is 4.*3 epochs"),
        (LearningRate("cosine", floor=2.0), 0, "floor is 2.0"),
        (LearningRate("step", gamma=0.0), 0, "gamma is 0.0"),
        (LearningRate("step", milestones=(-1,)), 0, "milestones"),
    ],
)
def test_bad_rates_are_refused(rate: LearningRate, step: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate(OptimizerSpec(), rate, step, 4, 3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_sum_over_samples_of_smoothed_cross_entropy(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 6, 3, 3, 1])
    target = torch.full((5, 7), smoothing / 7, dtype=torch.float64)
    target[torch.arange(5), labels] += 1 - smoothing
    expected = -(target * (logits - logits.exp().sum(1, keepdim=True).log())).sum()
    assert torch.allclose(cross_entropy_sum(logits, labels, smoothing), expected, rtol=1e-14)
    parts = sum(cross_entropy_sum(logits[i:j], labels[i:j], smoothing) for i, j in [(0, 2), (2, 5)])
    assert torch.allclose(torch.as_tensor(parts), expected, rtol=1e-14)


def test_the_loss_keeps_at_least_float32() -> None:
    labels = torch.zeros(300, dtype=torch.int64)
    logits = torch.zeros(300, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(300 * math.log(2), rel=1e-6)
    assert cross_entropy_sum(logits.double(), labels).dtype == torch.float64


def test_the_loss_of_no_samples_is_zero_and_smoothing_is_bounded() -> None:
    none = torch.zeros(0, 3, requires_grad=True)
    loss = cross_entropy_sum(none, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    with pytest.raises(ValueError, match="label smoothing is 1.0"):
        cross_entropy_sum(none, torch.zeros(0, dtype=torch.int64), 1.0)
