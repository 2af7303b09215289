"""A model under Lightning's Trainer, killed anywhere, resumed by itself: `python lightning_fit.py OUT`."""

import logging
import sys
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from torch import nn

from ckptool.integrations.lightning import DurableCheckpointIO, ExactResume, newest_checkpoint

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


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


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, draws):
        self.rows = Rows(draws)

    def __iter__(self):
        yield from (self.rows[index] for index in range(len(self.rows)))


class Model(lightning.LightningModule):
    def __init__(self, width=16, plateau=False):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2)
        )

    def training_step(self, batch, index):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.body(inputs), labels)

    def validation_step(self, batch, index):
        self.log("val_loss", self.training_step(batch, index))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.hparams.plateau:
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Inside(lightning.Callback):
    """Saves after each batch, as a checkpoint by time does when its time has come."""

    def on_train_batch_end(self, trainer, *args):
        trainer.save_checkpoint(trainer.default_root_dir + "/inside.ckpt")


class Draws(lightning.Callback):
    def on_train_epoch_end(self, *args):
        torch.rand(())


def main(
    out,
    steps=40,
    stateful=True,
    draws=False,
    stream=False,
    workers=0,
    every=5,
    keep=2,
    accumulate=1,
    persist=False,
    inside=False,
    devices=1,
    plateau=False,
    scheduled=False,
    ends=False,
):
    lightning.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    else:
        from torch.utils.data import DataLoader as Loader
    data = Stream(draws) if stream else Rows(draws)
    loader = Loader(data, batch_size=8, shuffle=not stream, num_workers=workers, persistent_workers=persist)
    checkpoints = {"every_n_train_steps": every} if every else {"save_on_train_epoch_end": True}
    trainer = lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        default_root_dir=out,
        plugins=[DurableCheckpointIO()],
        callbacks=[
            ExactResume(),
            ModelCheckpoint(out, monitor="step", mode="max", save_top_k=keep, **checkpoints),
            *([Inside()] if inside else []),
            *([GradientAccumulationScheduler({0: 1, 2: 2})] if scheduled else []),
            *([Draws(), EarlyStopping("loss", strict=False, check_on_train_epoch_end=False)] if ends else []),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(plateau=plateau)
    validation = torch.utils.data.DataLoader(Rows(), batch_size=16, shuffle=True)
    trainer.fit(model, loader, validation, ckpt_path=newest_checkpoint(out))
    if trainer.is_global_zero:  # each process has its own statistics of batches
        torch.save(model.state_dict(), out + "/final.pt")


if __name__ == "__main__":
    main(sys.argv[1])
