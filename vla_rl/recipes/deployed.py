"""The policy that is evaluated, by the text of ``--policy``."""

from __future__ import annotations

from vla_rl.contract.policy import Policy
from vla_rl.experience.expert import ExpertPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.policies import check_if_foreign, names_class, new_policy
from vla_rl.recipes.saved import checkpoint_of

EXPERT = "expert"


def deployed_policy(name: str, env: EnvConfig, seed: int = 0) -> Policy:
    """The policy that ``name`` means in ``env``.

    ``name`` is a checkpoint folder; a run folder (its best checkpoint); "module:Class", called with the environment's
    spec after torch was seeded with ``seed``; or "expert", the task's scripted expert.  Raises UserError when it does
    not exist and ContractError when it does not fit the environment.
    """
    if name == EXPERT:
        return ExpertPolicy(env.make_expert().act, horizon=1)
    if names_class(name):
        policy: Policy = new_policy(name, env.spec(), {}, seed)
    else:
        policy = load_policy(checkpoint_of(name), env.spec())
    check_if_foreign(policy, env, seed, needs=())
    return policy
