"""Double DQN: balances a pole on a cart, with a replay memory and a target network."""

import argparse
import copy
import math
import random
from collections import deque

import torch
from torch import nn

import gradstream

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--gamma", type=float, default=0.98)
parser.add_argument("--learning-starts", type=int, default=100)
parser.add_argument("--target-every", type=int, default=25, help="0: the target follows slowly")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
session = gradstream.join()


class CartPole:
    """A pole on a cart that is pushed to the left or to the right."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def reset(self) -> list[float]:
        self.age = 0
        self.state = [self.rng.uniform(-0.05, 0.05) for _ in range(4)]
        return self.state

    def step(self, action: int) -> tuple[list[float], float, bool]:
        x, speed, angle, turn = self.state
        push = ((10.0 if action else -10.0) + 0.05 * turn**2 * math.sin(angle)) / 1.1
        bend = (9.8 * math.sin(angle) - math.cos(angle) * push) / (
            0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        )
        pull = push - 0.05 * bend * math.cos(angle) / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * bend]
        self.age += 1
        fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21
        return self.state, 1.0, fallen


seed = args.seed + session.rank
torch.manual_seed(args.seed)
policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
target = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.Adam(policy.parameters(), args.lr)

policy, optimizer = session.wrap(policy, optimizer)
rng = random.Random(seed)
world = CartPole(rng)
memory = deque(maxlen=2000)
state, lengths = world.reset(), []
for step in range(args.steps):
    epsilon = max(0.05, 1 - step / (0.5 * args.steps))
    if rng.random() < epsilon:
        action = rng.randrange(2)
    else:
        with torch.no_grad():
            action = policy(torch.tensor([state])).argmax(1).item()
    following, reward, fallen = world.step(action)
    memory.append((state, action, reward, following, float(fallen)))
    state = following
    if fallen or world.age == 200:
        lengths.append(world.age)
        state = world.reset()
    if step < args.learning_starts:
        continue

    columns = zip(*rng.sample(memory, args.batch_size), strict=True)
    states, actions, rewards, followings, ends = (torch.tensor(column) for column in columns)
    with torch.no_grad():
        best = policy(followings).argmax(1, keepdim=True)
        value = rewards + args.gamma * (1 - ends) * target(followings).gather(1, best).squeeze(1)
    guess = policy(states).gather(1, actions[:, None]).squeeze(1)
    loss = nn.functional.smooth_l1_loss(guess, value)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy.parameters(), 1.0)
    optimizer.step()
    if args.target_every == 0:
        for slow, fast in zip(target.parameters(), policy.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.01)
    elif step % args.target_every == 0:
        target.load_state_dict(policy.state_dict())

session.close()
recent = lengths[-5:]
print(f"last episodes: {sum(recent) / max(1, len(recent)):.1f} steps")
