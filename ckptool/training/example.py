"""The configuration that `ckptool train --init` prints: every key, with what it means."""

from __future__ import annotations

EXAMPLE = """\
# A run of ckptool's training harness: every key. What is left out has the value that stands here, or the default that is named.
# Start it: ckptool train run.yaml      Go on with it: ckptool resume runs/digits      Prove it: ckptool prove run.yaml
run: runs/digits              # the folder of the run
seed: 7                       # with step and place, the source of all randomness (default: 0)
device: auto                  # auto | cpu | cuda | cuda:1 | mps
strategy: single              # single | dp (DataParallel) | ddp (under torchrun) | split (see split)
deterministic: true           # true | warn | false: torch.use_deterministic_algorithms
data:
  name: digits                # digits | blobs | images | spirals | linear | ring | modadd | text | sequences | file.py:NAME
  args: {}                    # what it takes
  batch: 32                   # the global batch, whatever the number of processes and of micro-steps
  workers: 0                  # processes that load
  collate: default            # default | pad (sequences) | file.py:NAME
  drop_last: false            # leave out the last, partial batch of an epoch
  val_fraction: 0.2           # held out for evaluation
models:
  main:
    name: mlp                 # mlp | conv | chargpt | tagger | generator | discriminator | file.py:NAME
    args: {hidden: [64, 64], dropout: 0.1}  # what it takes (default: {})
    init: default             # default | xavier_uniform | kaiming_normal | orthogonal | file.py:NAME
    freeze: []                # patterns: ["body.*"], or until a step: [{match: "body.*", until: 100}]; all else is as the model has it
    from: null                # a checkpoint to start from
    strict: true              # of that checkpoint, every key has to fit
task: classify                # classify | regress | lm | gan | file.py:NAME
optim:
  main:
    name: adamw               # any class of torch.optim
    lr: 0.001
    args: {weight_decay: 0.01}  # what it takes (default: {})
    groups: []                # [{match: "head.*", lr: 0.01}]: the first pattern that matches; every parameter in one group
    clip: null                # {norm: 1.0} | {value: 0.5}
    schedule: null            # {name: step, args: {step_size: 500, gamma: 0.5}, per: step}; warmup_cosine, inverse_sqrt, …
train:
  steps: 2000                 # or epochs: 10, exactly one of the two
  accumulate: 1               # micro-steps in a step
  precision: fp32             # fp32 | bf16 | fp16 (with a scaler)
  compile: false              # true: torch.compile; or the name of a backend
  activation_checkpoint: null # {match: "blocks.*"} | {sequential: body, segments: 4}
  ema: null                   # 0.999: a running average of the weights
  on_nonfinite: stop          # stop | skip a step whose loss or gradients are not finite
eval: {every: 200, metric: val_acc, mode: max}  # what is best (default: val_loss, min); at the end, too, which is only told
save:
  every: 200
  at_start: false
  keep_last: 3                # what is kept is the union of these
  keep_best: 1
  keep_every: 0
  async: false                # write while the next steps run
  verify: full                # what resuming checks: full (sha256) | size
stop: {after: null, signals: [TERM, INT, USR1]}   # after: seconds from the first step on, or 30m, 2h
log: {every: 10, tensorboard: false}
hooks: []                     # grad_norm | activation_stats | file.py:NAME
profile: null                 # {wait: 1, warmup: 1, active: 3, trace: profile.json}
split: null                   # {devices: [cuda:0, cuda:1], at: [blocks.4], microbatches: 4}
"""
