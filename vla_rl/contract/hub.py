"""Names on the Hugging Face hub where a folder may stand: ``owner/name``, ``owner/name@revision``.

huggingface_hub owns cache, tokens, revisions and transfers that go on where they stopped.  A name becomes the folder of
its revision in the cache.  What is kept names that revision by its commit (:func:`portable`): going on needs no network
where the files are there, never another revision, and may be on another machine.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vla_rl.contract.errors import UserError
from vla_rl.contract.load import installed

Kind: TypeAlias = Literal["model", "dataset"]
_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"(?:models|datasets)--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
_LOCAL = ("runs", "downloads", "configs")  # folders of the documentation, which no owner on the hub is called
MODEL_FILES = ("*.json", "*.safetensors")  # in any folder; data: no code is fetched, and no pickle
DATASET_META = "meta/*"  # of a dataset in LeRobot's format: what it is and where each episode lies
LEROBOT = "lerobot:"  # before the folder, or the name, of a policy that LeRobot runs (vla_rl/policies/lerobot)
# What OpenVLA-OFT writes beside a model: heads and projectors, each a pickle, and what tells that it is one.
_STATISTICS, _PART, _DATA = "dataset_statistics.json", "*--*_checkpoint.pt", ".safetensors"
_VERSIONS = ("v3.0", None)  # LeRobot tags the commit of a dataset that is in this format; None: the main branch


@dataclass(frozen=True)
class Repository:
    """``owner/name`` on the hub.  ``revision``: a branch, tag or commit; None for the newest that can be read."""

    name: str
    revision: str | None = None
    kind: Kind = "model"

    def __str__(self) -> str:
        return self.name + (f"@{self.revision}" if self.revision else "")

    def download(self, patterns: Collection[str]) -> Path:
        """The folder of this revision in the cache, with the files that match ``patterns``, as those of fnmatch.

        Without a network, what is there.  Raises UserError when the hub has no such repository or revision, or not for
        this user, and when it can neither be reached nor needs not to be.
        """
        hub = client(f"{str(self)!r}, which is no folder here, cannot be downloaded")
        alone, problem = _COMMIT.fullmatch(self.revision or "") is not None and not self._reached(hub), None
        for revision in _VERSIONS if self.kind == "dataset" and self.revision is None else (self.revision,):
            given = {"repo_type": self.kind, "revision": revision, "local_files_only": alone}
            try:
                return Path(hub.snapshot_download(self.name, allow_patterns=[*patterns], **given))
            except (hub.errors.RevisionNotFoundError, hub.errors.LocalEntryNotFoundError) as error:
                problem = problem if alone and problem else error
                alone = isinstance(error, hub.errors.LocalEntryNotFoundError)  # nothing else is taken from the hub
            except errors_of(hub) as error:
                problem = error
                break
        raise UserError(self._sentence(hub.errors, problem or OSError())) from problem

    def _reached(self, hub: Any) -> bool:
        """Whether the hub answers: of a commit, the client asks for nothing before the files, and that long."""
        try:
            hub.HfApi().repo_info(self.name, repo_type=self.kind)
        except hub.errors.HfHubHTTPError:
            return True
        except errors_of(hub):
            return False
        return True

    def _sentence(self, errors: Any, error: Exception) -> str:
        """What went wrong, what follows and what to do."""
        if isinstance(error, errors.GatedRepoError):
            return (
                f"{self.name!r} asks for an agreement on the Hugging Face hub, so it was not downloaded; accept it on "
                "its page and log in (hf auth login)."
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return (
                f"{self.name!r} has no revision {self.revision or 'main'!r} on the Hugging Face hub, so nothing was "
                "downloaded; name a branch, tag or commit that its page lists."
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"{self.name!r} is no folder here and no {self.kind} that the Hugging Face hub shows you, so there is "
                "nothing to open; correct the name, or log in (hf auth login) if it is private."
            )
        return (
            f"{self.name!r} is no folder here, and it could not be downloaded from the Hugging Face hub "
            f"({first_line(error)}), so there is nothing to open; try again with a network, where a download goes on, "
            "or name a folder."
        )


def client(otherwise: str) -> Any:
    """huggingface_hub with its ``errors``; raises UserError where it is not installed: what is so ``otherwise``."""
    installed("huggingface_hub.errors", otherwise, "hub")  # which it does not import itself
    return installed("huggingface_hub", otherwise, "hub")


def errors_of(hub: Any) -> tuple[type[Exception], ...]:
    """What the client, and the library that it sends by, raise."""
    return (OSError, ValueError, RuntimeError, hub.errors.HTTPError)


def first_line(error: Exception) -> str:
    """The first line of what ``error`` says, or its name."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def named(name: str, kind: Kind = "model") -> Repository | None:
    """What ``name`` names, whatever is here; None where no repository can be called that."""
    found = _NAME.fullmatch(name)
    return None if found is None else Repository(found["repository"], found["revision"], kind)


