"""Names on the Hugging Face hub where a folder may stand: ``owner/name``, ``owner/name@revision``.

huggingface_hub owns cache, tokens, revisions and downloads that go on where they stopped.  A name becomes the folder of
its revision in the cache, which a run notes: going on with it needs no network, and never another revision.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vla_rl.contract.errors import UserError
from vla_rl.contract.load import installed

_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.][\w./-]*))?")
_LOCAL = ("runs", "downloads", "configs")  # folders of the documentation, which no owner on the hub is called
_MODEL = ("*.json", "*.safetensors", "*/*.json", "*/*.safetensors")  # data; no code is fetched, and no pickle


def located(name: str) -> str:
    """``name`` itself, or the folder of the model that it names on the hub, downloaded where it is not there yet.

    What is a folder here, or would be one in a folder that is here, is none on the hub.
    Raises UserError when the hub has no such model or revision, or not for this user, and when it cannot be reached.
    """
    found, owner = _NAME.fullmatch(name), Path(name).parent
    if found is None or Path(name).exists() or owner.is_dir() or owner.name in _LOCAL:
        return name
    hub: Any = installed("huggingface_hub", f"{name!r}, which is no folder here, cannot be downloaded", "hub")
    try:
        return str(hub.snapshot_download(found["repository"], revision=found["revision"], allow_patterns=[*_MODEL]))
    except (OSError, ValueError) as error:  # its errors are one or the other
        raise UserError(_sentence(hub.errors, name, error)) from error


def _sentence(errors: Any, name: str, error: Exception) -> str:
    """What went wrong with ``name``, what follows and what to do."""
    repository, _, revision = name.partition("@")
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repository!r} asks for an agreement on the Hugging Face hub, so it was not downloaded; accept it on its "
            "page and log in (hf auth login)."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{repository!r} has no revision {revision!r} on the Hugging Face hub, so nothing was downloaded; name a "
            "branch, tag or commit that its page lists."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repository!r} is no folder here and no model that the Hugging Face hub shows you, so there is nothing "
            "to open; correct the name, or log in (hf auth login) if it is private."
        )
    reason = str(error).strip().partition("\n")[0]
    return (
        f"{repository!r} is no folder here, and it could not be downloaded from the Hugging Face hub ({reason}), so "
        "there is nothing to open; try again with a network, where a download goes on, or name a folder."
    )
