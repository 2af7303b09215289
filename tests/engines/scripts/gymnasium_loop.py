"""A loop of examples/loops with gymnasium's CartPole in the place of its own environment.

The wrapper that saves it is the one that docs/own-loop.md shows.
"""

import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy
import torch

HOME = Path(__file__).parents[3]
names: dict[str, Any] = {"gymnasium": gymnasium, "numpy": numpy}
exec(re.findall(r"```py\n(class Saved.*?)```", (HOME / "docs" / "own-loop.md").read_text(), re.DOTALL)[0], names)


class Pole:
    """One environment, as reinforce.py calls it."""

    def __init__(self, seed: int) -> None:
        self.env = names["Saved"](gymnasium.make("CartPole-v1", max_episode_steps=60))
        self.env.reset(seed=seed)
        self.state_dict, self.load_state_dict = self.env.state_dict, self.env.load_state_dict

    def reset(self) -> list[float]:
        return self.env.reset()[0].tolist()

    def step(self, action: int) -> tuple[list[float], float, bool]:
        seen, reward, terminated, truncated, _ = self.env.step(action)
        return seen.tolist(), float(reward), terminated or truncated


class Walks:
    """Several, as ppo.py calls them, of which the angle and its speed are seen."""

    def __init__(self, count: int, seed: int) -> None:
        self.poles = [Pole(seed + number) for number in range(count)]

    def reset(self) -> torch.Tensor:
        return torch.tensor([pole.reset()[2:] for pole in self.poles])

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        moved = [pole.step(action) for pole, action in zip(self.poles, actions.tolist(), strict=True)]
        seen = [pole.reset() if ended else seen for pole, (seen, _, ended) in zip(self.poles, moved, strict=True)]
        rewards, ended = torch.tensor([each[1:] for each in moved], dtype=torch.float32).unbind(1)
        return torch.tensor([each[2:] for each in seen]), rewards, ended

    def state_dict(self) -> dict[str, Any]:
        return {str(number): pole.state_dict() for number, pole in enumerate(self.poles)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, pole in enumerate(self.poles):
            pole.load_state_dict(state[str(number)])


def main(folder: str, steps: int = 40, name: str = "reinforce") -> None:
    script = HOME / "examples" / "loops" / f"{name}.py"
    source, replaced = re.subn(r"class (Pole|Walks):.*?(?=\n\n\n)", "", script.read_text(), flags=re.DOTALL)
    assert replaced == 1
    sys.argv = [str(script), folder, str(steps)]
    exec(compile(source, script, "exec"), {"__name__": "__main__", "Pole": Pole, "Walks": Walks})
