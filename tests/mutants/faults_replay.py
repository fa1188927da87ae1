"""Faults in what off-policy learning stands on: replay, relabelling, residual policies, critics, residual TD3."""

from __future__ import annotations

from tests.mutants.fault import Fault

_REPLAY, _STORAGE = "vla_rl/experience/replay.py", "vla_rl/experience/storage.py"
_MIXTURE, _RELABEL, _ROLLOUT = (f"vla_rl/experience/{name}.py" for name in ("mixture", "relabel", "rollout"))
_RESIDUAL, _HEADS, _CRITICS = (f"vla_rl/policies/{name}.py" for name in ("residual", "heads", "critics"))
_OFF, _TD3, _LOOP = "vla_rl/algorithms/off_policy.py", "vla_rl/algorithms/residual_td3.py", "vla_rl/training/loop.py"
_FUNCTION = "vla_rl/policies/function.py"
_ON_REPLAY, _ON_RELABEL = "tests/experience/test_replay.py::", "tests/experience/test_relabel.py::"
_ON_STORAGE, _ON_MIXTURE = "tests/experience/test_storage.py::", "tests/experience/test_mixture.py::"
_ON_RESIDUAL, _ON_HEADS = "tests/policies/test_residual.py::", "tests/policies/test_heads.py::"
_ON_TD3 = "tests/algorithms/test_residual_td3.py::"
_BRUTE = f"{_ON_REPLAY}test_n_steps_equal_brute_force_on_200_ragged_cases"
_GOLDEN = f"{_ON_REPLAY}test_golden_three_steps"
_SLOTS = f"{_ON_REPLAY}test_every_slot_can_be_recomputed_and_none_is_missing"
_SAVED = f"{_ON_REPLAY}test_a_saved_replay_goes_on_bit_for_bit"
_TARGET = f"{_ON_TD3}test_the_target_by_hand"
_BASE = f"{_ON_RESIDUAL}test_at_first_it_is_the_base_chunk_by_chunk_after_every_kind_of_end"
_ROWS = f"{_ON_RESIDUAL}test_rows_follow_plans_of_their_own"
_KILLED = f"{_ON_STORAGE}test_killed_inside_a_write_there_are_only_whole_decisions"

