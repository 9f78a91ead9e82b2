"""Config files, and what is said of wrong ones: one line with key, value and way out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from experiments.errors import UserError
from experiments.identity import run_id
from experiments.loading import config_names, load, load_runs, tiers
from experiments.paths import CONFIGS
from experiments.preflight import missing_hardware
from experiments.resolve import job_of, layers_of, tasks_of
from runtimes.job import DataSpec, Job
from runtimes.systems import PEERS, SYSTEMS

NAMES = config_names()
FILES = sorted(CONFIGS.rglob("*.toml"))


OF_THE_SYSTEM = {"name": "", "system": None, "plan": None, "switch": None}
FAMILIES = ("smoke", "peers", "asynchrony", "cifar100", "vit_h14")


def write(folder: Path, text: str, name: str = "own") -> str:
    file = folder / f"{name}.toml"
    file.write_text(text)
    return str(file)


SMALL = """
[system]
name = "dapple"
[plan]
stages = 2
[model]
name = "VisionTransformer"
args = { img_size = 8, patch_size = 4, in_chans = 1, num_classes = 10, embed_dim = 8, depth = 2, num_heads = 1 }
[data]
set = "digits"
image_size = 8
[train]
batch_size = 4
"""  # noqa: E501 - an inline table is one line.


def test_the_families_are_there() -> None:
    assert {name.split("/")[0] for name in NAMES} >= {*FAMILIES}
    assert {*FAMILIES} <= set(tiers())
    smoke = [name for name in NAMES if "smoke" in load(name).tiers]
    systems = {c.system for name in smoke for c in load(name).contenders()}
    assert systems == {*SYSTEMS, *PEERS}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(CONFIGS).as_posix())
def test_files_open_with_what_they_are(file: Path) -> None:
    text = file.read_text()
    head = text[: text.index("\n\n")]
    assert all(line.startswith("#") for line in head.splitlines())
    if not file.stem.startswith("base-"):
        name = file.relative_to(CONFIGS).with_suffix("").as_posix()
        for word in ("Part of:", "Deviation:", "Takes:", "Expect:", "Run:"):
            assert f"\n# {word} " in head, word
        assert f"pipebench run {name}" in head or f"pipebench bench {name}" in head


@pytest.mark.parametrize("name", NAMES)
def test_every_config_resolves_to_a_job_that_survives_json(name: str) -> None:
    scales = load(name).scales
    for settings in ([], *([f"scale={scale}"] for scale in scales)):
        for config in load_runs(name, settings):
            layers = layers_of(config)
            tasks = tasks_of(config, layers)
            missing_hardware(config, tasks)
            job = job_of(config, tasks, DataSpec("train", "validation"))
            assert Job.from_json(job.to_json()) == job
            assert job.tasks[0].plan.layers == len(layers.names)


def test_no_two_runs_are_the_same() -> None:
    ids = [run_id(config) for name in NAMES for config in load_runs(name)]
    assert len(set(ids)) == len(ids)


def test_a_study_asks_the_same_of_every_system() -> None:
    """One regime, one sweep and the same seeds, fresh ones; all that differs is the system."""
    studies = [name for name in NAMES if load(name).best_of is not None]
    assert len(studies) == 6
    regimes, sweeps = set(), set()
    for name in studies:
        config = load(name)
        assert config.best_of is not None
        sweep = load(config.best_of.sweep)
        assert config.best_of.sweep == name.replace("/", "/sweep-")
        assert (sweep.system, sweep.plan, sweep.switch) == (
            config.system,
            config.plan,
            config.switch,
        )
        assert sweep.train.seed not in (config.train.seeds or ())
        sizes = config.data.sizes.model_copy(update={"held_out": sweep.data.sizes.held_out})
        assert sweep.data == config.data.model_copy(update={"sizes": sizes})
        regimes.add(config.model_copy(update=OF_THE_SYSTEM | {"best_of": None}).model_dump_json())
        sweeps.add(sweep.model_copy(update=OF_THE_SYSTEM).model_dump_json())
    assert (len(regimes), len(sweeps)) == (1, 1)


def test_a_scale_is_a_run_of_its_own_that_a_cpu_can_hold() -> None:
    large, small = load("vit_h14/throughput"), load("vit_h14/throughput", ["scale=smoke"])
    assert (large.launch.device, small.launch.device) == ("cuda", "cpu")
    assert run_id(large) != run_id(small)
    assert large.scales == ("smoke",)
    assert small.scales == ()


def test_settings_come_after_the_scale_whatever_their_order() -> None:
    settings = ["train.batch_size=24", "scale=smoke"]
    assert load("vit_h14/throughput", settings).train.batch_size == 24


def test_a_file_extends_another_beside_it(tmp_path: Path) -> None:
    write(tmp_path, SMALL, "base-small")
    own = write(tmp_path, 'extends = "base-small"\n[train]\nepochs = 7\n')
    config = load(own)
    assert (config.train.epochs, config.train.batch_size, config.name) == (7, 4, "own")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('extends = "base-nowhere"', "extends 'base-nowhere', but there is no"),
        ('extends = "own"', "extends itself"),
        ("a = ", "is not TOML"),
        (SMALL + "[scales]\nsmoke = 3\n", "scales must be tables"),
        (SMALL.replace("[system]", "[bench]"), "bench.contenders is missing"),
        (SMALL.replace('[system]\nname = "dapple"\n', ""), "needs a [system]"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load(write(tmp_path, text))
    assert said in str(caught.value)
    assert "own.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.epochs=3", 3),
        ("train.optimizer.lr=1e-3", 1e-3),
        ("data.root=/some/where", "/some/where"),
        ("data.root=a = b", "a = b"),
    ],
)
def test_settings_are_toml_or_else_text(tmp_path: Path, text: str, value: object) -> None:
    found: object = load(write(tmp_path, SMALL), [text])
    for part in text.partition("=")[0].split("."):
        found = getattr(found, part)
    assert found == value


def test_a_setting_reaches_into_lists() -> None:
    config = load("smoke/throughput", ["bench.contenders.2.plan.micro_batches=8"])
    assert config.contenders()[2].plan.micro_batches == 8


def test_seeds_are_runs(tmp_path: Path) -> None:
    runs = load_runs(write(tmp_path, SMALL), ["train.seeds=[3, 5]"])
    assert [run.train.seed for run in runs] == [3, 5]
    assert len({run_id(run) for run in runs}) == 2
    alone = load(write(tmp_path, SMALL), ["train.seed=3"])
    assert run_id(runs[0]) == run_id(alone)


def test_a_contender_with_other_stages_drops_what_was_said_of_each() -> None:
    config = load("smoke/throughput", ["plan.layers=[4, 6]"])
    stages = {task.label: task.plan.stages for task in tasks_of(config, layers_of(config))}
    assert [stage.last for stage in stages["dapple"]] == [4, 10]
    assert [stage.last for stage in stages["dp"]] == [10]


REFUSED = {
    "system.name=dappel": "unknown system 'dappel'; did you mean 'dapple'?",
    "system.options.polcy=B": "dapple has no option 'polcy'",
    "system.options.policy=C": "policy = 'C', but it is one of 'A', 'B'",
    "train.batchsize=3": "unknown key 'batchsize' in [train]; did you mean 'batch_size'?",
    "tran.batch_size=3": "unknown key 'tran'; did you mean 'train'?",
    "train.optimizer.momentun=0.5": "unknown key 'momentun' in [train.optimizer]; did you mean",
    "train.batch_size=0": "train.batch_size is 0, but must be at least 1",
    "train.batch_size=many": "train.batch_size is 'many'",
    "train.precision=fp16": "fp16 is refused",
    "train.precision=fp8": "train.precision is 'fp8', which is unknown",
    "train.optimizer.momentum=1": "must be below 1",
    "train.optimizer={name = 'adamw', momentum = 0.9}": "adamw has betas instead",
    "train.optimizer={nesterov = true}": "nesterov needs sgd with a momentum above 0",
    "train.optimizer.betas=[0.9, 1.0]": "must be below 1",
    "train.label_smoothing=1": "train.label_smoothing is 1",
    "train.seed=-1": "train.seed is -1",
    "data.augmentation.cutout=99": "augmentation.cutout is 99 pixels, but images have only",
    "train.learning_rate.warmup_epochs=9": "warmup_epochs is 9.0, but there are only 1 epochs",
    "train.seeds=[1, 1]": "seeds (1, 1) repeat one",
    "train=3": "train is 3, but must be a table",
    "plan.replicas=[1]": "replicas has 1 values for 2 stages",
    "plan.recompute=[true]": "recompute has 1 values for 2 stages",
    "plan.micro_batches=0": "plan.micro_batches is 0",
    "data.set=digit": "data.set is 'digit', which is unknown; did you mean 'digits'?",
    "data.classes=3": 'classes: only for set = "random"',
    "tracking.mode=of": "tracking.mode is 'of', which is unknown; did you mean 'off'?",
    "launch.nodes=2": "port is 0 (any)",
    "launch.port=70000": "launch.port is 70000, but must be at most 65535",
    "launch={transport = 'in-process', nodes = 2, port = 29500}": "one process, but nodes is 2",
    "launch.transport=inprocess": "launch.transport is 'inprocess', which is unknown; did you mean",
    "scale=smok": "has no scale 'smok'",
    "train.epochs": "must look like section.key=value",
    "train.epochs.x=3": "must be a table|has no key 'x'|train.epochs is",
}


@pytest.mark.parametrize(("setting", "said"), REFUSED.items(), ids=REFUSED.keys())
def test_what_a_config_may_not_say(tmp_path: Path, setting: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load(write(tmp_path, SMALL + "epochs = 1\n"), [setting])
    text = str(caught.value)
    assert any(part in text for part in said.split("|")), text
    assert "\n" not in text


SWITCH = """
[switch]
epoch = 2
system = { name = "dp" }
plan = { replicas = [2] }
"""

REFUSED_SWITCHES = {
    "switch.epoch=0": "switch.epoch is 0, but must be 1 … 2, as train.epochs is 3: choose",
    "switch.epoch=3": "switch.epoch is 3, but must be 1 … 2, as train.epochs is 3",
    "train.epochs=1": "switch.epoch is 2, but must be below the epochs, as train.epochs is 1",
    "switch.plateau={patience=2}": "needs either an epoch, or a plateau",
    "switch.plateau={patience=0}": "switch.plateau.patience is 0, but must be at least 1",
    "switch={system={name='dp'}, plan={}}": "needs either an epoch, or a plateau",
    "switch.system.name=dpp": "unknown system 'dpp'; did you mean 'dp'?",
    "switch.system.options.overlp=false": "dp has no option 'overlp'",
    "switch.system.name=torch-ddp": "torch-ddp is a peer, and a [switch] is from one of ours",
    "system.name=torch-1f1b": "torch-1f1b is a peer, and a [switch] is from one of ours",
    "switch.plan.micro_batchs=2": "unknown key 'micro_batchs' in [switch.plan]; did you mean",
}


@pytest.mark.parametrize(("setting", "said"), REFUSED_SWITCHES.items(), ids=REFUSED_SWITCHES.keys())
def test_what_a_switch_may_not_say(tmp_path: Path, setting: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load(write(tmp_path, SMALL + "epochs = 3\n" + SWITCH), [setting])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_switch_is_a_task_of_its_own(tmp_path: Path) -> None:
    config = load(write(tmp_path, SMALL + "epochs = 3\n" + SWITCH))
    tasks = tasks_of(config, layers_of(config))
    job = job_of(config, tasks, DataSpec("train", "validation"))
    assert Job.from_json(job.to_json()) == job
    assert job.switch is not None
    assert (job.tasks[0].system, job.switch.task.system, job.switch.epoch) == ("dapple", "dp", 2)
    assert job.switch.task.plan.stages[0].replicas == 2
    assert (config.label, run_id(config)[:16]) == ("dapple → dp@2", "digits-dapple-dp")
    plateau = ["switch={plateau={patience=2}, system={name='dp'}, plan={replicas=[2]}}"]
    late = load(write(tmp_path, SMALL), plateau)
    assert late.label == "dapple → dp@plateau"
    three = load(write(tmp_path, SMALL), [plateau[0].replace("[2]", "[3]")])
    with pytest.raises(UserError, match="both systems share ranks .* not dapple 2, dp 3"):
        tasks_of(three, layers_of(three))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smoke/digits-torch-ddp", "torch-ddp is a peer, which takes a process for each rank"),
        ("smoke/throughput", "in which ranks take turns: a [bench] measures time"),
    ],
)
def test_who_cannot_share_a_process(name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load(name, ["launch.transport=in-process"])
    assert said in str(caught.value)
    assert '"distributed"' in str(caught.value)


def test_a_benchmark_neither_switches_nor_goes_on() -> None:
    switch = "switch={epoch=1, system={name='dp'}, plan={}}"
    for setting in (switch, "train.start_from=some-run"):
        with pytest.raises(UserError, match="are for training runs, and this is a .bench."):
            load("smoke/throughput", [setting])


UNFIT = {
    "plan.stages=5": "plan.stages is 5, but the model has 4 layers: use 1 … 4 stages",
    "plan.layers=[1, 1]": "are 2 layers, but the model has 4: embed, blocks.0",
    "system.name=dp": "dp has one stage, not 2",
    "system.name=torch-ddp": "it takes 1 stage, not 2",
    "model.name=vit_hug_patch14_224": "unknown model 'vit_hug_patch14_224'",
    "model={name='resnet18'}": "bn1 is a BatchNorm2d: its results depend on how a batch is cut",
    "model={name='alexnet'}": "torchvision's models take 3 channels",
    "model.batch_norm=per-unit": "but the model has no BatchNorm: leave it out",
    "model.args.dept=3": "did you mean 'depth'",
    "model.args.in_chans=3": "images of 1 channels and 8 × 8 pixels",
    "model.args.num_classes=9": "9 outputs, but scikit-learn digits has 10 classes",
    "data.image_size=12": "images of 1 channels and 12 × 12 pixels",
}


@pytest.mark.parametrize(("setting", "said"), UNFIT.items(), ids=UNFIT.keys())
def test_what_a_model_cannot_do(tmp_path: Path, setting: str, said: str) -> None:
    config = load(write(tmp_path, SMALL), [setting])
    with pytest.raises(UserError) as caught:
        tasks_of(config, layers_of(config))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["plan.micro_batches=16"], None),
        (["plan.micro_batches=32"], "stage 1 gets units of 1 sample (batches of 32), of which lay"),
        (["plan.micro_batches=32", "data.image_size=64"], None),
        (
            ["bench.contenders.1.system=torch-gpipe"],
            'own for BatchNorm\'s running statistics, but model.batch_norm is "per-unit": leave it',
        ),
    ],
)
def test_batch_norm_needs_a_unit_to_normalise(settings: list[str], said: str | None) -> None:
    config = load("vision/resnet18", settings)
    layers = layers_of(config)
    if said is None:
        assert job_of(config, tasks_of(config, layers), DataSpec("", "")).model.batch_norm
        return
    with pytest.raises(UserError) as caught:
        tasks_of(config, layers)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("train", "fits"), [(64, True), (66, False), (68, True)])
def test_so_does_the_last_batch_of_a_training_run(tmp_path: Path, train: int, fits: bool) -> None:
    text = (CONFIGS / "vision/resnet18.toml").read_text()
    text = text[: text.index("[bench]")] + '[system]\nname = "gpipe"\n'
    settings = ["plan={stages=2, micro_batches=2}", f"data.sizes.train={train}"]
    config = load(write(tmp_path, text), settings)
    if fits:
        tasks_of(config, layers_of(config))
        return
    with pytest.raises(UserError, match=r"units of 1 sample \(batches of 32 and 2\), of which lay"):
        tasks_of(config, layers_of(config))


@pytest.mark.parametrize("name", ["smoke/digits-dappl", "smoke/base-digits", "nowhere.toml"])
def test_configs_that_are_not_there(name: str) -> None:
    with pytest.raises(UserError, match=r"unknown config .*known: |no config file"):
        load(name)


def test_the_shared_parts_are_toml_without_a_system() -> None:
    bases = [file for file in FILES if file.stem.startswith("base-")]
    assert bases
    assert all("system" not in tomllib.loads(file.read_text()) for file in bases)
