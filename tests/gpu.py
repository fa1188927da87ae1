"""``python -m tests.gpu [SLICE ...]`` (``make gpu PART=SLICE``): everything that needs a GPU, in slices of ten minutes.

models   the vision-language-action models of ``tests/benchmarks/gpu.py``
warp     the speed of MuJoCo-Warp, and of MuJoCo beside it
learn    lift from nothing by the preset ``configs/gpu.py:demo``, and runs of PPO on MuJoCo-Warp
imagine  imagined pictures, and the preset ``imagine`` from a policy that imitates
others   the tests marked ``gpu``, and the other simulators that are installed

``runs/gpu/results.json`` and the table ``runs/gpu/results.md`` are written after every line; a part that fails, or for
which its slice has no time left, is a line that says so.  Parts whose lines are there are not run again.  Without a GPU
everything runs on the processor, small, and the table says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from sims.catalog import make
from tests.benchmarks import gpu as vla
from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.measure import Contender, Line, NotRun, Report, interleave
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.contract.check import random_actions
from vla_rl.contract.env import to_env
from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.feed_forward import ActorConfig
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.demo import Demo
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imagine.plan import CollectConfig
from vla_rl.recipes.imitate import Imitate, NewTiny
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.metrics import rows
from vla_rl.recipes.recipe import run
from vla_rl.recipes.terminal import Clock, steps_per_second
from vla_rl.recipes.trainers import StateBased
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig
from vla_rl.training.loop import LoopConfig
from vla_rl.training.world_model import WorldModelFit
from world_models.backbones.unet import UNetConfig

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("runs/gpu")
SLICE = 570.0  # seconds of all parts of one


@dataclass(frozen=True)
class Simulator:
    """A simulator to measure and to train in: its package, its environment, and its options on a device.

    ``blind`` are the options that leave its pictures out, where it has any.
    """

    package: str
    extra: str
    env: str
    options: Callable[[str], dict[str, Any]] = lambda device: {}
    blind: Mapping[str, Any] = field(default_factory=dict)
    cameras: tuple[str, ...] = ()  # whose pixels the policy reads
    num_envs: int = 1024  # in the run of PPO

    @property
    def missing(self) -> str:
        """Why it cannot run here, "" when it can."""
        if importlib.util.find_spec(self.package) is not None:
            return ""
        return f"{self.package} is not installed; pip install 'vla-rl[{self.extra}]'"


def _pick_cube(device: str, obs: str = "state") -> dict[str, Any]:
    """ManiSkill's PickCube with dense rewards, for which its own baselines do not end an episode at success."""
    return {"task": "PickCube-v1", "obs": obs, "image_size": 64, "ends_at_success": False, "device": device}


_BLIND = {"cameras": []}  # of the tabletop
SIMULATORS = {
    "MuJoCo lift": Simulator("mujoco", "mujoco", "lift", blind=_BLIND, cameras=("front",), num_envs=64),
    "Warp lift": Simulator("mujoco_warp", "warp", "warp", lambda device: {"device": device}, _BLIND, ("front",)),
    "Genesis lift": Simulator("genesis", "genesis", "genesis", lambda device: {"device": device, "cameras": []}),
    "Genesis lift from pixels": Simulator(
        "genesis", "genesis", "genesis", lambda device: {"device": device}, cameras=("front",)
    ),
    "ManiSkill PickCube": Simulator("mani_skill", "maniskill", "maniskill", _pick_cube),
    "ManiSkill PickCube from pixels": Simulator(
        "mani_skill", "maniskill", "maniskill", partial(_pick_cube, obs="rgb"), cameras=("base_camera",)
    ),
}


@dataclass(frozen=True)
class Plan:
    """How much is done, and where."""

    device: str
    sizes: tuple[int, ...] = (256, 1024, 4096)
    steps: int = 20
    decisions: int = 16
    iterations: int = 60
    seconds: float = 300.0  # most of a part
    quick: bool = False

    @classmethod
    def of(cls, device: str) -> Plan:
        """All of it on a GPU; tiny on a processor."""
        return cls(device) if device != "cpu" else cls("cpu", (2,), 2, 2, 2, 120.0, quick=True)


Part = Callable[[Plan], list[Line]]


