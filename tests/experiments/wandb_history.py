"""Reads what W&B wrote offline, from the bytes up: W&B itself offers no reader for it.

A .wandb file is a log in LevelDB's format: after 7 bytes of its own, blocks of 32 KiB, in them
records, each of a CRC-32, a length and a kind (1 whole; 2, 3, 4 first, middle, last piece).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PARTS", "expected_history", "offline_files", "read_history", "read_run", "read_summary"]

MAGIC = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
BLOCK = 32768
HEADER = struct.Struct("<IHB")

#: The parts of a rank's wall time, as docs/records.md lists them; the history has their means.
PARTS = ("compute", "interference", "communication", "reduce", "optimizer", "idle", "overhead")


def offline_files(run_dir: Path) -> list[Path]:
    """The .wandb files below RUN_DIR/wandb, oldest first."""
    return sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the only offline file of a run, in the order written; each has "_step".

    W&B's other own keys ("_runtime", "_timestamp") are left out.
    """
    history = []
    for record in _records(_only_file(run_dir)):
        if record.WhichOneof("record_type") == "history":
            row = _values(record.history.item)
            assert row["_step"] == record.history.step.num
            history.append({k: v for k, v in row.items() if k == "_step" or k[0] != "_"})
    return history


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The last value of each key of the summary, without W&B's own."""
    summary: dict[str, Any] = {}
    for record in _records(_only_file(run_dir)):
        if record.WhichOneof("record_type") == "summary":
            summary |= _values(record.summary.update)
    return {key: value for key, value in summary.items() if key[0] != "_"}


def read_run(run_dir: Path) -> dict[str, Any]:
    """{"id", "name", "project", "config", "exit_code" (None: never finished)}."""
    found: dict[str, Any] = {"exit_code": None}
    for record in _records(_only_file(run_dir)):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config = _values(record.run.config.update)
            config.pop("_wandb", None)
            found |= {
                "id": record.run.run_id,
                "name": record.run.display_name,
                "project": record.run.project,
                "config": config,
            }
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found


def _only_file(run_dir: Path) -> Path:
    files = offline_files(run_dir)
    assert len(files) == 1, f"one offline file expected in {run_dir}, not {files}"
    return files[0]


def _values(items: Any) -> dict[str, Any]:
    return {
        "/".join(item.nested_key) if item.nested_key else item.key: json.loads(item.value_json)
        for item in items
    }


def _records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for content in _contents(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        yield record


def _contents(data: bytes) -> Iterator[bytes]:
    assert data[:7] == MAGIC, "not a .wandb file of a known version"
    position, pieces = 7, b""
    while position + HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left  # what is too short for a header pads the block
            continue
        checksum, length, kind = HEADER.unpack_from(data, position)
        position += HEADER.size
        piece = data[position : position + length]
        if len(piece) < length:
            return  # the writer was killed
        position += length
        assert zlib.crc32(piece, zlib.crc32(bytes([kind]))) == checksum, "damaged .wandb file"
        pieces = piece if kind in (1, 2) else pieces + piece
        if kind in (1, 4):
            yield pieces


def expected_history(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What events.jsonl says the history must be: one row a step, in rising order."""
    points: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["event"] == "step":
            row = points[event["step"] + 1]
            row["train/loss"], row["train/lr"] = event["loss"], event["lr"]
            row["epoch"] = event["epoch"]
        elif event["event"] == "evaluation":
            row = points[event["step"]]
            row["validation/accuracy"] = event["accuracy"]
            row["validation/loss"] = event["loss"]
        elif event["event"] == "segment":
            row = points[event["last"]]
            row["train/images_per_s"] = event["samples"] / event["wall_s"]
            row |= _mean_times("time", event["ranks"])
        elif event["event"] == "round":
            row = points[event["round"]]
            row[f"bench/images_per_s/{event['task']}"] = event["samples"] / event["wall_s"]
            row |= _mean_times(f"bench/time/{event['task']}", event["ranks"])
    return [{"_step": step} | points[step] for step in sorted(points)]


def _mean_times(prefix: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {f"{prefix}/{part}": sum(rank[part] for rank in ranks) / len(ranks) for part in PARTS}
