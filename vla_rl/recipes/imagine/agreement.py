"""Policies in a world model: how well it agrees with the simulator about them, and which is best (``imagine rank``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vla_rl.contract.config import JsonObject
from vla_rl.contract.env import VecEnv, on_host
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.agreement import RewardAgreement, policy_agreement, reward_agreement
from vla_rl.evaluation.object_positions import TARGET, ObjectProbe, frame_agreement, object_error, replayed_positions
from vla_rl.evaluation.ranking import (
    MOST,
    SPREAD,
    TOLERANCE,
    Pair,
    Played,
    Ranking,
    Searches,
    Tried,
    expected_searches,
    rank,
)
from vla_rl.evaluation.report import Bar, Report
from vla_rl.evaluation.run import evaluate
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.experience.driver import Decision
from vla_rl.policies.function import EpsilonRandomPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import world_models
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig, play, shown
from vla_rl.recipes.imagine.calibrated_model import (
    CalibratedModel,
    ImaginedEnvFactory,
    recorded_initial_states,
    replay_trajectories,
)
from vla_rl.recipes.imagine.recipe import SavedRun, load_run
from vla_rl.recipes.terminal import bar
from vla_rl.recipes.trainers import generator, placed
from vla_rl.training.device import resolve_device
from vla_rl.training.fit import FIT, fit_probe
from vla_rl.training.tracking import write_json
from vla_rl.training.world_model import as_predicted, at_least_one


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
    config, training = EvaluationConfig(num_envs=num_envs), env.with_options(**env.training_options)
    ratings = []
    for name, policy in policies.items():
        for share in RANDOM_ACTION_PROBS:
            player = EpsilonRandomPolicy(policy, calibrated.model.spec, share) if share else policy
            title = f"{name}, {share:.0%} random" if share else name
            imagined = play(factory, player, range(len(scenes)), config, seed, f"imagined: {title}")
            true = play(training, player, scenes, config, seed, f"simulated: {title}")
            ratings.append(PolicyRating(title, imagined.rate, true.rate))
    return ratings


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
    paid = calibrated.imagination
    if calibrated.model.reward is not None:  # whose head says what calls earn
        paid = replace(paid, reward=world_models.PredictedReward())
    found = replay_trajectories(calibrated.model, held_out, paid)
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


# -- which is best -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """Policies in the world model of a run, from the starts of the episodes that it was not trained on."""

    real: tuple[str, ...] = ()  # what is known: NAME=SUCCESSES/EPISODES of policies that were played for real
    starts: int = 0  # imagined rollouts of each; 0: as many as there are such episodes
    steps: int = 0  # control steps of a rollout; 0: as many as an episode of the simulator has
    num_envs: int = 64
    seed: int = 1
    before_deployment: bool = False  # also the share of decisions that leave what was tried
    out: str = ""  # folder of rank.json and rank.html; "": the run's


def rank_policies(run: SavedRun, policies: Sequence[str], config: Rank) -> tuple[Ranking, Searches]:
    """Play every one of ``policies``, checkpoint folders, from the same starts; write ``rank.json`` and ``rank.html``.

    Returns what is believed of them, and how many real episodes would find the best of them.

    Raises UserError for fewer than two, a checkpoint of another environment, and known results that nobody can read.
    """
    known = _known(config.real, policies)
    recorded = run.not_learnt_from()
    starts = config.starts or recorded.count
    if starts > recorded.count:
        raise UserError(
            f"{starts} starts were asked for and the run holds out {recorded.count} episodes, so some would be "
            f"played twice and look like news; ask for at most {recorded.count}."
        )
    model = run.calibrated.model
    loaded = {name: load_policy(name, model.spec) for name in policies}
    # Neither uncertainty nor resampling ends a rollout, as in training: what a new policy does differently is often
    # uncertain, and would count as its failure.  Nor does training's deadline: who tries again may succeed later.
    steps = config.steps or model.spec.time_limit
    imagination = replace(run.calibrated.imagination, horizon=steps, deadline=None, resamples=0)
    factory = ImaginedEnvFactory(model, recorded_initial_states(model, recorded), None, imagination)
    played, outside = list[Played](), dict[str, float]()
    for name, policy in loaded.items():
        watched = _Watched()
        with (
            bar(f"imagined: {Path(name).name}", starts) as update,
            closing(factory.make(min(config.num_envs, starts))) as env,
        ):
            outcomes = evaluate(env, policy, range(starts), config.seed, report=shown(update), watch=watched)
        played.append(Played(name, outcomes.success, known.get(name, (0, 0))))
        if config.before_deployment:
            outside[name] = watched.share_left(recorded)
    found = rank(played)
    searches = expected_searches(played, found)
    out = Path(config.out or run.folder)
    summary = _summary(found, played, outside, starts, steps)
    medians = {"informed": float(np.median(searches.informed)), "alone": float(np.median(searches.alone))}
    write_json(out / "rank.json", summary | {"search": medians | {"at_most": MOST}})
    _page(out / "rank.html", found, played, outside, run.folder, searches)
    return found, searches


def _known(given: Sequence[str], policies: Sequence[str]) -> dict[str, tuple[int, int]]:
    """{policy: (successes, episodes)} of ``--real NAME=54/100``."""
    found = {}
    for text in given:
        match = re.fullmatch(r"(.+)=(\d+)/(\d+)", text)
        if not match or not 0 <= int(match[2]) <= int(match[3]) or not int(match[3]):
            raise UserError(
                f"--real {text!r} says nothing about a policy, so it was not used; write NAME=SUCCESSES/EPISODES, for "
                f"example {policies[0]}=54/100."
            )
        if match[1] not in policies:
            raise UserError(f"--real names {match[1]!r}, which is not ranked; {did_you_mean(match[1], policies)}")
        found[match[1]] = (int(match[2]), int(match[3]))
    return found


class _Watched:
    """The decisions of a policy in imagined rollouts."""

    def __init__(self) -> None:
        self.state: list[np.ndarray] = []
        self.chunk: list[np.ndarray] = []

    def __call__(self, decision: Decision) -> None:
        running = on_host(decision.step.valid).any(1)
        self.state.append(on_host(decision.obs.state)[running])
        self.chunk.append(on_host(decision.out.action)[running])

    def share_left(self, recorded: Trajectories) -> float:
        """The share that is further from all ``recorded`` decisions than those are from each other."""
        state, chunk = np.concatenate(self.state), np.concatenate(self.chunk)
        return float(tried(recorded, chunk.shape[1]).left(state, chunk).mean())


def tried(recorded: Trajectories, horizon: int) -> Tried:
    """The ``recorded`` chunks of ``horizon`` actions, one beginning at every step from which there are as many."""
    starts = [np.arange(begin, max(begin, end - horizon)) for begin, end in recorded.spans()]
    begins = np.concatenate(starts)
    if not len(begins):
        raise UserError(
            f"no recorded episode is longer than {horizon} actions, the policy's chunk, so nobody can say what was "
            "tried; leave --before-deployment out."
        )
    chunks = recorded.action[begins[:, None] + np.arange(horizon)]
    return Tried.of(recorded.state[begins], chunks, recorded.episode[begins])


def _summary(
    found: Ranking, played: Sequence[Played], outside: dict[str, float], starts: int, steps: int
) -> JsonObject:
    by_name = {one.name: one for one in played}
    rows = []
    for estimate in found.estimates:
        one = by_name[estimate.name]
        row = asdict(estimate) | {"imagined": asdict(Rate.of(one.imagined)), "real": list(one.real)}
        rows.append(row | ({"outside": outside[one.name]} if outside else {}))
    parts = {"strictness": found.strictness, "spread": found.spread, "starts": starts, "steps": steps}
    return {"policies": rows, "pairs": [asdict(pair) for pair in found.pairs], **parts}


def needed(pair: Pair) -> str:
    """In words: what would decide it."""
    return "decided" if pair.decided else "too many" if pair.episodes is None else f"{pair.episodes} of each"


def effort(searches: Searches) -> str:
    """In a sentence: the real episodes of half of the searches for the best policy."""
    informed, alone = (
        f"{median:.0f}" if (median := float(np.median(episodes))) < MOST else f"more than {MOST}"
        for episodes in (searches.informed, searches.alone)
    )
    return (
        f"Half of the searches for the best policy, or one within {TOLERANCE:.0%} of it, end after {informed} more "
        f"real episodes, and after {alone} without imagined rollouts."
    )


def short_names(folders: Sequence[str]) -> dict[str, str]:
    """{folder: "RUN/CHECKPOINT"} for ``RUN/checkpoints/CHECKPOINT``, where that tells all ``folders`` apart."""
    parts = {name: [part for part in Path(name).parts if part != "checkpoints"] for name in folders}
    short = {name: "/".join(found[-2:]) for name, found in parts.items()}
    return short if len(set(short.values())) == len(set(folders)) else {name: name for name in folders}


def _page(
    path: Path, found: Ranking, played: Sequence[Played], outside: dict[str, float], run: Path, searches: Searches
) -> None:
    report = Report("Which policy is best", f"Imagined rollouts of {run}, and what is known from real episodes")
    by_name, short = {one.name: one for one in played}, short_names([one.name for one in played])
    rows, bars = [], []
    for estimate in found.estimates:
        one, rate = by_name[estimate.name], Rate(estimate.success, estimate.low, estimate.high, 0)
        real = f"{one.real[0]} of {one.real[1]}" if one.real[1] else "–"
        shown = f"{rate.success:.1%} [{rate.low:.1%}, {rate.high:.1%}]"
        left = [f"{outside[one.name]:.1%}"] if outside else []
        rows.append([short[one.name], shown, f"{estimate.best:.0%}", f"{one.imagined.mean():.1%}", real, *left])
        bars.append(Bar.of(short[one.name], rate))
    header = ["", "success, estimated", "best with", "imagined", "real", "leaves what was tried"]
    caption = (
        "Estimated from imagined rollouts and real episodes together, with 95 % intervals. The world model's error is "
        f"taken to differ between policies by {found.spread:.2f} in log-odds: a guess of {SPREAD:g}, weighed against "
        "what real episodes show."
    )
    report.table(header if outside else header[:-1], rows, caption)
    report.bars("Estimated success", bars)
    pairs = [
        [f"{short[one.better]} > {short[one.worse]}", f"{one.probability:.1%}", needed(one)] for one in found.pairs
    ]
    report.table(["", "probability", "real episodes that would decide it"], pairs, effort(searches))
    report.command(f"vla-rl imagine rank {run} POLICY ...")
    report.write(path)
