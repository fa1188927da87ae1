"""The world model of a run beside reinforcement learning: it is trained on real episodes again when it needs them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import cast

from vla_rl.contract.batch import ExperienceSource, Resumable, Rollout
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.background import CollectingSource
from vla_rl.recipes import world_models
from vla_rl.recipes.context import RunContext, Trainable, generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel, calibrate
from vla_rl.recipes.imagine.imagined_env import ImaginedEnvFactory, measure_rollouts
from vla_rl.recipes.imagine.plan import Plan
from vla_rl.recipes.imagine.replays import mine_initial_states, success_probability
from vla_rl.recipes.imagine.run_episodes import RunEpisodes
from vla_rl.recipes.imagine.train_model import train_model
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.progress import console
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.training.coevolve import Coevolution, Decision, Signals
from vla_rl.training.loop import LoopConfig, LoopLearner
from vla_rl.training.tracking import RunFolder, write_json

_ROLLOUTS = 128  # imagined for one decision


class WorldModelRun:
    """The calibrated world model of a run with its episodes, environments and decisions (``coevolution.json``)."""

    def __init__(
        self,
        plan: Plan,
        env: EnvConfig,
        seed: int,
        folder: RunFolder,
        episodes: RunEpisodes,
        calibrated: CalibratedModel,
    ) -> None:
        """``env``: the simulator."""
        self.plan, self.env, self.seed, self.folder = plan, env, seed, folder
        self.episodes, self.calibrated = episodes, calibrated
        self._initial_state_pool = self._mine_initial_states()
        self.env_factory = ImaginedEnvFactory(
            calibrated.model, self._initial_state_pool, calibrated.limits, calibrated.imagination
        )
        self._file = folder.path / "coevolution.json"
        self.decisions: list[JsonObject] = []
        if self._file.exists():
            self.decisions = json.loads(self._file.read_text(encoding="utf-8"))

    def measure_baseline(self, policy: Policy) -> None:
        """Note the signals before RL, unless an earlier part of the run has."""
        if not self.decisions:
            first = self._measure(policy, self.episodes.policy_success, 0)
            self._note(Decision(first, first, 0, ()), 0)

    def coevolve(self, policy: Policy, iteration: int) -> bool:
        """Before ``iteration`` of RL: buy real episodes if the signals ask for it; whether the model has changed."""
        config, last = self.plan.coevolution, self.decisions[-1]
        if iteration < last["iteration"] + config.every:
            return False
        baseline = Signals(**last["baseline"])
        signals = self._measure(policy, baseline.real, iteration)
        decision = Coevolution(config, baseline, self.episodes.bought).decide(signals)
        if decision.buy:
            real = self.episodes.buy(self.env, policy, decision.buy, self.plan, self.seed)
            self._refit()
            decision = replace(decision, baseline=self._measure(policy, real, iteration))
        self._note(decision, iteration)
        return decision.buy > 0

    @property
    def keyframes(self) -> int:
        """How many keyframes imagined rollouts may begin at."""
        return len(self._initial_state_pool.keyframes)

    def _measure(self, policy: Policy, real: float, iteration: int) -> Signals:
        """The signals of ``policy``, whose ``real`` success was last played."""
        env, seeds = self.env_factory.make(_ROLLOUTS), seed_ranges.held_out(seed_ranges.VALIDATION, _ROLLOUTS, 10_000)
        noise = generator(self.seed, 1000 + iteration)
        found = measure_rollouts(env, self.calibrated.model, policy, seeds, noise)
        return Signals(found.success, real, found.uncertain, found.inverse_dynamics_error)

    def _refit(self) -> None:
        """Train on all episodes, calibrate again and renew the imagined environments."""
        model = self.calibrated.model
        train_model(model, self.episodes, self.plan.refit, self.seed, self.folder)
        self.calibrated = calibrate(model, self.episodes.calibration, self.plan)
        self.calibrated.save(self.folder.checkpoint("world"))
        self._initial_state_pool = self._mine_initial_states()
        self.env_factory.renew(self._initial_state_pool, self.calibrated.limits, self.calibrated.imagination)

    def _mine_initial_states(self) -> world_models.InitialStatePool:
        model, latest = self.calibrated.model, self.episodes.latest(self.plan.initial_episodes)
        return mine_initial_states(model, latest, success_probability(model, latest), self.plan.keyframes)

    def _note(self, decision: Decision, iteration: int) -> None:
        self.decisions.append(asdict(decision) | {"iteration": iteration, "bought": self.episodes.bought})
        write_json(self._file, self.decisions)
        self.folder.log("coevolution", iteration, {**asdict(decision.signals), "buy": decision.buy})
        for reason in decision.reasons:
            console.print(f"iteration {iteration}: {reason}; bought {decision.buy} real episodes.")


@dataclass(frozen=True)
class CoevolvingTrainer:
    """``trainer``, in imagination, whose world model is trained beside the policy (a ``TrainerConfig``)."""

    trainer: TrainerConfig
    world_model: WorldModelRun

    def __post_init__(self) -> None:
        """Raises UserError for a rollout ahead: it would be played while the world model changes."""
        if self.trainer.loop.rollouts_ahead:
            raise UserError(
                "a world model that is trained beside the policy cannot be played in one rollout ahead, so this run "
                "could not be repeated; set rollouts_ahead to 0."
            )

    @property
    def loop(self) -> LoopConfig:
        return self.trainer.loop

    def build_env(self, context: RunContext) -> VecEnv:
        return self.trainer.build_env(context)

    def build_policy(self, context: RunContext) -> Trainable:
        return self.trainer.build_policy(context)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        return self.trainer.build_learner(context, env, policy)

    def build_source(self, context: RunContext, env: VecEnv, policy: Trainable) -> CollectingSource:
        return self.trainer.build_source(context, env, policy)

    def pretrain(self, learner: LoopLearner) -> bool:
        return self.trainer.pretrain(learner)

    def whole_source(self, source: ExperienceSource, policy: Trainable) -> ExperienceSource:
        """``source``, whose imagined environments are renewed when the world model was trained."""
        whole = self.trainer.whole_source(source, policy)
        return CoevolvingSource(whole, self.world_model, policy, self.loop.iterations)


class CoevolvingSource:
    """``source`` in imagined environments whose world model may need real episodes (``RenewableSource``)."""

    def __init__(self, source: ExperienceSource, world_model: WorldModelRun, policy: Policy, iterations: int) -> None:
        self.source, self.world_model, self.policy, self.iterations = source, world_model, policy, iterations

    def next(self) -> Rollout:
        return self.source.next()

    def renew(self, progress: float) -> bool:
        """Buy real episodes and train the world model if the signals ask for it; whether it has changed."""
        return self.world_model.coevolve(self.policy, round(progress * self.iterations))

    def state_dict(self) -> dict[str, object]:
        return cast(Resumable, self.source).state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        cast(Resumable, self.source).load_state_dict(state)