def slices() -> dict[str, dict[str, Part]]:
    """The parts of every slice by name, in the order in which they are done."""
    benches = {name: {f"bench {name}": partial(benchmark, name)} for name in BENCHMARKS}
    speeds = {name: {f"speed {name}": partial(speed, simulator)} for name, simulator in SIMULATORS.items()}
    runs = {name: {f"PPO {name}": partial(train, simulator)} for name, simulator in SIMULATORS.items()}
    others = [name for name in SIMULATORS if name not in ("MuJoCo lift", "Warp lift")]
    found: dict[str, dict[str, Part]] = {
        "models": {"models": models},
        "warp": benches["warp_vs_alone"] | speeds["Warp lift"] | speeds["MuJoCo lift"],
        "learn": {"lift from nothing": from_nothing} | runs["Warp lift"] | runs["MuJoCo lift"],
        "imagine": benches["imagined_vs_simulator"] | benches["wan_frames"] | {"imagined lift": imagined},
        "others": {"tests": marked} | benches["maniskill_vs_alone"] | benches["genesis_vs_alone"],
    }
    for name in others:
        found["others"] |= speeds[name] | runs[name]
    return found


def main(arguments: Sequence[str] | None = None) -> Report:
    """Do the parts of the slices that are named; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("slices", nargs="*", choices=[*slices(), "all"], default="all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seconds", type=float, default=SLICE, help="of all parts of a slice")
    given = parser.parse_args(arguments)
    plan = Plan.of(given.device)
    report = Report(given.out, "results", plan.device, small=plan.quick)
    report.resume()
    print(report.heading(), flush=True)
    for name, parts in slices().items():
        if name in given.slices or "all" in given.slices:
            end = time.monotonic() + given.seconds
            for part in [part for part in parts if part not in report.parts]:
                report.run(part, partial(parts[part], plan), max(0.1, min(plan.seconds, end - time.monotonic())))
    print(f"written: {given.out / 'results.json'} and {given.out / 'results.md'}")
    return report


# -- parts ------------------------------------------------------------------------------------------------------------


def marked(plan: Plan) -> list[Line]:
    """The tests marked ``gpu``; without one they are skipped, and counted as such."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        subprocess.run(
            [*command, f"--junitxml={report}", *map(str, files)], cwd=ROOT, check=False, stdout=subprocess.DEVNULL
        )
        return counted(report)


