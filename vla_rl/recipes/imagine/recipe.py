"""The recipe that trains a world model on few episodes, improves a policy in it and tests it in the simulator."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

from vla_rl.contract.config import JsonObject
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.trust import check_folder, read_json
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.stats import paired_successes
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.recipes import world_models
from vla_rl.recipes.config_files import read_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import play
from vla_rl.recipes.imagine.calibrated_model import (
    CalibratedModel,
    ImaginedEnvFactory,
    calibrate,
    load_or_train,
    measure_rollouts,
    mine_initial_states,
    success_probability,
    train_model,
    world_after,
)
from vla_rl.recipes.imagine.plan import Plan, RunEpisodes
from vla_rl.recipes.improve import FromPolicy, improve
from vla_rl.recipes.terminal import clock, console
from vla_rl.recipes.trainers import RunContext, Trainable, generator, placed
from vla_rl.training.device import resolve_device
from vla_rl.training.distributed import current_reducer
from vla_rl.training.loop import Hook
from vla_rl.training.tracking import RunFolder, write_json
from vla_rl.training.world_model import Coevolution, Decision, Signals

_ROLLOUTS = 128  # imagined for one decision


@dataclass(frozen=True)
class Imagine(FromPolicy):
    """Collect episodes, train and calibrate a world model, improve the policy in it, play the test scenes.

    The best weights are chosen by imagined episodes alone, so collected and bought episodes are all that is simulated
    before the test.
    """

    plan: Plan = field(kw_only=True)

    def __post_init__(self) -> None:
        """Raises UserError for a source ahead of the learner: it would play while the world model changes."""
        if self.rl.loop.staleness:
            raise UserError(
                "a world model that is trained beside the policy cannot be played in one rollout ahead, so this run "
                "could not be repeated; set staleness to 0."
            )

    def run(self, folder: RunFolder) -> JsonObject:
        """Leave the checkpoints "start", "first", "world" and "best"; an interrupted run goes on."""
        seconds: dict[str, float] = {}
        with clock(seconds, "world"):
            policy, world_model = self.prepare(folder)
        before = copy.deepcopy(policy)
        with clock(seconds, "rl"):
            device = resolve_device(self.device)
            context = RunContext(
                world_model.env_factory, policy, self.seed, current_reducer(), device=device, reward=self.reward
            )
            trained, best = improve(self.rl, context, self.evaluation, folder, world_model.follow)
        with clock(seconds, "agreement"):
            tables = world_model.calibrated.agreement(world_model.episodes.held_out)
        with clock(seconds, "test"):
            compared = self._test({"imitation": before, "imagined_rl": trained})
        calibrated = world_model.calibrated
        return {
            **compared,
            "agreement": [asdict(table) for table in tables],
            "horizon": calibrated.imagination.horizon,
            "threshold": calibrated.imagination.success_threshold,
            "limits": list(calibrated.limits.values),
            "best_iteration": best.iteration,
            "simulator_episodes": self.plan.collect.episodes + world_model.episodes.bought,
            "bought": world_model.episodes.bought,
            "keyframes": world_model.keyframes,
            "seconds": seconds,
            "seed": self.seed,
        }

    def prepare(self, folder: RunFolder) -> tuple[Trainable, WorldModelRun]:
        """The starting policy and a calibrated world model, as far as an earlier part of the run has not made them.

        Raises UserError without a policy.
        """
        device, spec = resolve_device(self.device), self.env.spec()
        require_imaginable(spec, self.plan)
        if (start := self.start(folder)) is None:
            raise UserError(
                "imagination collects episodes with a policy and none was given, so there is nothing to train a world "
                "model on; add --policy with a checkpoint folder or module:Class."
            )
        policy = placed(start, device)
        episodes = RunEpisodes.load_or_collect(folder.path / "episodes", self.env, policy, self.plan, self.seed)
        calibrated = load_or_train(folder, spec, episodes, self.plan, self.seed, device)
        world_model = WorldModelRun(self.plan, self.env, self.seed, folder, episodes, calibrated)
        world_model.measure_baseline(policy)
        return policy, world_model

    def _test(self, policies: dict[str, Policy]) -> JsonObject:
        """The rates of both ``policies`` on the test scenes of the simulator, and what the second gains."""
        scenes = seed_ranges.held_out(seed_ranges.TEST, self.evaluation.test)
        before, after = (
            play(self.env, policy, scenes, self.evaluation, self.seed, f"test {name.replace('_', ' ')}")
            for name, policy in policies.items()
        )
        pairs = paired_successes(after.success, before.success)
        return {
            **{name: asdict(found.rate) for name, found in zip(policies, (before, after), strict=True)},
            "gain": asdict(pairs.difference) | {"mcnemar_p": pairs.p_value},
        }


def require_imaginable(spec: EnvSpec, plan: Plan) -> None:
    """Raise UserError, before anything is played, where a world model of ``spec`` would have nothing to predict."""
    world_models.Canvas.of(spec, plan.model.resolution, plan.model.backbone.multiple)
    if not plan.init_from:
        plan.imagination.reward.require(plan.model.reward)
    if spec.success is None:
        raise UserError(
            f"{spec.name!r} has no notion of success, which imagined rollouts are rewarded with; an environment of "
            "Gymnasium gets one by the option success_return."
        )


class WorldModelRun(Hook):
    """The calibrated world model of a run with its episodes, environments and decisions (``coevolution.json``).

    It is trained further where the policy that learns in it (:meth:`follow`) needs real episodes.
    A decision is written down before it is carried out, and the world model before a purchase is kept, so that a run
    that was killed goes on from the world model of its saved state, and carries out the later decisions again.
    """

    def __init__(
        self,
        plan: Plan,
        env: EnvConfig,
        seed: int,
        folder: RunFolder,
        episodes: RunEpisodes,
        calibrated: CalibratedModel,
    ) -> None:
        """``env``: the simulator; ``calibrated``: before any purchase (:meth:`load_state_dict` goes on from later)."""
        self.plan, self.env, self.seed, self.folder = plan, env, seed, folder
        self.episodes, self.calibrated = episodes, calibrated
        episodes.use(0)
        self._pool = self._mine_initial_states()
        self.env_factory = ImaginedEnvFactory(calibrated.model, self._pool, calibrated.limits, calibrated.imagination)
        self._file = folder.path / "coevolution.json"
        written = read_json(self._file) if self._file.exists() else []
        self.decisions: list[JsonObject] = written[:1]
        self._again: list[JsonObject] = written[1:]  # to be carried out again, in turn

    def measure_baseline(self, policy: Policy) -> None:
        """Note the signals before RL, unless an earlier part of the run has.

        Raises UserError where the policy hardly succeeds in imagination (``TrustConfig.require_closed_loop``).
        """
        if not self.decisions:
            real = self.episodes.policy_success, self.episodes.policy_episodes
            first = self._measure(policy, real, 0)
            self._note(Decision(first, first, 0, ()), 0)
        first = Signals(**self.decisions[0]["signals"])
        if first.real is None:
            return
        imagined = round(first.imagined * first.rollouts), first.rollouts
        try:
            self.plan.trust.require_closed_loop(
                imagined, (round(first.real * first.real_episodes), first.real_episodes)
            )
        except UserError as error:
            raise UserError(
                f"{error} This one is kept, and a new run with --plan.init-from {self.folder.path} "
                "--plan.trust.min-imagined 0 uses it as it is."
            ) from error

    def follow(self, policy: Policy) -> WorldModelRun:
        """Decide by how ``policy`` does, which is about to learn."""
        self.policy = policy
        return self

    def before_iteration(self, iteration: int) -> bool:
        """Buy real episodes if the signals ask for it; whether the model has changed."""
        policy = self.policy
        if iteration < self.decisions[-1]["iteration"] + self.plan.coevolution.every:
            return False
        decision = self._decide(policy, iteration)
        self._note(decision, iteration)
        if decision.buy:
            real = self.episodes.buy(self.env, policy, decision.buy, self.plan, self.seed)
            self._refit()
            baseline = self._measure(policy, real, iteration)
            self.decisions[-1] |= {"baseline": asdict(baseline), "bought": self.episodes.bought}
            self._write()
        return decision.buy > 0

    def state_dict(self) -> dict[str, object]:
        """How many decisions are carried out; the world model and the episodes are in the run's folder."""
        return {"decisions": len(self.decisions)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from the world model, the episodes and the environments of :meth:`state_dict`.

        Before the source does: its environments are restored under the horizon of the world model.
        """
        written, count = [*self.decisions, *self._again], cast(int, state["decisions"])
        self.decisions, self._again = written[:count], written[count:]
        last, purchases = self.decisions[-1], sum(one["buy"] > 0 for one in self.decisions)
        self.folder.keep_metrics(lambda line: line["stage"] != "coevolution" or line["step"] <= last["iteration"])
        self.folder.keep_metrics(lambda line: _bought_before(line["stage"]) <= last["bought"])
        if purchases == self.episodes.purchases:
            return
        self.episodes.use(purchases)
        model = self.calibrated.model
        kept = CalibratedModel.load(world_after(self.folder, purchases), self.plan.imagination, model.device)
        model.load_state_dict(kept.model.state_dict())
        self._renew(replace(kept, model=model))

    @property
    def keyframes(self) -> int:
        """How many keyframes imagined rollouts may begin at."""
        return len(self._pool.keyframes)

    def _decide(self, policy: Policy, iteration: int) -> Decision:
        """By the present signals, or as before the run was interrupted."""
        if self._again and self._again[0]["iteration"] <= iteration:
            one = self._again.pop(0)
            signals, baseline = Signals(**one["signals"]), Signals(**one["baseline"])
            return Decision(signals, baseline, one["buy"], tuple(one["reasons"]))
        baseline = Signals(**self.decisions[-1]["baseline"])
        signals = self._measure(policy, (baseline.real, baseline.real_episodes), iteration)
        return Coevolution(self.plan.coevolution, baseline, self.episodes.bought).decide(signals)

    def _measure(self, policy: Policy, real: tuple[float | None, int], iteration: int) -> Signals:
        """The signals of ``policy``, whose ``real`` success was last played, in so many episodes."""
        env, seeds = self.env_factory.make(_ROLLOUTS), seed_ranges.held_out(seed_ranges.VALIDATION, _ROLLOUTS, 10_000)
        noise = generator(self.seed, 1000 + iteration)
        return measure_rollouts(env, self.calibrated.model, policy, seeds, noise, real)

    def _refit(self) -> None:
        """Train on all episodes, calibrate again and renew the imagined environments.

        Raises UserError when no horizon is trusted; a resumed run trains on the same episodes again.
        """
        model, number = self.calibrated.model, self.episodes.purchases
        earlier = self.folder.checkpoint(f"world-{number - 1}")
        if not (earlier / "config.json").exists():
            self.calibrated.save(earlier)
        train_model(model, self.episodes, self.plan.refit, self.seed, self.folder)
        try:
            calibrated = calibrate(model, self.episodes.calibration, self.plan)
        except UserError as error:
            raise UserError(
                f"purchase {number} of real episodes leaves a world model that is not trusted: {error} The best policy "
                "so far and the episodes are kept; a new run with --plan.coevolution.budget 0 buys none."
            ) from error
        calibrated.save(self.folder.checkpoint("world"))
        self._renew(calibrated)

    def _renew(self, calibrated: CalibratedModel) -> None:
        """Imagine with ``calibrated``, in all environments that are in use."""
        self.calibrated = calibrated
        self._pool = self._mine_initial_states()
        self.env_factory.renew(self._pool, self.calibrated.limits, self.calibrated.imagination)

    def _mine_initial_states(self) -> world_models.InitialStatePool:
        model, latest = self.calibrated.model, self.episodes.latest(self.plan.initial_episodes)
        value = success_probability(model, latest) if self.plan.imagination.keyframe_share else None
        return mine_initial_states(model, latest, value, self.plan.keyframes)

    def _note(self, decision: Decision, iteration: int) -> None:
        self.decisions.append(asdict(decision) | {"iteration": iteration, "bought": self.episodes.bought})
        self._write()
        numbers = {name: math.nan if value is None else value for name, value in asdict(decision.signals).items()}
        self.folder.log("coevolution", iteration, {**numbers, "buy": decision.buy})
        bought = f"{decision.buy} real episodes are bought"
        for reason in decision.reasons:
            does = bought if decision.buy else "plan.coevolution.budget allows no more of them"
            console.print(f"iteration {iteration}: {reason}; {does}.")

    def _write(self) -> None:
        write_json(self._file, [*self.decisions, *self._again])


def _bought_before(stage: str) -> int:
    """How many episodes were bought before a ``stage`` that trains the world model; -1 for other stages."""
    words = stage.split()  # "world after 100 bought"
    return int(words[2]) if words[:2] == ["world", "after"] else -1


@dataclass(frozen=True)
class SavedRun:
    """One run in ``folder``, finished or not."""

    folder: Path
    calibrated: CalibratedModel
    held_out: Trajectories

    @classmethod
    def load(cls, run: str | Path) -> SavedRun:
        """Read the run folder ``run``, or that of the comparison in ``run``.

        Raises UserError when there is no run, one without a world model, or one without held-out episodes.
        """
        folder = find_run(run)
        episodes = folder / "episodes" / "held_out.npz"
        for path, what in ((folder / "checkpoints" / "world", "world model"), (episodes, "held-out episodes")):
            if (folder / "config.json").exists() and not path.exists():
                raise UserError(
                    f"the run in {str(folder)!r} has no {what} ({path.relative_to(folder)} is missing), so there is "
                    "nothing to imagine; name a run of vla-rl imagine whose world model is trained."
                )
        check_folder(folder)
        return cls(folder, load_run(folder)[1], Trajectories.load(episodes))

    def not_learnt_from(self) -> Trajectories:
        """All episodes that the model was not trained on: held-out ones, then those of calibration."""
        calibration = Trajectories.load(self.folder / "episodes" / "calibration.npz")
        return Trajectories.joined([self.held_out, calibration])


def find_run(run: str | Path) -> Path:
    """The run with a world model: ``run`` itself, or the one in the comparison ``run``."""
    inner = Path(run) / "imagination"
    return inner if (inner / "config.json").exists() else Path(run)


def load_run(run: Path) -> tuple[Imagine, CalibratedModel]:
    """The recipe and the world model of a run, finished or not; raises UserError when there is none."""
    recipe = read_config(run)
    if not isinstance(recipe, Imagine):
        raise UserError(
            f"{str(run)!r} is a run of {type(recipe).__name__}, which has no world model, so there is none to use; "
            "name a folder that vla-rl imagine made."
        )
    return recipe, CalibratedModel.load(run / "checkpoints" / "world", recipe.plan.imagination)
