"""RL in a world model beside the same PPO in the simulator, from one imitation policy, and a page about both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vla_rl.contract.config import JsonObject
from vla_rl.contract.env import VecEnv
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.agreement import policy_agreement
from vla_rl.evaluation.frame_metrics import frame_agreement, object_error
from vla_rl.evaluation.object_positions import TARGET, replayed_positions
from vla_rl.evaluation.probe import ObjectProbe
from vla_rl.evaluation.reward_metrics import RewardAgreement, reward_agreement
from vla_rl.evaluation.run import Outcomes, evaluate
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.trajectories import Trajectories
from vla_rl.policies.function import EpsilonRandomPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import metrics, world_models
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.context import generator, placed
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel, ImaginedEnvFactory, replay_trajectories
from vla_rl.recipes.imagine.recipe import SavedRun, load_run
from vla_rl.recipes.imagine.report import write_report
from vla_rl.recipes.progress import bar
from vla_rl.recipes.sweep import Cell, on_device, run_sweep
from vla_rl.recipes.workers import EngineOptions
from vla_rl.training.device import resolve_device
from vla_rl.training.probe import FIT, fit_probe
from vla_rl.training.tracking import write_json
from vla_rl.training.world_model import as_predicted, at_least_one


@dataclass(frozen=True)
class ImagineComparison(EngineOptions):
    """Runs are separate processes, one per core; those whose ``summary.json`` exists are not repeated."""

    seed: int = 1
    policy: str = ""  # a checkpoint folder; without one, the demo's imitation is made first
    recipe: str = "imagine.py:lift"
    simulator: str = "demo.py:last_step"  # the same RL without a world model
    scenes: int = 128  # test scenes for each policy that is rated in both
    processes: int = 2
    device: str = "cpu"  # of all runs: "cpu", "cuda", "cuda:1", "auto"
    out: str = "runs/imagine"


def compare(config: ImagineComparison) -> JsonObject:
    """Imitate, improve in imagination and in the simulator, evaluate; write ``summary.json`` and ``report.html``."""
    for function in (config.recipe, config.simulator):
        load_config(function)  # an unknown name should be known before minutes of work
    out = Path(config.out)
    first_given = ("--seed", str(config.seed), *on_device(config.device))
    policy = config.policy or str(out / "imitation" / "checkpoints" / "imitation")
    given = (*first_given, "--policy", policy)
    every_five = ("--rl.loop.validate-every", "5")  # how many episodes it needs is to be read from its curve
    first = [] if config.policy else [Cell(out / "imitation", "demo.py:imitate", first_given)]
    second = [
        Cell(out / "imagination", config.recipe, given),
        Cell(out / "simulator", config.simulator, (*given, *every_five)),
    ]
    run_sweep(out, {"imitate": first, "improve": second}, config.processes)
    found = evaluate_world_model(out / "imagination", config.scenes)
    write_json(out / "agreement.json", found)
    summary = summarize(out, found)
    write_json(out / "summary.json", summary)
    write_report(out, summary, found)
    return summary | {"report": str(out / "report.html")}


def evaluate_world_model(run: Path, scenes: int) -> JsonObject:
    """Agreement of the world model of ``run``, finished or not, with the simulator: replays, pictures and policies."""
    recipe, saved = load_run(run)[0], SavedRun.load(run)
    calibrated = saved.calibrated
    device = resolve_device(recipe.device)
    calibrated.model.to(device)
    names = {"imitation": "start", "imagined RL": "best"}
    kept = {name: run / "checkpoints" / folder for name, folder in names.items()}
    policies = {name: placed(load_policy(folder), device) for name, folder in kept.items() if folder.exists()}
    seeds = seed_ranges.held_out(seed_ranges.TEST, scenes)
    ratings = rate_policies(calibrated, recipe.env, policies, seeds, recipe.evaluation.num_envs, recipe.seed)
    rates = [one.imagined.success for one in ratings], [one.true.success for one in ratings]
    learnt = Trajectories.load(run / "episodes" / "learnt.npz")
    quality = measure_prediction_quality(calibrated, recipe.env, learnt, saved.held_out, recipe.seed)
    share, pairs = calibrated.foresight(saved.held_out)
    return {
        "replays": [asdict(table) for table in calibrated.agreement(saved.held_out)],
        "foresight": {"auroc": share, "pairs": pairs},
        "prediction_quality": quality,
        "horizon": calibrated.imagination.horizon,
        "policies": asdict(policy_agreement(*rates)),
        "ratings": [asdict(one) for one in ratings],
        "test_episodes": len(ratings) * scenes,
    }


def summarize(out: Path, found: JsonObject) -> JsonObject:
    """The three policies side by side; ``simulator_episodes`` counts all after imitation except the final test's."""
    imagination, simulator = metrics.summary(out / "imagination"), metrics.summary(out / "simulator")
    curve, imagined = metrics.watched(out / "simulator"), imagination["imagined_rl"]
    enough = [row["episodes"] for row in curve if row["success"] >= imagined["success"]]
    spent = {
        "simulator_episodes": imagination["simulator_episodes"],
        "seconds": sum(imagination["seconds"].values()),
    }
    return {
        "imitation": imagination["imitation"] | {"simulator_episodes": 0, "seconds": 0.0},
        "imagined_rl": imagined | spent,
        "simulator_rl": simulator["rl"]
        | {
            "simulator_episodes": simulator["episodes"],
            "seconds": sum(simulator["seconds"].values()),
            "episodes_to_imagined_success": enough[0] if enough else None,
            "validation_episodes": sum(row["played"] for row in curve),
        },
        "gain": imagination["gain"],
        "agreement": headline_agreement(found),
    }


