"""A small GPT-2 of transformers in a loop of one's own: `python own_loop.py OUT STEPS [stateful]`."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import ckptool

out, steps, stateful = sys.argv[1], int(sys.argv[2]), "stateful" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, 5, steps)
tokens = torch.randint(0, 64, (60, 16), generator=torch.Generator().manual_seed(1))
if stateful:
    from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
else:
    from torch.utils.data import DataLoader
loader = DataLoader(
    torch.utils.data.TensorDataset(tokens), batch_size=4, shuffle=True, num_workers=2 if stateful else 0
)
run = ckptool.Run(out, model=model, optimizer=optimizer, scheduler=scheduler, keep_last=2)
for step, (batch,) in run.batches(loader, steps=steps):
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    run.log(step, loss=loss)
    run.save(every=5)
