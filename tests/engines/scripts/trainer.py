"""A small GPT-2 under transformers' Trainer, killed anywhere, resumed by itself: `python trainer.py OUT`."""

import sys

import torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ckptool.integrations.transformers import DurableCheckpoints


class DurableTrainer(DurableCheckpoints, Trainer):
    pass


class Text(torch.utils.data.Dataset):
    def __init__(self, draws: bool = False) -> None:
        self.draws = draws
        self.tokens = torch.randint(0, 64, (96, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict:
        tokens = self.tokens[index]
        if self.draws and torch.rand(()) < 0.5:
            tokens = tokens.flip(0)
        return {"input_ids": tokens, "labels": tokens}


def main(
    out,
    steps=40,
    limit=2,
    draws=False,
    resume=True,
    best=False,
    mixin=True,
    workers=0,
    accumulate=2,
    every=5,
    patience=0,
):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, **tokens))
    arguments = TrainingArguments(
        out,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        dataloader_num_workers=workers,
        save_steps=every,
        save_total_limit=limit,
        eval_strategy="steps" if best else "no",
        eval_steps=5,
        learning_rate=0.3 if patience else 5e-5,
        load_best_model_at_end=best,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    kind = DurableTrainer if mixin else Trainer
    stops = [EarlyStoppingCallback(patience)] if patience else []
    trainer = kind(model, arguments, train_dataset=Text(draws), eval_dataset=Text(), callbacks=stops)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(out + "/final")


if __name__ == "__main__":
    main(sys.argv[1])