def headline_agreement(found: JsonObject) -> JsonObject:
    """The agreement at the horizon that RL used, and that of the policies."""
    table = next(one for one in found["replays"] if one["horizon"] == found["horizon"])
    hallucinated, policies = table["hallucinated"], found["policies"]
    return {
        "horizon": found["horizon"],
        "accuracy": table["accuracy"]["success"],
        "hallucinated": hallucinated and hallucinated["success"],
        "hallucinated_high": 1.0 if hallucinated is None else hallucinated["high"],
        **{name: policies[name] for name in ("policies", "r", "r_low", "r_high")},
    }


# Of a decision; chosen beforehand, so that the policies range from good to hopeless.
RANDOM_ACTION_PROBS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75)


@dataclass(frozen=True)
class PolicyRating:
    """A policy's success in the world model and in the simulator."""

    name: str
    imagined: Rate
    true: Rate


def rate_policies(
    calibrated: CalibratedModel,
    env: EnvConfig,
    policies: Mapping[str, Policy],
    scenes: Sequence[int],
    num_envs: int,
    seed: int,
) -> list[PolicyRating]:
    """Every one of ``policies`` with each of ``RANDOM_ACTION_PROBS``, from the first observations of ``scenes``.

    Imagined rollouts have the trusted horizon and end as in RL; simulated episodes have RL's deadline.
    """
    first = first_observations(env, scenes, calibrated.model)
    pool = world_models.OrderedPool(first)
    factory = ImaginedEnvFactory(calibrated.model, pool, calibrated.limits, calibrated.imagination)
    ratings = []
    for name, policy in policies.items():
        for share in RANDOM_ACTION_PROBS:
            player = EpsilonRandomPolicy(policy, calibrated.model.spec, share) if share else policy
            title = f"{name}, {share:.0%} random" if share else name
            imagined = _evaluate(factory, player, range(len(scenes)), num_envs, seed, f"imagined: {title}")
            true = _evaluate(_TrainingEnvs(env), player, scenes, num_envs, seed, f"simulated: {title}")
            ratings.append(PolicyRating(title, imagined.rate, true.rate))
    return ratings


@dataclass(frozen=True)
class _TrainingEnvs:
    """The environments of RL, to evaluate in."""

    env: EnvConfig

    def make(self, num_envs: int) -> VecEnv:
        return self.env.make_training(num_envs)

    make_training = make

    def spec(self) -> EnvSpec:
        return self.env.spec()


def _evaluate(
    factory: EnvFactory, policy: Policy, seeds: Sequence[int], num_envs: int, seed: int, title: str
) -> Outcomes:
    env = factory.make(num_envs)
    with bar(title, len(seeds)) as update:
        outcomes = evaluate(
            env, policy, seeds, noise_seed=seed, report=lambda done, won: update(done, f"success {won / done:.0%}")
        )
    env.close()
    return outcomes


def first_observations(
    env_config: EnvConfig, scenes: Sequence[int], model: world_models.WorldModel
) -> world_models.InitialStates:
    """The first observation of each of ``scenes``, which is all of its context."""
    env, parts = env_config.make(min(64, len(scenes))), []
    for first in range(0, len(scenes), env.num_envs):
        batch = np.array(scenes[first : first + env.num_envs])
        obs = env.reset(np.arange(len(batch)), batch).select(slice(0, len(batch)))
        context = np.repeat(model.canvas.stack(obs.images)[:, None], 1 + model.config.context_frames, 1)
        parts.append((context, at_least_one(np.asarray(obs.state)), np.asarray(obs.task), np.asarray(obs.time)))
    env.close()
    return world_models.InitialStates(*(np.concatenate(items) for items in zip(*parts, strict=True)))


