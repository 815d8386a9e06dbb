"""The private names of torch behind attention over a divided sequence: they are there, and do what is read of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.parallel import torch_private
from shardwise.parallel.mesh_torch_private import flatten_mesh, join_meshes
from shardwise.parallel.torch_private import fused_attention, fused_attention_backward
from shardwise.testing import fake_world


def test_the_cpu_kernel_gives_the_log_of_the_sum_and_takes_it_back() -> None:
    q, k, v, grad = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(4))
    out, lse = fused_attention(q, k[:, :2], v[:, :2], None, causal=False, scale=0.3)
    keys, values = k[:, :2].repeat_interleave(2, 1), v[:, :2].repeat_interleave(2, 1)
    torch.testing.assert_close(lse, torch.logsumexp(0.3 * q @ keys.mT, dim=-1))
    leaves = [t.clone().requires_grad_() for t in (q, k[:, :2], v[:, :2])]
    whole = F.scaled_dot_product_attention(
        leaves[0], leaves[1].repeat_interleave(2, 1), leaves[2].repeat_interleave(2, 1), scale=0.3
    )
    whole.backward(grad)
    grads = fused_attention_backward((q, k[:, :2], v[:, :2]), (grad, out, lse), None, causal=False, scale=0.3)
    torch.testing.assert_close(list(grads), [leaf.grad for leaf in leaves])
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, keys, values, scale=0.3))


def test_no_kernel_serves_values_of_another_size() -> None:
    q = torch.randn(1, 1, 4, 8)
    assert fused_attention(q, q, q[..., :3], None, causal=True, scale=1.0) is None


def test_the_cuda_kernels_take_what_they_are_given() -> None:
    q = torch.empty(2, 4, 64, 32, dtype=torch.bfloat16, device="meta")
    out, lse, *_ = torch_private._FLASH_CUDA(q, q, q, 0.0, True, False, scale=0.1)
    assert out.shape == q.shape and lse.shape == (2, 4, 64) and lse.dtype == torch.float32
    seed = torch.empty(2, dtype=torch.int64, device="meta")
    lengths = (None, None, 64, 64)
    grads = torch_private._FLASH_CUDA_BACKWARD(q, q, q, q, out, lse, *lengths, 0.0, True, seed, seed, scale=0.1)
    assert [grad.shape for grad in grads] == [q.shape] * 3


def test_two_axes_stand_side_by_side_one_of_them_flattened() -> None:
    plan = sw.Plan.parse("dp2 fsdp2 cp2 tp2")
    with fake_world(16, rank=11), sw.open_mesh(plan, device="cpu") as mesh:
        shards = flatten_mesh(mesh.device_mesh, ("dp_shard", "cp"))
        both = join_meshes(mesh.device_mesh["dp_replicate"], shards)
        assert both.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
        assert both.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
