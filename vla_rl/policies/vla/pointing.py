"""How the vision-language model of a small network from nothing learns to see, before its action expert imitates.

Published models were trained on the pictures and texts of the internet; this stands in for that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.policies.image_encoder import BackboneOutput, cell_centres
from vla_rl.policies.vla.network import FlowNetwork


class PointingVLM(nn.Module):
    """The vision-language model with heads that point, from the values that its last layer lets an action expert read.

    One head reads those of every picture token: how likely the object is there, and where within the token's cell.
    Another reads the mean of the prompt's, so that an expert need not find the right cell, and a third ``pooled``, for
    critics.  They are thrown away after grounding, which trains only the vision-language model, on one camera.

    Where prompts hold ``state`` numbers of a robot's state, the prompt's mean tells them as well.
    """

    def __init__(self, network: FlowNetwork, state: int = 0) -> None:
        super().__init__()
        self.vlm, self._network, self._side = network.vision_language, (network,), network.picture_side
        values, device = network.value_size, next(self.vlm.parameters()).device
        self.cells = nn.Linear(values, 3).to(device)
        self.words = nn.Linear(values, 2 + state).to(device)
        self.pooled = nn.Linear(network.pooled_size, 2).to(device)

    def forward(
        self, images: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor | None = None
    ) -> BackboneOutput:
        """Where ``images`` uint8 [B,h,w,3] show what the prompts ``tokens``, ``token_mask`` [B,L] name: 3 queries.

        And one for every two numbers of the normalised ``state`` [B,S] in the prompts, see ``with_state``.
        """
        prefix = self._network[0].encode([images], tokens, token_mask)
        values = prefix["cache"][:, -1].chunk(2, 1)[1].transpose(1, 2).flatten(2)
        logits, offset = self.cells(values[:, : self._side**2]).split((1, 2), -1)
        places = cell_centres(self._side, self._side, like=offset) + torch.tanh(offset) / self._side
        logits = logits.transpose(1, 2)
        weight = token_mask[..., None].to(values)
        words = (values[:, -tokens.shape[1] :] * weight).sum(1) / weight.sum(1)
        point, said = self.words(words).tensor_split((2,), 1)
        uv = torch.stack([(logits.softmax(-1) @ places)[:, 0], point, self.pooled(prefix["pooled"])], 1)
        if state is not None:
            uv = with_state(uv, point, said - state)
        return BackboneOutput(words, uv, logits.expand(-1, uv.shape[1], -1))


def with_state(uv: Tensor, point: Tensor, wrong: Tensor) -> Tensor:
    """``uv`` [B,Q,2] and a query for every two numbers of a state: ``point`` [B,2], off by as much as what the network
    tells of these numbers is ``wrong`` [B,S], so that the loss of pointing teaches it them, too.
    """
    pairs = functional.pad(wrong, (0, wrong.shape[1] % 2))
    return torch.cat([uv, point[:, None] + pairs.reshape(len(uv), pairs.shape[1] // 2, 2)], 1)


@torch.no_grad()
def scale_to_inputs(network: nn.Module) -> None:
    """Draw the weights of linear layers and convolutions anew, with std ``1/sqrt(inputs)``, from the global generator.

    Those of Hugging Face's classes, with std .02, let a small model of few layers begin a hundred steps later.  What
    begins at 0, such as the gates of pi0.5's layers, stays 0.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.any():
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
