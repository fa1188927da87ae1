"""Faults in sharing the weights of a policy among processes."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SHARDING, _LOCKSTEP, _CLIP = (
    "vla_rl/training/sharding.py",
    "vla_rl/training/lockstep.py",
    "vla_rl/algorithms/gradients.py",
)
_ON = "tests/training/test_sharding.py::"
_TWO = f"{_ON}test_two_processes_that_share_the_weights_learn_what_one_learns[expert]"

FAULTS = (
    Fault(
        "gradients of shared weights are means over the processes",
        _SHARDING,
        "unit.set_gradient_divide_factor(1.0)",
        "unit.set_gradient_divide_factor(2.0)",
        (_TWO,),
    ),
    Fault(
        "gradients are clipped by the norm of the shards alone",
        _CLIP,
        "for part in (shards, whole) if part]",
        "for part in (shards,) if part]",
        (_TWO,),
    ),
    Fault(
        "a file of gathered tensors places each where the one before it begins",
        "vla_rl/pretrained.py",
        "begin, end = end, end + tensor.numel()",
        "begin, end = 0, end + tensor.numel()",
        (f"{_ON}test_gathered_files_are_as_those_of_safetensors",),
    ),
    Fault(
        "no tensor is a shard",
        "vla_rl/contract/shards.py",
        "return module is not None and isinstance(item, module.DTensor)",
        "return False",
        (_TWO,),
    ),
    Fault(
        "every process imports what shards need",
        "vla_rl/contract/shards.py",
        'sys.modules.get("torch.distributed.tensor")',
        '__import__("importlib").import_module("torch.distributed.tensor")',
        (f"{_ON}test_nothing_of_sharding_is_imported_where_nothing_is_shared",),
    ),
    Fault(
        "a sharded run starts without torchrun",
        _SHARDING,
        "if not (dist.is_available() and dist.is_initialized()):",
        "if not dist.is_available():",
        ("tests/recipes/test_sharded.py::test_sharded_without_torchrun_is_refused",),
    ),
)
