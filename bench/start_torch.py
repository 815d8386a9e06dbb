"""A plain torch script up to its first step: what `make bench` starts under torchrun."""

import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from sizes import CLIP, LR, SIZES, batch_of, weights

dist.init_process_group("gloo")
torch.set_num_threads(1)
size = SIZES[0]
model = DistributedDataParallel(weights(size))
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
batch = batch_of(size, dist.get_rank())
logits = model(batch["input_ids"])
cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
optimizer.step()
if dist.get_rank() == 0:
    print("first step done at", time.time(), flush=True)
dist.destroy_process_group()