_MEMORY = (
    Fault(
        "a truncated decision has no value after it",
        _REPLAY,
        '"terminated": rollout.terminated,',
        '"terminated": rollout.terminated | rollout.truncated,',
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "what follows a truncation is the next episode's first",
        _REPLAY,
        "last = {name: item[final] for name, item in rollout.final_stored.items()}",
        "last = {name: item[end + 1, row] for name, item in rollout.stored.items()}",
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "n steps look past an end",
        _REPLAY,
        'columns["remaining"][slots].clamp_max(self.n_step)',
        'columns["remaining"][slots].clamp(self.n_step, self.n_step)',
        (_BRUTE,),
    ),
    Fault(
        "later rewards of n steps are not discounted",
        _REPLAY,
        'torch.where(within, discount * columns["reward"][slot], 0.0)',
        'torch.where(within, columns["reward"][slot], 0.0)',
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "a discount per decision and not per action",
        _REPLAY,
        'self.gamma ** columns["count"][slot], 1.0)',
        "self.gamma, 1.0)",
        (_BRUTE,),
    ),
    Fault(
        "an episode without its end",
        _REPLAY,
        '"count": valid.sum(-1),',
        '"count": valid.sum(-1) * (valid.all(-1) | (valid.shape[-1] == 1)),',
        (_BRUTE, _SLOTS),
    ),
    Fault(
        "rewards that were not earned",
        _REPLAY,
        "(torch.where(valid, rollout.reward, 0.0) * powers)",
        "(rollout.reward * powers)",
        (_BRUTE,),
    ),
    Fault(
        "the return of a truncated episode is what it had earned so far",
        _REPLAY,
        'if episode["terminated"][-1]:',
        "if len(reward):",
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "windows cut otherwise fill the replay in another order",
        _REPLAY,
        "for end, row in ends.nonzero().tolist():",
        "for row, end in ends.T.nonzero().tolist():",
        (f"{_ON_REPLAY}test_windows_cut_anywhere_give_the_same_replay",),
    ),
    Fault(
        "an episode that was broken off goes on in the next",
        _REPLAY,
        "played.clear()",
        "played.copy()",
        (f"{_ON_REPLAY}test_an_episode_that_was_broken_off_is_not_joined_to_the_next",),
    ),
    Fault(
        "new decisions are the growth of the replay",
        _REPLAY,
        'return int((self.columns["remaining"][newest] > 0).sum()) if written else 0',
        "return written and max(0, self._size - self.capacity)",
        (f"{_ON_REPLAY}test_what_is_new_is_counted_though_something_old_made_room",),
    ),
    Fault(
        "ends of episodes are drawn as decisions",
        _REPLAY,
        "self._playable = remaining.nonzero().flatten()",
        "self._playable = (remaining >= 0).nonzero().flatten()",
        (_SLOTS,),
    ),
    Fault(
        "a replay that goes on forgets its running episodes",
        _REPLAY,
        'self._open = {int(row): list(parts) for row, parts in state["open"].items()}',
        "self._open = {}",
        (_SAVED,),
    ),
    Fault(
        "a replay that goes on begins its ring anew",
        _REPLAY,
        'self._cursor, self._size, self._playable = state["cursor"], state["size"], None',
        'self._cursor, self._size, self._playable = 0, state["size"], None',
        (_SAVED,),
    ),
    Fault(
        "a state that is saved again at once is empty",
        _REPLAY,
        "            self.storage.note(self._cursor, self._size)",
        "            pass",
        (_SAVED,),
    ),
    Fault(
        "killed in a write, decisions are half of one and half of another",
        _REPLAY,
        'self.columns["remaining"][index] = 0  #',
        "#",
        (_KILLED,),
    ),
    Fault(
        "interventions are all decisions",
        _REPLAY,
        'return decisions[self.replay.columns["intervened"][decisions]] if len(decisions) else decisions',
        "return decisions",
        (f"{_ON_REPLAY}test_interventions_are_a_view",),
    ),
    Fault(
        "a replay is read with another gamma",
        _STORAGE,
        "if made_with[name] != value:",
        'if made_with[name] != value and name != "gamma":',
        (f"{_ON_STORAGE}test_other_numbers_are_refused",),
    ),
    Fault(
        "a file of another size is taken",
        _STORAGE,
        "if found is not None and found != needed:",
        "if found is not None and found > needed:",
        (f"{_ON_STORAGE}test_damage_is_named",),
    ),
    Fault(
        "shares are rounded each on its own",
        _MIXTURE,
        "counts[name] = round(size * behind / total) - given",
        "counts[name] = round(size * share / total)",
        (f"{_ON_MIXTURE}test_shares_are_kept_to_within_rounding_and_add_up",),
    ),
    Fault(
        "an empty memory keeps its share",
        _MIXTURE,
        "share if len(self.parts[name]) else 0.0 for",
        "share for",
        (f"{_ON_MIXTURE}test_the_others_have_the_share_of_an_empty_part",),
    ),
)

_RECORDED = (
    Fault(
        "a truncated recording keeps the action of unknown outcome",
        _RELABEL,
        "last = end if terminated else end - 1",
        "last = end",
        (f"{_ON_RELABEL}test_what_did_not_end_is_truncated_at_its_last_observation",),
    ),
    Fault(
        "recordings end by termination whatever their flags say",
        _RELABEL,
        "return bool(np.asarray(flags).reshape(-1)[step]) if flags is not None else False",
        "return True",
        (f"{_ON_RELABEL}test_what_did_not_end_is_truncated_at_its_last_observation",),
    ),
    Fault(
        "the base's plan is begun anew at every recorded step",
        _RELABEL,
        "found[i], state = policy.context(stored, state, generator)",
        "found[i], _ = policy.context(stored, state, generator)",
        (f"{_ON_RELABEL}test_the_base_acts_as_in_a_live_rollout_of_the_same_observations",),
    ),
    Fault(
        "the last offsets of a short episode are left out",
        _RELABEL,
        "range(min(offsets, end - begin))",
        "range(min(offsets, end - begin - 1) or 1)",
        (f"{_ON_RELABEL}test_every_offset_is_decided_at",),
    ),
    Fault(
        "what was not executed is zero",
        _ROLLOUT,
        "return torch.where(to_tensor(step.valid).unsqueeze(-1), executed, out.action.to(executed))",
        "return executed",
        ("tests/experience/test_executed.py::test_executed_is_what_was_done_and_after_an_end_what_had_been_chosen",),
    ),
    Fault(
        "the choice is kept as what was executed",
        _ROLLOUT,
        "return torch.where(to_tensor(step.valid).unsqueeze(-1), executed, out.action.to(executed))",
        "return out.action.to(executed)",
        ("tests/experience/test_executed.py::test_executed_is_what_was_done_and_after_an_end_what_had_been_chosen",),
    ),
    Fault(
        "last observations get the context of other rows",
        _ROLLOUT,
        "then = {name: item[truncated] for name, item in self._state.items()}",
        "then = {name: item[: len(truncated)] for name, item in self._state.items()}",
        (
            "tests/experience/test_executed.py::test_every_observation_gets_its_context_the_last_one_that_of_its_own_episode",
        ),
    ),
)

