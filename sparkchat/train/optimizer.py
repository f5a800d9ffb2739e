"""The drafter's optimiser: AdamW for everything, or Muon for the hidden matrices beside it.

Muon (Jordan 2024; scaled to AdamW's update size as in Liu et al. 2025, "Muon is scalable for LLM training") makes
the update of a matrix orthogonal. Embeddings, the output matrix of the Markov head, norms and biases stay with AdamW.
"""

import torch
from torch import Tensor, nn

_HIDDEN = ("fc.", "layers.")


class DrafterOptimizer:
    """One or two torch optimisers over a drafter's parameters, stepped together at one learning rate."""

    def __init__(self, drafter: nn.Module, kind: str, learning_rate: float, *, is_fused: bool) -> None:
        """``kind`` is ``adamw`` or ``muon``; ``is_fused`` asks for AdamW's one-launch form (CUDA)."""
        named = dict(drafter.named_parameters())
        hidden = {n for n, p in named.items() if kind == "muon" and n.startswith(_HIDDEN) and p.dim() == 2}
        self._names = {"adamw": [n for n in named if n not in hidden], "muon": [n for n in named if n in hidden]}
        parts: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(
                [named[n] for n in self._names["adamw"]],
                lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0, fused=is_fused,
            )
        }  # fmt: skip
        if hidden:
            parts["muon"] = torch.optim.Muon(
                [named[n] for n in self._names["muon"]],
                lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw",
            )  # fmt: skip
        self._parts = parts

    def set_learning_rate(self, value: float) -> None:
        for part in self._parts.values():
            for group in part.param_groups:
                group["lr"] = value

    def zero_grad(self) -> None:
        for part in self._parts.values():
            part.zero_grad(set_to_none=True)

    def step(self) -> None:
        for part in self._parts.values():
            part.step()

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments by ``optimizer/parameter/moment``; empty before the first step."""
        state = {}
        for kind, part in self._parts.items():
            for index, moments in part.state_dict()["state"].items():
                state |= {f"{kind}/{self._names[kind][index]}/{key}": value for key, value in moments.items()}
        return state

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Takes what ``state_tensors`` gave. Raises KeyError for a parameter that is not this optimiser's."""
        for kind, part in self._parts.items():
            moments: dict[int, dict[str, Tensor]] = {}
            for name, value in state.items():
                owner, parameter, key = name.split("/")
                if owner == kind:
                    moments.setdefault(self._names[kind].index(parameter), {})[key] = value
            part.load_state_dict({**part.state_dict(), "state": moments})
        known = set(self._parts)
        if unknown := {name.split("/")[0] for name in state} - known:
            raise KeyError(", ".join(sorted(unknown)))
