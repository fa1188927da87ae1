"""What ``make test-sims`` does with each simulator; every function returns the text of its row of the table."""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sims import catalog, installations
from sims.installations import child_environment
from sims.maniskill.lift import LOOKS
from sims.robosuite import INSTRUCTIONS
from tests.benchmarks.maniskill import maniskill_vs_alone
from tests.policies.vla.tiny_folders import MAKERS
from tests.simulators import libero_boxes
from vla_rl.cli import main as vla_rl
from vla_rl.contract.check import check_env
from vla_rl.contract.env import EnvSpec, VecEnv
from vla_rl.contract.policy import ActionOut, Features, Mode, State
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.collect import ExpertPolicy
from vla_rl.policies.function import BlackBoxPolicy

SMALL: dict[str, dict[str, Any]] = {
    "genesis": {"workers": 1, "image_size": 32},
    "metaworld": {"tasks": ["reach", "drawer-close"], "time_limit": 100, "image_size": 32},
    "robosuite": {"time_limit": 12, "cameras": ["agentview"], "image_size": 32},
    "libero": {"suite": "libero_object", "tasks": [0], "time_limit": 12, "cameras": ["agentview"], "image_size": 32},
    "maniskill": {"obs": "rgb", "control_mode": "pd_ee_delta_pose", "time_limit": 12, "image_size": 32},
}
ALSO = {"env": "lift", "options": {"image_size": 32}}  # what the joint run plays besides them
STILL = "tests.simulators.parts:Still"
# The suite of each simulator, a policy for it, some of its tasks (without, all), and how many episodes are filmed.
SUITES: dict[str, tuple[str, str, tuple[str, ...], int]] = {
    "genesis": ("genesis", "expert", (), 1),
    "metaworld": ("metaworld-mt10", "expert", (), 1),
    "robosuite": ("robosuite", STILL, (), 0),  # its pictures take longest
    "libero": ("libero", STILL, tuple(f"libero_{part}-0" for part in ("spatial", "object", "goal", "10")), 1),
    "maniskill": ("maniskill", STILL, (), 0),
}
JUDGED = {"evaluation.validation": 2, "evaluation.test": 2, "evaluation.num_envs": 2}
TRAINING = {"rl.loop.iterations": 1, "rl.loop.validate-every": 1, "rl.algorithm.minibatch": 16}
TRAINING |= {"rl.experience.num_envs": 2, "rl.experience.decisions": 8, **JUDGED}
# PPO of configs/smolvla.py, pi0.py and openvla_oft.py in moments
DOWNLOADED = {"rl.loop.iterations": 1, "rl.experience.num-envs": 2, "rl.experience.decisions": 2}
DOWNLOADED |= {"rl.algorithm.minibatch": 4, **JUDGED}
# configs/metaworld.py in moments
IMITATION = {"imitation.demonstrations": 2, "imitation.fit.steps": 5, "evaluation.validation": 2}
RESIDUAL = {"rl.experience.num-envs": 2, "rl.algorithm.learning-starts": 16, "rl.algorithm.batch": 16}
RESIDUAL |= {"rl.loop.env-steps": 64, **JUDGED}


