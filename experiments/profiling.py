"""`pipebench profile`: what is asked for is measured by ranks of a launch, or computed."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from experiments.config import Launch
from experiments.environment import environment
from experiments.errors import UserError, one_line
from experiments.launcher import launch, launch_spec, rank_command
from experiments.loading import load
from experiments.outcome import last_words
from experiments.overrides import parse_setting
from experiments.profiles import model_of
from experiments.progress import Progress
from experiments.reports import columns
from experiments.resolve import image_of
from runtimes.job import BatchNorm, ModelSpec, Precision
from runtimes.manifest import write_json
from runtimes.planning.device_specs import DeviceSpec, device_spec
from runtimes.planning.profile import LayerProfile, Profile
from runtimes.planning.request import PROFILE_FILE, REQUEST_FILE, ProfileRequest

if TYPE_CHECKING:
    from runtimes.model.stack import LayerStack

__all__ = ["Wanted", "profile_text", "profiled", "write_profile"]

_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_DEVICES: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
_BATCH_NORMS: tuple[BatchNorm, ...] = get_args(BatchNorm)
_MODULE = "runtimes.planning.measurement"

Word = TypeVar("Word")


@dataclass(frozen=True)
class Wanted:
    """The words of the command line.  None: what the config says, or the default.

    ``model``: a config, if it is one's path or has the "/" of one's name; else a model.
    """

    model: str
    output: Path
    batch_sizes: str = "1,2,4,8"
    image_size: int | None = None
    in_chans: int | None = None
    precision: str | None = None
    device: str | None = None
    args: Sequence[str] = ()
    batch_norm: str | None = None
    settings: Sequence[str] = ()
    ranks: int = 1
    pin_cores: bool | None = None
    repeats: int = 15
    device_spec: str | None = None
    compute_efficiency: float | None = None
    memory_efficiency: float | None = None
    cluster: Path | None = None

    @property
    def of_config(self) -> bool:
        return "/" in self.model or self.model.endswith(".toml")


def profiled(wanted: Wanted, progress: Progress, stop: threading.Event) -> Profile:
    """What is asked for.  UserError for what cannot be, before anything is measured, and
    RuntimeError if ranks fail, or are stopped."""
    request, stack = _request(wanted)
    spec = _spec(wanted, request)
    if spec is None:
        _check_device(wanted, request)
    for path in (wanted.output, *([] if wanted.cluster is None else [wanted.cluster])):
        _check_output(path)
    found = environment("measured")
    known = {key: found[key] for key in ("python", "versions", "commit")}
    if spec is not None:
        profile = _computed(wanted, request, stack, spec)
    else:
        profile = _measured(request, wanted.ranks, progress, stop)
        known["machine"] = found["machine"]
    return replace(profile, provenance={**profile.provenance, **known})


def write_profile(profile: Profile, path: Path) -> None:
    try:
        write_json(path, profile.to_json())
    except OSError as error:
        raise _unwritable(path, error) from None


# -- what is asked for -----------------------------------------------------------------------


def _request(wanted: Wanted) -> tuple[ProfileRequest, LayerStack]:
    from runtimes.execution.precision import dtype_of
    from runtimes.model.stack import build_stack

    model, image, defaults = _of_config(wanted) if wanted.of_config else _of_model(wanted)
    precision = _one_of(_PRECISIONS, "precision", wanted.precision or defaults["precision"])
    try:
        request = ProfileRequest(
            model=model,
            image=image,
            batch_sizes=_sizes(wanted.batch_sizes),
            precision=precision,
            device=_one_of(_DEVICES, "device", wanted.device or defaults["device"]),
            repeats=wanted.repeats,
            pin_cores=defaults["pin_cores"] if wanted.pin_cores is None else wanted.pin_cores,
        )
        stack = build_stack(model)
        lone = next(filter(None, stack.lone_norms(image, dtype_of(request.precision))), None)
    except (ValueError, RuntimeError) as error:
        raise UserError(one_line(error)) from None
    if lone is not None and 1 in request.batch_sizes:
        raise UserError(
            f"in a unit of 1 sample {lone} sees 1 value a channel, too few to normalise: give "
            "--batch-sizes from 2 on, or larger images"
        )
    return request, stack


def _one_of(known: tuple[Word, ...], what: str, given: str) -> Word:
    for word in known:
        if word == given:
            return word
    raise UserError(f"{what} {given!r} is none of {', '.join(map(str, known))}")


def _of_model(wanted: Wanted) -> tuple[ModelSpec, tuple[int, int, int], dict[str, Any]]:
    if wanted.settings:
        raise UserError(
            f"--set changes a config, and {wanted.model!r} is a model: give its arguments by --arg"
        )
    from runtimes.model.vision import NAMES

    args = {".".join(path): value for path, value in map(parse_setting, wanted.args)}
    if wanted.model in NAMES:
        # Of torchvision, which take images of any size and three channels.
        size, channels = wanted.image_size or 224, 3
        if wanted.in_chans not in (None, channels):
            raise UserError(f"{wanted.model} takes images of 3 channels, not {wanted.in_chans}")
    else:
        # timm's names for what the model takes.
        for key, given in (("img_size", wanted.image_size), ("in_chans", wanted.in_chans)):
            if given is not None and args.setdefault(key, given) != given:
                raise UserError(f"--arg {key}={args[key]} and {given} images do not go together")
        size, channels = args.get("img_size", 224), args.get("in_chans", 3)
    if not isinstance(size, int) or not isinstance(channels, int) or min(size, channels) < 1:
        raise UserError(
            f"images of {channels} channels and {size} pixels: both must be at least 1, and whole"
        )
    defaults = {"precision": "float32", "device": "cpu", "pin_cores": False}
    norm = wanted.batch_norm
    per_unit = None if norm is None else _one_of(_BATCH_NORMS, "--batch-norm", norm)
    return ModelSpec(wanted.model, args, per_unit), (channels, size, size), defaults


def _of_config(wanted: Wanted) -> tuple[ModelSpec, tuple[int, int, int], dict[str, Any]]:
    given = (wanted.image_size, wanted.in_chans, wanted.batch_norm)
    if wanted.args or any(value is not None for value in given):
        raise UserError(
            f"model and images are those of config {wanted.model!r}: change them by --set, "
            "e.g. --set model.args.depth=4"
        )
    config = load(wanted.model, wanted.settings)
    defaults = {
        "precision": config.train.precision,
        "device": config.launch.device,
        "pin_cores": config.launch.pin_cores,
    }
    return model_of(config), image_of(config), defaults


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"--batch-sizes {text!r} must be numbers, e.g. 1,2,4,8") from None


def _spec(wanted: Wanted, request: ProfileRequest) -> DeviceSpec | None:
    if wanted.cluster is not None and (wanted.ranks < 2 or wanted.device_spec is not None):
        raise UserError("--write-cluster needs links that are measured: add --ranks 2")
    if wanted.device_spec is None:
        if wanted.compute_efficiency is not None or wanted.memory_efficiency is not None:
            raise UserError("efficiencies are of a device that is not here: name its --device-spec")
        return None
    if wanted.ranks > 1:
        raise UserError("--ranks are measured, and a --device-spec is computed with: drop one")
    try:
        spec = device_spec(wanted.device_spec)
        spec.peak_flops_per_s(request.precision)
    except ValueError as error:
        raise UserError(one_line(error)) from None
    return spec


def _check_output(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UserError:
    reason = (error.strerror or str(error)).lower()
    return UserError(f"cannot write {path}: {reason}; name another file")


def _check_device(wanted: Wanted, request: ProfileRequest) -> None:
    if wanted.ranks < 1:
        raise UserError(f"--ranks is {wanted.ranks}, but must be at least 1")
    if request.device == "cpu":
        if request.precision == "tf32":
            raise UserError("only CUDA devices have tf32, and the device is 'cpu': use float32")
        return
    import torch

    devices = torch.cuda.device_count() if request.device == "cuda" else 0
    if devices < wanted.ranks:
        raise UserError(
            f"{wanted.ranks} rank(s) need a device {request.device!r} each, and this machine has "
            f"{devices or 'none'}: use --device cpu, or --device-spec for one that is not here"
        )


# -- measured, or computed -------------------------------------------------------------------


def _computed(
    wanted: Wanted, request: ProfileRequest, stack: LayerStack, spec: DeviceSpec
) -> Profile:
    from runtimes.planning.roofline import (
        COMPUTE_EFFICIENCY,
        MEMORY_EFFICIENCY,
        analytic_profile,
    )

    compute, memory = wanted.compute_efficiency, wanted.memory_efficiency
    try:
        return analytic_profile(
            request.model,
            stack,
            request.image,
            request.batch_sizes,
            spec,
            precision=request.precision,
            compute_efficiency=COMPUTE_EFFICIENCY if compute is None else compute,
            memory_efficiency=MEMORY_EFFICIENCY if memory is None else memory,
        )
    except ValueError as error:
        raise UserError(one_line(error)) from None


def _measured(
    request: ProfileRequest, ranks: int, progress: Progress, stop: threading.Event
) -> Profile:
    """By ranks as a run has them: processes of one thread, started by the same launcher."""
    folder = Path(tempfile.mkdtemp(prefix="pipebench-profile-"))
    (folder / "ranks").mkdir()
    write_json(folder / REQUEST_FILE, request.to_json())
    command = (*rank_command(folder), _MODULE)
    spec = launch_spec(Launch(), command, ranks, "profile")
    with progress.of("profile"):
        outcome = launch(folder, spec, stop=stop, watch=_watch(folder, progress))
    if outcome.status == "interrupted":
        shutil.rmtree(folder)
        raise KeyboardInterrupt
    if outcome.status != "ok":
        raise RuntimeError(f"{outcome.status}: {outcome.error}; the log is {folder / 'log'}")
    profile = Profile.load(folder / PROFILE_FILE)
    shutil.rmtree(folder)
    return profile


def _watch(folder: Path, progress: Progress) -> Callable[[], None]:
    """Tells what the first rank is doing, when it does something else."""
    said: list[str] = []

    def watch() -> None:
        words = last_words(folder).get(0)
        action = words.action if words else None
        # Actions of tiny models pass by too quickly to be read.
        if action and not action.startswith("p0.") and action not in said:
            said.append(action)
            progress.update("profile", action)

    return watch


# -- told ------------------------------------------------------------------------------------


def profile_text(profile: Profile) -> str:
    """Layers that follow each other and cost the same in one row, then totals and the rest."""
    sizes = sorted(profile.layers[0].forward_seconds)
    header = ["layer", "weights MB", "kept MB", *(f"{way}({n}) ms" for n in sizes for way in "FB")]
    rows = [_row(list(group), sizes) for _, group in groupby(profile.layers, key=_cost)]
    last = len(profile.layers)
    total = ["total", *_megabytes(profile.layers)]
    for n in sizes:
        total += [_ms(profile.forward(0, last, n)), _ms(profile.backward(0, last, n))]
    return "\n".join([columns([header, *rows, total]), "", *_facts(profile)])


def _facts(profile: Profile) -> Iterator[str]:
    image = " × ".join(map(str, profile.image))
    yield (
        f"{profile.source} for {profile.device} in {profile.precision}: {profile.model.name}, "
        f"images {image}; F(n) and B(n) of a unit of n samples, kept by the forward of one"
    )
    if steps := profile.optimizer_seconds_per_byte:
        listed = ", ".join(f"{name} {1e12 * s:.3g}" for name, s in steps.items())
        yield f"optimizer step, ms a GB of weights: {listed}"
    if at_once := profile.concurrency:
        listed = ", ".join(f"{share:.2f} of {k}" for k, share in at_once.items())
        yield f"time of a unit among several at once ÷ alone: {listed}"
    if overhead := profile.action_seconds:
        listed = ", ".join(f"{op} {1e6 * s:.0f}" for op, s in overhead.items())
        yield f"overhead of an action, µs: {listed}"
    if (links := profile.links) is not None:
        latency, bandwidth = 1e6 * links.latency_seconds, links.bandwidth_bytes_per_s / 1e9
        stolen = 1e12 * links.stolen_seconds_per_byte
        yield f"a message: {latency:.0f} µs, then {bandwidth:.2f} GB/s"
        yield f"computing beside messages: {stolen:.3g} ms longer a GB"


def _cost(layer: LayerProfile) -> object:
    times = layer.forward_seconds, layer.backward_seconds
    return [sorted(by.items()) for by in times], layer.parameter_bytes, layer.kept_bytes


def _row(group: Sequence[LayerProfile], sizes: Sequence[int]) -> list[str]:
    """What follows the name is of each."""
    first, last = group[0], group[-1]
    name = first.name
    if len(group) > 1:
        name = f"{first.name} … {last.name} (each of {len(group)})"
    ways = (first.forward_seconds, first.backward_seconds)
    return [name, *_megabytes([first]), *(_ms(times[n].median) for n in sizes for times in ways)]


def _megabytes(layers: Sequence[LayerProfile]) -> list[str]:
    weights = sum(layer.parameter_bytes for layer in layers)
    kept = sum(layer.kept_bytes for layer in layers)
    return [f"{weights / 1e6:.3g}", f"{kept / 1e6:.3g}"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
