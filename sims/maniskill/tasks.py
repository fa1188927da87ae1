"""What ManiSkill's tasks ask for in words, and what a task needs besides the package."""

from __future__ import annotations

import importlib
from typing import Any

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load

INSTRUCTIONS = {
    "PickCube-v1": "pick up the red cube and move it to the green goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "PushT-v1": "push the T onto the goal T",
    "PegInsertionSide-v1": "insert the orange end of the peg into the hole of the box",
    "PushCube-v1": "push the blue cube to the target",
    "PullCube-v1": "pull the blue cube to the target",
    "PokeCube-v1": "push the cube with the peg",
    "LiftPegUpright-v1": "stand the peg upright",
    "PlaceSphere-v1": "put the blue ball into the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "RollBall-v1": "roll the ball to the goal",
    "PutOnPlateInScene25Main-v3": "put the object on the plate",
}
"""Tasks with an instruction of their own; the others have their name, or what ManiSkill says itself."""
ELSEWHERE = {
    "PutOnPlateInScene25": (
        "is not in ManiSkill but in the ManiSkill fork of RL4VLA (https://github.com/gen-robot/RL4VLA), with its "
        "assets; install that and name the module that registers it, as in task='mani_skill.envs:ID'"
    )
}
"""{beginning of an id: where the tasks of that name are}."""


def instruction_of(task: str, env: Any = None) -> str:
    """The instruction of ``task``: ours, what the built ``env`` says itself, or the words of its name."""
    if task in INSTRUCTIONS:
        return INSTRUCTIONS[task]
    said = getattr(env, "get_language_instruction", None)
    if said is not None:
        return str(said()[0])
    name = task.rpartition("-v")[0] or task
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


def registered(task: str) -> Any:
    """What ManiSkill has registered as ``task``; "module:ID" imports the module that registers it first.

    Raises UserError for an unknown task and for one whose files were not downloaded.
    """
    importlib.import_module("mani_skill.envs")  # registers its own
    from mani_skill.utils.registration import REGISTERED_ENVS

    module, _, name = task.rpartition(":")
    if module:
        load(f"{module}:__name__")
    if name not in REGISTERED_ENVS:
        where = next((text for start, text in ELSEWHERE.items() if name.startswith(start)), "")
        cure = f"it {where}" if where else did_you_mean(name, REGISTERED_ENVS)
        raise UserError(f"ManiSkill has no task {name!r}, so it cannot be played; {cure}")
    found = REGISTERED_ENVS[name]
    missing = missing_assets(found.asset_download_ids or ())
    if missing:
        raise UserError(
            f"{name} needs files that are not here ({', '.join(missing)}), so it cannot be played; download them with "
            f"'python -m mani_skill.utils.download_asset {name}' where ManiSkill is installed."
        )
    return found


def missing_assets(asset_ids: Any) -> list[str]:
    """Those of ManiSkill's ``asset_ids`` (of groups: of their members) that were not downloaded."""
    from mani_skill.utils import assets

    sources: list[str] = []
    for one in asset_ids:
        inside = one in assets.DATA_GROUPS
        sources += assets.expand_data_group_into_individual_data_source_ids(one) if inside else [one]
    return sorted(one for one in sources if not assets.is_data_source_downloaded(one))
