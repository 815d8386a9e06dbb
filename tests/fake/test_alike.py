"""Which blocks of a module are alike, and what a deep model is read by."""

import pytest
import torch
from torch import nn

from shardwise.cli.options import hf
from shardwise.model.alike import enough, kinds_of, shorten
from tests.parity import hf_models


class Layer(nn.Module):
    def __init__(self, index: int, **changes: object) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.layer_idx, self.heads, self.seen = index, 4, set()
        for key, value in changes.items():
            setattr(self, key, value)


def stack(*layers: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    root = nn.Module()
    root.layers = nn.ModuleList(layers)
    return root, tuple(f"layers.{index}" for index in range(len(layers)))


def test_a_layers_own_place_makes_no_kind():
    assert kinds_of(*stack(*map(Layer, range(8)))) == (0,) * 8  # the place that is the number of heads included


@pytest.mark.parametrize(
    "changes",
    [{"window": 8}, {"heads": 2}, {"layer_idx": 7}, {"seen": {1}}, {"table": [1, {"a": torch.ones(2)}]}, {"act": {}}],
)
def test_what_differs_makes_a_kind(changes):
    usual = {"window": None, "table": [1, {"a": torch.ones(3)}], "act": None}
    layers = [Layer(index, **usual) for index in range(3)]
    assert kinds_of(*stack(*layers, Layer(3, **{**usual, **changes}))) == (0, 0, 0, 3)


def test_modules_shapes_hooks_and_shared_parameters_make_kinds():
    layers = [Layer(index) for index in range(6)]
    layers[1].linear = nn.Linear(2, 3)
    layers[2].linear.register_forward_hook(lambda *_: None)
    layers[3].linear = nn.Sequential(nn.Linear(2, 2))
    layers[4].linear.bias.requires_grad_(False)
    root, names = stack(*layers)
    root.outer = nn.Linear(2, 2)
    root.outer.weight = layers[5].linear.weight
    assert kinds_of(root, names) == (0, 1, 2, 3, 4, 5)


def test_a_list_is_left_up_to_the_second_of_each_kind():
    root, names = stack(*(Layer(index, is_full=index % 6 == 5) for index in range(30)))
    chosen = enough(root, names, kinds_of(root, names))
    assert chosen == names[:12]
    shorten(root, names, chosen)
    assert list(root.layers._modules) == [str(index) for index in range(12)]


DEEP = {
    "llama": {"num_hidden_layers": 6},
    "gemma2": {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "mixtral": {"num_hidden_layers": 6},
    "t5": {"num_layers": 6},
    "gpt2": {"n_layer": 6},
    "bloom": {"n_layer": 6},
}


@pytest.mark.parametrize("family", DEEP)
def test_a_short_model_is_refused_what_the_whole_is(monkeypatch, family):
    config = hf_models.config(family, **DEEP[family])
    depths = []
    places = hf.place
    monkeypatch.setattr(hf, "place", lambda made, *rest: (depths.append(depth(made.module)), places(made, *rest))[1])
    found = hf.refused_axes(config)
    least = min(depths)
    monkeypatch.setattr(hf, "shorter", lambda factory, _: factory)
    depths.clear()
    assert hf.refused_axes(config) == found
    assert least < min(depths) == 6, "the whole model was placed"


def depth(module: nn.Module) -> int:
    return max(len(inner) for inner in module.modules() if isinstance(inner, nn.ModuleList))


def test_a_model_that_does_without_no_block_is_placed_whole(monkeypatch):
    """A refusal of the short one is not told: the forward may count its layers."""
    config = hf_models.config("llama", num_hidden_layers=6)
    made = hf.hf_factory(config)

    def counts(module: nn.Module, _: object) -> None:
        module.model.layers[5]

    def counting() -> nn.Module:
        module = made()
        module.register_forward_pre_hook(counts)
        return module

    monkeypatch.setattr(hf, "hf_factory", lambda _: counting)
    assert hf.refused_axes(config) == {"ep": "module.no-experts"}
