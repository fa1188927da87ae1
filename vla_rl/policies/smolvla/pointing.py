"""A SmolVLA network of random weights that learns to see: it points at the object that an instruction names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_rl.policies.backbone import BackboneOutput, cell_centres
from vla_rl.policies.smolvla.network import SmolVLANetwork


class PointingVLM(nn.Module):
    """The vision-language model with heads that point, from the values that its last layer lets an action expert read.

    One head reads those of every picture token: how likely the object is there, and where within the token's cell.
    Another reads the mean of the prompt's, so that an expert need not find the right cell, and a third ``pooled``, for
    critics.  They are thrown away after grounding, which trains only the vision-language model, on one camera.
    """

    def __init__(self, network: SmolVLANetwork) -> None:
        super().__init__()
        text, device = network.shape.text, next(network.parameters()).device
        self.vlm, self._network = network.model["vlm_with_expert"]["vlm"], (network,)
        self.cells = nn.Linear(text.key_value_heads * text.head_size, 3).to(device)
        self.words = nn.Linear(text.key_value_heads * text.head_size, 2).to(device)
        self.pooled = nn.Linear(network.pooled_size, 2).to(device)
        self._side = round(network.shape.picture_tokens**0.5)

    def forward(self, images: Tensor, tokens: Tensor, token_mask: Tensor) -> BackboneOutput:
        """Where ``images`` uint8 [B,h,w,3] show what the prompts ``tokens``, ``token_mask`` [B,L] name: 3 queries."""
        prefix = self._network[0].encode([images], tokens, token_mask)
        values = prefix["values"][:, -1].transpose(1, 2).flatten(2)
        logits, offset = self.cells(values[:, : self._side**2]).split((1, 2), -1)
        places = cell_centres(self._side, self._side, like=offset) + torch.tanh(offset) / self._side
        logits = logits.transpose(1, 2)
        weight = token_mask[..., None].to(values)
        words = (values[:, -tokens.shape[1] :] * weight).sum(1) / weight.sum(1)
        uv = torch.stack([(logits.softmax(-1) @ places)[:, 0], self.words(words), self.pooled(prefix["pooled"])], 1)
        return BackboneOutput(words, uv, logits.expand(-1, 3, -1))


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
