"""The rules of plans that the mover relies on."""

from __future__ import annotations

import numpy as np

from moeedge.errors import require
from moeedge.experts import Residency, Resident
from moeedge.lab.sim.policy_replay import PolicyReplay
from moeedge.policies.base import CacheShape, Plan


class CheckedReplay(PolicyReplay):
    """A replay that checks every plan."""

    def push(self, plan: Plan) -> None:
        check_plan(plan, self.slots.shape, self.slots.resident, cap=5)  # spac-program's K
        super().push(plan)


def check_plan(plan: Plan, shape: CacheShape, resident: Resident, cap: int) -> None:
    """Raises ValueError where a plan breaks a rule."""
    size = (shape.n_layers, shape.n_experts)
    for name, array, dtype, expected_shape in (
        ("tau", plan.tau, np.float32, (shape.n_layers,)),
        ("utility", plan.utility, np.float32, size),
        ("uploads", plan.uploads, np.int32, (plan.priority.size, 2)),
        ("priority", plan.priority, np.uint8, (len(plan.uploads),)),
        ("victims", plan.victims, np.int32, (plan.victim_utility.size, 2)),
        ("victim_utility", plan.victim_utility, np.float32, (len(plan.victims),)),
    ):
        require(array.dtype == dtype, f"{name} is {array.dtype}, not {np.dtype(dtype)}")
        require(array.shape == expected_shape, f"{name} has shape {array.shape}, not {expected_shape}")
        require(array.flags.c_contiguous, f"{name} is not contiguous")
    require(np.isfinite(plan.utility).all(), "a utility is not finite")
    require(plan.utility.min() >= 0 and plan.utility.max() <= cap, f"a utility is not in 0..{cap}")
    require(plan.tau.min() > 0 and plan.tau.max() <= cap, f"a tau is not in 1..{cap}")
    for name, pairs in (("upload", plan.uploads), ("victim", plan.victims)):
        require(bool((pairs >= 0).all() and (pairs < size).all()), f"an {name} does not exist")
        require(len({tuple(pair) for pair in pairs.tolist()}) == len(pairs), f"an {name} occurs twice")
    require((shape.group[plan.uploads[:, 0]] >= 0).all(), "an upload is of a layer without experts")
    require(not np.any(resident[tuple(plan.uploads.T)]), "an upload is resident or in flight")
    require(np.all(resident[tuple(plan.victims.T)] == Residency.RESIDENT), "a victim is not resident")
    priority_step = np.diff(plan.priority.astype(int))
    require(np.all(priority_step <= 0), "priorities rise")
    require(bool(np.all((plan.priority >= 1) & (plan.priority <= cap))), f"a priority is not in 1..{cap}")
    layer_step = np.diff(plan.uploads[:, 0])
    require(np.all(layer_step[priority_step == 0] >= 0), "equal priorities are not in the order of layers")
    require(np.all(np.diff(plan.victim_utility) >= 0), "victims are not in the order of their utility")
    for group, capacity in enumerate(shape.capacity.tolist()):
        layers = shape.group == group
        n_uploads = int(np.count_nonzero(layers[plan.uploads[:, 0]]))
        n_victims = int(np.count_nonzero(layers[plan.victims[:, 0]]))
        free = max(capacity - int(np.count_nonzero(resident[layers])), 0)
        require(n_uploads <= free + n_victims, f"group {group}: {n_uploads} uploads, {free} free, {n_victims} victims")
