from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from pages import ROOT, all_blocks
from shardwise.cli.lint import lint
from shardwise.diagnose.lint import RULES, docs_text, lint_files, lint_text
from shardwise.errors import DataError, ExitCode

app = typer.Typer()
app.command()(lint)

HEAD = """
import os, random, sys
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
"""
ACCELERATE = "from accelerate import Accelerator\nimport torch\n"
DEEPSPEED = "import deepspeed\nimport torch\n"

# id -> scripts whose line with `# !` is found. A script that begins with an import has no HEAD.
WRONG = {
    "rank.collective": [
        """
        if dist.get_rank() == 0:
            dist.barrier()  # !
        """,
        """
        rank = dist.get_rank()
        if rank % 2:
            dist.barrier()  # !
        while rank == 0:
            dist.all_reduce(x)  # !
            break
        match rank:
            case 0:
                dist.barrier()  # !
        """,
        """
        import shardwise as sw
        with sw.open_mesh(plan) as mesh:
            if mesh.is_first:
                sw.export_hf(placed, "out")  # !
        """,
        """
        import torch.distributed
        def report(args, loss):
            if args.local_rank in (-1, 0) and args.step % 10 == 0:
                torch.distributed.all_reduce(loss)  # !
                print(loss)
        """,
        """
        from torch.distributed import all_reduce, get_rank
        is_master = get_rank() == 0
        def log(x):
            if not is_master:
                return
            all_reduce(x)  # !
            print(x)
        """,
        """
        rank = int(os.environ["RANK"])
        def evaluate(model, loader):
            total = torch.zeros(1)
            for x in loader:
                total += model(x)
            dist.all_reduce(total)
            return total
        def main(model, loader):
            if rank == 0:
                print(evaluate(model, loader))  # !
        """,
        """
        class Trainer:
            def __init__(self):
                self.rank = dist.get_rank()
            def sync(self, x):
                dist.broadcast(x, src=0)
            def save(self, x):
                if self.rank != 0:
                    return
                self.sync(x)  # !
        """,
        """
        from accelerate import Accelerator
        accelerator = Accelerator()
        if accelerator.is_main_process:
            print("saving")
            accelerator.wait_for_everyone()  # !
        """,
        """
        import shardwise as sw
        with sw.open_mesh("dp2") as mesh:
            if mesh.is_first:
                print(mesh.all_reduce_sum(x))  # !
        """,
        """
        import horovod.torch as hvd
        def main(model):
            if hvd.rank() == 0:
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # !
        """,
        """
        import lightning as L
        class Net(L.LightningModule):
            def validation_step(self, batch, i):
                loss = self(batch)
                if self.trainer.is_global_zero:
                    self.log("loss", loss, sync_dist=True)  # !
        """,
        """
        import lightning as L
        class Net(L.LightningModule):
            def on_train_epoch_end(self):
                if self.trainer.is_global_zero:
                    self.all_gather(torch.tensor(1.0))  # !
        """,
        """
        from transformers import Trainer
        trainer = Trainer(model=model, args=args)
        trainer.train()
        if trainer.is_world_process_zero():
            trainer.evaluate()  # !
        if args.local_rank == 0:
            print(trainer.predict(held_out))  # !
        """,
        """
        def main(loader):
            for x in loader:
                if dist.get_rank() > 0:
                    continue
                dist.all_reduce(x)  # !
        """,
        """
        import torch.distributed as dist
        dist.get_rank() == 0 and dist.barrier()  # !
        """,
        """
        def main(model):
            model = FSDP(model)
            if dist.get_rank() == 0:
                model(torch.ones(2))  # !
        """,
    ],
    "rank.save": [
        """
        model = FSDP(build())
        if dist.get_rank() == 0:
            weights = model.state_dict()  # !
        """,
        """
        import shardwise as sw
        store = sw.Store("runs/a")
        def train(state, mesh):
            for m in sw.steps(state, loss_fn, until=10):
                if mesh.rank == 0:
                    store.save(state)  # !
        """,
        """
        from accelerate import Accelerator
        class Trainer:
            def __init__(self):
                self.accelerator = Accelerator()
            def checkpoint(self, path):
                if self.accelerator.is_local_main_process:
                    self.accelerator.save_state(path)  # !
        """,
        """
        import deepspeed
        model_engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
        if torch.distributed.get_rank() == 0:
            model_engine.save_checkpoint("out")  # !
        """,
        """
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        def save(state, path):
            if dist.get_rank() != 0:
                return
            dcp.save(state, checkpoint_id=path)  # !
        """,
        """
        import shardwise
        def save(store, state): store.save(state)
        def main(state, mesh):
            checkpoints = shardwise.Store("x")
            if mesh.is_first:
                save(checkpoints, state)  # !
        """,
    ],
    "clip.shard": [
        """
        import shardwise as sw
        def clipped(optimizer, *_):
            for group in optimizer.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], 1.0)  # !
        placed = sw.apply(net, plan, mesh)
        optimizer = sw.adamw(placed, lr=0.1)
        optimizer.torch.register_step_pre_hook(clipped)
        """,
        """
        def train(model):
            model = FSDP(model, use_orig_params=True)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # !
        """,
        """
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.nn.utils import clip_grad_norm_
        class Trainer:
            def __init__(self, model):
                self.model = FullyShardedDataParallel(model)
            def step(self):
                params = [p for p in self.model.parameters() if p.requires_grad]
                clip_grad_norm_(params, 1.0)  # !
        """,
        """
        import deepspeed
        from torch import nn
        engine, opt, loader, sched = deepspeed.initialize(model=model, config="ds.json")
        nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)  # !
        """,
        """
        import shardwise as sw, torch
        def main(plan, mesh):
            placed = sw.apply(Model, plan, mesh)
            torch.nn.utils.clip_grad_norm_(placed.module.parameters(), 1.0)  # !
        """,
        """
        from torch.distributed.pipelining import PipelineStage
        import torch
        stage = PipelineStage(stage_model, rank, 4, device)
        torch.nn.utils.clip_grad_norm_(stage_model.parameters(), 1.0)  # !
        """,
        """
        from accelerate import Accelerator
        import torch
        accelerator = Accelerator(mixed_precision="fp16")
        model, optimizer = accelerator.prepare(model, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # !
        """,
    ],
    "optimizer.before-sharding": [
        """
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # !
        model = FSDP(model)
        """,
        """
        from torch.distributed._composable.fsdp import fully_shard
        from torch.optim import SGD
        def build():
            net = Net()
            opt = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)  # !
            for block in net.blocks:
                fully_shard(block)
            fully_shard(net)
            return net, opt
        """,
        """
        class Trainer:
            def __init__(self, model):
                self.model = model
                groups = [{"params": self.model.parameters()}]
                self.optimizer = torch.optim.SGD(groups, lr=0.1)  # !
                self.model = FSDP(self.model)
        """,
        """
        import shardwise as sw, torch
        def main(plan, mesh):
            model = Net()
            optimizer = torch.optim.Adam(params=model.parameters())  # !
            placed = sw.apply(model, plan, mesh)
        """,
        """
        from torch.distributed.tensor.parallel import parallelize_module
        import torch
        def make_optimizer(model, lr):
            return torch.optim.AdamW(model.parameters(), lr=lr)
        def main(mesh, plan):
            model = Net()
            opt = make_optimizer(model, 1e-3)  # !
            parallelize_module(model, mesh, plan)
        """,
    ],
    "shard.number": [
        """
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        print(placed.module.head.weight.norm().item())  # !
        """,
        """
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        print(float(placed.module.head.bias.abs().max()))  # !
        """,
        """
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        for name, p in placed.named_parameters().items():
            log(name, p.detach().norm().item())  # !
        """,
    ],
    "save.sharded": [
        """
        model = FSDP(model)
        torch.save(model.state_dict(), "model.pt")  # !
        """,
        """
        def main(model):
            fully_shard(model)
            state = {"epoch": 1, "model": model.state_dict()}
            torch.save(state, "model.pt")  # !
        """,
        """
        class Trainer:
            def __init__(self, model):
                self.model = fully_shard(model)
            def save(self, path):
                weights = self.model.state_dict()
                torch.save(weights, path)  # !
        """,
        """
        import shardwise as sw, torch
        def main(plan, mesh):
            placed = sw.apply(Net, plan, mesh)
            if mesh.is_first:
                torch.save(placed.module.state_dict(), "x.pt")  # !
        """,
        """
        def wrap(model):
            return FSDP(model.cuda())
        def save(obj, path):
            torch.save({"model": obj.state_dict()}, path)  # !
        def main():
            model = wrap(Net())
            save(model, "x")
        """,
    ],
    "ddp.device-ids": [
        """
        model = DDP(model, device_ids=[0, 1, 2, 3])  # !
        """,
        """
        model = DDP(model.cuda(), device_ids=list(range(torch.cuda.device_count())))  # !
        """,
        """
        model = DDP(model, device_ids=[0])  # !
        """,
        """
        import os, torch
        local_rank = int(os.environ["LOCAL_RANK"])
        rank = int(os.environ.get("RANK", 0))
        torch.cuda.set_device(local_rank)
        model = torch.nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[rank], output_device=rank)  # !
        """,
        """
        rank = dist.get_rank()
        ddp = DDP(Net().to(rank), [rank])  # !
        """,
        """
        net = Net().to("cpu")
        net = DDP(net, device_ids=[local_rank])  # !
        """,
        """
        model = DDP(model, device_ids=[torch.device("cuda:0")])  # !
        """,
    ],
    "sampler.missing": [
        """
        model = DDP(Net())
        loader = DataLoader(dataset, batch_size=8, shuffle=True)  # !
        for x in loader:
            model(x).backward()
        """,
        """
        import torch
        from torch.utils.data import DataLoader as Loader
        def main():
            train_set = Digits(train=True)
            train = torch.utils.data.DataLoader(train_set, 8, True, num_workers=2)  # !
            model = FSDP(Net())
            for x in train:
                model(x).backward()
        """,
        """
        train_set, val_set = random_split(Digits(), [0.9, 0.1])
        model = fully_shard(Net())
        loader = StatefulDataLoader(dataset=train_set, shuffle=True)  # !
        """,
    ],
    "sampler.set-epoch": [
        """
        sampler = DistributedSampler(dataset)  # !
        loader = DataLoader(dataset, sampler=sampler)
        for epoch in range(10):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
        """,
        """
        import torch
        class Trainer:
            def __init__(self, data):
                self.train_data = torch.utils.data.DataLoader(
                    data, sampler=torch.utils.data.distributed.DistributedSampler(data))  # !
            def _run_epoch(self):
                for batch in self.train_data:
                    self.model(batch).backward()
            def train(self, n):
                for _ in range(n):
                    self._run_epoch()
        """,
        """
        def train_one(model, loader):
            for batch in tqdm(loader):
                model(batch).backward()
        def main(train_set, val_set):
            train_sampler = DistributedSampler(train_set, shuffle=True)  # !
            train_loader = DataLoader(train_set, sampler=train_sampler)
            other = DistributedSampler(more)
            other.set_epoch(1)
            for e in range(5):
                train_one(model, train_loader)
        """,
        """
        from torch.utils.data import DistributedSampler as DS, DataLoader
        def get_loader(ds):
            s = DS(ds, seed=1)  # !
            return DataLoader(ds, batch_size=4, sampler=s)
        train_loader = get_loader(ds)
        step = 0
        while step < 100:
            for i, batch in enumerate(train_loader):
                model(batch).backward()
        """,
    ],
    "sync.item": [
        """
        for i, batch in enumerate(loader):
            loss = model(batch)
            loss.backward()
            total += loss.item()  # !
            if (i + 1) % 4 == 0:
                optimizer.step()
        """,
        """
        from accelerate import Accelerator
        accelerator = Accelerator(gradient_accumulation_steps=4)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                running.append(float(loss))  # !
        """,
        """
        class Trainer:
            def step(self, batches):
                for micro in batches:
                    loss = self.model(micro)
                    loss.backward()
                    self.meter.update(loss.detach().item())  # !
                self.optimizer.step()
        """,
        """
        accum = 8
        while True:
            for it, x in enumerate(loader):
                is_update = it % accum == 0
                loss = model(x)
                scaler.scale(loss).backward()
                if dist.get_rank() == 0:
                    bar.set_postfix(loss=loss.item())  # !
                if is_update:
                    scaler.step(opt)
                    scaler.update()
        """,
    ],
    "accumulate.never-summed": [
        """
        model = DDP(net)
        for step in range(100):
            for batch in micro:
                with model.no_sync():
                    loss = model(batch).mean()
                    loss.backward()  # !
            optimizer.step()
        """,
        """
        model = FSDP(net)
        for i, batch in enumerate(loader):
            if i < accum:
                with model.no_sync(), torch.autocast("cuda"):
                    model(batch).sum().backward()  # !
            optimizer.step()
        """,
        """
        model = DDP(net)
        with model.no_sync():
            loss = model(batch).mean()  # !
        loss.backward()  # DDP has looked in forward
        optimizer.step()
        @torch.no_grad()
        def validate():
            return model(held_out)
        """,
        """
        model = FSDP(net)
        loss = model(batch).mean()
        with model.no_sync():
            loss.backward()  # !
        optimizer.step()
        """,
        ACCELERATE
        + """
accelerator = Accelerator(gradient_accumulation_steps=4)
model, optimizer = accelerator.prepare(net, optimizer)
for batch in loader:
    with accelerator.no_sync(model):
        accelerator.backward(model(batch).mean())  # !
    optimizer.step()
""",
    ],
    "seed.by-rank": [
        """
        import shardwise as sw
        import torch
        def main(plan):
            with sw.open_mesh(plan) as mesh:
                torch.manual_seed(17 + mesh.rank)  # !
                placed = sw.apply(Net(), plan, mesh)
        """,
        """
        import shardwise as sw
        with sw.open_mesh(plan) as mesh:
            placed = sw.apply(Net, plan, mesh, seed=mesh.rank)  # !
            offset = mesh.batch.rank
            data = sw.loader(rows, 8, mesh, seed=1 + offset)  # !
        """,
        """
        rank = dist.get_rank(); seed_all(1234 + rank)  # !
        net = Net()
        parallelize_module(net, mesh, rules)
        """,
        """
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "fsdp"))
        torch.manual_seed(args.seed + int(os.environ["RANK"]))  # !
        model = Net()
        fully_shard(model, mesh=mesh)
        """,
    ],
    "loss.backward": [
        """
        import shardwise as sw
        def loss_fn(output, batch):
            loss = output.mean()
            loss.backward()  # !
            return loss
        for m in sw.steps(state, loss_fn, until=3):
            pass
        """,
        """
        from shardwise import make_step
        def main(state):
            def objective(output, batch):
                (output.mean() / 2).backward(retain_graph=True)  # !
                return output.mean()
            step = make_step(state, loss_fn=objective)
        """,
        """
        import shardwise as sw
        def loss_fn(output, batch):
            accelerator.backward(output.loss)  # !
            return output.loss
        step = sw.make_step(state, loss_fn)
        """,
    ],
    "rows.batch-first": [
        """
        import shardwise as sw
        from torch import nn
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm = nn.LSTM(8, 8, num_layers=2)  # !
                self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)  # !
            def forward(self, x):
                return self.lstm(self.attention(x, x, x)[0])[0][:, -1]
        placed = sw.apply(Tagger, plan, mesh)
        """,
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        layer = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2)  # !
        model = DDP(torch.nn.TransformerEncoder(layer, 2))
        """,
        """
        import torch.nn as nn
        from accelerate import Accelerator
        model = nn.Sequential(nn.GRU(8, 8, bidirectional=True))  # !
        model = Accelerator().prepare(model)
        """,
    ],
    "init.after-apply": [
        """
        import shardwise as sw
        with sw.open_mesh(plan) as mesh:
            placed = sw.apply(Net, plan, mesh)
            placed.module.apply(init_weights)  # !
        """,
        """
        import shardwise as sw
        from torch import nn
        def main(plan, mesh):
            placed = sw.apply(Net, plan, mesh)
            for name, p in placed.named_parameters().items():
                if p.dim() > 1:
                    nn.init.xavier_uniform_(p)  # !
        """,
        """
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        with torch.no_grad():
            placed.module.head.weight.normal_(std=0.02)  # !
        placed.module.head.reset_parameters()  # !
        """,
        """
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        for m in sw.steps(state, loss_fn, until=10):
            with torch.no_grad():
                for weight in placed.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.01)  # !
        """,
        """
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        g = torch.Generator()
        for m in sw.steps(state, loss_fn, until=10):
            g.manual_seed(m.step)
            with torch.no_grad():
                for name, p in placed.named_parameters().items():
                    p.add_(torch.randn(p.shape, generator=g), alpha=0.01)  # !
                    p.mul_(1 + torch.rand(size=p.size()))  # !
        """,
    ],
    "accumulate.division": [
        """
        for i, batch in enumerate(loader):
            loss = model(batch) / accumulation_steps  # !
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
        """,
        """
        class Trainer:
            def micro(self, x, i):
                for x in self.data:
                    loss = F.cross_entropy(self.model(x), x, ignore_index=-100)
                    loss /= self.args.grad_accum  # !
                    loss.backward()
                    if i % self.args.grad_accum == 0:
                        self.optimizer.step()
        """,
        """
        from accelerate import Accelerator
        accelerator = Accelerator(gradient_accumulation_steps=4)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss / 4 if False else loss / args.gradient_accumulation_steps)  # !
                optimizer.step()
        """,
        """
        from accelerate import Accelerator
        acc = Accelerator(gradient_accumulation_steps=4)
        for x in loader:
            with acc.accumulate(model):
                loss = model(x).mean() / 4  # !
                acc.backward(loss)
                opt.step()
        """,
        """
        import deepspeed
        engine, *_ = deepspeed.initialize(model=model, config={"gradient_accumulation_steps": 4})
        for x in loader:
            loss = engine(x).mean()
            if late:
                loss = loss / engine.gradient_accumulation_steps()  # !
            else:
                loss = loss / 4  # !
            engine.backward(loss)
            engine.step()
        """,
        """
        import deepspeed
        engine, _, _, _ = deepspeed.initialize(model=model, config=cfg)
        for batch in loader:
            loss = engine(batch)
            engine.backward(loss / args.gradient_accumulation_steps)  # !
            engine.step()
        """,
        """
        import shardwise as sw
        def loss_fn(logits, batch):
            return sw.token_cross_entropy(logits, batch["labels"]) / plan.batch.micro_batches  # !
        """,
        """
        for k in range(steps):
            for m in range(8):
                x = next(it)
                (model(x).mean() / 8).backward()  # !
            opt.step()
        """,
        """
        scaler = torch.amp.GradScaler()
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            scaler.scale(loss / N).backward()  # !
            if i % N != 0:
                pass
            elif (i + 1) % N == 0:
                scaler.step(optimizer)
        """,
    ],
    "random.control-flow": [
        """
        for batch in loader:
            if random.random() < 0.5:  # !
                loss = aux(batch)
                loss.backward()
        """,
        """
        class Net(nn.Module):
            def forward(self, x):
                for layer in self.layers:
                    if self.training and torch.rand(1).item() < self.drop:  # !
                        continue
                    x = layer(x)
                return x
        """,
        """
        torch.manual_seed(1234 + dist.get_rank())
        def train(x):
            skip = torch.rand(()) < 0.1
            if not skip:  # !
                dist.all_reduce(x)
        """,
        """
        def train(model):
            for _ in range(np.random.randint(1, 4)):  # !
                model(next(it)).backward()
        """,
        """
        from random import random
        import torch.distributed as dist
        def sync(x):
            while random() > 0.1:  # !
                dist.all_reduce(x)
        """,
    ],
    "loop.left-by-some": [
        """
        rank = dist.get_rank()
        def train(model, loader):
            for x in loader:
                model(x).backward()
        for epoch in range(10):
            train(model, loader)
            if rank == 0:
                if loss < best:
                    best = loss
                else:
                    break  # !
        """,
        """
        def train(model, optimizer, loader):
            for x in loader:
                optimizer.step()
                if dist.get_rank() == 0 and stopper(x):
                    print("stopped early")
                    return  # !
        """,
        """
        import shardwise as sw
        with sw.open_mesh(plan) as mesh:
            for m in sw.steps(state, loss_fn, until=10):
                if mesh.is_first and m.loss < 0.1:
                    break  # !
        """,
        """
        for x in loader:
            try:
                model(x).backward()
            except RuntimeError:
                if dist.get_rank() == 0:
                    break  # !
        """,
    ],
    "eval.padding": [
        """
        val_sampler = DistributedSampler(val_set, shuffle=False)  # !
        """,
        """
        def evaluate(model, dataset):
            loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False))  # !
        """,
        """
        sampler = DistributedSampler(ds, num_replicas=4, rank=0, shuffle=False)  # !
        loader = DataLoader(ds, sampler=sampler)
        @torch.no_grad()
        def score(model, batches):
            return sum(model(x) for x in batches) + [f(x) for x in batches][0]
        def measure(model):
            with torch.no_grad():
                for x in loader:
                    correct += model(x).sum()
        """,
        """
        from accelerate import Accelerator
        accelerator = Accelerator()
        eval_loader = accelerator.prepare(eval_loader)
        for batch in eval_loader:
            predictions = accelerator.gather(model(batch))  # !
        """,
        """
        class Data:
            def test_dataloader(self):
                return DataLoader(self.ds, sampler=torch.utils.data.distributed.DistributedSampler(self.ds))  # !
        """,
    ],
}

# id -> scripts in which that rule finds nothing.
RIGHT = {
    "rank.collective": [
        """
        from transformers import Trainer
        trainer = Trainer(model=model, args=args)
        metrics = trainer.evaluate()
        if trainer.is_world_process_zero():
            print(metrics)
            trainer.save_model("out")
            model.evaluate()
        """,
        """
        if dist.get_rank() == 0:
            print("hello")
        dist.barrier()
        """,
        """
        rank = dist.get_rank()
        while step < 10 % size:
            dist.barrier()
        match kind:
            case "sum":
                dist.all_reduce(x)
        """,
        """
        if rank == 0:
            dist.broadcast(x, src=0)
        else:
            x = torch.zeros(4)
            dist.broadcast(x, src=0)
        """,
        """
        if args.local_rank not in [-1, 0]:
            torch.distributed.barrier()  # the first downloads
        data = load()
        if args.local_rank == 0:
            torch.distributed.barrier()
        """,
        """
        if local_rank != -1:
            dist.barrier()
        if os.environ.get("RANK") is not None:
            dist.init_process_group()
            dist.barrier()
        if world_size > 1:
            dist.all_reduce(x)
        """,
        """
        def gather(model, everywhere):
            if dist.get_rank() != 0 and not everywhere:
                return None
            dist.broadcast(model, src=0)
        """,
        """
        group = dist.new_group([0, 1, 2])
        if rank in [0, 1, 2]:
            dist.all_reduce(x, group=group)
        if local_rank == 0:
            dist.all_reduce(x, group=leaders)
        """,
        """
        if rank == 0:
            dist.send(x, dst=1)
        elif rank == 1:
            dist.recv(x, src=0)
        """,
        """
        def main():
            if rank != 0:
                dist.barrier()
                return load()
            prepare()
            dist.barrier()
            return load()
        """,
        """
        if rank == 0:
            schedule.step(x)
            names = reduce(add, gather(x))
            lora.broadcast()
        """,
        """
        if lora_rank == 0:
            layer = nn.Linear(2, 2)
        if rank > 3:
            raise ValueError(rank)
        dist.barrier()
        """,
        """
        for rank in range(0, world_size, 8):
            group = dist.new_group(list(range(rank, rank + 8)))
            if rank == 0:
                first = dist.new_group([0])
        """,
        """
        master_process = ddp_rank == 0
        if step % 100 == 0:
            losses = estimate_loss()
            if master_process:
                print(losses)
        dist.barrier()
        """,
        """
        def log(x):
            if rank == 0:
                print(x)
        if rank == 0:
            log("x")
        """,
        """
        if rank == 0:
            def later():
                dist.barrier()
        """,
    ],
    "rank.save": [
        """
        model = DDP(model)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "x.pt")
        """,
        """
        from accelerate import Accelerator
        accelerator = Accelerator()
        accelerator.save_state("x")
        if accelerator.is_main_process:
            accelerator.save(weights, "x.pt")
        """,
        """
        model = FSDP(model)
        weights = model.state_dict()
        if dist.get_rank() == 0:
            torch.save(weights, "x.pt")
        """,
        """
        import shardwise as sw
        store = sw.Store("x")
        for m in sw.steps(state, loss_fn, until=9):
            if m.step % 5 == 0:
                store.save(state)
            if mesh.is_first:
                figure.save("x.png")
        """,
    ],
    "clip.shard": [
        "model = DDP(model)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "model = FSDP(model)\nmodel.clip_grad_norm_(1.0)",
        "fully_shard(model)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        """
        if args.fsdp:
            model = FSDP(model)
        else:
            model = DDP(model)
        if args.fsdp:
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """,
        """
        from accelerate import Accelerator
        accelerator = Accelerator()
        model = accelerator.prepare(model)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        """,
    ],
    "optimizer.before-sharding": [
        "model = FSDP(model)\nopt = torch.optim.Adam(model.parameters())",
        "opt = torch.optim.Adam(model.parameters())\nmodel = DDP(model)",
        """
        opt = torch.optim.Adam(model.parameters())
        fully_shard(model)
        opt = torch.optim.Adam(model.parameters())
        """,
        """
        opt = torch.optim.Adam(head.parameters())
        model = FSDP(model)
        """,
        """
        from accelerate import Accelerator
        import torch
        accelerator = Accelerator()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        """,
        """
        import deepspeed, torch
        optimizer = torch.optim.AdamW(model.parameters())
        engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer)
        """,
        """
        def build(kind, model):
            if kind == "fsdp":
                model = FSDP(model)
                opt = torch.optim.Adam(model.parameters())
            else:
                opt = torch.optim.Adam(model.parameters())
            return model, opt
        """,
    ],
    "shard.number": [
        """
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        print(placed.module.head.weight.full_tensor().norm().item())
        """,
        """
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        print(float(placed.module(x).mean()), int(mesh.rank), model.head.weight.norm().item())
        print(sum(int(p.numel()) for p in placed.parameters()))
        """,
        """
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        for name, p in placed.named_parameters().items():
            log(name, p.norm().full_tensor().item(), int(p.numel()), float(m.loss))
        """,
    ],
    "save.sharded": [
        "model = DDP(model)\ntorch.save(model.module.state_dict(), 'x.pt')",
        "torch.save(model.state_dict(), 'before.pt')\nmodel = FSDP(model)",
        """
        model = FSDP(model)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            weights = model.state_dict()
        if rank == 0:
            torch.save(weights, "x.pt")
        """,
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
        fully_shard(model)
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        torch.save(weights, "x.pt")
        """,
        """
        fully_shard(model)
        weights = {k: v.full_tensor() for k, v in model.state_dict().items()}
        torch.save(weights, "x.pt")
        """,
        """
        model = FSDP(model) if args.fsdp else DDP(model)
        torch.save(model.state_dict(), "x.pt")
        """,
    ],
    "ddp.device-ids": [
        "local_rank = int(os.environ['LOCAL_RANK'])\nmodel = DDP(model, device_ids=[local_rank])",
        "model = DDP(model)",
        "model = DDP(model, device_ids=None)",
        "device = dist.get_rank() % torch.cuda.device_count()\nmodel = DDP(model, device_ids=[device])",
        "rank = dist.get_rank() % torch.cuda.device_count()\nmodel = DDP(model, device_ids=[rank])",
        "def train(rank, world_size):\n    model = DDP(Net().to(rank), device_ids=[rank])",
        "os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']\nmodel = DDP(model, device_ids=[0])",
        "model = DDP(model, device_ids=[torch.cuda.current_device()])",
    ],
    "sampler.missing": [
        """
        model = DDP(Net())
        loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False))
        valid = DataLoader(dataset, shuffle=True)
        """,
        """
        model = DDP(Net())
        for loader in (DataLoader(stream), DataLoader(dataset, shuffle=False), DataLoader(dataset, **options)):
            pass
        """,
        """
        model = DDP(Net())
        mine = Subset(dataset, range(rank, len(dataset), world_size))
        loader = DataLoader(mine, shuffle=True)
        """,
        """
        model = DDP(Net())
        val_loader = DataLoader(val_set, shuffle=True)
        """,
        "model = Net()\nloader = DataLoader(dataset, shuffle=True)",
        "from accelerate import Accelerator\nmodel = DDP(Net())\nloader = DataLoader(dataset, shuffle=True)",
    ],
    "sampler.set-epoch": [
        """
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, sampler=sampler)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for x in loader:
                model(x).backward()
        """,
        """
        loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
        for epoch in range(10):
            loader.sampler.set_epoch(epoch)
            for x in loader:
                model(x).backward()
        """,
        """
        sampler = DistributedSampler(dataset, shuffle=False)
        loader = DataLoader(dataset, sampler=sampler)
        for epoch in range(10):
            for x in loader:
                model(x).backward()
        """,
        """
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, sampler=sampler)
        for x in loader:
            model(x).backward()
        """,
        """
        class Trainer:
            def __init__(self):
                self.sampler = DistributedSampler(data) if dist.is_initialized() else None
                self.loader = DataLoader(data, sampler=self.sampler)
            def fit(self):
                for epoch in range(9):
                    if self.sampler is not None:
                        self.sampler.set_epoch(epoch)
                    for x in self.loader:
                        self.model(x).backward()
        """,
        """
        from accelerate import Accelerator
        from torch.utils.data import DataLoader, DistributedSampler
        loader = Accelerator().prepare(DataLoader(d, sampler=DistributedSampler(d)))
        for epoch in range(3):
            for x in loader: ...
        """,
    ],
    "sync.item": [
        """
        for batch in loader:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            total += loss.item()
        """,
        """
        for i, batch in enumerate(loader):
            loss = model(batch)
            loss.backward()
            total += loss.detach()
            if (i + 1) % 4 == 0:
                optimizer.step()
                print(total.item())
        """,
        """
        for step in range(100):
            for micro in range(4):
                loss = model(next(it))
                loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(loss.item())
        """,
        """
        for x in loader:
            correct += (model(x) == y).sum().item()
        """,
    ],
    "accumulate.never-summed": [
        """
        model = DDP(net)
        for k, batch in enumerate(micro):
            with model.no_sync() if k < 3 else contextlib.nullcontext():
                model(batch).mean().backward()
        optimizer.step()
        """,
        """
        model = DDP(net)
        with model.no_sync():
            for batch in micro[:-1]:
                model(batch).mean().backward()
        model(micro[-1]).mean().backward()
        optimizer.step()
        """,
        """
        model = DDP(net)
        with model.no_sync():
            model(batch).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        """,
        """
        model = DDP(net)
        loss = model(batch).mean()  # what DDP looks at
        with model.no_sync():
            loss.backward()
        optimizer.step()
        """,
        """
        model = FSDP(net)
        with model.no_sync():
            loss = model(batch).mean()
        loss.backward()  # what FSDP looks at
        optimizer.step()
        """,
    ],
    "seed.by-rank": [
        """
        torch.manual_seed(1234 + dist.get_rank())
        model = DDP(Net())  # takes rank 0's weights
        """,
        """
        import shardwise as sw
        import torch
        with sw.open_mesh(plan) as mesh:
            torch.manual_seed(17)
            net = Net()
            torch.manual_seed(17 + mesh.rank)
            placed = sw.apply(net, plan, mesh)
            data = sw.loader(rows, 8, mesh, seed=1)
        """,
        """
        import shardwise as sw
        import torch
        with sw.open_mesh(plan) as mesh:
            torch.manual_seed(17 + mesh.rank)
            placed = sw.apply(Net, plan, mesh, seed=17)
        """,
        """
        torch.manual_seed(1234 + dist.get_rank())
        model = Net()
        fully_shard(model)
        """,
        """
        torch.manual_seed(1234 + dist.get_rank())
        model = Net()
        model.load_state_dict(torch.load("start.pt"))
        parallelize_module(model, mesh, rules)
        """,
    ],
    "loss.backward": [
        """
        import shardwise as sw
        def loss_fn(output, batch):
            return output.mean()
        def saliency(output):
            output.sum().backward()
        for m in sw.steps(state, loss_fn, until=3):
            saliency(placed.module(x))
        """,
        """
        def loss_fn(output, batch):
            loss = output.mean()
            loss.backward()
            return loss
        """,
        """
        import shardwise as sw
        step = sw.make_step(state, lambda output, batch: output.mean())
        penalty(model).backward()
        """,
    ],
    "rows.batch-first": [
        """
        import shardwise as sw
        from torch import nn
        class Tagger(nn.Module):
            def __init__(self, **options):
                super().__init__()
                self.lstm = nn.LSTM(8, 8, batch_first=True)
                self.gru = nn.GRU(8, 8, **options)
        placed = sw.apply(Tagger, plan, mesh)
        """,
        """
        import shardwise as sw
        from torch import nn
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm = nn.LSTM(8, 8)
            def forward(self, x):
                return self.lstm(x.transpose(0, 1))[0][-1]
        placed = sw.apply(Tagger, plan, mesh)
        """,
        """
        from torch import nn
        lstm = nn.LSTM(8, 8)
        """,
    ],
    "init.after-apply": [
        """
        import shardwise as sw
        from torch import nn
        class Net(nn.Module):
            def __init__(self):
                self.head = nn.Linear(4, 4)
                nn.init.xavier_uniform_(self.head.weight)
                self.apply(init_weights)
        placed = sw.apply(Net, plan, mesh, init=init_weights)
        """,
        """
        import shardwise as sw
        from torch import nn
        placed = sw.apply(Net, plan, mesh)
        nn.init.zeros_(placed.module.head.bias)
        """,
        """
        import shardwise as sw
        from torch import nn
        net = Net()
        net.apply(init_weights)
        placed = sw.apply(net, plan, mesh)
        noise = torch.empty(4).normal_()
        """,
        """
        import zlib
        import shardwise as sw
        placed = sw.apply(Net, plan, mesh)
        g = torch.Generator()
        for name, p in placed.named_parameters().items():
            g.manual_seed(zlib.crc32(name.encode()))
            p.add_(torch.randn(p.shape, generator=g), alpha=0.01)
        for x in data:
            noise = torch.randn(x.shape)
        """,
    ],
    "accumulate.division": [
        """
        for batch in loader:
            loss = model(batch) / len(batch)
            loss.backward()
            optimizer.step()
        """,
        """
        for i, batch in enumerate(loader):
            losses = F.cross_entropy(model(batch), batch, reduction="sum")
            (losses / tokens_in_step).backward()
            if (i + 1) % accum == 0:
                optimizer.step()
        """,
        """
        from accelerate import Accelerator
        accelerator = Accelerator(gradient_accumulation_steps=4)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
            average = total / accumulation_steps
        """,
        """
        from accelerate import Accelerator
        accelerator = Accelerator(gradient_accumulation_steps=4)
        for batch in loader:
            loss = model(batch)
            if by_hand:
                loss /= accelerator.gradient_accumulation_steps
                loss.backward()
            else:
                accelerator.backward(loss)
        """,
        """
        steps_per_epoch = len(loader) // accumulation_steps
        lr = base / accumulation_steps
        """,
    ],
    "random.control-flow": [
        """
        class Data(torch.utils.data.Dataset):
            def __getitem__(self, i):
                x = self.items[i]
                if random.random() < 0.5:
                    x = x.flip(0)
                return x
        """,
        """
        random.seed(1234)
        for batch in loader:
            if random.random() < 0.5:
                model(batch).backward()
        """,
        """
        rng = random.Random(args.seed)
        for batch in loader:
            if rng.random() < 0.5:
                model(batch).backward()
        """,
        """
        def set_seed(seed):
            random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)
        set_seed(args.seed)
        for batch in loader:
            if np.random.rand() < 0.5:
                model(batch).backward()
        """,
        """
        import random
        def forward(self, x):
            if random.random() < 0.5:
                x = self.layer(x)
            return x
        """,
        """
        noise = torch.randn(4)
        if random.random() < 0.01:
            print("sample", noise)
        dist.barrier()
        """,
    ],
    "loop.left-by-some": [
        """
        rank = dist.get_rank()
        for epoch in range(10):
            for x in loader:
                model(x).backward()
                if rank == 0:
                    for line in open("notes"):
                        if line:
                            break
            stop = torch.zeros(1)
            if rank == 0 and stopper():
                stop += 1
            dist.broadcast(stop, 0)
            if stop:
                break
        """,
        """
        def names(rank):
            for line in open("names"):
                if rank == 0:
                    return line
        for x in loader:
            names(dist.get_rank())
            model(x).backward()
        """,
        """
        rank = dist.get_rank()
        for line in open("names"):
            if rank == 0:
                break
        while True:
            loss.backward()
            if rank == 0:
                dist.broadcast(stop, 0)
                break
            else:
                dist.broadcast(stop, 0)
                break
        """,
    ],
    "eval.padding": [
        """
        def evaluate(model, data_loader):
            with torch.inference_mode():
                for x in data_loader:
                    model(x)
        train_sampler = DistributedSampler(dataset)  # the evaluation's loader has this one's name inside a function
        data_loader = DataLoader(dataset, sampler=train_sampler)
        evaluate(model, test_loader)
        """,
        """
        train_sampler = DistributedSampler(train_set)
        latest = DistributedSampler(attested)
        """,
        """
        val_loader = DataLoader(val_set, sampler=DistributedSampler(val_set, drop_last=True))
        """,
        """
        val_sampler = DistributedSampler(val_set, shuffle=False)
        scores = torch.cat(scores)[: len(val_dataset)]
        """,
        """
        from accelerate import Accelerator
        accelerator = Accelerator()
        for batch in eval_loader:
            predictions = accelerator.gather_for_metrics(model(batch))
        """,
        """
        import shardwise as sw
        for batch in sw.eval_batches(dataset, mesh): ...
        """,
    ],
}


