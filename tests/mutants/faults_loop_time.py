"""Faults in where the time of iterations goes, and in environments that training and validation share."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PROGRESS, _LOOP, _BACKGROUND = (
    "vla_rl/recipes/progress.py",
    "vla_rl/training/loop.py",
    "vla_rl/experience/background.py",
)
_ROLLOUT, _DRIVER, _GROUPS = (f"vla_rl/experience/{name}.py" for name in ("rollout", "driver", "groups"))
_SHARED, _STAGES, _STATE = (f"vla_rl/recipes/{name}.py" for name in ("shared_envs", "stages", "state_ppo"))
_ON_PROGRESS, _ON_SHARED = "tests/recipes/test_progress.py::test_", "tests/recipes/test_shared_envs.py::test_"
_SHARES = (f"{_ON_PROGRESS}shares_are_of_the_wall_time_of_all_iterations",)
_BESIDE = (f"{_ON_PROGRESS}what_collectors_did_beside_is_said_apart",)
_SECONDS = ("tests/training/test_loop.py::test_the_seconds_of_an_iteration_are_those_of_its_parts",)
_AHEAD = ("tests/experience/test_background.py::test_the_learner_s_waiting_is_its_own_and_collecting_is_beside",)
_SAME = (f"{_ON_SHARED}validation_in_between_leaves_training_as_it_is_and_sees_its_own_seeds",)
_BROKEN_OFF = (f"{_ON_SHARED}episodes_that_cannot_be_put_aside_are_broken_off_and_the_next_seeds_begin",)
_REFUSED = (f"{_ON_SHARED}what_cannot_be_shared_is_refused_in_one_sentence",)

FAULTS = (
    Fault("encoding is not inference", _PROGRESS, '("encode_s", "act_s")', '("act_s",)', _SHARES),
    Fault(
        "the first validation is an iteration", _PROGRESS, 'if "time/iteration_s" in metrics:', "if metrics:", _SHARES
    ),
    Fault("the rest of the time is not shown", _PROGRESS, 'own["other"] =', "_ =", _SHARES),
    Fault(
        "what collectors do is part of the learner's time",
        _PROGRESS,
        'self._parts("time"), self._parts("collector")',
        'Counter(self._parts("time")) + Counter(self._parts("collector")), {}',
        _BESIDE,
    ),
    Fault(
        "the smallest part is named",
        _PROGRESS,
        "max(parts, key",
        "min(parts, key",
        (f"{_ON_PROGRESS}the_largest_part_of_an_iteration_is_named",),
    ),
    Fault(
        "validation slows the run down",
        _PROGRESS,
        ' - metrics.get("time/validate_s", 0.0)',
        "",
        (f"{_ON_PROGRESS}the_speed_leaves_validation_out",),
    ),
    Fault(
        "the shares are not printed",
        _PROGRESS,
        'console.print(f"time: {shares}")',
        "pass",
        (f"{_ON_PROGRESS}the_shares_are_printed",),
    ),
    Fault(
        "an iteration is its learning",
        _LOOP,
        'metrics["time/iteration_s"] = time.perf_counter() - start',
        'metrics["time/iteration_s"] = metrics["time/learn_s"]',
        _SECONDS,
    ),
    Fault(
        "validation takes no time",
        _LOOP,
        "        seconds = time.perf_counter() - start",
        "        seconds = 0.0",
        _SECONDS,
    ),
    Fault(
        "collecting beside the learner is the learner's time",
        _BACKGROUND,
        'name.replace("time/", "collector/")',
        "name",
        _AHEAD,
    ),
    Fault(
        "waiting for collectors is not counted",
        _BACKGROUND,
        '| {"time/wait_s": stop - start})',
        ")",
        _AHEAD,
    ),
    Fault(
        "training does not get its episodes back",
        _ROLLOUT,
        "        self.load_state_dict(saved)",
        "        pass",
        _SAME,
    ),
    Fault(
        "an episode that was broken off goes on",
        _DRIVER,
        "self.obs, self._features, self._begun, self._unchecked = None, None, None, None",
        "self._begun = None",
        _BROKEN_OFF,
    ),
    Fault(
        "the policy remembers the episode that was broken off",
        _DRIVER,
        "        self.state = self.policy.initial_state(self.env.num_envs)",
        "        pass",
        _BROKEN_OFF,
    ),
    Fault(
        "groups go on from what was validated",
        _GROUPS,
        "        self.driver.forget()",
        "        pass",
        (f"{_ON_SHARED}groups_lend_their_environments_too",),
    ),
    Fault(
        "shared environments are made twice",
        _STAGES,
        "closing(shared or evaluation.evaluator(context.env))",
        "closing(evaluation.evaluator(context.env))",
        (f"{_ON_SHARED}a_run_is_the_same_with_one_set_of_environments_as_with_two[improve]",),
    ),
    Fault(
        "a state-based run validates in the middle of training's episodes",
        _STATE,
        "lending(source).lent if self.evaluation.share_env else nullcontext",
        "nullcontext",
        (f"{_ON_SHARED}a_state_based_run_is_the_same_too",),
    ),
    Fault(
        "validation shares what only training may vary",
        _SHARED,
        " or env.training_options:",
        ":",
        _REFUSED,
    ),
    Fault(
        "environments are borrowed while they collect",
        _SHARED,
        "if not isinstance(source, LendingSource):",
        "if False:",
        _REFUSED,
    ),
    Fault(
        "other processes share the environments of this one",
        _STAGES,
        "if self.share_env and self.processes > 1:",
        "if False:",
        _REFUSED,
    ),
)
