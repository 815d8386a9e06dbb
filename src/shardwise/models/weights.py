"""How the reference models fill their parameters."""

from __future__ import annotations

from torch import nn


def fill_weights(model: nn.Module, std: float, num_layers: int, residual: tuple[str, ...]) -> None:
    """Normal weights, smaller by sqrt(2 layers) where a layer adds to the residual stream; ones; zero biases.

    Args:
        model: its parameters are written in place.
        std: standard deviation of the weights.
        num_layers: layers that add to the residual stream, twice each.
        residual: endings of the names of the weights that do (GPT-2, Radford et al. 2019, section 2.3).
    """
    for name, parameter in model.named_parameters():
        if name.endswith(residual):
            nn.init.normal_(parameter, std=std / (2 * num_layers) ** 0.5)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)
