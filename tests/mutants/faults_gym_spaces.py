"""Faults in how Gymnasium's spaces and vector environments are translated, in discrete actions and in pixels."""

from __future__ import annotations

from tests.mutants.fault import Fault

_LAWS = "tests/policies/test_likelihoods.py"
_LAW = f"{_LAWS}::test_densities_entropies_and_kl_are_those_of_torch[categorical per chunk]"
_SPACES, _ROWS, _BOOK = "sims/gym_spaces.py", "sims/gym_rows.py", "vla_rl/contract/rows.py"
_CATEGORICAL, _ON_CATEGORICAL = "vla_rl/policies/categorical.py", "tests/policies/test_categorical.py::"
_ON_SPACES, _ON_VECTOR = "tests/sims/test_gym_spaces.py::", "tests/sims/test_gym_vector.py::"
_APART = f"{_ON_SPACES}test_an_observation_is_taken_apart"
_ACTIONS = f"{_ON_SPACES}test_actions_of_a_space_from_vectors"
_INDICES = f"{_ON_SPACES}test_indices_count_from_where_the_space_starts"
_REFUSED = f"{_ON_SPACES}test_spaces_without_a_policy_are_refused_in_one_sentence"
_PLAYS = f"{_ON_VECTOR}test_a_vector_environment_plays_the_episodes_of_single_ones"
_ROW_BY_ROW = f"{_ON_VECTOR}test_an_id_with_a_vector_form_only_is_played_row_by_row"

