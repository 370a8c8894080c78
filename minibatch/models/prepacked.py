"""Weight matrices laid out once for the CPU's matrix kernels, instead of at every call.

A decode iteration multiplies few rows with every weight of the model, so on a CPU it costs what it takes to bring the
weights in. oneDNN reads them fastest in a blocked layout of its own; ``nn.Linear`` in bfloat16 converts to it at every
call. These are the operations by which PyTorch's own compiler (inductor, "freezing") avoids that. They are not public
and may go away, so whatever lacks them falls back to ``F.linear`` and says nothing: only speed is lost.

They also take along what follows the product (an addition, a product, SiLU), while the result is still in registers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16)
ROWS = 32  # the batch that the layout is chosen for; it is right for any


class Linear:
    """``x W^T + b`` of one ``nn.Linear``, or of several with the same input as one product, outputs side by side."""

    def __init__(self, *linears: nn.Linear) -> None:
        biased = any(x.bias is not None for x in linears)
        self.bias = torch.cat([_bias(x) for x in linears]) if biased else None
        weight = torch.cat([x.weight.detach() for x in linears]) if len(linears) > 1 else linears[0].weight.detach()
        self._packed = _pack(weight)
        if self._packed is None:
            self.weight = weight
            for linear, part in zip(linears, weight.split([x.out_features for x in linears]), strict=True):
                linear.weight.data = part  # a view, so that nothing is stored twice

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def silu(self, x: Tensor) -> Tensor:
        """``silu(x W^T + b)``"""
        if self._packed is None:
            return F.silu(self(x))
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "swish", [], "")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """``(x W^T + b) * other``"""
        return self._with(x, other, "mul") if self._packed is not None else self(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """``(x W^T + b) + other``"""
        return self._with(x, other, "add") if self._packed is not None else self(x) + other

    def _with(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed, self.bias, operation)


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()


def _pack(weight: Tensor) -> Tensor | None:
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):  # not in this build, or not on this processor
        return None
    return packed
