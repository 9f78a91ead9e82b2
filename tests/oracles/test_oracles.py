"""The references are worth something only if they are right by themselves and independent."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracles.keyed_masks import Keys, keep, layer_key, mix, replace_random_layers
from tests.oracles.synchronous import Batch, Recipe, evaluate, train, vision_transformer

VIT = {
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "num_classes": 4,
    "embed_dim": 8,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
}
RATES = {
    "pos_drop_rate": 0.1,
    "attn_drop_rate": 0.2,
    "proj_drop_rate": 0.15,
    "drop_path_rate": 0.3,
    "drop_rate": 0.1,
}


def _batch(samples: int, seed: int = 0) -> Batch:
    generator = np.random.default_rng(seed)
    return Batch(
        generator.permutation(100)[:samples],
        generator.normal(size=(samples, 1, 8, 8)),
        generator.integers(0, 4, samples),
    )


def test_the_oracles_import_nothing_of_ours() -> None:
    allowed = {"torch", "timm", "numpy", *sys.stdlib_module_names}
    files = [f for f in Path(__file__).parent.glob("*.py") if not f.name.startswith("test_")]
    names = {file.name.removesuffix(".py") for file in files}
    assert {"asynchronous", "avgpipe", "optimizers", "published_faults", "stages"} <= names
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                names = [node.module or ""]
            else:
                continue
            for name in names:
                comparing = file.name == "cases.py" and name == "pytest"
                inside = name.startswith("tests.oracles.")
                assert name.split(".")[0] in allowed or inside or comparing, (file, name)


def test_mix_has_the_published_values_of_the_murmur3_finaliser() -> None:
    """MurmurHash3_x86_32 of no bytes is the finaliser of its seed (SMHasher's test vectors)."""
    words = mix(np.array([0, 1, 0xFFFFFFFF], dtype=np.uint32))
    assert words.tolist() == [0, 0x514E28B7, 0x81F16F39]


def test_the_layer_key_is_the_first_word_of_sha256() -> None:
    # SHA-256("abc") = ba7816bf 8f01cfea … (FIPS 180-2, appendix B.1)
    assert layer_key("abc") == 0xBF1678BA


def test_a_mask_worked_out_by_hand() -> None:
    def scalar_mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    seed, step, p = 2**32 + 5, 7, 0.3
    mask = keep(seed, step, [9, 2], "blocks.0.mlp.drop1", 50, p)
    for row, sample in enumerate([9, 2]):
        key = scalar_mix(scalar_mix(scalar_mix(5) ^ step) ^ sample)
        key = scalar_mix(key ^ layer_key("blocks.0.mlp.drop1"))
        for i in range(50):
            u = scalar_mix((i * 0x9E3779B1 % 2**32) ^ key)
            assert mask[row, i] == (u >= int(p * 2**32))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_keep_the_right_share_and_differ_in_every_key(p: float) -> None:
    n = 200 * 500
    mask = keep(3, 4, range(200), "a", 500, p)
    assert abs(mask.mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    others = [
        keep(4, 4, range(200), "a", 500, p),
        keep(3, 5, range(200), "a", 500, p),
        keep(3, 4, range(1, 201), "a", 500, p),
        keep(3, 4, range(200), "b", 500, p),
    ]
    expected = 1 - 2 * p * (1 - p)  # two independent masks agree this often
    for other in others:
        assert abs((mask == other).mean() - expected) < 0.01


def test_a_samples_mask_depends_neither_on_the_batch_nor_on_the_place_in_it() -> None:
    whole = keep(0, 2, [5, 1, 8, 3], "a", 64, 0.4)
    assert (keep(0, 2, [3, 5], "a", 64, 0.4) == whole[[3, 0]]).all()


def test_random_layers_are_keyed_by_name_and_off_in_evaluation() -> None:
    torch.manual_seed(0)
    model = vision_transformer(**VIT, **RATES).double()
    keys = Keys(seed=1)
    replace_random_layers(model, keys)
    assert not [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    keys.step, keys.samples = 5, [10, 11, 12]
    model.train()
    first, again = model(images), model(images)
    assert torch.equal(first, again)
    keys.samples = [12, 10, 11]
    moved = model(images[[2, 0, 1]])
    assert torch.allclose(moved, first[[2, 0, 1]], rtol=1e-12, atol=0)
    keys.step = 6
    assert not torch.allclose(model(images[[2, 0, 1]]), moved)
    plain = vision_transformer(**VIT).double()
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(model.eval()(images), plain.eval()(images), rtol=1e-12)


def test_one_mask_scales_what_it_keeps() -> None:
    model, keys = nn.Sequential(nn.Identity(), nn.Dropout(0.25)), Keys(0)
    replace_random_layers(model, keys)
    keys.step, keys.samples = 1, [4, 6]
    x = torch.ones(2, 3, 5, dtype=torch.float64)
    y = model.train()(x)
    kept = torch.from_numpy(keep(0, 1, [4, 6], "1", 15, 0.25)).reshape(2, 3, 5)
    assert torch.equal(y, kept.double() / 0.75)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_without_random_layers_it_is_plain_training(optimizer: str) -> None:
    """The loop written out once more with timm's own fused attention and a mean loss."""
    torch.manual_seed(0)
    weights = vision_transformer(**VIT).double().state_dict()
    batches = [_batch(6, 1), _batch(6, 2), _batch(1, 3)]
    rates = [0.1, 0.05, 0.02]
    recipe = Recipe(optimizer, momentum=0.9, weight_decay=0.01, label_smoothing=0.1)  # type: ignore[arg-type]
    history = train(lambda: vision_transformer(**VIT), weights, recipe, batches, rates)

    model = vision_transformer(**VIT).double()
    model.load_state_dict(weights)
    step: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        if optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)
    )
    for batch, rate, update in zip(batches, rates, history.updates, strict=True):
        step.param_groups[0]["lr"] = rate
        step.zero_grad()
        loss = F.cross_entropy(
            model(torch.from_numpy(batch.images)),
            torch.from_numpy(batch.labels),
            label_smoothing=0.1,
        )
        loss.backward()
        step.step()
        assert update.loss == pytest.approx(loss.item(), rel=1e-13)
        for name, parameter in model.named_parameters():
            # as a whole: a key bias has no gradient but rounding, which AdamW enlarges
            error = (update.weights[name] - parameter).norm() / parameter.norm()
            assert error < 1e-9, name
    moment = "exp_avg" if optimizer == "adamw" else "momentum_buffer"
    assert set(history.optimizer) == set(weights)
    assert torch.is_tensor(history.optimizer["head.weight"][moment])


def test_gradients_agree_with_central_differences_with_all_masks_on() -> None:
    torch.manual_seed(0)
    arguments = VIT | RATES
    weights = {
        k: v + 0.3 * torch.randn_like(v)
        for k, v in vision_transformer(**arguments).double().state_dict().items()
    }
    batch = _batch(5)

    def loss_and_gradients(
        values: dict[str, torch.Tensor],
    ) -> tuple[float, dict[str, torch.Tensor]]:
        recipe = Recipe(label_smoothing=0.1, seed=3)
        history = train(lambda: vision_transformer(**arguments), values, recipe, [batch], [0.0])
        return history.updates[0].loss, history.updates[0].gradients

    _, gradients = loss_and_gradients(weights)
    for name in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc1.bias"):
        direction = torch.randn_like(weights[name])
        above, _ = loss_and_gradients(weights | {name: weights[name] + 1e-5 * direction})
        below, _ = loss_and_gradients(weights | {name: weights[name] - 1e-5 * direction})
        slope = (gradients[name] * direction).sum().item()
        assert (above - below) / 2e-5 == pytest.approx(slope, rel=1e-6)


def test_evaluation_counts_hits_and_sums_plain_cross_entropy() -> None:
    linear = {"weight": torch.eye(3, dtype=torch.float64), "bias": torch.zeros(3).double()}
    images = np.array([[5.0, 0, 0], [0, 5, 0], [0, 0, 5]])
    correct, loss = evaluate(lambda: nn.Linear(3, 3), linear, images, np.array([0, 1, 1]))
    hit = float(np.log(1 + 2 * np.exp(-5)))
    assert correct == 2
    assert loss == pytest.approx(2 * hit + hit + 5, rel=1e-12)
