"""Faults in GRPO, RLOO and the groups they learn from."""

from __future__ import annotations

from tests.mutants.fault import Fault

_RELATIVE, _GRPO = "vla_rl/algorithms/group_relative.py", "vla_rl/algorithms/grpo.py"
_GROUPS, _COLUMNS = "vla_rl/experience/groups.py", "vla_rl/experience/columns.py"
_MEMBERS = "vla_rl/experience/members.py"
_ADVANTAGES, _LEARNT = "tests/algorithms/test_grpo_advantages.py::", "tests/algorithms/test_grpo.py::"
_ON_GROUPS = "tests/experience/test_groups.py::"
_GOLDEN = f"{_ADVANTAGES}test_golden_advantages"
_ENUMERATED = f"{_ADVANTAGES}test_the_expected_gradient_by_enumeration"
_GRADIENT = f"{_LEARNT}test_the_first_gradient_is_the_policy_gradient"
_ENTERS = f"{_LEARNT}test_idle_and_intervened_decisions_and_those_after_a_success_never_enter"
_NUMBERS = f"{_ON_GROUPS}test_every_number_can_be_recomputed_and_groups_come_in_the_order_of_their_launch"
_AGE = f"{_ON_GROUPS}test_carried_groups_are_at_most_those_ahead_and_one_rollout_old"

_ADVANTAGE = (
    Fault(
        "the baseline holds the episode itself",
        _RELATIVE,
        "(returns.sum() - returns) / (len(returns) - 1)",
        "returns.sum() / len(returns)",
        (_ENUMERATED,),
    ),
    Fault("the std of the population", _RELATIVE, "returns.std(correction=1)", "returns.std(correction=0)", (_GOLDEN,)),
    Fault(
        "all episodes are one group",
        _RELATIVE,
        "members = seeds == seed",
        "members = seeds == seeds",
        (f"{_ADVANTAGES}test_advantages_equal_brute_force_whatever_the_order_of_the_columns",),
    ),
    Fault(
        "equal returns get an advantage from rounding",
        _RELATIVE,
        "if (group != group[0]).any():",
        "if len(group):",
        (f"{_ADVANTAGES}test_equal_returns_have_advantages_of_exactly_zero",),
    ),
    Fault(
        "every episode weighs the same by default",
        _RELATIVE,
        "averaging: Averaging = Global()",
        "averaging: Averaging = PerTrajectory()",
        (f"{_LEARNT}test_uniform_groups_stay_in_the_denominators",),
    ),
)

_LEARNING = (
    Fault(
        "uniform groups leave the denominators",
        _RELATIVE,
        "weights(usable.sum(0), self.reducer)",
        "weights((usable & (advantage != 0)).sum(0), self.reducer)",
        (_GRADIENT, f"{_LEARNT}test_uniform_groups_stay_in_the_denominators"),
    ),
    Fault(
        "each process has denominators of its own",
        _RELATIVE,
        "total = reducer.sum(decisions.sum().double())",
        "total = decisions.sum().double()",
        (f"{_LEARNT}test_two_processes_that_share_the_groups_end_with_the_weights_of_one",),
    ),
    Fault(
        "what follows a success is learnt from",
        _RELATIVE,
        "after = success.cumsum(0) - success > 0",
        "after = success.cumsum(0) < 0",
        (_ENTERS,),
    ),
    Fault(
        "the success itself is not learnt from",
        _RELATIVE,
        "after = success.cumsum(0) - success > 0",
        "after = success.cumsum(0) > 0",
        (_GRADIENT,),
    ),
    Fault(
        "GRPO's bounds exchanged",
        _GRPO,
        "advantage, self.config.clip_low, self.config.clip_high)",
        "advantage, self.config.clip_high, self.config.clip_low)",
        (f"{_LEARNT}test_clipped_and_unclipped_objectives_by_hand",),
    ),
)

_COLLECTING = (
    Fault(
        "surplus groups are dropped",
        _GROUPS,
        "self._carried = parts[wanted:]",
        "self._carried = []",
        (_NUMBERS,),
    ),
    Fault(
        "the newest groups are delivered",
        _GROUPS,
        "replace(side_by_side(parts[:wanted], info), spans",
        "replace(side_by_side(parts[-wanted:], info), spans",
        (_NUMBERS,),
    ),
    Fault(
        "a uniform group is played again",
        _GROUPS,
        "seed = self.seeds.draw(taken)",
        "seed = self._groups[-1].seed if self._groups and not self._groups[-1].mixed else next(self.seeds)",
        (_NUMBERS,),
    ),
    Fault(
        "mixed means a success rate between .1 and .9",
        _MEMBERS,
        "member.episode_return != self.members[0].episode_return for member in self.members",
        "0.1 <= sum(m.episode_return for m in self.members) / len(self.members) <= 0.9 for _ in self.members",
        (f"{_ON_GROUPS}test_one_that_differs_among_many_is_enough",),
    ),
    Fault(
        "groups are launched without need",
        _GROUPS,
        "running >= missing + self.config.ahead or",
        "",
        (_AGE,),
    ),
    Fault(
        "a group waits for the group before it",
        _GROUPS,
        "running >= missing + self.config.ahead or",
        "running >= 1 or",
        (f"{_ON_GROUPS}test_no_environment_idles_while_episodes_are_wanted",),
    ),
    Fault(
        "the steps of groups thrown away are not counted",
        _GROUPS,
        '"env/steps": self._steps,',
        '"env/steps": float(sum(part.valid.sum() for part in parts[:wanted])),',
        (f"{_ON_GROUPS}test_counters_are_of_all_groups_played_replaced_and_carried",),
    ),
    Fault(
        "launched rows keep the policy's state of the episode before",
        _GROUPS,
        "self.driver.reset(env_ids, seeds)",
        "state = self.driver.state\n        self.driver.reset(env_ids, seeds)\n        self.driver.state = state",
        (_NUMBERS,),
    ),
    Fault(
        "carried groups are not saved",
        _GROUPS,
        "carried = [to_state(group) for group in self._carried]",
        "carried: list[Any] = []",
        (f"{_ON_GROUPS}test_the_same_seeds_give_the_same_rollouts_and_a_saved_state_goes_on_with_them",),
    ),
    Fault(
        "idle decisions go on being valid",
        _COLUMNS,
        "torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])",
        "torch.cat([values, values[-1:].expand(length - len(values), *values.shape[1:])])",
        (_NUMBERS,),
    ),
    Fault(
        "truncations are those of the neighbour",
        _COLUMNS,
        "for part, first in zip(parts, widths[:-1], strict=True)",
        "for part, first in zip(parts, widths[1:], strict=True)",
        (_NUMBERS,),
    ),
)

FAULTS = (*_ADVANTAGE, *_LEARNING, *_COLLECTING)