_POLICIES = (
    Fault(
        "the base's queue outlives its episode",
        _RESIDUAL,
        "left[torch.as_tensor(rows, dtype=torch.long)] = 0",
        "left[torch.as_tensor(rows, dtype=torch.long)] *= 1",
        (_BASE,),
    ),
    Fault(
        "the base's own state outlives its episode",
        _RESIDUAL,
        "theirs = self.base.reset_state(_inner(state), rows)",
        "theirs = _inner(state)",
        (_BASE,),
    ),
    Fault(
        "the base's new state is dropped",
        _RESIDUAL,
        "            theirs[name][rows] = item",
        "            theirs[name][rows] = theirs[name][rows]",
        (_BASE,),
    ),
    Fault(
        "the chunk of one row is that of another",
        _RESIDUAL,
        "queue[rows, : chunk.shape[1]] = self",
        "queue[rows.flip(0), : chunk.shape[1]] = self",
        (_ROWS,),
    ),
    Fault(
        "the plan shows what is not in the queue any more",
        _RESIDUAL,
        "(ahead < left[:, None])[..., None]",
        "(ahead < 99 + left[:, None])[..., None]",
        (f"{_ON_RESIDUAL}test_what_else_is_in_the_queue_is_seen_and_nothing_beyond_it",),
    ),
    Fault(
        "the noise grows with its correlation",
        _RESIDUAL,
        "(1.0 - self.config.correlation**2) ** 0.5",
        "1.0 - self.config.correlation * 0.0",
        (f"{_ON_RESIDUAL}test_the_noise_is_an_ornstein_uhlenbeck_process",),
    ),
    Fault(
        "the noise of an episode goes on in the next",
        _RESIDUAL,
        "noise[torch.as_tensor(rows, dtype=torch.long)] = 0.0",
        "noise[torch.as_tensor(rows, dtype=torch.long)] *= 1.0",
        (f"{_ON_RESIDUAL}test_the_noise_is_an_ornstein_uhlenbeck_process",),
    ),
    Fault(
        "critics judge a correction that the bounds did not let through",
        _RESIDUAL,
        "total = self.corrected(stored, self.delta(stored)).clamp(-1.0, 1.0)",
        "total = self.corrected(stored, self.delta(stored))",
        (f"{_ON_RESIDUAL}test_it_corrects_by_at_most_its_scale_within_the_bounds",),
    ),
    Fault(
        "a residual's density forgets its std",
        _RESIDUAL,
        ".square() - std.log() - 0.5",
        ".square() - 0.5",
        (f"{_ON_RESIDUAL}test_the_gaussian_density_is_that_of_torch",),
    ),
    Fault(
        "a squashed density without its slope",
        _HEADS,
        "return torch.tanh(u), (normal - log_slope(u)).sum(-1)",
        "return torch.tanh(u), normal.sum(-1)",
        (f"{_ON_HEADS}test_a_squashed_density_is_that_of_torch",),
    ),
    Fault(
        "critics share their first layer",
        _CRITICS,
        "return torch.baddbmm(self.bias, x, self.weight)",
        "return torch.baddbmm(self.bias, x, self.weight[:1].expand_as(self.weight))",
        ("tests/policies/test_critics.py::test_the_loss_of_one_head_moves_no_other",),
    ),
    Fault(
        "a function's actions for all rows are taken as one row's chunk",
        _FUNCTION,
        "if action.dim() != 3 or action",
        "if action.dim() == 3 and action",
        ("tests/policies/test_function.py::test_what_is_chosen_stays_within_the_bounds_and_has_a_chunk_per_row",),
    ),
)

