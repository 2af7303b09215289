"""A small GPT-2 of transformers in a loop of one's own, killed anywhere, resumed by itself."""

import random
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import ckptool

TOKENS = torch.randint(0, 64, (60, 16), generator=torch.Generator().manual_seed(1))


class Text(torch.utils.data.Dataset):
    def __init__(self, draws):
        self.draws = draws

    def __len__(self):
        return len(TOKENS)

    def __getitem__(self, index):
        return TOKENS[index].roll(int(torch.rand(()) * 8) + random.randrange(8)) if self.draws else TOKENS[index]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, draws):
        self.text = Text(draws)

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from (self.text[index] for index in range(worker.id, len(TOKENS), worker.num_workers))


def main(out, steps=40, stateful=False, stream=False):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 5, steps)
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
    else:
        from torch.utils.data import DataLoader
    data = (Stream if stream else Text)(draws=stateful)
    loader = DataLoader(data, batch_size=4, shuffle=not stream, num_workers=2 if stateful else 0)
    run = ckptool.Run(out, model=model, optimizer=optimizer, scheduler=scheduler, keep_last=2)
    for step, batch in run.batches(loader, steps=steps):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        run.log(step, loss=loss)
        run.save(every=5)


if __name__ == "__main__":
    main(sys.argv[1])
