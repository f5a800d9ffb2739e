"""The router behind its scores: who is chosen, with which weight, and the lists that the experts' products read."""

from __future__ import annotations

from torch import Tensor

from sparkchat.kernels.gate.reference import route_reference
from sparkchat.kernels.gate.routing import Routing

__all__ = ["Routing", "route"]


def route(
    logits: Tensor,
    routing: Routing,
    scale: float,
    *,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    arrived: Tensor | None = None,
) -> None:
    """Fill ``routing`` from logits [N, E] float32, or partial sums [S, N, E] that are added in order.

    A score is sqrt(softplus(logit)). With ``bias`` [E] float32 the k experts with the largest score + bias are chosen,
    of equals the lower one; with ``table`` [V, k] int64 those that it names for ``token_ids`` [N] int64 (ids outside
    of it read its ends: rows that pad a batch have any). Weights are the scores of the chosen, without bias, over their
    sum, times ``scale``. Logits that are no numbers give weights that are none. ``arrived`` [1] int32, 0 before and
    behind each launch, belongs to a stream of launches; with it few rows take one. Raises ValueError for wrong shapes.
    """
    rows, per_row = routing.weights.shape
    experts = routing.lists.shape[0]
    if tuple(logits.shape[-2:]) != (rows, experts) or logits.stride(-1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit {rows} rows and {experts} experts")
    if (bias is None) == (table is None) or (table is None) != (token_ids is None):
        raise ValueError("experts are chosen by a bias, or by a table and token ids")
    if table is not None and table.shape[1] != per_row:
        raise ValueError(f"the table names {table.shape[1]} experts a token, not {per_row}")
    if not logits.is_cuda:
        route_reference(logits, bias, table, token_ids, scale, routing)
        return
    from sparkchat.kernels.gate.kernel import launch_route

    launch_route(logits, routing, scale, bias, table, token_ids, arrived)
