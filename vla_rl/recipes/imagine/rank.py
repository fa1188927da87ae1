"""``vla-rl imagine rank``: which of several policies is best, before a robot sees them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from vla_rl.contract.config import JsonObject
from vla_rl.contract.env import on_host
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.policy import Policy
from vla_rl.evaluation.novelty import Tried
from vla_rl.evaluation.ranking import MOST, SPREAD, TOLERANCE, Pair, Played, Ranking, Searches, expected_searches, rank
from vla_rl.evaluation.report import Bar, Report
from vla_rl.evaluation.run import evaluate
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.driver import Decision
from vla_rl.experience.trajectories import Trajectories
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import world_models
from vla_rl.recipes.imagine.calibrated_model import ImaginedEnvFactory, recorded_initial_states
from vla_rl.recipes.imagine.recipe import SavedRun
from vla_rl.recipes.progress import bar
from vla_rl.training.tracking import write_json


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
    pool = recorded_initial_states(run.calibrated.model, recorded)
    loaded = {name: load_policy(name, run.calibrated.model.spec) for name in policies}
    played, outside = list[Played](), dict[str, float]()
    for name, policy in loaded.items():
        watched = _Watched()
        outcomes = _imagine(run, pool, policy, starts, config, watched, name)
        played.append(Played(name, outcomes, known.get(name, (0, 0))))
        if config.before_deployment:
            outside[name] = watched.share_left(recorded)
    found = rank(played)
    searches = expected_searches(played, found)
    out = Path(config.out or run.folder)
    summary = _summary(found, played, outside, starts, _length(run, config))
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


def _imagine(
    run: SavedRun,
    pool: world_models.OrderedPool,
    policy: Policy,
    starts: int,
    config: Rank,
    watch: _Watched,
    name: str,
) -> np.ndarray:
    """bool [starts]: which imagined rollouts succeed.

    Neither uncertainty nor resampling ends one, as in training: what a new policy does differently is often
    uncertain, and would count as its failure.  Nor does training's deadline: who tries again may succeed later.
    """
    model = run.calibrated.model
    imagination = replace(run.calibrated.imagination, horizon=_length(run, config), deadline=None, resamples=0)
    factory = ImaginedEnvFactory(model, pool, None, imagination)
    env = factory.make(min(config.num_envs, starts))
    with bar(f"imagined: {Path(name).name}", starts) as update:
        outcomes = evaluate(
            env,
            policy,
            range(starts),
            config.seed,
            report=lambda done, won: update(done, f"success {won / done:.0%}"),
            watch=watch,
        )
    env.close()
    return outcomes.success


def _length(run: SavedRun, config: Rank) -> int:
    """The control steps of a rollout."""
    return config.steps or run.calibrated.model.spec.time_limit


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
    path: Path,
    found: Ranking,
    played: Sequence[Played],
    outside: dict[str, float],
    run: Path,
    searches: Searches,
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
    header = [
        "",
        "success, estimated",
        "best with",
        "imagined",
        "real",
        *(["leaves what was tried"] if outside else []),
    ]
    caption = (
        "Estimated from imagined rollouts and real episodes together, with 95 % intervals. The world model's error is "
        f"taken to differ between policies by {found.spread:.2f} in log-odds: a guess of {SPREAD:g}, weighed against "
        "what real episodes show."
    )
    report.table(header, rows, caption)
    report.bars("Estimated success", bars)
    pairs = [
        [f"{short[one.better]} > {short[one.worse]}", f"{one.probability:.1%}", needed(one)] for one in found.pairs
    ]
    report.table(["", "probability", "real episodes that would decide it"], pairs, effort(searches))
    report.command(f"vla-rl imagine rank {run} POLICY ...")
    report.write(path)
