"""One set of environments for training and validation, where memory is too short for two."""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.contract.batch import ExperienceSource, LendingSource
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.evaluation.run import Outcomes, evaluate
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.evaluators import Report


class SharedEnvs:
    """Makes the environments of a run (``EnvFactory``) and validates in those that it trains in (``Evaluator``).

    Validation has its own seeds and begins its own episodes; those of training are put aside meanwhile (see
    ``LendingSource``).  Where the environments have snapshots, results are the same, bit for bit, as with two sets.
    """

    def __init__(self, env: EnvFactory) -> None:
        """Raises UserError where training needs other environments than validation."""
        require_same(env)
        self.env = env
        self._made: list[VecEnv] = []
        self._source: LendingSource

    def make(self, num_envs: int) -> VecEnv:
        return self.env.make(num_envs)

    def make_training(self, num_envs: int) -> VecEnv:
        self._made.append(self.env.make_training(num_envs))
        return self._made[-1]

    def spec(self) -> EnvSpec:
        return self.env.spec()

    def lend(self, source: ExperienceSource) -> None:
        """Validate in the environments of ``source`` from now on; raises UserError unless it can lend them."""
        self._source = lending(source)

    def evaluate(
        self, policy: Policy, seeds: Sequence[int], noise_seed: int, report: Report = lambda episodes, successes: None
    ) -> Outcomes:
        (env,) = self._made
        with self._source.lent():
            return evaluate(env, policy, seeds, noise_seed, report=report)

    def close(self) -> None:
        """The environments are those of training, which closes them."""


def require_same(env: EnvFactory) -> None:
    """Raise UserError for ``env`` whose environments to train in are others than those to validate in."""
    if not isinstance(env, EnvConfig) or env.training_options:
        raise UserError(
            f"{type(env).__name__} trains in other environments than it validates in, so they cannot be shared; set "
            "evaluation.share_env to False."
        )


def lending(source: ExperienceSource) -> LendingSource:
    """``source``; raises UserError unless it can lend its environments."""
    if not isinstance(source, LendingSource):
        raise UserError(
            f"{type(source).__name__} cannot lend its environments between two rollouts, so validation cannot share "
            "them; leave collectors at 1 and staleness at 0 in one process, or set evaluation.share_env to False."
        )
    return source
