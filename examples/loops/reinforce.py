"""Policy gradients in the shape of pytorch/examples reinforce: a step is an episode, and `break` once it is solved.

    python examples/loops/reinforce.py runs/reinforce [EPISODES]

An environment has a state, too. Give it `state_dict` and `load_state_dict`, and give it to `Run`.
"""

import math
import random
import sys
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical

import ckptool

EPISODES = int(sys.argv[2]) if len(sys.argv) > 2 else 120


class Pole:
    """A pole on a cart, pushed left or right, that must not fall over."""

    def __init__(self, seed: int) -> None:
        self.random, self.state, self.steps = random.Random(seed), [0.0] * 4, 0

    def reset(self) -> list[float]:
        self.state, self.steps = [self.random.uniform(-0.05, 0.05) for _ in range(4)], 0
        return self.state

    def step(self, action: int) -> tuple[list[float], float, bool]:
        place, speed, angle, turning = self.state
        push = 10.0 if action else -10.0
        pull = (push + 0.05 * turning**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * pull) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        force = pull - 0.05 * turn * math.cos(angle) / 1.1
        self.state = [place + 0.02 * speed, speed + 0.02 * force, angle + 0.02 * turning, turning + 0.02 * turn]
        self.steps += 1
        return self.state, 1.0, abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21 or self.steps >= 100

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.getstate(), "state": self.state, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate(state["random"])
        self.state, self.steps = state["state"], state["steps"]


def finish_episode() -> torch.Tensor:
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    worth = torch.tensor(returns)
    worth = (worth - worth.mean()) / (worth.std() + 1e-8)
    loss = -(torch.stack(saved_log_probs) * worth).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rewards.clear()
    saved_log_probs.clear()
    return loss


torch.manual_seed(543)
torch.set_num_threads(1)
env = Pole(543)
policy = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2), nn.Softmax(-1))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
rewards: list[float] = []
saved_log_probs: list[torch.Tensor] = []
run = ckptool.Run(sys.argv[1], policy=policy, optimizer=optimizer, env=env)
if not run.resumed:
    run["running_reward"] = 10.0

for episode in run.steps(EPISODES):
    state, ended = env.reset(), False
    while not ended:
        choice = Categorical(policy(torch.tensor(state)))
        action = choice.sample()
        saved_log_probs.append(choice.log_prob(action))
        state, reward, ended = env.step(int(action))
        rewards.append(reward)
    run["running_reward"] = 0.05 * len(rewards) + 0.95 * run["running_reward"]
    run.log(loss=finish_episode(), running_reward=run["running_reward"])
    run.save(every=10)
    if run["running_reward"] > 32:
        print(f"solved in {episode} episodes")
        break
