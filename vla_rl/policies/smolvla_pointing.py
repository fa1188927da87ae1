"""A SmolVLA network of random weights that learns to see: it points at the object that an instruction names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_rl.policies.backbone import BackboneOutput, cell_centres
from vla_rl.policies.smolvla_network import SmolVLANetwork


class PointingVLM(nn.Module):
    """The vision-language model with a head that points, from what its last layer lets an action expert read.

    The head reads the values of every picture token: how likely the object is there, and where within the token's cell.
    It is thrown away after grounding, which trains only the vision-language model, on pictures of one camera.
    """

    def __init__(self, network: SmolVLANetwork) -> None:
        super().__init__()
        text = network.shape.text
        self.vlm, self._network = network.model["vlm_with_expert"]["vlm"], (network,)
        self.head = nn.Linear(text.key_value_heads * text.head_size, 3).to(next(self.vlm.parameters()).device)
        self._last, self._side = f"{text.layers - 1}.value", round(network.shape.picture_tokens**0.5)

    def forward(self, images: Tensor, tokens: Tensor, token_mask: Tensor) -> BackboneOutput:
        """Where ``images`` uint8 [B,h,w,3] show what the prompts ``tokens``, ``token_mask`` [B,L] name: one query."""
        prefix = self._network[0].encode([images], tokens, token_mask)
        values = prefix[self._last][:, : self._side**2].flatten(2)
        logits, offset = self.head(values).split((1, 2), -1)
        logits = logits.transpose(1, 2)
        places = cell_centres(self._side, self._side, like=offset) + torch.tanh(offset) / self._side
        return BackboneOutput(values.mean(1), logits.softmax(-1) @ places, logits)


@torch.no_grad()
def scale_to_inputs(network: nn.Module) -> None:
    """Draw the weights of linear layers and convolutions anew, with std ``1/sqrt(inputs)``, from the global generator.

    Those of Hugging Face's classes, with std .02, let a small model of few layers begin a hundred steps later.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
