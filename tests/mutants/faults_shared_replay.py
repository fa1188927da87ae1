"""Off-policy learning by several processes, each with its share of the replay."""

from __future__ import annotations

from tests.mutants.fault import Fault

_OFF, _GRADIENTS, _STATE, _RECIPE = (
    "vla_rl/algorithms/off_policy.py",
    "vla_rl/algorithms/gradients.py",
    "vla_rl/training/shared_state.py",
    "vla_rl/recipes/off_policy.py",
)
_TWO = "tests/algorithms/test_replay_by_rank.py::"
_SAME = (f"{_TWO}test_two_processes_take_the_steps_of_one_with_all_decisions",)
_RUN = ("tests/training/test_distributed.py::test_an_off_policy_run_in_two_processes_is_resumed_bit_for_bit",)

FAULTS = (
    Fault(
        "off-policy processes sum their gradients and do not average them",
        _GRADIENTS,
        "        parameter.grad /= reducer.size",
        "        parameter.grad /= 1",
        _SAME,
    ),
    Fault(
        "off-policy processes step with their own gradients",
        _OFF,
        "        mean_gradients(self.reducer, parameters.values())",
        "        pass",
        _SAME,
    ),
    Fault(
        "each of several off-policy processes draws a whole batch",
        _OFF,
        "self.replay.sample(self.config.batch // self.reducer.size, self.generator)",
        "self.replay.sample(self.config.batch, self.generator)",
        _SAME,
    ),
    Fault(
        "off-policy processes count their own decisions",
        _OFF,
        "        total: Tensor = self.reducer.sum(torch.tensor(counts, dtype=torch.float64))",
        "        total = torch.tensor(counts, dtype=torch.float64)",
        _SAME,
    ),
    Fault(
        "off-policy processes standardise inputs by their own decisions",
        _OFF,
        "public(dict(features)), self.reducer)",
        "public(dict(features)), OneProcess())",
        _SAME,
    ),
    Fault(
        "an off-policy process learns while another has nothing to draw",
        _OFF,
        "        if empty:",
        "        if empty == self.reducer.size:",
        (f"{_TWO}test_nobody_learns_while_a_process_has_nothing_to_draw",),
    ),
    Fault(
        "processes that draw different noise may share a guard",
        _OFF,
        "    if processes > 1 and (config.release or config.fallback):",
        "    if processes > 2 and (config.release or config.fallback):",
        (f"{_TWO}test_what_processes_cannot_share_is_said",),
    ),
    Fault(
        "several processes cannot save a number that was expanded",
        _STATE,
        "    row = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)",
        "    row = flat",
        _RUN,
    ),
    Fault(
        "off-policy processes explore and draw alike",
        _RECIPE,
        "        draws = generator(context.seed, 4 + 100 * context.group.rank)",
        "        draws = generator(context.seed, 4)",
        ("tests/recipes/test_trainers.py::test_processes_draw_different_decisions",),
    ),
)