class Still(BlackBoxPolicy):
    """For suites whose tasks nobody has learnt here: zeros, in the longest chunks that are possible."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec, "standing still")
        self._chunk = np.zeros((spec.max_chunk, spec.action_dim), np.float32)

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        obs = self.observation(features)
        return self.action_out(np.repeat(self._chunk[None], len(obs.time), 0), len(obs.time)), state


def parts_of(name: str) -> dict[str, Callable[[], str]]:
    """{what is done: how} with the simulator ``name``."""
    parts = {
        "check_env": partial(checked, name, {**SMALL[name], "workers": 2}),
        "expert": partial(expert, name),
        "training": partial(train, name, SMALL[name]),
        "downloaded models": partial(downloaded, name),
        "suite": partial(suite, *SUITES[name]),
    }
    return parts | MORE.get(name, {})


def parts_of_all(names: list[str]) -> dict[str, Callable[[], str]]:
    """What is done with all of ``names`` at once."""
    options = {"envs": [*({"env": name, "options": SMALL[name]} for name in names), ALSO]}
    return {"check_env": partial(checked, "multi_task", options), "training": partial(train, "multi_task", options)}


def checked(name: str, options: Mapping[str, Any]) -> str:
    """The environment keeps the contract, and repeats itself as its spec says."""
    with closing(catalog.make(name, num_envs=2, **options)) as env:
        found = {item.name: item.result for item in check_env(env, seed=11)}
        return f"{len(found)} checks; {found['determinism']}"


def robosuite_task(task: str) -> str:
    """A robosuite task keeps the contract, and another process plays the same episode."""
    robots = ["Panda"] * (2 if task.startswith("TwoArm") else 1)
    options = {**SMALL["robosuite"], "task": task, "robots": robots, "cameras": []}
    result = checked("robosuite", options)
    states = []
    for _ in range(2):
        with closing(catalog.make("robosuite", num_envs=1, **options)) as env:
            env.reset([0], [5])
            step = env.step(np.full((1, 8, env.spec.action_dim), 0.3))
            states.append(np.concatenate([step.obs.state, step.obs.extras["privileged/objects"], step.reward], 1))
    assert np.array_equal(*states), "a second process plays another episode"
    return f"{result}, and in another process"


def libero_rules() -> str:
    """LIBERO's own code starts tasks of every suite and knows when one is fulfilled."""
    path = Path(__file__).with_name("libero_play.py")
    found = json.loads(libero_boxes.run(path).splitlines()[-1])
    assert found["success"] == [[False, ""], [True, "success"]], found["success"]
    count = sum(map(len, found["played"].values()))
    return f"{count} tasks of {len(found['played'])} suites start; success when the object is put where it belongs"