def counted(report: Path) -> list[Line]:
    """How many tests passed and were skipped, and a line for each that failed, from pytest's JUnit ``report``."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = float(len(cases) - len(failed) - len(skipped))
    reasons = "; ".join({item.get("message", "") for case in skipped for item in case.iter("skipped")})
    note = f"{len(failed)} failed, {len(skipped)} skipped{f': {reasons}' if reasons else ''}"
    lines = [Line("tests", "marked gpu, passed", passed, note=note)]
    return lines + [
        Line("tests", f"{case.get('classname')}::{case.get('name')}", None, note="failed") for case in failed
    ]


def benchmark(name: str, plan: Plan) -> list[Line]:
    """The rows of one benchmark; raises NotRun where it needs what is not there."""
    found = BENCHMARKS[name](plan.quick)
    if not found:
        raise NotRun("not measured, it needs a GPU")
    notes = ["" if row.ratio is None else f"{row.ratio:.2f} of the other's {row.other:,.4g}" for row in found]
    return [Line("bench", row.name, row.ours, row.unit, note=note) for row, note in zip(found, notes, strict=True)]


def models(plan: Plan) -> list[Line]:
    """Vision-language-action models: chunks, updates, memory (``tests/benchmarks/gpu.py``)."""
    with TemporaryDirectory() as folder:
        given = ["--device", plan.device, "--out", folder, *(["--small"] if plan.quick else [])]
        return vla.main(given).lines


def speed(simulator: Simulator, plan: Plan) -> list[Line]:
    """Control steps per second of whole steps with random actions, with and without pictures where it has any."""
    if simulator.missing:
        raise NotRun(simulator.missing)
    views = {"": {}, **({", no pictures": simulator.blind} if simulator.blind else {})}
    return [
        Line(
            "speed",
            f"{simulator.env}, {num_envs} environments{view}",
            _steps_per_second(simulator.env, num_envs, {**simulator.options(plan.device), **options}, plan),
            "steps/s",
        )
        for view, options in views.items()
        for num_envs in plan.sizes
    ]


def _steps_per_second(name: str, num_envs: int, options: Mapping[str, Any], plan: Plan) -> float:
    with closing(make(name, num_envs=num_envs, **options)) as env:
        env_ids = np.arange(num_envs)
        chunks = [to_env(torch.from_numpy(random_actions(env, 1, np.random.default_rng(i))), env) for i in range(4)]

        def play() -> None:
            for i in range(plan.steps):
                env.step(chunks[i % len(chunks)])
            if plan.device != "cpu":
                torch.cuda.synchronize()

        took = interleave({"": Contender(play, partial(env.reset, env_ids, env_ids))}, 1 if plan.quick else 3)[""]
    return num_envs * plan.steps / took


FEW = EvaluationConfig(2, 2, 2, num_envs=2)
FIT = FitConfig(2, batch=4)


def small(config: Any) -> Any:
    """``config`` of reinforcement learning with two of everything."""
    rl = replace(config.rl, experience=WindowConfig(2, 2), loop=LoopConfig(2), algorithm=PPOConfig(minibatch=2))
    return replace(config, rl=rl, evaluation=FEW)


def demo(plan: Plan) -> Demo:
    """The preset of lift on MuJoCo-Warp."""
    config = replace(load_config("gpu.py:demo"), device=plan.device)
    if not plan.quick:
        return config
    learnt = {"new": NewTiny(width=32, blocks=1), "grounding": GroundingConfig(8, FIT)}
    return replace(small(config), imitation=ImitationConfig(2, fit=FIT), **learnt)


def imagined(plan: Plan) -> list[Line]:
    """The preset of imagination: success in the simulator before and after, and the seconds of its parts."""
    base, config = demo(plan), replace(load_config("gpu.py:imagine"), device=plan.device)
    if plan.quick:
        model = replace(config.plan.model, backbone=UNetConfig(patch=4, width=16, deep=16, depth=1, heads=2))
        short = replace(config.plan.imagination, horizon=5, deadline=5, batch_size=2)
        made = replace(config.plan, model=model, imagination=short, fit=WorldModelFit(*[FIT] * 4))
        episodes = CollectConfig(2, 1, 2, calibration=2, held_out=2, num_envs=2)
        trust = TrustConfig(max_hallucinated=1.0, max_missed=1.0, min_imagined=0.0)
        config = small(replace(config, plan=replace(made, collect=episodes, trust=trust)))
    with TemporaryDirectory() as folder:
        common = {
            name: getattr(base, name) for name in ("env", "new", "grounding", "imitation", "evaluation", "device")
        }
        run(Imitate(**common), f"{folder}/imitate")
        plans = replace(config.plan, demonstrations=f"{folder}/imitate/demonstrations" if plan.quick else "")
        config = replace(config, policy=f"{folder}/imitate/checkpoints/imitation", plan=plans)
        found = run(config, f"{folder}/run")
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in found["seconds"].items())
    what = f"lift, {config.rl.experience.num_envs} dreams at once"
    return [
        Line("imagine", f"{what}, whole", sum(found["seconds"].values()), "s", "300", seconds),
        Line("imagine", f"{what}, before", 100 * found["imitation"]["success"], "%"),
        Line("imagine", f"{what}, after", 100 * found["imagined_rl"]["success"], "%"),
    ]


def from_nothing(plan: Plan) -> list[Line]:
    """Demonstrations, imitation and PPO, and the seconds of each."""
    config = demo(plan)
    with TemporaryDirectory() as folder:
        found = run(config, f"{folder}/run")
        lines = rows(Path(folder) / "run", "rl")
    curve = ", ".join(f"{line['validation/success']:.1%}" for line in lines if "validation/success" in line)
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in found["seconds"].items())
    what = f"lift, {config.rl.experience.num_envs} environments"
    return [
        Line("learn", f"{what}, imitation", 100 * found["imitation"]["success"], "%"),
        Line("learn", f"{what}, after PPO", 100 * found["rl"]["success"], "%", note=f"{curve}; {seconds}"),
    ]


def train(simulator: Simulator, plan: Plan) -> list[Line]:
    """One run of PPO from nothing: training steps per second, the last validation, and where the time went."""
    if simulator.missing:
        raise NotRun(simulator.missing)
    num_envs = 2 if plan.quick else simulator.num_envs
    config = Improve(
        StateBased(
            ActorConfig(cameras=simulator.cameras),
            algorithm=PPOConfig(minibatch=num_envs * plan.decisions // 4),
            experience=WindowConfig(num_envs, plan.decisions),
            loop=LoopConfig(plan.iterations, validate_every=0, save_every=plan.iterations, collapse=float("inf")),
        ),
        policy="",
        env=EnvConfig(simulator.env, simulator.options(plan.device)),
        evaluation=EvaluationConfig(validation=num_envs, test=num_envs, num_envs=num_envs),
        device=plan.device,
    )
    spent = Clock()
    with TemporaryDirectory() as folder:
        found = run(config, f"{folder}/run")["return"]
        lines = rows(Path(folder) / "run", "rl")
    for line in lines:
        spent.add(line)
    speeds = [steps_per_second(line) for line in lines if "time/iteration_s" in line]
    what = f"{simulator.env}, {num_envs} environments x {plan.decisions} decisions"
    return [
        Line("PPO", what, float(np.median(speeds)), "steps/s", note=spent.shares()),
        Line(
            "PPO", f"{simulator.env}, test return", found["mean"], note=f"{int(lines[-1]['env/steps_total']):,} steps"
        ),
    ]


if __name__ == "__main__":
    main()
