"""Tensor names of public pi0 checkpoints: LeRobot's, transformers' and openpi's.

All are openpi's names; what is in front of them, and which of tied tensors is written, differs.
"""

from __future__ import annotations

import re

# Regular expression at the start of a name: its replacement.  Tried in order; the first that fits counts.
_RENAMED = (
    (r"paligemma_with_expert\.gemma_expert\.model\.", "model.dit."),
    (r"paligemma_with_expert\.paligemma\.lm_head\.", "model.vlm.language_model.embed_tokens."),
    (r"paligemma_with_expert\.paligemma\.(model\.)?language_model\.(model\.)?", "model.vlm.language_model."),
    (r"paligemma_with_expert\.paligemma\.(model\.)?vision_tower\.(vision_model\.)?", "model.vlm.vision_tower."),
    (r"paligemma_with_expert\.paligemma\.(model\.)?multi_modal_projector\.", "model.vlm.multi_modal_projector."),
    (r"(state_proj|action_in_proj|action_time_mlp_in|action_time_mlp_out)\.", r"embed_action_time.\1."),
    (r"action_out_proj\.", "action_out_proj."),
)
# The expert predicts no words, and LeRobot once kept statistics among the weights; see vla/dataset_statistics.py.
_UNUSED = re.compile(r"paligemma_with_expert\.gemma_expert\.lm_head\.|(un)?normalize_")


def public_name(name: str) -> str | None:
    """The name in :class:`Pi0Network` of a tensor of a public checkpoint; None for one that nothing reads."""
    bare = name.removeprefix("model.")
    if _UNUSED.match(bare):
        return None
    for pattern, replacement in _RENAMED:
        renamed, count = re.subn(f"^{pattern}", replacement, bare)
        if count:
            return renamed
    return name
