"""Writes results directories as a launcher would, with numbers that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["MACHINE", "PARTS", "Results"]

PARTS = ("compute", "interference", "communication", "reduce", "optimizer", "idle", "overhead")
MACHINE = {
    "cpu": "Example CPU",
    "cores": 2,
    "memory_gb": 8.0,
    "accelerators": [],
    "system": "Linux x86_64",
}
CONFIG = """\
name = "{name}"
[system]
name = "{system}"
[system.options]
{options}
[plan]
stages = {stages}
micro_batches = {micro_batches}
[model]
name = "VisionTransformer"
[model.args]
embed_dim = 64
depth = 6
patch_size = 4
[data]
set = "digits"
image_size = 32
root = "{root}"
{sizes}
[train]
batch_size = {batch_size}
epochs = {epochs}
seed = {seed}
precision = "float32"
[train.optimizer]
name = "adamw"
lr = {lr}
[train.learning_rate]
kind = "cosine"
{sections}
"""


class Results:
    """A results directory; every method writes one record."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def directory(self, identity: str, source: str = "") -> Path:
        base = self.root / "reference" / source if source else self.root / "runs"
        path = base / identity
        path.mkdir(parents=True, exist_ok=True)
        return path

    def bench(
        self,
        label: str,
        walls: Sequence[float],
        *,
        system: str | None = None,
        bench_id: str = "bench-1",
        samples: int = 100,
        bounds: Sequence[float | None] | None = None,
        references: Sequence[float | None] | None = None,
        breakdown: Mapping[str, Mapping[str, float]] | None = None,
        source: str = "",
        reverse: bool = False,
        **changes: Any,
    ) -> Path:
        """A contender whose rounds took ``walls`` seconds for ``samples`` images each."""
        bounds = bounds or [None] * len(walls)
        references = references or [None] * len(walls)
        rounds = [
            {
                "round": index,
                "position": 0,
                "wall_s": wall,
                "samples": samples,
                "images_per_s": samples / wall,
                "compute_bound_s": bound,
                "reference_s": reference,
            }
            for index, (wall, bound, reference) in enumerate(
                zip(walls, bounds, references, strict=True)
            )
        ]
        path = self.directory(f"{bench_id}.{label}", source)
        result = {
            **_result(f"{bench_id}.{label}", "bench", system or label, label),
            "name": "smoke/throughput",
            "bench_id": bench_id,
            "rounds": rounds[::-1] if reverse else rounds,
            "breakdown": breakdown or {},
            **changes,
        }
        (path / "result.json").write_text(json.dumps(result))
        return path

    def train(
        self,
        system: str,
        *,
        seed: int = 0,
        losses: Sequence[float] = (),
        steps_per_epoch: int = 3,
        accuracy: float | None = 0.95,
        lr: float = 0.001,
        epochs: int = 20,
        options: str = "",
        identity: str | None = None,
        source: str = "",
        root: str = "",
        sizes: str = "",
        sections: str = "",
        evaluations: Mapping[int, float] | None = None,
        **changes: Any,
    ) -> Path:
        """A training run with one step event a loss, and an accuracy after so many updates;
        ``sections`` are further ones of its config."""
        identity = identity or f"digits-{system}-s{seed}"
        path = self.directory(identity, source)
        result = {
            **_result(identity, "train", system, system),
            "name": f"smoke/digits-{system}",
            "seed": seed,
            "final_loss": losses[-1] if losses else 0.5,
            "accuracy": accuracy,
            "epochs": epochs,
            "steps": len(losses),
            **changes,
        }
        (path / "result.json").write_text(json.dumps(result))
        given = {"options": options, "lr": lr, "root": root, "epochs": epochs}
        self.config(path, {**result, **given, "sizes": sizes, "sections": sections})
        events: list[dict[str, Any]] = [{"event": "launch", "t": 0.0, "attempt": 1}]
        events += [
            {
                "event": "step",
                "step": step,
                "epoch": step // steps_per_epoch,
                "loss": loss,
                "lr": lr,
                "samples": 90,
            }
            for step, loss in enumerate(losses)
        ]
        events += [
            {"event": "evaluation", "step": step, "epoch": 0, "accuracy": value}
            for step, value in (evaluations or {}).items()
        ]
        events.append({"event": "end", "t": 1.0, "status": result["status"], "error": None})
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return path

    def bench_config(self, path: Path, systems: Sequence[str]) -> None:
        """The config of a benchmark whose contenders carry their systems' names."""
        values = {"name": "smoke/throughput", "system": "", "options": "", "root": ""}
        values |= {"sizes": "", "sections": ""}
        values |= {"stages": 2, "micro_batches": 4, "batch_size": 90}
        self.config(path, {**values, "epochs": 1, "seed": 0, "lr": 0.1})
        text = (path / "config.toml").read_text()
        text = text.replace('[system]\nname = ""\n[system.options]\n', "")
        contenders = [
            f'[[bench.contenders]]\nlabel = "{name}"\nsystem = "{name}"\n' for name in systems
        ]
        (path / "config.toml").write_text(text + "".join(contenders))

    def config(self, path: Path, values: Mapping[str, Any]) -> None:
        (path / "config.toml").write_text(CONFIG.format(**values))


def _result(identity: str, kind: str, system: str, label: str) -> dict[str, Any]:
    pipeline = system not in ("dp", "torch-ddp")
    return {
        "schema": "pipebench.result/1",
        "id": identity,
        "kind": kind,
        "system": system,
        "label": label,
        "seed": 0,
        "status": "ok",
        "error": None,
        "evidence": "measured",
        "machine": MACHINE,
        "world_size": 2,
        "batch_size": 90,
        "micro_batches": 4 if pipeline else 1,
        "stages": 2 if pipeline else 1,
        "replicas": 1 if pipeline else 2,
        "config_hash": "0" * 64,
    }