def repository(name: str, kind: Kind = "model") -> Repository | None:
    """What ``name`` names on the hub; None where it is a folder here, or would be one in a folder that is here."""
    owner = Path(name).parent
    here = Path(name).exists() or owner.is_dir() or owner.name in _LOCAL
    return named(name, kind) if is_pinned(name) or not here else None


def is_pinned(name: str) -> bool:
    """Whether ``name`` is ``owner/name@COMMIT``, which is never a folder."""
    found = named(name)
    return found is not None and _COMMIT.fullmatch(found.revision or "") is not None


def names_lerobot(name: object) -> bool:
    """Whether ``name`` is that of a policy which LeRobot runs, and of no folder that we open."""
    return str(name).startswith(LEROBOT)


def located(name: str) -> str:
    """``name`` itself, or the folder of the model that it names on the hub, downloaded where it is not there yet."""
    if names_lerobot(name):
        return LEROBOT + located(name.removeprefix(LEROBOT))
    found = repository(name)
    if found is None:
        return name
    folder = found.download(MODEL_FILES)
    _require_parts(found, folder)
    return str(folder)


def _require_parts(found: Repository, folder: Path) -> None:
    """Raise UserError where a part of an OpenVLA-OFT (its head) is a pickle there, which ``folder`` does not show.

    Without a network it is not looked for again: it was when the folder was downloaded.
    """
    if not (folder / _STATISTICS).is_file():
        return
    hub = client(f"{str(found)!r} cannot be looked at")
    try:
        files = [Path(name) for name in hub.HfApi().list_repo_files(found.name, revision=found.revision)]
    except errors_of(hub):
        return
    pickles = [file.name for file in files if file.match(_PART) and not (folder / file).with_suffix(_DATA).is_file()]
    if pickles:
        raise UserError(
            f"{found.name!r} has a part that is a pickle ({pickles[0]}), which is not downloaded, so its actions would "
            f"be others without it; download it all into a folder and write that part as {_DATA} (docs/bring/vla.md)."
        )


def cached(name: str, file: str) -> Path | None:
    """The folder of the model ``name`` in the cache, without asking, if its ``file`` is there; others may not be."""
    found = repository(name)
    hub = client(f"{name!r} cannot be downloaded")
    path = found and hub.try_to_load_from_cache(found.name, file, revision=found.revision)
    return Path(path).parent if isinstance(path, str) else None


def portable(folder: str | Path) -> str:
    """How a ``folder`` is named elsewhere: ``owner/name@COMMIT`` for one of the hub's cache, else its whole path."""
    if is_pinned(str(folder)):
        return str(folder)
    whole = Path(folder).resolve()
    found = _CACHED.fullmatch("/".join(whole.parts[-3:]))
    return f"{found['owner']}/{found['name']}@{found['commit']}" if found else str(whole)


def pinned(name: str) -> str:
    """``name`` itself, or the dataset that it names on the hub by its commit, of which ``meta/`` is downloaded."""
    found = repository(name, "dataset")
    return name if found is None else portable(found.download((DATASET_META,)))