def genesis_rows() -> str:
    """One environment of a scene diverges, in several ways, and the others are as without it."""
    python, path = installations.find("genesis").python, Path(__file__).with_name("genesis_rows.py")
    run = [str(python), str(path)]
    done = subprocess.run(run, env=child_environment("genesis"), stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["undisturbed"] == "" and found["pinch"] < 0.002, found
    assert all(ended == ["diverged", True] for ended in found["alone"].values()), found["alone"]
    return f"{len(found['alone'])} ways to diverge, each of which ended one environment and left the others bit for bit"


def expert(name: str) -> str:
    """The expert, if there is one, mostly succeeds."""
    return "it has none" if catalog.extras(name).expert is None else demonstrated(name, SMALL[name], 1)


def demonstrated(name: str, options: Mapping[str, Any], horizon: int) -> str:
    """The expert of ``name``, which plans ``horizon`` actions, mostly succeeds."""
    env: VecEnv
    with closing(catalog.make(name, num_envs=2, **{**options, "cameras": []})) as env:
        found = evaluate(env, ExpertPolicy(catalog.expert(name, horizon).act), list(range(8)))
    assert found.rate.success > 0.5, found.cause
    return f"success {found.rate.success:.0%} of {found.rate.episodes}"


def maniskill_lift(looks: str) -> str:
    """MuJoCo's expert lifts ManiSkill's cube by MuJoCo's actions, and pictures keep the contract in both looks."""
    options = {"image_size": 32, "looks": looks, "workers": 2}
    return f"{checked('maniskill_lift', options)}; {demonstrated('maniskill_lift', options, 5)}"


def beside_itself() -> str:
    """The benchmark against ManiSkill alone plays whole episodes of both."""
    rows = maniskill_vs_alone(quick=True)
    assert all(row.ours > 0 and row.ratio is not None for row in rows)
    return ", ".join(f"{row.name} {row.ratio:.2f}" for row in rows)


def train(name: str, options: Mapping[str, Any]) -> str:
    """PPO trains on it by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        env = ["--env", name, "--env.options", json.dumps(dict(options)), "--out", f"{folder}/run"]
        _run(["train", "gym.py:inverted_pendulum", *env, *_arguments(TRAINING)])
        _require_losses(Path(folder) / "run")
    return "one iteration of PPO"


def downloaded(name: str) -> str:
    """PPO trains a tiny folder in the public format of every family, by its config."""
    spec = catalog.spec_of(name, **SMALL[name])
    for family, make in MAKERS.items():
        with tempfile.TemporaryDirectory() as folder:
            env = ["--env", name, "--env.options", json.dumps(SMALL[name]), "--out", f"{folder}/run"]
            policy = ["--policy", str(make(Path(folder) / "policy", spec))]
            _run(["train", f"{family}.py:ppo", *policy, *env, *_arguments(DOWNLOADED)])
            _require_losses(Path(folder) / "run")
    return f"one iteration of PPO of {', '.join(MAKERS)} with tiny random weights"


def from_pixels() -> str:
    """The expert is imitated from pixels and the policy improved."""
    with tempfile.TemporaryDirectory() as folder:
        _run(["train", "metaworld.py:imitate", "--out", f"{folder}/imitate", *_arguments(IMITATION)])
        start = ["--policy", f"{folder}/imitate/checkpoints/imitation"]
        start += ["--demonstrations", f"{folder}/imitate/demonstrations", "--out", f"{folder}/residual"]
        _run(["train", "metaworld.py:residual_td3", *start, *_arguments(RESIDUAL)])
        _require_losses(Path(folder) / "residual")
    return "imitation, then residual TD3"


def suite(name: str, policy: str, tasks: tuple[str, ...], filmed: int) -> str:
    """An episode of every task of the suite ``name``; the same command again plays nothing and writes the same."""
    with tempfile.TemporaryDirectory() as folder:
        given = ["--suite", name, "--policy", policy, "--out", folder, "--episodes", "1", "--num-envs", "1"]
        command = ["eval", *given, "--videos", str(filmed), *(["--tasks", *tasks] if tasks else [])]
        _run(command)
        first = (Path(folder) / "episodes.csv").read_bytes()
        _run(command)
        assert (Path(folder) / "episodes.csv").read_bytes() == first
        results = json.loads((Path(folder) / "results.json").read_text())
        videos, page = list((Path(folder) / "videos").glob("*.mp4")), (Path(folder) / "report.html").read_text()
    played = [line["task"] for line in csv.DictReader(first.decode().splitlines())]
    assert played == list(results["tasks"]) and len(videos) == filmed * len(played), (played, videos)
    assert all(task in page for task in played)
    ends = sorted({cause for task in results["tasks"].values() for cause in task["causes"]})
    return f"{len(played)} tasks of {name} played ({', '.join(ends)})"


def _run(arguments: list[str]) -> None:
    """A command of ours; raises RuntimeError when it refuses, and what Ctrl-C raises."""
    try:
        vla_rl(arguments)
    except SystemExit as ended:
        if ended.code == 2:
            raise RuntimeError(f"vla-rl {' '.join(arguments)} was refused") from ended
        raise


def _arguments(values: Mapping[str, object]) -> list[str]:
    return [text for key, value in values.items() for text in (f"--{key}", str(value))]


def _require_losses(run: Path) -> None:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [value for line in metrics for key, value in line.items() if key.startswith("critic/")]
    assert losses and np.isfinite(losses).all()


MORE: dict[str, dict[str, Callable[[], str]]] = {
    "genesis": {"one diverges": genesis_rows},
    "maniskill": {"beside itself": beside_itself}
    | {f"lift in PickCube, looks {name}": partial(maniskill_lift, name) for name in LOOKS},
    "metaworld": {"from pixels": from_pixels},
    "robosuite": {task: partial(robosuite_task, task) for task in INSTRUCTIONS},
    "libero": {"rules": libero_rules},
}