FAULTS = (
    Fault(
        "a one-hot index ignores where the space starts",
        _SPACES,
        "index = np.ravel(value) - start",
        "index = np.ravel(value) % counts",
        (_APART,),
    ),
    Fault(
        "an image with its channels first is handed out as it is",
        _SPACES,
        "return image if image.shape[2] <= image.shape[0] else np.moveaxis(image, 0, 2)",
        "return image",
        (_APART,),
    ),
    Fault(
        "a small board is taken for a picture",
        _SPACES,
        "(len(space.shape) == 2 and min(space.shape) >= _SMALLEST_GREY)",
        "len(space.shape) == 2",
        (_APART,),
    ),
    Fault(
        "an action loses where its indices start",
        _SPACES,
        'return _Part(start, start + counts - 1, "int64")',
        'return _Part(0 * start, counts - 1, "int64")',
        (_INDICES,),
    ),
    Fault(
        "parts of a dict action are all given the first values",
        _SPACES,
        "(action[place] for place in self._places)",
        "(action[self._places[0]] for _ in self._places)",
        (_ACTIONS,),
    ),
    Fault(
        "numbers and indices are mixed in one action",
        _SPACES,
        "if len(kinds) > 1:",
        "if len(kinds) > 2:",
        (_REFUSED,),
    ),
    Fault(
        "a fraction is cut to an index",
        _BOOK,
        "if spec.discrete:",
        "if spec.discrete and spec.images:",
        (f"{_ON_SPACES}test_a_fraction_is_no_index_and_moves_nothing",),
    ),
    Fault(
        "indices are executed as numbers",
        _BOOK,
        "np.minimum(np.maximum(action, low), high).astype(spec.action.dtype)",
        "np.minimum(np.maximum(action, low), high)",
        (_INDICES,),
    ),
    Fault(
        "the last observation of a row that restarted at once is the next episode's first",
        _ROWS,
        "if self._mode == AutoresetMode.SAME_STEP:",
        "if self._mode == AutoresetMode.NEXT_STEP and not infos:",
        (_PLAYS,),
    ),
    Fault(
        "an ended row is stepped without a reset",
        _ROWS,
        "if self._mode == AutoresetMode.DISABLED and self._ended.any():",
        "if self._mode == AutoresetMode.SAME_STEP and self._ended.any():",
        (_PLAYS,),
    ),
    Fault(
        "a reset of some rows resets all of them",
        _ROWS,
        'options = None if mask.all() else {"reset_mask": mask}',
        "options = None",
        (_PLAYS,),
    ),
    Fault(
        "rows are given each other's seeds",
        _ROWS,
        "by_row = dict(zip(env_ids, seeds, strict=True))",
        "by_row = dict(zip(env_ids, list(seeds)[::-1], strict=True))",
        (_PLAYS,),
    ),
    Fault(
        "a vector environment that cannot reset one row is taken",
        _ROWS,
        "if not kept:",
        "if not kept and self._mode is None:",
        (f"{_ON_VECTOR}test_a_vector_environment_that_resets_all_rows_at_once_is_refused_and_single_ones_are_not",),
    ),
    Fault(
        "a vector environment of one row shows the next episode at an end",
        _ROWS,
        "if self._same_step and bool(terminated[0] or truncated[0]):",
        "if False:",
        (_ROW_BY_ROW,),
    ),
    Fault(
        "a policy for physical quantities takes indices",
        "vla_rl/policies/normalization.py",
        "if spec.discrete:",
        "if spec.discrete and spec.images:",
        ("tests/policies/test_categorical.py::test_policies_for_physical_quantities_refuse_discrete_actions",),
    ),
    Fault(
        "indices come back from a worker as numbers",
        "sims/isolation/messages.py",
        "(horizon, *spec.action.shape), spec.action.dtype)",
        '(horizon, *spec.action.shape), "float32")',
        (f"{_ON_SPACES}test_discrete_actions_reach_a_process_of_its_own",),
    ),
    Fault(
        "an impossible index is possible",
        _CATEGORICAL,
        "return logits.masked_fill(self.impossible, _IMPOSSIBLE).log_softmax(-1)",
        "return logits.log_softmax(-1)",
        (f"{_ON_CATEGORICAL}test_samples_are_as_likely_as_declared_and_never_impossible",),
    ),
    Fault(
        "the density of a chunk is that of its first entry",
        _CATEGORICAL,
        "self.logprob(_log_density(log_probs, sample.flatten(1)))",
        "self.logprob(_log_density(log_probs, sample.flatten(1)))[:1].expand(len(sample))",
        (_LAW,),
    ),
    Fault(
        "actions count from 0 wherever the space starts",
        _CATEGORICAL,
        "return ActionOut(sample + self.first, sample, logprob, {}, self.version), state",
        "return ActionOut(sample, sample, logprob, {}, self.version), state",
        (f"{_ON_CATEGORICAL}test_samples_are_as_likely_as_declared_and_never_impossible",),
    ),
    Fault(
        "what is deployed of a categorical policy is drawn",
        _CATEGORICAL,
        'if mode == "sample":',
        'if mode != "sample" or generator:',
        (f"{_ON_CATEGORICAL}test_what_is_deployed_is_the_most_likely",),
    ),
    Fault(
        "the KL is that of the other direction",
        _CATEGORICAL,
        "return (one.exp() * (one - other)).sum((1, 2))",
        "return (other.exp() * (other - one)).sum((1, 2))",
        (_LAW,),
    ),
    Fault(
        "a critic of pixels is blind",
        "vla_rl/policies/critics.py",
        "inputs = torch.cat([inputs, self.vision(features)], -1)",
        "inputs = torch.cat([inputs, 0 * self.vision(features)], -1)",
        (f"{_ON_CATEGORICAL}test_a_critic_sees_pixels_of_a_whole_rollout",),
    ),
    Fault(
        "a policy of pixels is blind",
        "vla_rl/policies/feed_forward.py",
        "found: Tensor = self.network(torch.cat([state, self.vision(features)], -1))",
        "found: Tensor = self.network(torch.cat([state, 0 * self.vision(features)], -1))",
        (f"{_ON_CATEGORICAL}test_the_actions_decide_which_policy_is_built_and_its_actions_depend_on_the_pixels",),
    ),
)
