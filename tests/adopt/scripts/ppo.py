# PPO in one file, after CleanRL; CPU only
import random
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
import tyro
from torch.distributions.categorical import Categorical


@dataclass
class Args:
    seed: int = 1
    total_timesteps: int = 500000
    learning_rate: float = 2.5e-4
    num_steps: int = 128
    update_epochs: int = 4
    minibatch_size: int = 32
    anneal_lr: bool = True


class Agent(nn.Module):
    def __init__(self, obs, actions):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(obs, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(obs, 64), nn.Tanh(), nn.Linear(64, actions))

    def act(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


if __name__ == "__main__":
    args = tyro.cli(Args)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    env = gym.make("CartPole-v1")
    agent = Agent(4, 2)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    obs, _ = env.reset(seed=args.seed)
    start = time.time()
    updates = args.total_timesteps // args.num_steps
    for update in range(1, updates + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / updates) * args.learning_rate
        rows, rewards = [], []
        for _ in range(args.num_steps):
            with torch.no_grad():
                action, logprob, _, value = agent.act(torch.Tensor(obs))
            rows.append((torch.Tensor(obs), action, logprob, value.flatten()))
            obs, reward, done, cut, _ = env.step(action.item())
            rewards.append(reward)
            if done or cut:
                obs, _ = env.reset()
        returns = torch.tensor(np.cumsum(rewards[::-1])[::-1].copy(), dtype=torch.float32)
        b_obs, b_actions, b_logprobs, b_values = (torch.stack(c) for c in zip(*rows))
        inds = np.arange(args.num_steps)
        for epoch in range(args.update_epochs):
            np.random.shuffle(inds)
            for s in range(0, args.num_steps, args.minibatch_size):
                mb = inds[s : s + args.minibatch_size]
                _, newlogprob, entropy, newvalue = agent.act(b_obs[mb], b_actions[mb])
                ratio = (newlogprob - b_logprobs[mb]).exp()
                adv = returns[mb] - b_values[mb].flatten()
                pg = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
                loss = pg - 0.01 * entropy.mean() + 0.5 * ((newvalue.flatten() - returns[mb]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        print(update, int(update * args.num_steps / (time.time() - start)), sum(rewards))
    torch.save(agent.state_dict(), f"runs/ppo_{args.seed}.pt")