def script(text: str) -> str:
    text = textwrap.dedent(text).lstrip("\n")
    return text if text.startswith(("import ", "from ")) else HEAD + text


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(rule, text) for rule, texts in table.items() for text in texts]


def test_every_rule_has_examples_of_both_kinds() -> None:
    assert set(WRONG) == set(RIGHT) == set(RULES)
    assert min(len(texts) for table in (WRONG, RIGHT) for texts in table.values()) >= 3


@pytest.mark.parametrize(("rule", "text"), cases(WRONG))
def test_mistake_is_found_on_its_line(rule: str, text: str) -> None:
    source = script(text)
    marked = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# !")]
    found = [f for f in lint_text(source) if f.finding.id == rule]
    assert [f.line for f in found] in (marked, [line - 1 for line in marked]), [str(f) for f in lint_text(source)]
    assert all(f.finding.what and f.finding.fix for f in found)


@pytest.mark.parametrize(("rule", "text"), cases(RIGHT))
def test_near_miss_gives_no_alarm(rule: str, text: str) -> None:
    assert [str(f) for f in lint_text(script(text)) if f.finding.id == rule] == []


def test_a_models_own_mean_is_told_by_what_is_divided() -> None:
    loop = "for i, x in enumerate(d):\n    {}; loss = loss / accum; loss.backward()\n    if i % accum == 0: opt.step()"
    found = [lint_text(HEAD + loop.format(f"loss = {made}")) for made in ("model(x).loss", "model(x).square().sum()")]
    assert [[f.finding.severity for f in each] for each in found] == [["warning"], ["note"]]


