"""Proximal policy optimization in the shape of cleanrl's ppo: a rollout, then a few epochs on what was seen.

    python examples/loops/ppo.py runs/ppo [ITERATIONS]

Episodes go on from one rollout to the next, so the environments' state and their last answers belong to the run.
"""

import sys
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributions import Categorical

import ckptool

ITERATIONS, ENVS, STEPS, RATE = int(sys.argv[2]) if len(sys.argv) > 2 else 30, 4, 16, 2.5e-3


class Walks:
    """Walkers on a line, each with a goal to the left or right; one that has reached it, or has left, begins anew."""

    def __init__(self, count: int, seed: int) -> None:
        self.generator, self.states = torch.Generator().manual_seed(seed), torch.zeros(count, 2)  # place and goal

    def reset(self, ended: torch.Tensor | bool = True) -> torch.Tensor:
        goals = 8.0 * torch.randint(2, (len(self.states),), generator=self.generator) - 4
        fresh = torch.stack([torch.zeros_like(goals), goals], 1)
        self.states = torch.where(torch.as_tensor(ended).view(-1, 1), fresh, self.states)
        return self.states

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        places, goals = self.states[:, 0] + 2 * actions - 1, self.states[:, 1]
        ended = (places == goals) | (places.abs() > 6)
        self.states = torch.stack([places, goals], 1)
        return self.reset(ended), (places == goals).float() - 0.1, ended.float()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.states = state["states"]


numpy.random.seed(1)
torch.manual_seed(1)
torch.set_num_threads(1)
envs = Walks(ENVS, seed=1)
actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
parameters = [*actor.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(parameters, lr=RATE, eps=1e-5)
run = ckptool.Run(sys.argv[1], actor=actor, critic=critic, optimizer=optimizer, envs=envs, keep_last=2)
if not run.resumed:
    run["next_obs"], run["next_done"], run["global_step"] = envs.reset(), torch.zeros(ENVS), 0
obs, actions = torch.zeros(STEPS, ENVS, 2), torch.zeros(STEPS, ENVS, dtype=torch.int64)
logprobs, rewards, dones, values = torch.zeros(4, STEPS, ENVS)

for iteration in run.steps(ITERATIONS):
    optimizer.param_groups[0]["lr"] = RATE * (1 - (iteration - 1) / ITERATIONS)
    next_obs, next_done = run["next_obs"], run["next_done"]
    with torch.no_grad():
        for step in range(STEPS):
            choice = Categorical(logits=actor(next_obs))
            obs[step], dones[step], actions[step] = next_obs, next_done, choice.sample()
            logprobs[step], values[step] = choice.log_prob(actions[step]), critic(next_obs).flatten()
            next_obs, rewards[step], next_done = envs.step(actions[step])
        advantages, last, ahead, alive = torch.zeros(STEPS, ENVS), 0, critic(next_obs).flatten(), 1 - next_done
        for step in reversed(range(STEPS)):
            advantages[step] = last = rewards[step] + 0.99 * ahead * alive - values[step] + 0.94 * alive * last
            ahead, alive = values[step], 1 - dones[step]
    run["next_obs"], run["next_done"], run["global_step"] = next_obs, next_done, run["global_step"] + STEPS * ENVS
    flat = [each.flatten(0, 1) for each in (obs, actions, logprobs, advantages, advantages + values)]
    for _ in range(3):
        for places in torch.from_numpy(numpy.random.permutation(STEPS * ENVS)).split(16):
            seen, done, before, worth, returns = (each[places] for each in flat)
            choice = Categorical(logits=actor(seen))
            ratio = (choice.log_prob(done) - before).exp()
            worth = (worth - worth.mean()) / (worth.std() + 1e-8)
            policy_loss = -torch.min(worth * ratio, worth * ratio.clamp(0.8, 1.2)).mean()
            value_loss = (critic(seen).flatten() - returns).pow(2).mean()
            loss = policy_loss - 0.01 * choice.entropy().mean() + 0.25 * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
    run.log(loss=loss, reward=rewards.sum(), global_step=run["global_step"])
    run.save(every=4)
