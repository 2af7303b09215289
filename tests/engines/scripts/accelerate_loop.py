"""A loop with accelerate, killed anywhere, resumed by itself: `python accelerate_loop.py OUT`."""

import itertools
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn

from ckptool.integrations.accelerate import AcceleratorCheckpoints


class Rows(torch.utils.data.Dataset):
    def __init__(self, draws=False):
        self.draws = draws
        self.inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        row = self.inputs[index]
        noise = torch.rand(8) if self.draws else 0
        return row + noise, (row.sum() > 0).long()


class Counter:
    """An object of the script's own."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def main(
    out,
    steps=40,
    limit=1,
    draws=False,
    seedable=False,
    stateful=False,
    workers=0,
    accumulate=1,
    every=5,
    flags=False,
    **more,
):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable, use_stateful_dataloader=stateful),
        project_config=ProjectConfiguration(out, automatic_checkpoint_naming=True, total_limit=limit),
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Rows(draws), batch_size=8, shuffle=True, num_workers=workers)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter, others = Counter(), {"other": Counter()} if more else {}
    checkpoints = AcceleratorCheckpoints(accelerator, out + "/checkpoints", counter=counter, **others)
    ends = (min(14, steps), steps) if flags else (steps,)  # of loops, one after the other
    batches = itertools.chain.from_iterable(checkpoints.batches(loader, steps=end) for end in ends)
    for step, (inputs, labels) in batches:
        if flags and step == 9:
            model[0].requires_grad_(False)
        if flags and step == 12:
            model[1].eval()
        inputs = inputs + counter.seen % 3  # of this process
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        counter.seen += len(labels) + accelerator.process_index
        if step % every == 0:
            checkpoints.save()
    if accelerator.is_main_process:  # each process has its own statistics of batches
        torch.save({"model": accelerator.unwrap_model(model).state_dict(), "seen": counter.seen}, out + "/final.pt")
    checkpoints.close()


if __name__ == "__main__":
    main(sys.argv[1])
