"""What modules have shown that were brought by nobody before: the closed form against the trace of their step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.diagnose.read_module import read_module
from shardwise.errors import ModelError
from shardwise.model.stacks import blocks_of
from tests.brought import Words
from tests.fake.test_modules_brought import near_the_trace
from tests.modules import WIDTH, hugging_face


class Autoencoder(nn.Module):
    """Its last parameter is the bias of a transposed convolution, and its largest in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 128))
        self.draw = nn.Sequential(nn.Linear(128, 64 * 64), nn.Unflatten(1, (64, 8, 8)), nn.ConvTranspose2d(64, 3, 4, 4))
        self.example_input_array = torch.zeros(2, 3, 32, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.draw(self.code(x)), x)}


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "plan",
    [
        "fsdp2 zero1 / bf16 / mb2",
        "fsdp4 zero2 / mb3",
        "fsdp2 / bf16-pure",  # the unit's own shards are in fp32, and in no other type
        "fsdp2 zero1 / bf16-pure / mb2",
        "dp2 fsdp2 / bf16-pure",
    ],
)
def test_while_gradients_are_reduced_torch_holds_the_last_of_them_in_the_modules_order(plan: str) -> None:
    near_the_trace(Autoencoder, plan, 3, 24, within=0.01)


def test_the_last_parameter_is_known_of_each_block_and_of_what_is_outside() -> None:
    profile = read_module("", Autoencoder, 3, "meta", blocks_of(Autoencoder, "auto"))
    assert [block.tensors[-1] for block in profile.blocks] == [3]
    words = read_module("", Words, 64, "meta")
    assert {block.tensors[-1] for block in words.blocks} == {WIDTH} and words.head.tensors[-1] == 320


class LargeTable(Words):
    """Few tokens, and a table of many words that is its head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8000, WIDTH), nn.Linear(WIDTH, 8000, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["fsdp4", "dp1", "dp2 / mb2", "fsdp4 / mb2", "dp1 / mb2 / bf16", "dp2 / mb4"])
def test_gradients_of_a_tied_table_are_counted_once(plan: str) -> None:
    """The head's, which waits through all blocks, the table's, and their sum."""
    near_the_trace(LargeTable, plan, 16, 8, within=0.01)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(partial(hugging_face, "bloom"), id="its scores are a sum with products"),
        pytest.param(
            partial(hugging_face, "qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48),
            id="its experts are products by group",
        ),
    ],
)
def test_operators_whose_results_recompute_does_not_keep(made: Callable[[], Callable[[], nn.Module]]) -> None:
    near_the_trace(made(), "fsdp2 / recompute=ops / bf16", 64, 24, within=0.02)


class Silent(Words):
    """Returns nothing."""

    def forward(self, ids: torch.Tensor) -> None:
        self.hidden(ids)


class Detached(Words):
    """Its output has no gradient."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.head(self.hidden(ids))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            Silent,
            "forward of Silent returned NoneType, in which no floating tensor was found; needed what a loss takes",
        ),
        (Detached, "forward of Detached returned has no gradient, .* leave out no_grad, detach"),
    ],
)
def test_what_no_step_goes_backward_from_is_refused(made: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_module("", made, 16, "meta")
