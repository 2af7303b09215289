"""A loop in the shape of pytorch/examples' imagenet, its checkpoints written by hand; each fault leaves out one thing.

python images.py FOLDER [FAULT [WORKERS]]
"""

import os
import random
import shutil
import sys

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

fault, workers = (*sys.argv, "", "")[2], int((*sys.argv, "", "0")[3] or 0)
EPOCHS = 6


class Images(Dataset):
    """Noise of two kinds; each is moved and turned anew every time that it is taken."""

    def __init__(self, count):
        made = np.random.default_rng(1)
        self.labels = made.integers(2, size=count)
        noise = made.normal(size=(count, 1, 8, 8))
        self.images = (noise + self.labels[:, None, None, None]).astype("float32")
        self.rng = np.random.default_rng(None if fault == "unseeded" else 3)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = np.roll(self.images[index], self.rng.integers(8), axis=2)
        image = image[:, :, ::-1].copy() if random.random() < 0.5 else image
        return image, self.labels[index]


class Prefetcher:
    """The batches of a loader without an end, each fetched one step ahead."""

    def __init__(self, loader):
        self.loader = loader
        self.begin()
        self.images, self.labels = next(self.batches)

    def begin(self):
        self.order = self.loader.generator.get_state()
        self.batches = iter(self.loader)

    def take(self):
        images, labels = self.images, self.labels
        try:
            self.images, self.labels = next(self.batches)
        except StopIteration:
            self.begin()
            self.images, self.labels = next(self.batches)
        return images, labels

    def state(self):
        drawn = self.loader.dataset.rng.bit_generator.state
        return {"order": self.order, "batch": [self.images, self.labels], "rng": drawn}

    def restore(self, state):
        if fault != "generator":
            self.loader.generator.set_state(state["order"])
        self.begin()
        images, labels = next(self.batches)
        if fault == "prefetch":
            self.images, self.labels = images, labels
        else:
            self.images, self.labels = state["batch"]
        if fault != "augmentation":
            self.loader.dataset.rng.bit_generator.state = state["rng"]


class AverageMeter:
    def __init__(self):
        self.sum, self.count, self.avg = 0.0, 0, 0.0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n
        self.avg = self.sum / self.count


def train(batches, count, model, ema, criterion, optimizer):
    losses = AverageMeter()
    model.train()
    for _ in range(count):
        images, target = batches.take()
        loss = criterion(model(images), target)
        losses.update(loss.item(), len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
    return losses.avg


def validate(loader, model):
    right = 0
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            right += (model(images).argmax(1) == target).sum().item()
    return right / len(loader.dataset)


def save_checkpoint(state, is_best, path):
    torch.save(state, path if fault == "torn" else path + ".tmp")
    if fault != "torn":
        os.replace(path + ".tmp", path)
    if is_best:
        shutil.copyfile(path, path + ".best.tmp")
        os.replace(path + ".best.tmp", os.path.join(os.path.dirname(path), "model_best.pth.tar"))


def main():
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 36, 2)
    )
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    generator = torch.Generator().manual_seed(2)
    train_set, val_set = Images(32), Images(16)
    loader = DataLoader(train_set, batch_size=8, shuffle=True, generator=generator, num_workers=workers)
    val_loader = DataLoader(val_set, batch_size=8)
    batches = Prefetcher(loader)
    start_epoch, best_acc, path = 0, 0.0, os.path.join(sys.argv[1], "checkpoint.pth.tar")
    if os.path.exists(path):
        checkpoint = torch.load(path, weights_only=True)
        start_epoch, best_acc = checkpoint["epoch"], checkpoint["best_acc"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if fault != "scheduler":
            scheduler.load_state_dict(checkpoint["scheduler"])
        if fault not in ("ema", "ema in no file"):
            ema.load_state_dict(checkpoint["ema"])
        batches.restore(checkpoint["batches"])
        val_set.rng.bit_generator.state = checkpoint["val_rng"]
        if fault != "rng":
            torch.set_rng_state(checkpoint["torch_rng"])
            random.setstate(checkpoint["python_rng"])
    for epoch in range(start_epoch, EPOCHS):
        train(batches, len(loader), model, ema, criterion, optimizer)
        acc = validate(val_loader, model)
        scheduler.step()
        is_best, best_acc = acc > best_acc, max(acc, best_acc)
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc": best_acc, "ema": ema.state_dict()}
        state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "batches": batches.state()}
        state |= {"torch_rng": torch.get_rng_state(), "python_rng": random.getstate()}
        state |= {"val_rng": val_set.rng.bit_generator.state}
        if fault == "ema in no file":
            del state["ema"]
        save_checkpoint(state, is_best, path)


main()
