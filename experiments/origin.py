"""The run whose last checkpoint another one starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.config import Config
from experiments.errors import UserError, did_you_mean, one_line
from experiments.profiles import model_of
from experiments.resolve import samples_of
from experiments.store import Store
from runtimes.execution.starting import copies_kept, unfit
from runtimes.job import Job, Task
from runtimes.manifest import read_manifest

__all__ = ["Origin", "origin_of"]


@dataclass(frozen=True)
class Origin:
    """``step`` updates are done in the checkpoint of the run in ``path``."""

    path: Path
    step: int


def origin_of(config: Config, store: Store, task: Task) -> Origin | None:
    """Of ``train.start_from``, if it is set; UserError if that run is not there, has no checkpoint,
    or cannot be gone on from with this config, which begins with ``task``."""
    given = config.train.start_from
    if given is None:
        return None
    start = f"{config.name}: train.start_from is {given!r}"
    path = _directory(given, start, store)
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        raise UserError(f"{start}: {one_line(error)}") from None
    if manifest is None:
        raise UserError(f"{start}, which has no checkpoint: run it first, or choose another run")
    _check_fit(config, start, path, task)
    _check_step(config, start, manifest.step)
    return Origin(path, manifest.step)


def _directory(given: str, start: str, store: Store) -> Path:
    named = Path(given).expanduser()
    path = store.run(given).path if named.name == given else named.absolute()
    if path.is_dir():
        return path
    runs = store.root / "runs"
    known = [entry.name for entry in runs.iterdir() if (entry / "checkpoint").is_dir()]
    raise UserError(
        f"{start}, but there is no such run in {path.parent}{did_you_mean(given, known)}"
    )


def _check_fit(config: Config, start: str, path: Path, task: Task) -> None:
    """Weights go to the parameters of the same names, and so does the optimizer's state."""
    try:
        theirs = Job.load(path / "job.json")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{start}, whose job.json cannot be read ({one_line(error)})") from None
    model = model_of(config)
    if theirs.model != model:
        ours = {"name": model.name, **model.args}
        other = {"name": theirs.model.name, **theirs.model.args}
        differ = sorted(key for key in ours | other if ours.get(key) != other.get(key))
        raise UserError(
            f"{start}, which trained another model ({', '.join(differ)} differ): weights go only "
            "from a model to the same one"
        )
    if theirs.optimizer.name != config.train.optimizer.name:
        raise UserError(
            f"{start}, whose optimizer is {theirs.optimizer.name}, but train.optimizer.name is "
            f"{config.train.optimizer.name!r}: its state goes only to the same one"
        )
    # Which of its systems it ended under is for its checkpoint to say.
    others = [theirs.tasks[0], *([theirs.switch.task] if theirs.switch is not None else [])]
    reference = config.train.start_from_reference
    found = [unfit(task, copies_kept(other), reference=reference) for other in others]
    if None not in found:
        raise UserError(f"{start}, which {found[0]}")


def _check_step(config: Config, start: str, step: int) -> None:
    samples, _ = samples_of(config)
    per_epoch = -(-samples // config.train.batch_size)
    epoch, rest = divmod(step, per_epoch)
    if rest:
        raise UserError(
            f"{start}, whose {step} updates are no whole number of epochs of {per_epoch}: use its "
            "train.batch_size and training images"
        )
    if epoch >= config.train.epochs:
        raise UserError(
            f"{start}, which has done {epoch} epochs, but train.epochs is {config.train.epochs}: "
            f"set it to {epoch + 1} or more"
        )
    switch = None if config.switch is None else config.switch.epoch
    if switch is not None and epoch >= switch:
        raise UserError(
            f"{start}, which has done {epoch} epochs, but switch.epoch is {switch}: set it to "
            f"{epoch + 1} or more, or start with the second system"
        )
