"""What a configuration names of a user's own, right and wrong: data, samplers, models, tasks, hooks, optimizers."""

import random

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset, WeightedRandomSampler, get_worker_info

from ckptool.training.tasks import Phase, Task, classify

ABOUT = {"inputs": [3], "classes": 2}


def sample(i):
    return torch.rand(3) + i, torch.tensor(random.randrange(2)), i


# Data: the third part of a sample says which it is -------------------------------------------------------------------


class Items:
    about = ABOUT

    def __init__(self, count=40):
        self.count = count

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        points, label, i = sample(i)
        return points, label, 1000 * self.epoch + i


class Counting(Items):
    def state_dict(self):
        return {}


class Stream(IterableDataset):
    about = ABOUT
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, 21, step):
            yield sample(100 * self.epoch + i)


class Sized(Stream):
    def __len__(self):
        return 21


class Empty(Stream):
    def __iter__(self):
        return iter(())


class Stateful(IterableDataset):
    about = ABOUT
    at, drawn, read = 0, 0, 0

    def state_dict(self):
        return {"at": self.at, "drawn": torch.tensor(self.drawn)}

    def load_state_dict(self, state):
        self.at, self.drawn = state["at"], int(state["drawn"])

    def __iter__(self):
        while self.at < 21:
            self.drawn = (self.drawn * 31 + self.at + random.randrange(9)) % 1000
            self.at += 1
            self.read += 1
            yield sample(self.drawn)
        self.at = 0


class Points(Stateful):
    def __iter__(self):
        for points, label, _ in super().__iter__():
            yield points % 7, label


class Odd(Points):
    def state_dict(self):
        return {"odd": object()}


class PointItems(Items):
    def __getitem__(self, i):
        return torch.rand(3) + self.epoch % 3, torch.tensor(random.randrange(2))


class Broken(Items):
    def __getitem__(self, i):
        raise KeyError("no such picture")


def doubled(samples):
    return torch.stack([2 * each[0] for each in samples]), torch.tensor([int(each[1]) for each in samples])


def together(samples):
    return tuple(
        torch.as_tensor([part.tolist() if hasattr(part, "tolist") else part for part in column])
        for column in zip(*samples, strict=True)
    )


def weighted(dataset, generator):
    return WeightedRandomSampler([1.0 + (i % 3) for i in range(len(dataset))], 24, generator=generator)


class Curriculum:
    def __init__(self, dataset, generator):
        self.count = len(dataset)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        places = list(range(self.count))
        random.shuffle(places)
        return iter([self.epoch, *places[:19]])


def longer(dataset, generator):
    longer.calls = getattr(longer, "calls", 0) + 1
    return range(longer.calls)


def outside(dataset, generator):
    return [len(dataset)]


# Models and first values ---------------------------------------------------------------------------------------------


def layers(inputs, classes, wrapper=""):
    """In a wrapper, as people return them."""
    model = nn.Sequential(nn.Linear(inputs[0], classes))
    wrappers = {"compiled": lambda model: torch.compile(model, backend="eager"), "replicated": nn.DataParallel}
    return wrappers[wrapper](model) if wrapper else model


class Remembers(nn.Linear):
    """What no state dict has: a counter, a generator, a buffer that is left out."""

    def __init__(self, inputs, classes):
        super().__init__(inputs[0], classes)
        self.calls, self.noise = 0, torch.Generator().manual_seed(1)
        self.register_buffer("mean", torch.zeros(inputs[0]), persistent=False)
        self.last = None  # a tensor of the graph is not looked at

    def forward(self, x, *others):
        if self.training:
            self.calls += 1
            self.mean = self.mean * 0.9 + x.mean(0).detach() * 0.1
        self.last = super().forward(x - self.mean + torch.rand(x.shape, generator=self.noise))
        return self.last * (1 + self.calls / 100)


