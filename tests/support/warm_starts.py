"""A model of the user to start from a checkpoint, and what comes of it."""

from pathlib import Path
from typing import Any

import ckptool
from ckptool.analysis.warm_start import LoadReport
from tests.support.files import load

CODE = """
import torch
from torch import nn

def build():
    print("building")
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

def state():
    return build().state_dict()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 16)

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]

def on_meta():
    with torch.device("meta"):
        return build()

def raises():
    raise ValueError("the data\\nare missing")

def number():
    return 7

module = nn.Linear(2, 2)
"""


def warm_started(file: Path, target: Path | str, out: Path, **options: Any) -> tuple[LoadReport, dict[str, Any]]:
    report = ckptool.warm_start(file, target, out, **options)
    assert report.accepted and report.applied, report
    return report, load(out)
