"""A film of an episode, as a GIF: python -m experiments.examples.film GpuMemory/vgg16-45-v0 film.gif

The agent is the simplest one that gets through: it empties the gap with the largest relief whenever a kernel ahead
would not fit, and else does nothing. ``frames`` takes any other: a function from an observation to an action.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from PIL import Image

import envs  # noqa: F401  # registers GpuMemory/…
from envs.graph import RELIEF

Observation = dict[str, np.ndarray]


def largest_relief(observation: Observation) -> int:
    """The valid node of largest relief; node 0, do nothing, has none."""
    relief = np.where(observation["action_mask"] > 0, observation["nodes"][:, RELIEF], -1)
    return int(relief.argmax())


def frames(env: gymnasium.Env[Any, Any], act: Callable[[Observation], int]) -> list[np.ndarray]:
    """A picture before each action of an episode, and one of its end."""
    observation, _ = env.reset(seed=0)
    out, over = [env.render()], False
    while not over:
        observation, _, terminated, truncated, _ = env.step(act(observation))
        out.append(env.render())
        over = terminated or truncated
    return out


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="an id of Gymnasium's registry")
    parser.add_argument("out", help="a .gif")
    given = parser.parse_args()
    film = frames(gymnasium.make(given.task, render_mode="rgb_array"), largest_relief)
    first, *others = (Image.fromarray(frame).quantize(64, dither=Image.Dither.NONE) for frame in film)
    first.save(given.out, save_all=True, append_images=others, duration=[150] * (len(film) - 1) + [3000], loop=0)
    print(given.out)


if __name__ == "__main__":
    main()
