"""Recording a constructor and replaying one tensor of it: the values are those that the constructor would have made."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.history import History, seed_for
from shardwise.parallel.init import init_model
from shardwise.parallel.initial.blueprint import blueprint_of, record


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def zoo() -> nn.Module:
    return nn.ModuleDict(
        {
            "linear": nn.Linear(200, 300),
            "embedding": nn.Embedding(50, 64, padding_idx=3),
            "conv": nn.Conv2d(3, 8, 3),
            "batchnorm": nn.BatchNorm2d(8),
            "lstm": nn.LSTM(8, 16),
            "attention": nn.MultiheadAttention(16, 2),
            "layer": nn.TransformerEncoderLayer(16, 2, 32),
            "prelu": nn.PReLU(),
        }
    )


def test_every_tensor_has_the_mean_and_spread_that_torch_gives_it() -> None:
    ours = init_model(zoo, seed=3).state_dict()
    for name, theirs in zoo().state_dict().items():
        mine = ours[name]
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
        if theirs.numel() >= 64:
            spread = max(float(theirs.std()), 1e-12)
            assert float(mine.std()) == pytest.approx(spread, rel=0.35, abs=1e-9), name
            assert abs(float(mine.mean() - theirs.mean())) < 7 * spread / math.sqrt(theirs.numel()) + 1e-9, name
        elif theirs.float().unique().numel() == 1:  # zeros and ones
            assert torch.equal(mine, theirs), name


def test_kaiming_bound_and_padding_row() -> None:
    model = init_model(zoo, seed=0)
    bound = 1 / math.sqrt(200)
    weight = model["linear"].weight.detach()
    assert 0.99 * bound < float(weight.abs().max()) <= bound
    assert not model["embedding"].weight[3].any() and model["embedding"].weight[2].any()


def test_seed_decides_and_nothing_else_does() -> None:
    torch.manual_seed(1)
    first = init_model(zoo, seed=0)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = init_model(zoo, seed=0)
    assert same(first, second)
    assert torch.equal(before, torch.random.get_rng_state())  # the user's own random state is left alone
    assert not same(first, init_model(zoo, seed=1))


def test_tensors_of_the_same_shape_differ() -> None:
    model = init_model(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), seed=0)
    assert not torch.equal(model[0].weight, model[1].weight)
    assert seed_for(0, "a", 0) != seed_for(0, "a", 1) != seed_for(0, "b", 0) != seed_for(1, "b", 0)


def test_a_layer_keeps_its_values_when_others_are_added() -> None:
    small = init_model(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), seed=0)
    large = init_model(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), seed=0)
    assert torch.equal(small[1].weight, large[1].weight)


def truncated_and_orthogonal() -> nn.Module:
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(16, 32), nn.Linear(40, 50))
    nn.init.trunc_normal_(model[0].weight, std=0.02, a=-0.04, b=0.04)
    nn.init.orthogonal_(model[1].weight)
    nn.init.sparse_(model[2].weight, sparsity=0.5)
    return model


def test_initialisers_that_torch_skips_on_meta() -> None:
    model = init_model(truncated_and_orthogonal, seed=0)
    weight = model[0].weight.detach()
    assert float(weight.std()) == pytest.approx(0.0176, rel=0.02)  # N(0, 0.02) cut at two deviations
    assert float(weight.abs().max()) <= 0.04
    gram = model[1].weight.detach().T @ model[1].weight.detach()
    assert torch.allclose(gram, torch.eye(16), atol=1e-5)
    assert (model[2].weight == 0).sum(0).eq(25).all()


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(100, 64)
        self.fc = nn.Linear(64, 256)
        self.c_proj = nn.Linear(256, 64)
        self.lm_head = nn.Linear(64, 100, bias=False)
        self.wte.weight = self.lm_head.weight
        self.scale = nn.Parameter(torch.ones(1) * 0.5)
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).view(1, 1, 4, 4))
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]), persistent=False)
        self.register_buffer("table", torch.from_numpy(np.arange(6.0)).reshape(2, 3))
        self.freqs = torch.outer(torch.arange(4).float(), 1.0 / 10 ** torch.arange(0, 1, 0.25)).cos()
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * 12))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)


def test_nanogpt_style_constructor() -> None:
    model, plain = init_model(NanoGPT, seed=0), NanoGPT()
    assert float(model.c_proj.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(24), rel=0.05)
    assert float(model.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not model.fc.bias.any()
    assert model.wte.weight is model.lm_head.weight
    for name in ("scale", "gain", "mask", "mean", "table", "freqs"):
        assert torch.equal(getattr(model, name), getattr(plain, name)), name
    assert model.rates == plain.rates
    assert record(NanoGPT).aliases == {"lm_head.weight": "wte.weight"}
    assert all(t.is_meta for t in record(NanoGPT).module.state_dict().values())


def test_overwritten_draws_are_not_performed() -> None:
    history = record(NanoGPT).history
    assert isinstance(history, History)
    blueprint = record(NanoGPT)
    closure = history.closure(blueprint.views["c_proj.weight"].storage)
    assert sum(history.operations[i].random for i in closure) == 1  # of three: kaiming, 0.02, the scaled one


def target_network() -> nn.Module:
    online = nn.Linear(8, 8)
    return nn.ModuleDict({"online": online, "target": copy.deepcopy(online)})


def test_copies_stay_copies() -> None:
    model = init_model(target_network, seed=0)
    assert torch.equal(model["online"].weight, model["target"].weight)
    assert model["online"].weight is not model["target"].weight


def test_copies_of_what_a_batch_norm_counts_by() -> None:
    def build() -> nn.Module:
        online = nn.BatchNorm1d(4)
        return nn.ModuleList([online, copy.deepcopy(online)])

    first, second = init_model(build, seed=0)
    assert first.num_batches_tracked.item() == second.num_batches_tracked.item() == 0
    assert first.num_batches_tracked is not second.num_batches_tracked


def test_orthogonal_weights_have_their_base_though_meta_has_no_kernel_for_it() -> None:
    layer = init_model(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 4)), seed=0)
    torch.testing.assert_close(layer.weight @ layer.weight.mT, torch.eye(4))


def test_weight_norm_and_low_precision_and_data_assignment() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), nn.Linear(4, 4).half())
        model[1].bias.data = torch.tensor([1.0, 2.0, 3.0, 4.0]).half()
        return model

    model = init_model(build, seed=0)
    magnitude, direction = (model[0].parametrizations.weight[0], model[0].parametrizations.weight.original1)
    assert torch.allclose(model[0].parametrizations.weight.original0, direction.norm(dim=1, keepdim=True))
    assert magnitude is not None and model[1].weight.dtype is torch.float16
    assert model[1].bias.tolist() == [1, 2, 3, 4]


def test_explicit_devices_in_the_constructor() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4, device="cpu")
        model.register_buffer("noise", torch.randn(1000, device="cpu"))
        model.weight = nn.Parameter(torch.Tensor(4, 4).uniform_(2, 3))
        return model

    first, second = init_model(build, seed=0), init_model(build, seed=0)
    assert same(first, second) and float(first.noise.std()) == pytest.approx(1, rel=0.2)
    weight = first.weight.detach()
    assert 2 <= float(weight.min()) <= float(weight.max()) <= 3


def test_a_constructor_may_look_at_values_that_are_not_random() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            grid = torch.arange(6)
            self.register_buffer("odd", grid[grid % 2 == 1])
            self.width = int(torch.ones(3).sum())
            self.names = torch.linspace(0, 1, 3).tolist()

    model = init_model(Masked)
    assert model.odd.tolist() == [1, 3, 5] and model.width == 3 and model.names == [0.0, 0.5, 1.0]


def test_a_constructor_that_looks_at_a_random_value_is_refused() -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 4 + int(torch.rand(1).item() > 2))

    with pytest.raises(ModelError, match=r"random value: `item` at test_init.py:\d+.*instance instead of a factory"):
        record(build)


def test_the_constructors_own_error_passes_unchanged() -> None:
    with pytest.raises(ZeroDivisionError):
        record(lambda: nn.Linear(1 // 0, 2))
    with pytest.raises(ModelError, match="returned int"):
        record(lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match="has no shape yet"):
        record(lambda: nn.LazyLinear(3))


def test_a_parameter_that_never_gets_a_value_is_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.register_buffer("cache", torch.empty(3))

    with pytest.raises(ModelError, match="parameter weight of Bare never gets a value"):
        init_model(Bare)
    filled = init_model(Bare, init=lambda m: nn.init.ones_(m.weight))
    assert filled.weight.tolist() == [1, 1, 1] and filled.cache.tolist() == [0, 0, 0]


def test_init_function_and_reset_parameters() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=5.0)
            nn.init.constant_(module.bias, 7.0)

    model = init_model(lambda: nn.Linear(64, 64), seed=0, init=fill)
    assert float(model.weight.detach().std()) == pytest.approx(5, rel=0.1) and model.bias.eq(7).all()
    again = init_model(zoo, seed=0, init="reset_parameters")
    assert float(again["linear"].weight.detach().abs().max()) <= 1 / math.sqrt(200)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(ModelError, match="Odd owns scale and has no method reset_parameters"):
        init_model(Odd, init="reset_parameters")


def test_instances_give_their_own_values() -> None:
    module = nn.Linear(3, 3)
    blueprint = blueprint_of(module)
    assert torch.equal(blueprint.value("weight", seed=9), module.weight)
    with pytest.raises(ModelError, match="did you mean 'weight'"):
        blueprint.value("weigth", seed=0)
    with pytest.raises(ModelError, match="would be lost"):
        blueprint_of(module, "reset_parameters")
    with torch.device("meta"):
        ghost = nn.Linear(3, 3)
    with pytest.raises(ModelError, match="weight of the given Linear is on the meta device"):
        blueprint_of(ghost)
    assert blueprint_of(ghost, "reset_parameters").value("weight", seed=0).abs().max() <= 1 / math.sqrt(3)


def test_tensors_hidden_in_a_list_are_refused() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = [torch.arange(3), torch.arange(4)]

    with pytest.raises(ModelError, match="tables of Hidden is a list of tensors"):
        record(Hidden)


def test_values_do_not_depend_on_the_number_of_threads() -> None:
    blueprint = record(lambda: nn.Linear(700, 700))
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = blueprint.value("weight", seed=0)
        torch.set_num_threads(4)
        assert torch.equal(one, blueprint.value("weight", seed=0))
    finally:
        torch.set_num_threads(num_threads)


def test_a_model_that_torch_wraps_draws_what_it_does() -> None:
    """`torch.compile(model)` puts a word of its own into names, and weights were other ones."""
    plain = init_model(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), seed=0)

    def build() -> nn.Module:
        return torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), backend="eager")

    wrapped = init_model(build, seed=0)
    assert [*dict(wrapped.named_parameters())][0] == "_orig_mod.0.weight"
    assert all(map(torch.equal, plain.parameters(), wrapped.parameters()))
