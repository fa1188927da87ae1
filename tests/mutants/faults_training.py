"""Faults in training, critics, checkpoints and sources in another process."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FIT, _LOOP = "vla_rl/training/fit.py", "vla_rl/training/loop.py"
_GROUNDING, _IMITATION = "vla_rl/training/grounding.py", "vla_rl/training/imitation.py"
_FLOW = "vla_rl/policies/flow.py"
_NORMALIZE, _PRETRAINED = "vla_rl/policies/normalization.py", "vla_rl/pretrained.py"
_PROCESS, _ROLLOUT, _RUN = "vla_rl/experience/process.py", "vla_rl/experience/rollout.py", "vla_rl/evaluation/run.py"

_ON_FIT, _ON_LOOP = "tests/training/test_fit.py::", "tests/training/test_loop.py::"
_ON_GROUNDING, _ON_IMITATION = "tests/training/test_grounding.py::", "tests/training/test_imitation.py::"
_ON_PROCESS = "tests/experience/test_process.py::"
_BIT_FOR_BIT = f"{_ON_PROCESS}test_the_same_rollouts_bit_for_bit_before_and_after_publishing"
_SHARES = f"{_ON_GROUNDING}test_shares_are_bilinear_weights_whose_mean_position_is_the_target"
_DRAWS = f"{_ON_IMITATION}test_every_chunk_is_drawn_with_several_noises_and_times"

_SUPERVISED = (
    Fault(
        "no warm-up",
        _FIT,
        "return warm * 0.5 *",
        "return 0.5 *",
        (f"{_ON_FIT}test_the_rate_warms_up_and_decays_to_zero",),
    ),
    Fault(
        "the rate is never lowered",
        _FIT,
        "scheduler.step()",
        "pass",
        (f"{_ON_FIT}test_it_fits_and_reports_every_step",),
    ),
    Fault(
        "one order of minibatches for all epochs",
        _FIT,
        "torch.randperm(count, generator=generator)",
        "torch.randperm(count, generator=torch.Generator().manual_seed(0))",
        (f"{_ON_FIT}test_batches_are_drawn_anew_every_epoch_without_repetition",),
    ),
    Fault(
        "a NaN enters what is fitted",
        _FIT,
        "if not torch.isfinite(norm):",
        "if norm < 0:",
        (f"{_ON_FIT}test_a_nan_stops_before_it_enters_the_weights",),
    ),
    Fault(
        "pointing targets with x for y", _GROUNDING, "((uv.flip(-1) + 1) / 2 * side", "((uv + 1) / 2 * side", (_SHARES,)
    ),
    Fault("pointing targets half a cell off", _GROUNDING, "/ 2 * side - 0.5)", "/ 2 * side)", (_SHARES,)),
    Fault(
        "pointing is not weighed",
        _GROUNDING,
        "config.position_weight * error.square().mean()",
        "error.square().mean()",
        (f"{_ON_GROUNDING}test_the_loss_by_hand",),
    ),
    Fault(
        "the grounded backbone stays trainable",
        _GROUNDING,
        "backbone.eval().requires_grad_(False)",
        "backbone.eval()",
        (f"{_ON_GROUNDING}test_a_backbone_learns_to_point_at_what_is_named_and_is_then_frozen",),
    ),
    Fault(
        "one time for the whole batch",
        _FLOW,
        "uniform((len(target),), generator, like=target)",
        "uniform((1,), generator, like=target).expand(len(target))",
        (_DRAWS,),
    ),
    Fault(
        "one noise and time per chunk",
        _FLOW,
        "target = chunks.flatten(1).repeat(draws, 1)",
        "target = chunks.flatten(1).repeat(draws := 1, 1)",
        (_DRAWS,),
    ),
    Fault(
        "a chunk is imitated in another's state",
        _IMITATION,
        "mean_loss(policy, chunks.select(index), config",
        "mean_loss(policy, replace(chunks.select(index), features=chunks.select(index.flip(0)).features), config",
        (f"{_ON_IMITATION}test_both_modes_have_their_place_share_and_width",),
    ),
)

_LOOPS = (
    Fault(
        "any worse validation is a collapse",
        _LOOP,
        "found.score < self.best.score - self.config.collapse",
        "found.score < self.best.score",
        (f"{_ON_LOOP}test_a_slightly_worse_validation_changes_nothing",),
    ),
    Fault(
        "of equals the earlier is kept",
        _LOOP,
        "if score < self.score:",
        "if score <= self.score:",
        (f"{_ON_LOOP}test_of_equals_the_later_one_is_kept",),
    ),
    Fault(
        "the last weights are not validated",
        _LOOP,
        " or self.progress() >= 1",
        "",
        (f"{_ON_LOOP}test_collect_learn_publish_in_turn_and_validate_first_in_between_and_last",),
    ),
    Fault(
        "the offset of an action with the wrong sign",
        _NORMALIZE,
        "return normalized * scale + offset",
        "return normalized * scale - offset",
        ("tests/policies/test_inputs.py::test_bounds_become_one",),
    ),
    Fault(
        "the critic's inputs are not centred",
        "vla_rl/policies/heads.py",
        "self.mean.copy_(mean)",
        "self.mean.copy_(0 * mean)",
        ("tests/algorithms/test_ppo.py::test_the_critic_is_calibrated_once_and_before_the_first_value",),
    ),
    Fault(
        "the only copy of a checkpoint is a leftover",
        _PRETRAINED,
        "if old.exists() and not folder.exists():",
        "if old.exists() and folder.exists():",
        ("tests/policies/test_tiny.py::test_a_run_killed_between_the_two_moves_loses_nothing",),
    ),
    Fault(
        "the last seed is not played",
        _RUN,
        "deque(range(len(self.seeds)))",
        "deque(range(len(self.seeds) - 1))",
        ("tests/evaluation/test_run.py::test_every_seed_is_played_once_and_reported_correctly",),
    ),
    Fault(
        "rows that end together share a seed",
        _ROLLOUT,
        "[next(self.seeds) for _ in env_ids]",
        "[next(self.seeds)] * len(env_ids)",
        ("tests/experience/test_rollout.py::test_every_number_can_be_recomputed",),
    ),
)

_PROCESSES = (
    Fault(
        "published weights do not arrive",
        _PROCESS,
        "own[name].copy_(",
        "own[name].clone().copy_(",
        (_BIT_FOR_BIT,),
    ),
    Fault(
        "new weights under the old version",
        _PROCESS,
        "policy.version + 1 if version is None",
        "policy.version + 0 if version is None",
        (_BIT_FOR_BIT,),
    ),
    Fault(
        "prints go between the messages",
        "vla_rl/contract/child.py",
        "os.dup2(2, 1)",
        "pass",
        (f"{_ON_PROCESS}test_errors_of_the_acting_process_are_raised_in_the_learner",),
    ),
    Fault(
        "errors of the acting process lose their type",
        "vla_rl/contract/child.py",
        "_ERRORS.get(answer[",
        "{}.get(answer[",
        (f"{_ON_PROCESS}test_errors_of_the_acting_process_are_raised_in_the_learner",),
    ),
)

FAULTS = (*_SUPERVISED, *_LOOPS, *_PROCESSES)
