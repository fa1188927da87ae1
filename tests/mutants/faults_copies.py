"""Faults that hold the features of a rollout once more than they need to be."""

from __future__ import annotations

from tests.mutants.fault import Fault

_HELD = "tests/training/test_copies.py::test_an_iteration_of_ppo_holds_features_once_and_what_it_computes_with"

FAULTS = (
    Fault(
        "a learner copies all features before it begins",
        "vla_rl/algorithms/ppo.py",
        "Gathered.where(rollout.features, usable)",
        "{name: flatten(item[:-1], usable) for name, item in rollout.features.items()}",
        (_HELD,),
    ),
    Fault(
        "decisions keep the features that are in the rollout",
        "vla_rl/experience/rollout.py",
        "replace(decision, step=to_policy_device(decision), features={})",
        "replace(decision, step=to_policy_device(decision))",
        (_HELD,),
    ),
    Fault(
        "features are gathered at the steps of other environments",
        "vla_rl/algorithms/decisions.py",
        "env, step = mask.T.nonzero(as_tuple=True)",
        "step, env = mask.nonzero(as_tuple=True)",
        ("tests/training/test_copies.py::test_gathered_features_are_those_of_the_flat_decisions",),
    ),
)
