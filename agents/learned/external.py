"""Planners from outside of the registry: a function of an observation, and an archive of Stable-Baselines3.

Both act greedily in one episode of an environment. ``experiments.evaluate`` and ``experiments.benchmark`` make them
from ``module:function`` and ``model.zip``.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.planner import MIB, Infeasible, at_least, one_of
from simulator.files import FormatError, load_json
from simulator.machine import Machine
from simulator.modes import MODES
from simulator.plan import Plan, PlanError
from simulator.program import Program

ENVIRONMENTS = ("GpuMemoryEdit", "GpuMemory")
SUMMARY = "summary.json"  # of train_sb3, beside the archive: the settings that built the network
EDIT_SETTINGS = ("min_bytes", "mode")  # settings of the environment that GpuMemoryEdit takes from the summary
WALK_SETTINGS = (*EDIT_SETTINGS, "reward", "actions")  # and GpuMemory


@dataclass(eq=False)
class FunctionPlanner:
    """Plans with a function from an observation to an action.

    Args:
        function: the policy; its attribute ``environment`` names the environment (ENVIRONMENTS).
        mode: "swap", "recompute" or "joint".
        min_bytes: size in bytes below which tensors stay resident.
        seed: seed of the environment.
    """

    function: Callable[[Mapping[str, Any]], Any]
    mode: str = one_of(MODES, "joint")
    min_bytes: int = at_least(0, MIB)
    seed: int = 0
    name: str = field(init=False)
    simulator_calls: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.name = str(getattr(self.function, "__name__", type(self.function).__name__))

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the best plan of one episode.

        Raises:
            Infeasible: if no plan can be started from, or the episode ends in a dead end.
            PlanError: if the environment is unknown or the function returns an invalid action.
        """
        from envs.edit.env import MemoryEditEnv  # Gymnasium takes seconds to import
        from envs.memory_env import MemoryEnv

        kind = getattr(self.function, "environment", ENVIRONMENTS[0])
        if kind not in ENVIRONMENTS:
            raise PlanError(f"{self.name}.environment: expected one of {', '.join(ENVIRONMENTS)}, got {kind!r}")
        self.simulator_calls = 0
        if program.peak_bytes <= limit:
            return Plan.of(program, (), self.name, limit, machine.name)
        options = {"program": program, "machine": machine, "limit": limit, "min_bytes": self.min_bytes}
        env: Any
        try:
            env = (MemoryEditEnv if kind == ENVIRONMENTS[0] else MemoryEnv)(**options, mode=self.mode)
        except ValueError as error:
            raise Infeasible(f"{self.name}: {error}") from None
        observation, info = env.reset(seed=self.seed)
        has_ended = False
        while not has_ended:
            action = int(self.function(observation))
            if not (0 <= action < env.action_space.n and observation["action_mask"][action]):
                raise PlanError(
                    f"{self.name}: returned {action}, which `action_mask` of its observation does not allow"
                )
            observation, _, terminated, truncated, info = env.step(action)
            has_ended = terminated or truncated
            self.simulator_calls += 1
        if kind == ENVIRONMENTS[0]:
            edited: Plan = replace(env.best_plan, planner=self.name)
            return edited
        if math.isnan(info["overhead"]):
            raise Infeasible(
                f"{self.name}: the episode on {program.name!r} ends in a dead end; raise the limit or act otherwise"
            )
        plan: Plan = env.plan(self.name)
        return plan


@dataclass(eq=False)
class ArchivePlanner:
    """Plans with the deterministic policy of an archive of Stable-Baselines3 that ``experiments.train_sb3`` wrote.

    Only policy.pth is read, as weights: an archive's ``data`` holds pickled objects, which can run code. The network is
    built from the settings in summary.json beside the archive.

    Args:
        path: model.zip in its run directory.

    Raises:
        FormatError: if the archive or its summary is missing or malformed.
    """

    path: Path
    name: str = field(init=False)
    simulator_calls: int = field(init=False, default=0)
    _config: dict[str, Any] = field(init=False)
    _keys: tuple[str, ...] = field(init=False)
    _algorithm: str = field(init=False)
    _weights: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._weights = self._read_weights()

        def read(data: object) -> dict[str, Any]:
            config = data.get("config") if isinstance(data, dict) else None
            if not isinstance(config, dict) or not isinstance(config.get("algo"), dict):
                raise FormatError("config: expected the settings of experiments.train_sb3, with a mapping algo")
            if config.get("network") is not None:
                raise FormatError("`network` names Python code, which an archive cannot bring; submit plans instead")
            kind = str(config.get("task")).partition("/")[0]
            self._keys = EDIT_SETTINGS if kind == ENVIRONMENTS[0] else WALK_SETTINGS
            if missing := [key for key in self._keys if key not in config]:
                raise FormatError(f"config: {', '.join(missing)} missing; keep the {SUMMARY} that train_sb3 wrote")
            return config

        self._config = load_json(self.path.with_name(SUMMARY), read)
        self._algorithm = "maskable_ppo" if "n_epochs" in self._config["algo"] else "dqn"
        self.name = f"sb3_{self._algorithm}"

    def _read_weights(self) -> dict[str, Any]:
        """Returns the weights of the policy without executing any content; raises FormatError."""
        import torch

        try:
            with zipfile.ZipFile(self.path) as archive:
                if damaged := archive.testzip():
                    raise ValueError(f"{damaged} is damaged")
                raw = archive.read("policy.pth")
            state = torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
        except Exception:  # torch.load raises many types for damaged files
            raise FormatError(
                f"{self.path}: not an archive of Stable-Baselines3 with weights, or a damaged one"
            ) from None
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise FormatError(f"{self.path}: policy.pth does not hold the weights of a policy; save the model again")
        return state

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the plan of one greedy episode.

        Raises:
            Infeasible: if the limit cannot be reached, or the episode ends in a dead end.
            FormatError: if the weights do not fit the network of the summary.
        """
        from agents.learned import sb3

        if program.peak_bytes <= limit:
            return Plan.of(program, (), self.name, limit, machine.name)
        environment = {"program": program, "machine": machine, "limit": limit}
        if self._keys == EDIT_SETTINGS:
            environment["id"] = f"{ENVIRONMENTS[0]}-v1"
        environment |= {key: self._config[key] for key in self._keys}
        settings = self._config["algo"] | {"num_envs": 1}
        if "buffer_size" in settings:
            settings["buffer_size"] = 1  # nothing is stored
        try:
            model = sb3.make(self._algorithm, environment, 0, **settings)
        except ValueError as error:
            raise Infeasible(f"{self.name}: {error}") from None
        weights = self._weights
        parameters = dict(model.policy.named_parameters())  # buffers depend on the program
        fits = all(key in weights and weights[key].shape == value.shape for key, value in parameters.items())
        if not fits:
            raise FormatError(
                f"{self.path}: the weights do not fit the network that {SUMMARY} describes; archive both of one run"
            )
        model.policy.load_state_dict({key: weights[key] for key in parameters}, strict=False)
        plan = sb3.greedy(model, environment, self.name)
        if plan is None:
            raise Infeasible(
                f"{self.name}: the episode on {program.name!r} ends in a dead end; raise the limit, or train longer"
            )
        return plan