_PROBE_EPISODES = 400  # that the probe is trained on


def measure_prediction_quality(
    calibrated: CalibratedModel, env_config: EnvConfig, learnt: Trajectories, held_out: Trajectories, seed: int
) -> list[JsonObject]:
    """One row per horizon: PSNR in dB and, where the simulator tells object positions, errors in millimetres.

    Of a world model with a head for rewards, also how those of the call that ends there follow the recorded ones.

    The probe that finds the object is trained on ``learnt`` episodes, the predictions are of ``held_out`` ones.
    """
    frames = calibrated.model.config.frames
    found = replay_trajectories(calibrated.model, held_out, _paid(calibrated))
    spans = held_out.spans()
    calls = np.array([(end - begin - 1) // frames for begin, end in spans])
    kept = np.flatnonzero(calls)
    imagined = np.moveaxis(found.pictures, 2, -1)[kept]
    pictures = _side_by_side(as_predicted(calibrated.model, held_out))
    true = np.zeros_like(imagined)
    for row, i in enumerate(kept):
        true[row, : calls[i]] = pictures[spans[i][0] + frames * np.arange(1, calls[i] + 1)]
    first = pictures[[spans[i][0] for i in kept]]
    depths = range(1, int(calls.max()) + 1)
    rows = [asdict(one) for one in frame_agreement(imagined, true, first, calls[kept], depths)]
    if calibrated.model.reward is not None:
        agreed = {one.horizon: asdict(one) for one in rewards_of_calls(found, held_out, frames, depths)}
        rows = [row | {"reward": agreed.get(row["horizon"])} for row in rows]
    if TARGET in env_config.spec().extras:
        env = env_config.make(32, **{**env_config.training_options, "render": False})
        probe = _probe(env, as_predicted(calibrated.model, learnt), seed)
        positions = np.zeros((*true.shape[:2], 3), np.float32)
        for row, (i, where) in enumerate(zip(kept, _positions(env, held_out.select(kept)), strict=True)):
            positions[row, : calls[i]] = where[frames : frames * calls[i] + 1 : frames]
        tasks = held_out.task[[spans[i][0] for i in kept]]
        errors = object_error(probe, imagined, true, first, tasks, calls[kept], depths, positions)
        rows = [row | {"object": asdict(error)} for row, error in zip(rows, errors, strict=True)]
        env.close()
    return [row | {"horizon": frames * row["horizon"]} for row in rows]


def _paid(calibrated: CalibratedModel) -> world_models.ImaginationConfig:
    """The calibrated imagination, in which a head for rewards says what calls earn."""
    paid = calibrated.imagination
    return paid if calibrated.model.reward is None else replace(paid, reward=world_models.PredictedReward())


def rewards_of_calls(
    found: world_models.ReplayResult, recorded: Trajectories, frames: int, depths: Sequence[int]
) -> tuple[RewardAgreement, ...]:
    """Agreement of the rewards of whole calls of ``frames`` control steps, at each of ``depths``."""
    sums, spans = np.full(found.earned.shape, np.nan, np.float32), recorded.spans()
    for row, (begin, end) in enumerate(spans):
        paid = recorded.reward[begin : end - 1]
        for k in range(len(paid) // frames):
            sums[row, k] = paid[k * frames : (k + 1) * frames].sum()
    calls = np.array([(end - begin - 1) // frames for begin, end in spans])
    return reward_agreement(found.earned, sums, calls, depths)


def _probe(env: VecEnv, learnt: Trajectories, seed: int) -> ObjectProbe:
    chosen = np.random.default_rng([seed, 36]).permutation(learnt.count)[:_PROBE_EPISODES]
    known = learnt.select([i for i in chosen if learnt.seed[learnt.spans()[i][0]] >= 0])
    positions = np.concatenate(_positions(env, known))
    torch.manual_seed(seed)  # module initialisation has no generator argument
    with bar("train the probe", FIT.steps) as update:
        return fit_probe(
            _side_by_side(known),
            known.task,
            positions,
            generator(seed, 37),
            report=lambda step, info: update(step + 1, "objects"),
        )


def _positions(env: VecEnv, trajectories: Trajectories) -> list[np.ndarray]:
    spans = trajectories.spans()
    seeds = [int(trajectories.seed[begin]) for begin, _ in spans]
    return replayed_positions(env, seeds, [trajectories.action[begin : end - 1] for begin, end in spans])


def _side_by_side(trajectories: Trajectories) -> np.ndarray:
    """uint8 [M,h,w,c], cameras in the order of their names."""
    return np.concatenate([trajectories.images[name] for name in sorted(trajectories.images)], -1)