def joined(text: str) -> str:
    """Statements that follow one another on one line, as far as Python allows it."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        simple = not line.endswith(":") and not line.lstrip().startswith("@")
        before = lines[-1] if lines else "@"
        follows = len(before) - len(before.lstrip()) == indent and not before.lstrip().startswith("@")
        if simple and follows and not before.endswith(":"):
            lines[-1] += f"; {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize("rule", RULES)
def test_several_statements_of_a_line_are_read_in_their_order(rule: str) -> None:
    for text in (*WRONG[rule], *RIGHT[rule]):
        plain = ast.unparse(ast.parse(script(text)))
        together = [f.finding.id for f in lint_text(joined(plain))]
        assert sorted(together) == sorted(f.finding.id for f in lint_text(plain)), text
    assert [
        (f.line, f.finding.id) for f in lint_text(HEAD + "m = N(); o = torch.optim.SGD(m.parameters()); m = FSDP(m)")
    ][-1:] == [(HEAD.count("\n") + 1, "optimizer.before-sharding")]


def repository_scripts() -> list[tuple[str, str]]:
    blocks = [(str(block), block.text) for block in all_blocks() if block.language == "python"]
    files = [*(ROOT / "examples").glob("*.py"), *(ROOT / "bench").glob("*.py"), *(ROOT / "src").rglob("models/*.py")]
    return blocks + [(file.name, file.read_text(encoding="utf-8")) for file in files]


def test_there_is_no_alarm_on_the_pages_and_examples() -> None:
    scripts = repository_scripts()
    assert len(scripts) > 30
    assert [f"{name}: {found}" for name, text in scripts for found in lint_text(text)] == []


def test_page_is_current() -> None:
    assert (ROOT / "docs" / "lint.md").read_text(encoding="utf-8") == docs_text(), (
        "run `python -m shardwise.diagnose.lint > docs/lint.md`"
    )


# ---------------------------------------------------------------- comments, files, the verb

MISTAKE = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()"


def test_a_comment_silences_one_rule() -> None:
    assert lint_text(MISTAKE + "  # shardwise: ignore[rank.collective]\n") == []
    assert (
        lint_text(MISTAKE.replace("    dist.b", "    # shardwise: ignore[rank.save, rank.collective]\n    dist.b"))
        == []
    )
    assert [f.finding.id for f in lint_text(MISTAKE + "  # shardwise: ignore[rank.save]\n")] == ["rank.collective"]


def test_a_comment_with_an_unknown_rule_is_found() -> None:
    found = lint_text(MISTAKE + "  # shardwise: ignore[rank.colective]\n")
    assert [f.finding.id for f in found] == ["lint.ignore", "rank.collective"]
    assert "did you mean 'rank.collective'" in found[0].finding.fix


def test_text_that_looks_like_a_comment_silences_nothing() -> None:
    source = MISTAKE.replace("dist.barrier()", 'print("# shardwise: ignore[rank.collective]"), dist.barrier()')
    assert [f.finding.id for f in lint_text(source)] == ["rank.collective"]


@pytest.mark.parametrize(
    "text", ["", "\n", "# only a comment\n", "x = 1\n", "match x:\n    case 1: y = 2\n", "lambda: 0"]
)
def test_scripts_without_anything_distributed(text: str) -> None:
    assert lint_text(text) == []


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_files_and_directories(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("a/one.py", "two.py", "a/__pycache__/three.py", ".hidden/four.py"):
        (tmp_path / name).write_text(MISTAKE)
    assert [Path(f.file).name for f in lint_files([tmp_path, tmp_path / "two.py"])] == ["one.py", "two.py"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"def f(:\n", r"bad\.py, line 1: it is no Python .*; found: .*; correct it first"),
        (b"x = '\xff'\n", r"bad\.py: it is no UTF-8 text; found byte 0xff at 5"),
        (b"x = '\x00'\n", r"bad\.py.*it is no Python"),
        (b"(" * 5000, r"bad\.py.*it is no Python"),
    ],
)
def test_bad_files_are_usage_errors(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.py").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        lint_files([tmp_path / "bad.py"])
    assert caught.value.exit_code == ExitCode.USAGE


def test_missing_files_name_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(DataError, match=r"there is no such file; did you mean 'train.py'"):
        lint_files([tmp_path / "trian.py"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no \*\.py file"):
        lint_files([tmp_path / "empty"])


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbf" + MISTAKE.encode())
    assert [f.line for f in lint_files([tmp_path / "bom.py"])] == [3]


def test_the_verb(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(MISTAKE)
    (tmp_path / "right.py").write_text("import torch.distributed as dist\ndist.barrier()\n")
    wrong = run(str(tmp_path / "wrong.py"))
    assert wrong.exit_code == ExitCode.REFUSED
    assert "wrong.py:3: error rank.collective" in wrong.stdout
    assert "do: call dist.barrier on every rank" in wrong.stdout
    assert wrong.stdout.splitlines()[-1] == "1 file: 1 error"
    right = run(str(tmp_path / "right.py"))
    assert (right.exit_code, right.stdout) == (ExitCode.OK, "1 file: nothing found\n")


def test_the_verb_for_programs(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(MISTAKE)
    result = run(str(tmp_path), "--json")
    assert result.exit_code == ExitCode.REFUSED
    answer = json.loads(result.stdout)
    assert answer["files"] == [str(tmp_path / "wrong.py")]
    (finding,) = answer["findings"]
    assert set(finding) == {"id", "severity", "what", "evidence", "fix", "file", "line"}
    assert (finding["id"], finding["line"], finding["severity"]) == ("rank.collective", 3, "error")


def test_notes_are_no_alarm(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(script("rank = dist.get_rank()\nmodel = DDP(model, device_ids=[rank])\n"))
    result = run(str(tmp_path / "x.py"))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (ExitCode.OK, "1 file: 1 note")


def test_no_script_is_run_and_no_torch_imported(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import torch\nraise SystemExit('this script was run')\n")
    code = (
        f"import sys; from shardwise.cli.lint import lint; lint([{str(tmp_path)!r}]); assert 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "1 file: nothing found\n"


def test_odd_syntax_is_walked() -> None:
    ast.parse(ODD)
    assert [f.finding.id for f in lint_text(ODD)] == ["rank.collective"]


ODD = (
    """
import torch.distributed as dist
async def f(*a, b=1, **k):
    async with a as b, c: pass
    async for x in y: await x
    match dist.get_rank():
        case 0 if a: pass
        case {"x": [1, *r]}: pass
    try: pass
    except* ValueError: pass
    finally: pass
    global g; del x; assert a, b
    (y := 5); z = [i async for i in q if i]; w: int
    return {**k, "a": lambda q=1, *, r: (yield)}
class A[dist.barrier](metaclass=B): x: int = 0
""".replace("[dist.barrier]", "")
    + "x = dist.barrier() if dist.get_rank() == 0 else None\n"
)
