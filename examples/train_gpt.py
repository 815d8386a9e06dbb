"""Train a small GPT to add, under any plan: `python train_gpt.py PLAN FOLDER [STEP TO STOP AT]`."""

import sys

from sums import SEQ_LEN, VOCAB_SIZE, Sums

import shardwise as sw

STEPS = 60


def model():
    return sw.GPT(sw.GPTConfig(vocab_size=VOCAB_SIZE, dim=64, num_layers=2, num_heads=4, max_seq_len=SEQ_LEN))


def loss_fn(logits, batch):
    return sw.token_cross_entropy(logits, batch["labels"])


def main(plan, out, until):
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(model, plan, mesh, seed=1234)
        optim = sw.adamw(placed, lr=3e-3)
        data = sw.loader(Sums(), plan.batch, mesh, global_size=64, seed=1)
        state = sw.TrainState(placed, optim, data, schedule=sw.warmup_cosine(20, STEPS))
        store = sw.Store(out, keep=2)
        store.load_latest(state)
        for m in sw.steps(state, loss_fn, until=until, clip=1.0, store=store):
            if m.step % 20 == 0:
                if mesh.is_first:
                    print(f"step {m.step}  loss {m.loss:.4f}  gradient norm {m.grad_norm:.4f}")
                store.save(state)
        total = sw.evaluate(placed, loss_fn, data.evaluation(Sums(held_out=True)))
        if mesh.is_first:
            print(f"held-out loss {total.sum / total.weight:.4f} over {total.weight:.0f} tokens")


if __name__ == "__main__":
    main(sw.Plan.load(sys.argv[1]), sys.argv[2], until=int(sys.argv[3]) if len(sys.argv) > 3 else STEPS)