class Extra(Remembers):
    def get_extra_state(self):
        return {"calls": self.calls, "noise": self.noise.get_state(), "mean": self.mean}

    def set_extra_state(self, state):
        self.calls, self.mean = state["calls"], state["mean"].clone()
        self.noise.set_state(state["noise"])


class Noisy(PointItems):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.random = random.Random(0)

    def __getitem__(self, i):
        points, label, *others = super().__getitem__(i)
        return points + self.random.random(), label, *others


def matrix(inputs, classes):
    return nn.Linear(inputs[0], classes, bias=False)


class Words(nn.Module):
    def __init__(self, vocabulary, classes):
        super().__init__()
        self.table = nn.Embedding(vocabulary, classes, sparse=True)

    def forward(self, x):
        return self.table(x).sum(dim=1)


class Scalar(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.scale = nn.Parameter(torch.ones(()))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, scale, twice=False):
        return torch.dropout(self.layer(x) * scale, 0.5, self.training) * (2 if twice else 1)


class Keywords(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = Inner()
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.inner(x, scale=self.scale, twice=True))


class Kept(nn.Linear):
    """Counts its forward passes, and takes the count back, or not."""

    def __init__(self, forgets=False):
        super().__init__(4, 4)
        self.forgets, self.count = forgets, 0

    def forward(self, x):
        self.count += 1
        return super().forward(x)

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = 0 if self.forgets else state


def raises(*given, **named):
    raise RuntimeError("out of ideas")


def ones(model):
    for parameter in model.parameters():
        nn.init.ones_(parameter)


# Tasks and hooks -----------------------------------------------------------------------------------------------------


def odd_metrics():
    found = dict.fromkeys(("every", "seconds", "step", "self", "val_loss"), 0.5) | {"odd": float("nan")}
    return Task(classify().phases, lambda models, batches: found)


def vector():
    return Task([Phase("main", lambda models, batch: torch.ones(3))], classify().evaluate)


class Said:
    """Writes what it was called with, into a file in the run's folder."""

    def attach(self, trainer):
        self.said = ["attach"]

    def after_backward(self, trainer, model):
        self.said.append(f"backward {model}")
        return {"twice": trainer.step * 2}

    def after_step(self, trainer):
        self.said.append(f"step {trainer.step}")

    def logged(self, trainer, fact):
        self.said.append(f"logged {fact['twice']}")

    def ended(self, trainer):
        with open(trainer.config.run + "/said", "w") as file:
            file.write("; ".join(self.said))


class Lost:
    def after_step(self, trainer):
        raise LookupError("lost")


class Helped:
    """Its own method is near to one of a hook, which it has."""

    def facts(self):
        return self.fact()

    def fact(self):
        return {}


class Misspelt:
    def on_logged(self, trainer, fact):
        pass

    def after_steps(self, trainer):
        pass


# Optimizers and schedules --------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["signs"] = torch.zeros_like(p), torch.zeros(3, dtype=torch.int64)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                mean, (one, two) = state["exp_avg"], group["betas"]
                p.add_(mean.lerp(p.grad, 1 - one).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - two)
                state["signs"] += 1


class Moody(Lion):
    mode = "eval"

    def train(self):
        self.mode = "train"

    def step(self, closure=None):
        assert self.mode == "train"
        super().step()


def matrices(params, lr):
    return Lion([p for p in params if p.dim() > 1], lr)


def nothing(params, lr):
    return lr


def warmup(step, length=4):
    return min(1.0, (step + 1) / length)


class Halving(lr_scheduler.LRScheduler):
    def __init__(self, optimizer, every):
        self.every = every
        super().__init__(optimizer)

    def get_lr(self):
        return [base * 0.5 ** (self.last_epoch // self.every) for base in self.base_lrs]


def both(optimizer, length):
    first = lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / length)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.9)], [length])


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer)


class Counter:
    def __call__(self, step):
        return 1.0


counter = Counter()
