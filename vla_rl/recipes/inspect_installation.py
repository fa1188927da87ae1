"""What ``vla-rl inspect`` says about this installation.

Nothing heavy is imported before it is looked at, so it works on a machine where half of it is missing.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path

from rich.console import Console

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.recipes import sims
from vla_rl.recipes.tables import table

# Distribution -> the extra of vla-rl that brings it; "" for what comes always.
PACKAGES = dict.fromkeys(("numpy", "msgpack", "tyro", "rich"), "")
PACKAGES |= {"torch": "train", "safetensors": "train", "mujoco": "mujoco", "gymnasium": "gym", "diffusers": "diffusion"}
PACKAGES |= {"av": "report", "pillow": "report", "jinja2": "report", "tensorboard": "tracking", "wandb": "tracking"}


def show_installation(show: Console) -> None:
    """Print versions, devices, renderers and environments; beside what is missing, the command that installs it."""
    versions = [("python", platform.python_version())] + [(name, _version(name)) for name in PACKAGES]
    show.print(table("installed", ("package", "version"), [*versions, ("contract", str(CONTRACT_VERSION))]))
    show.print(table("devices", ("device", ""), _devices()))
    drivers = [("Vulkan, for ManiSkill", sims.maniskill_driver())]
    show.print(table("renderers", ("", ""), [*_renderers(), *drivers]))
    show.print(table("environments", ("name", "what it is"), [(name, _about(name)) for name in sorted(catalog())]))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return missing_package(package)


def missing_package(package: str) -> str:
    """That ``package`` is not installed, and the command that installs it."""
    return f"not installed: pip install 'vla-rl[{PACKAGES.get(package) or 'all'}]'"


def _devices() -> list[tuple[str, str]]:
    found = [("cpu", f"{os.cpu_count()} cores")]
    try:
        import torch
    except ImportError as error:
        return [*found, ("cuda", f"unknown: torch cannot be imported ({error})")]
    gpus = [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    return found + (gpus or [("cuda", "none")])


def _renderers() -> list[tuple[str, str]]:
    try:
        return list(sims.renderers().items())
    except ImportError as error:
        return [("none", f"mujoco cannot be imported ({error})")]


def catalog() -> dict[str, str]:
    """{name: "module:make"} of the environments that have a name."""
    entries: dict[str, str] = sims.catalog().CATALOG
    return entries


def _about(name: str) -> str:
    """The first line of the entry's docstring, read without importing what may not be installed."""
    module = catalog()[name].partition(":")[0]
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    return (ast.get_docstring(ast.parse(source)) or f"{module} is missing").partition("\n")[0]
