"""Faults in the adapter for Gymnasium, in running statistics, and in who observes privileged state."""

from __future__ import annotations

from tests.mutants.fault import Fault

_GYM, _STATISTICS = "sims/gym.py", "vla_rl/policies/statistics.py"
_SHARED, _PPO = "vla_rl/algorithms/policy_gradient.py", "vla_rl/algorithms/ppo.py"
_FEED_FORWARD, _ROLLOUT = "vla_rl/policies/feed_forward.py", "vla_rl/experience/rollout.py"
_CONTRACT = "vla_rl/contract/policy.py"
_ON_GYM, _ON_STATISTICS = "tests/sims/test_gym.py::", "tests/policies/test_statistics.py::"
_ON_WORDS = "tests/sims/test_gym_words.py::"
_ENDS = f"{_ON_GYM}test_ends_inside_a_chunk_are_exact_and_rows_idle_until_they_are_reset"
_MERGED = f"{_ON_STATISTICS}test_merged_statistics_are_those_of_all_the_data"
_SHOWN = f"{_ON_STATISTICS}test_the_policy_is_never_given_what_is_privileged_and_the_critic_is"
_WHEN = f"{_ON_STATISTICS}test_statistics_move_after_the_update_only"

FAULTS = (
    Fault(
        "a time limit wins over a termination in the same step",
        _GYM,
        "np.where(terminated, FAILURES, np.where(late, TIME_LIMIT, 0))",
        "np.where(late, TIME_LIMIT, np.where(terminated, FAILURES, 0))",
        (_ENDS,),
    ),
    Fault(
        "Gymnasium's termination is lost",
        _GYM,
        "np.where(terminated, FAILURES, np.where(late, TIME_LIMIT, 0))",
        "np.where(terminated | late, TIME_LIMIT, 0)",
        (_ENDS,),
    ),
    Fault(
        "a snapshot forgets the last action",
        _GYM,
        "for action in self._actions[env_id, : self._book.time[env_id]]:",
        "for action in self._actions[env_id, : self._book.time[env_id] - 1]:",
        (f"{_ON_GYM}test_a_snapshot_is_played_again_into_another_row",),
    ),
    Fault(
        "every environment has the first one's seed",
        _GYM,
        "self._rows.reset(env_ids.tolist(), seeds.tolist())",
        "self._rows.reset(env_ids.tolist(), [int(seeds[0])] * env_ids.size)",
        (f"{_ON_GYM}test_an_episode_is_the_one_that_gymnasium_plays",),
    ),
    Fault(
        "privileged entries stay in the state",
        _GYM,
        "self._public = np.setdiff1d(np.arange(size), np.array(taken, int))",
        "self._public = np.arange(size)",
        (f"{_ON_GYM}test_privileged_entries_leave_the_state",),
    ),
    Fault(
        "an observation that is not a number is handed out",
        _GYM,
        "finite = np.isfinite(vectors).all(1) & np.isfinite(value)",
        "finite = np.isfinite(value)",
        (f"{_ON_GYM}test_an_observation_that_is_not_finite_truncates_and_is_not_handed_out",),
    ),
    Fault(
        "an environment's buffer is kept instead of a copy",
        "sims/gym_rows.py",
        "return obs.copy()",
        "return obs",
        (f"{_ON_WORDS}test_the_last_observation_of_one_buffer_is_not_the_next_episode_s_first",),
    ),
    Fault(
        "success is what any step says",
        _GYM,
        "for k in np.flatnonzero(ended):",
        "for k in range(env_ids.size):",
        (f"{_ON_WORDS}test_success_in_info_is_that_of_the_last_step",),
    ),
    Fault(
        "info['success'] is not read",
        "sims/gym_rows.py",
        'SUCCESS_KEYS = ("is_success", "success")',
        'SUCCESS_KEYS = ("is_success",)',
        (f"{_ON_WORDS}test_success_in_info_is_that_of_the_last_step",),
    ),
    Fault(
        "a reward that is not finite is cut in silence",
        _GYM,
        "if not self._warned:",
        "if False:",
        (f"{_ON_WORDS}test_a_reward_that_is_not_a_number_is_named_and_never_handed_out",),
    ),
    Fault(
        "an index outside its space marks its neighbour",
        "sims/gym_spaces.py",
        "(index >= 0) & (index < counts)",
        "(index >= 0)",
        (f"{_ON_WORDS}test_what_cannot_be_right_is_one_sentence_that_names_the_environment",),
    ),
    Fault(
        "the largest float counts as a bound of actions",
        "sims/gym_spaces.py",
        "else 1e30)",
        "else np.inf)",
        (f"{_ON_WORDS}test_unbounded_actions_are_refused_with_advice_that_helps",),
    ),
    Fault(
        "merging forgets how far apart the means are",
        _STATISTICS,
        "squares = squares + self.variance * self.count + gap.square() * self.count * fresh / total",
        "squares = squares + self.variance * self.count",
        (f"{_ON_STATISTICS}test_by_hand",),
    ),
    Fault(
        "statistics hold the newest data alone",
        _STATISTICS,
        "self.count.copy_(total)",
        "self.count.copy_(fresh)",
        (_MERGED, f"{_ON_STATISTICS}test_by_hand"),
    ),
    Fault(
        "every process has statistics of its own",
        _STATISTICS,
        "mean = reducer.sum(values.sum(0)) / fresh",
        "mean = values.mean(0) + 0 * reducer.sum(values.sum(0))",
        (f"{_ON_STATISTICS}test_several_processes_have_the_statistics_of_one",),
    ),
    Fault(
        "the mean is subtracted in single precision",
        _STATISTICS,
        "standard = (physical - self.mean) * scale",
        "standard = (physical - self.mean.to(physical)) * scale",
        (f"{_ON_STATISTICS}test_digits_far_from_zero_are_kept",),
    ),
    Fault(
        "statistics are not among the weights",
        _FEED_FORWARD,
        "return dict(self.named_parameters())",
        "return {name: item for name, item in self.named_parameters() if item.requires_grad}",
        (f"{_ON_STATISTICS}test_statistics_go_wherever_weights_go",),
    ),
    Fault(
        "statistics are updated before the update has used them",
        _FEED_FORWARD,
        "return encode_inputs(obs, self.spec, self.config.cameras, self.last.weight.device)",
        'return self.standardize.observe(torch.as_tensor(obs.state), __import__("vla_rl.contract.batch").contract.batch'
        ".OneProcess()) or encode_inputs(obs, self.spec, self.config.cameras, self.last.weight.device)",
        (f"{_ON_STATISTICS}test_the_ratio_is_one_before_every_update",),
    ),
    Fault(
        "statistics move before the update",
        _SHARED,
        "old = self._old_likelihood(batch, metrics)",
        "old = [o.observe(batch.features, self.reducer) for o in self._observers()] and "
        "self._old_likelihood(batch, metrics)",
        (_WHEN,),
    ),
    Fault(
        "the critic's statistics stay those of the first rollout",
        _PPO,
        "return super()._observers() + ([self.critic] if isinstance(self.critic, Observer) else [])",
        "return super()._observers()",
        (_WHEN,),
    ),
    Fault(
        "acting gives the policy all observations",
        _ROLLOUT,
        "return {**features, **extras}",
        "features.update(extras)\n        return features",
        (_SHOWN,),
    ),
    Fault(
        "learning gives the policy all observations",
        _SHARED,
        "new = self.policy.log_prob(public(dict(micro.features)), micro.sample, micro.aux)",
        "new = self.policy.log_prob(dict(micro.features), micro.sample, micro.aux)",
        (_SHOWN,),
    ),
    Fault(
        "the policy encodes all observations",
        _CONTRACT,
        "features = policy.encode(shown)",
        "features = policy.encode(obs)",
        (_SHOWN,),
    ),
    Fault(
        "a return is that of the last chunk",
        "vla_rl/evaluation/run.py",
        "self.rewards[env_id] += step.reward[env_id].tolist()",
        "self.rewards[env_id] = step.reward[env_id].tolist()",
        ("tests/evaluation/test_run.py::test_every_seed_is_played_once_and_reported_correctly",),
    ),
    Fault(
        "the interval is that of one episode",
        "vla_rl/evaluation/stats.py",
        "half = student(freedom) / math.sqrt(n)",
        "half = student(freedom)",
        ("tests/evaluation/test_stats.py::test_mean_return",),
    ),
    Fault(
        "the critic never learns from what is privileged",
        "vla_rl/policies/heads.py",
        "self.keys, self.size = tuple(sizes), sum(sizes.values())",
        'self.keys, self.size = tuple("state" for name in sizes), sum(sizes.values())',
        (f"{_ON_STATISTICS}test_the_critic_explains_what_only_it_can_see",),
    ),
)
