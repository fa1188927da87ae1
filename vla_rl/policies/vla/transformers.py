"""The package of Hugging Face that holds the vision-language models: imported when a policy needs it."""

from __future__ import annotations

from typing import Any

from vla_rl.contract.errors import UserError


def transformers() -> Any:
    """The package; raises UserError, naming the extra, when it is not installed."""
    try:
        import transformers as package
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed, so no vision-language-action model can be used; pip install 'vla-rl[vla]'."
        ) from error
    return package