_LEARNING = (
    Fault(
        "heads are regressed on their mean",
        _OFF,
        "loss = (value - target).square().mean(1).sum() + self",
        "loss = len(value) * (value.mean(0) - target).square().mean() + self",
        (f"{_ON_TD3}test_heads_that_begin_apart_end_together", f"{_ON_TD3}test_each_head_is_regressed_on_its_own"),
    ),
    Fault(
        "the pair is drawn with replacement",
        _OFF,
        "torch.randperm(self.critic.heads, generator=self.generator)[: self.config.subset]",
        "torch.randint(self.critic.heads, (self.config.subset,), generator=self.generator)",
        (f"{_ON_TD3}test_the_least_is_of_a_random_pair_without_replacement",),
    ),
    Fault("targets are the mean of the pair", _OFF, "[chosen].amin(0)", "[chosen].mean(0)", (_TARGET,)),
    Fault(
        "targets by the critics themselves",
        _OFF,
        "self.target_critic(stored, action)[",
        "self.critic(stored, action)[",
        (_TARGET,),
    ),
    Fault(
        "targets by the policy itself",
        _TD3,
        "swapped(self.learnt, self.slow)",
        "swapped(self.slow, self.slow)",
        (_TARGET,),
    ),
    Fault(
        "targets are smoothed without a bound",
        _TD3,
        "noise.clamp(-self.config.target_clip, self.config.target_clip)",
        "noise",
        (_TARGET,),
    ),
    Fault(
        "the actor ascends the least of the heads",
        _TD3,
        "loss = -self.critic(batch.stored, action).mean()",
        "loss = -self.critic(batch.stored, action).amin(0).mean()",
        (f"{_ON_TD3}test_the_actor_ascends_the_mean_of_all_heads_less_the_penalty",),
    ),
    Fault(
        "the targets never follow",
        _OFF,
        "slow.lerp_(fast, self.config.target_rate)",
        "slow.lerp(fast, self.config.target_rate)",
        (f"{_ON_TD3}test_targets_follow_slowly",),
    ),
    Fault(
        "the critics learn from the actor",
        _OFF,
        "            parameter.requires_grad_(False)",
        "            parameter.requires_grad_(True)",
        (f"{_ON_TD3}test_critics_get_nothing_from_the_actor",),
    ),
    Fault(
        "half steps are lost",
        _OFF,
        "            self.owed -= 1",
        "            self.owed = self.owed // 1 - 1",
        (f"{_ON_TD3}test_steps_follow_the_decisions_once_there_are_enough",),
    ),
    Fault(
        "idle decisions call for steps",
        _OFF,
        "new = int(rollout.valid.any(-1).sum())",
        "new = rollout.valid[..., 0].numel()",
        (f"{_ON_TD3}test_steps_follow_the_decisions_once_there_are_enough",),
    ),
    Fault(
        "the actor learns from critics that know nothing",
        _OFF,
        "if turn and self.steps >= self.config.critic_warmup:",
        "if turn:",
        (f"{_ON_TD3}test_the_actor_rests_at_first_and_then_follows_every_other_step",),
    ),
    Fault(
        "a learner that goes on has other slow weights",
        _TD3,
        'self.slow = state["slow"]',
        "self.slow = dict(self.slow)",
        (f"{_ON_TD3}test_a_saved_run_goes_on_bit_for_bit",),
    ),
    Fault(
        "validation by actions comes once only",
        _LOOP,
        "rate, self.validated_at = self.validate(), self.env_steps",
        "rate = self.validate()",
        ("tests/training/test_loop.py::test_validation_comes_after_so_many_actions_too",),
    ),
)

FAULTS = (*_MEMORY, *_RECORDED, *_POLICIES, *_LEARNING)
